"""The results as tables of docs/checks.md, between two marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"


def tables(rows: list[dict[str, Any]]) -> str:
    """What was run, by checker and kind; then every survivor and every equivalent mutant."""
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for row in rows:
        place = counts.setdefault((row["checker"], row["kind"]), {})
        outcome = "caught" if row["outcome"] == "timeout" else row["outcome"]
        place[outcome] = place.get(outcome, 0) + 1
    dates, seconds = sorted(row["date"] for row in rows), sum(row["seconds"] for row in rows)
    lines = [
        f"{len(rows)} mutants run, {dates[0]} to {dates[-1]}, {seconds / 60:.0f} minutes of tests.",
        "",
        "| checker | mutants | run | caught | survived | equivalent | score |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for (checker, kind), place in sorted(counts.items()):
        numbers = [sum(place.values()), *(place.get(o, 0) for o in _OUTCOMES)]
        lines.append(f"| {checker} | {kind} | {' | '.join(map(str, numbers))} | {_score(place)} |")
    totals = {o: sum(place.get(o, 0) for place in counts.values()) for o in _OUTCOMES}
    numbers = [len(rows), *totals.values()]
    lines.append(f"| all | | {' | '.join(map(str, numbers))} | {_score(totals)} |")
    for title, outcome in (("Survivors", "survived"), ("Equivalent", "equivalent")):
        chosen = [row for row in rows if row["outcome"] == outcome]
        if chosen:
            lines += ["", f"{title}:", "", "| where | instead of | fault | remark |"]
            lines += ["|---|---|---|---|"]
            lines += [
                f"| {row['file']}:{row['line']} | {_code(row['before'])} | {_code(row['after'])} "
                f"| {row['reason'] or row['why']} |"
                for row in chosen
            ]
    return "\n".join(lines)


_OUTCOMES = ("caught", "survived", "equivalent")


def _score(place: dict[str, int]) -> str:
    """Of the faults that a test could tell, the share that one did."""
    tellable = place.get("caught", 0) + place.get("survived", 0)
    return f"{place.get('caught', 0) / tellable:.2f}" if tellable else ""


def _code(text: str) -> str:
    """Code in a cell: one line, no longer than fits, no mark that ends the cell."""
    flat = " ".join(text.split())
    flat = flat if len(flat) <= 60 else flat[:57] + "..."
    return "`" + flat.replace("|", "\\|").replace("`", "'") + "`" if flat else "nothing"


def write(rows: list[dict[str, Any]], page: Path) -> None:
    """Put the tables between the marks of a page."""
    text = page.read_text()
    head, _, rest = text.partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        raise SystemExit(f"{page} has no {BEGIN} ... {END}")
    page.write_text(f"{head}{BEGIN}\n{tables(rows)}\n{END}{tail}")
