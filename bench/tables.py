"""Write the tables of the README and the docs from `bench/results`, or check them: `make tables`.

    python -m bench.tables            rewrite them
    python -m bench.tables --check    exit 1 when a page disagrees with the results

A table stands between `<!-- table: FILE [PICK] COLUMNS... -->` and `<!-- end -->`; PICK says which
rows: all of them when it is not given, else one of `PICKS`, or `of:KERNEL` for the methods on one
kernel (rows named `kernel / method`), the best first. A column is one of `COLUMNS`, or
`check:NAME` for a check of the row, with `_` for the spaces of its name.

What a page says about a file as a whole is counted from its rows too: `claim` writes the sentence
between `<!-- claim: FILE [PICK] -->` and `<!-- end -->`, `extremes` names rows of extreme ratios
between `<!-- extremes: FILE [PICK] LOWEST HIGHEST -->` and `<!-- end -->`, and `errors` writes the
sentence on predictions, whose mark is `<!-- errors: FILE -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, median

from bench.evidence import Evidence, read_rows
from warploom.errors import InputError
from warploom.files import write_text_atomically
from warploom.rewrites.rules import RULES
from warploom.runtime.stats import Ratio

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
RESULTS = ROOT / "bench" / "results"
MARKER = re.compile(r"(<!-- table: (\S+) ([^>]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
RULE_TABLE = re.compile(r"(<!-- rules -->\n)(.*?)(<!-- end -->)", re.DOTALL)
ERRORS = re.compile(r"(<!-- errors: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
WELL = 0.08  # error of a prediction that is good
CLAIM = re.compile(r"(<!-- claim: (\S+) ?([^>]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

EXTREMES = re.compile(
    r"(<!-- extremes: (\S+) (?:(\S+) )?(\d+) (\d+) -->\n)(.*?)(<!-- end -->)", re.DOTALL
)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _interval(pair: tuple[float, float] | None) -> str:
    return "" if pair is None else f"{pair[0]:.3f}-{pair[1]:.3f}"


def _best(row: Evidence) -> tuple[str, float]:
    pick = max if row.better == "higher" else min
    return pick(row.baselines.items(), key=lambda item: item[1])


def verdict(row: Evidence) -> str:
    """`ahead` or `behind` where the whole interval is beyond what an A/A control shows, else
    `level`; `wrong` where the result was."""
    if str(row.checks.get("numerics", "pass")) != "pass":
        return "wrong"
    if row.ci95 is None or row.control is None:
        return ""
    (low, high), (least, most) = row.ci95, row.control
    control = Ratio(1.0, least, most, row.samples, 1)
    if Ratio(row.ratio_to_best, low, high, row.samples, 1).clears(control):
        return "ahead"
    turned = Ratio(1 / row.ratio_to_best, 1 / high, 1 / low, row.samples, 1)
    return "behind" if turned.clears(control) else "level"


def _sittings(row: Evidence) -> str:
    """Ours and every baseline, one figure a sitting."""
    seen = row.checks["sittings"]
    rates = {"ours": [one["ours"] for one in seen]}
    rates |= {name: [one["baselines"][name] for one in seen] for name in row.baselines}
    return "<br>".join(f"{name} {', '.join(map(_number, x))}" for name, x in rates.items())


def _each(values: list[int | None]) -> str:
    """The value of every seed, once where all agree."""
    if len(set(values)) == 1:
        values = values[:1]
    return ", ".join("no gain" if value is None else str(value) for value in values)


COLUMNS: dict[str, tuple[str, Callable[[Evidence], str]]] = {
    "kernel": ("kernel", lambda row: row.kernel),
    "shape": ("shape", lambda row: row.shape),
    "dtype": ("type", lambda row: row.dtype),
    "ours": ("ours", lambda row: f"{_number(row.ours)} {row.unit}"),
    "best": ("best baseline", lambda row: f"{_number(_best(row)[1])} ({_best(row)[0]})"),
    "baselines": (
        "baselines",
        lambda row: ", ".join(f"{name} {_number(value)}" for name, value in row.baselines.items()),
    ),
    "ratio": ("ratio", lambda row: f"{row.ratio_to_best:.3f}"),
    "ci95": ("95 % interval", lambda row: _interval(row.ci95)),
    "control": ("A/A control", lambda row: _interval(row.control)),
    "verdict": ("verdict", verdict),
    "fastest": ("its best sitting", lambda row: _number(row.checks["fastest baseline"])),
    "over": ("ours over that", lambda row: f"{row.checks['over the fastest']:.3f}"),
    "limit": ("of the limit", lambda row: f"{row.checks['of the limit']:.0%}"),
    "sittings": ("each sitting", _sittings),
    "device": ("device", lambda row: row.device),
    "notes": ("notes", lambda row: row.notes),
    "predicted": ("predicted", lambda row: f"{row.checks['predicted cycles']:.0f}"),
    "counted": ("counted", lambda row: f"{row.checks['counted cycles']:.0f}"),
    "method": ("method", lambda row: f"`{row.kernel.split(' / ')[-1]}`"),
    "seeds": ("seeds", lambda row: ", ".join(f"{s[0]:.3f}" for s in row.checks["seeds"].values())),
    "median": (
        "median [95 %]",
        lambda row: f"{row.ratio_to_best:.3f} [{_interval(row.ci95).replace('-', ', ')}]",
    ),
    "spent": ("measurements", lambda row: _each(row.checks["measurements"])),
    "to95": ("until 95 % of the gain", lambda row: _each(row.checks["measurements_to_95_percent"])),
    "model": ("model's error", lambda row: f"{row.checks['model error']:+.1%}"),
}
VERDICTS = ("ahead", "level", "behind", "wrong")


def best_per_shape(rows: list[Evidence]) -> list[Evidence]:
    """The fastest variant of every shape, in the order the shapes were measured."""
    return _best_of(rows, lambda row: f"{row.shape} {row.dtype}")


def best_per_kernel(rows: list[Evidence]) -> list[Evidence]:
    """The best method of every kernel, where rows are named `kernel / method`."""
    return _best_of(rows, lambda row: row.kernel.split(" / ")[0])


def defaults(rows: list[Evidence]) -> list[Evidence]:
    """What a user gets who names no variant: the rows of the default configuration alone."""
    return [row for row in rows if row.kernel.endswith(" default")]


def dense(rows: list[Evidence]) -> list[Evidence]:
    """Defaults of attention with nothing special: shapes of a head's size, a mask and rows."""
    words = [(row, row.shape.split()) for row in defaults(rows)]
    return [row for row, (size, *rest) in words if size.isdigit() and len(rest) == 2]


def kind(name: str) -> Callable[[list[Evidence]], list[Evidence]]:
    """The rows of kernels whose name ends so."""
    return lambda rows: [row for row in rows if row.kernel.endswith(f" {name}")]


def ablated(rows: list[Evidence]) -> list[Evidence]:
    """Rows that say what was taken away and what became of it."""
    return [row for row in rows if "ablations" in row.checks]


def unmeasured(rows: list[Evidence]) -> list[Evidence]:
    """Textbooks whose kernel a search chose by its model alone, before any was timed."""
    return [row for row in rows if not row.kernel.endswith(", measured")]


def searched(kernel: str, origin: str) -> Callable[[list[Evidence]], list[Evidence]]:
    """Of the unmeasured ones those of a textbook whose shape comes from a benchmark, or was drawn
    at random."""

    def pick(rows: list[Evidence]) -> list[Evidence]:
        return [
            row
            for row in unmeasured(rows)
            if kernel in row.kernel and str(row.checks["origin"]).startswith(origin)
        ]

    return pick


def named(*words: str) -> Callable[[list[Evidence]], list[Evidence]]:
    """The rows whose shape begins with one of the words."""
    return lambda rows: [row for row in rows if row.shape.split()[0] in words]


def _best_of(rows: list[Evidence], key: Callable[[Evidence], str]) -> list[Evidence]:
    best: dict[str, Evidence] = {}
    for row in rows:
        name = key(row)
        if name not in best or row.ratio_to_best > best[name].ratio_to_best:
            best[name] = row
    return list(best.values())


FEW = 600  # rows of an image or a short prompt

PICKS: dict[str, Callable[[list[Evidence]], list[Evidence]]] = {
    "best-per-shape": best_per_shape,
    "best-per-kernel": best_per_kernel,
    "defaults": defaults,
    "dense": dense,
    "few-rows": lambda rows: [row for row in dense(rows) if int(row.shape.split()[2]) < FEW],
    "one-order": kind("deterministic"),
    "steps": kind("with forward"),
    "hard": named("fp8", "sharp", "rising", "jump"),
    "ablated": ablated,
    "unmeasured": unmeasured,
    "searched-attention": searched("attention", "benchmark"),
    "searched-gemm": searched("gemm", "benchmark"),
    "searched-drawn": searched("", "drawn"),
    "measured": lambda rows: [row for row in rows if row.kernel.endswith(", measured")],
    "behind": lambda rows: [row for row in rows if verdict(row) in ("behind", "wrong")],
    "gemm": named("gemm"),
    "grouped": named("grouped", "rows8"),
    "attention": named("attention"),
}
CHECK = "check:"
OF = "of:"


def _check(row: Evidence, name: str) -> str:
    value = row.checks.get(name, "")
    if isinstance(value, dict):
        return "<br>".join(f"{key}: {item}" for key, item in value.items())
    return str(value)


def _column(name: str, file: str) -> tuple[str, Callable[[Evidence], str]]:
    if name.startswith(CHECK):
        check = name.removeprefix(CHECK).replace("_", " ")
        return check, lambda row: _check(row, check)
    if name not in COLUMNS:
        raise InputError(
            f"table of {file}: no column {name!r}; there are {', '.join(COLUMNS)}, {CHECK}NAME"
        )
    return COLUMNS[name]


def table(file: str, columns: list[str]) -> str:
    """One markdown table; losses included."""
    rows = read_rows(RESULTS / file)
    if columns and columns[0] in PICKS:
        rows, columns = PICKS[columns[0]](rows), columns[1:]
    elif columns and columns[0].startswith(OF):
        wanted = columns[0].removeprefix(OF)
        rows = [row for row in rows if row.kernel.split(" / ")[0] == wanted]
        rows.sort(key=lambda row: -row.ratio_to_best)
        columns = columns[1:]
    chosen = [_column(column, file) for column in columns]
    lines = ["| " + " | ".join(title for title, _ in chosen) + " |", "|" + "---|" * len(chosen)]
    lines += ["| " + " | ".join(cell(row) for _, cell in chosen) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def claim(file: str, pick: str) -> str:
    """What the rows of a file say together, as one paragraph."""
    every = read_rows(RESULTS / file)
    rows = PICKS[pick](every) if pick else every
    counts = {name: sum(verdict(row) == name for row in rows) for name in VERDICTS}
    ratios = [row.ratio_to_best for row in rows]
    is_or_are = "is" if counts["ahead"] == 1 else "are"
    wrong = f" ({counts['wrong']} wrong)" if counts["wrong"] else ""
    return (
        f"Of {len(rows)} rows{wrong} {counts['ahead']} {is_or_are} ahead, {counts['behind']} "
        f"behind and {counts['level']} level; ratios from {min(ratios):.3f} to {max(ratios):.3f}, "
        f"geometric mean {geometric_mean(ratios):.3f}{_of_any(rows, every)}.\n"
    )


def extremes(file: str, pick: str, lowest: int, highest: int) -> str:
    """The rows of the lowest and of the highest ratios, by name."""
    rows = read_rows(RESULTS / file)
    rows = sorted(PICKS[pick](rows) if pick else rows, key=lambda row: row.ratio_to_best)
    several = len({row.dtype for row in rows}) > 1
    ends = {"Lowest": rows[:lowest], "highest" if lowest else "Highest": rows[: -highest - 1 : -1]}
    told = [
        f"{end}: {', '.join(_named(row, several) for row in rows)}"
        for end, rows in ends.items()
        if rows
    ]
    return "; ".join(told) + ".\n"


def _named(row: Evidence, several: bool) -> str:
    """A row in few words: its kernel's name where that is no default, its shape and ratio."""
    name = row.kernel.split(" / ")[0]
    words = [row.shape] if name.endswith(" default") else [name, row.shape]
    words += [row.dtype] if several and row.dtype not in row.shape else []
    old = ", an earlier kernel" if "an earlier kernel" in row.notes else ""
    return f"{' '.join(words)} ({row.ratio_to_best:.3f}{old})"


def _of_any(rows: list[Evidence], every: list[Evidence]) -> str:
    """The mean over the best rate of any baseline in any run; nothing where rows are times."""
    if any(row.better != "higher" for row in every):
        return ""
    fastest = fastest_baselines(every)
    ratio = geometric_mean([row.ours / fastest[row.shape, row.dtype] for row in rows])
    return (
        "\n(over the best rate that any baseline had in any run on file, at whatever clock: "
        f"{ratio:.3f})"
    )


def rules() -> str:
    """The rules on tile programs, in the words of their descriptions."""
    lines = ["| rule | before -> after | keeps | cost |", "|---|---|---|---|"]
    for rule in RULES.values():
        words = (rule.told(what) for what in ("before -> after", "keeps", "cost"))
        told = [text.replace("|", "\\|") for text in words]
        lines.append(" | ".join([f"| `{rule.name}`", *told]) + " |")
    return "\n".join(lines) + "\n"


def launches(rows: list[Evidence]) -> list[Evidence]:
    """A row a launch that was predicted: a row of a search tells of several."""
    found: list[Evidence] = []
    for row in rows:
        if "predicted" in row.baselines:
            found.append(row)
            continue
        if row.kernel.endswith(", measured"):
            continue  # the same launches again
        for one in json.loads(row.notes):
            told, ours = one["predicted"], one["measured"]
            seen = {"baselines": {"predicted": told}, "checks": {"error": told / ours - 1.0}}
            found.append(replace(row, ours=ours, notes=one["point"], **seen))
    return found


def errors(told: list[Evidence]) -> str:
    """How far predictions are from what was measured, over a file's rows."""
    rows = launches(told)
    far = max(rows, key=lambda row: abs(float(row.checks["error"])))
    found = sorted(abs(float(row.checks["error"])) for row in rows)
    within = sum(error <= WELL for error in found)
    return (
        f"Over {len(found)} launches the median error is {median(found):.1%}; {within} are within "
        f"{WELL:.0%}, the largest is {found[-1]:.0%} ({far.kernel}, {far.shape})."
        f"{first_choices(rows)}"
    )


def first_choices(rows: list[Evidence]) -> str:
    """Of every shape with several points how much longer the one that is predicted to be the
    fastest takes than the one that is; nothing where no shape has several."""
    shapes: dict[tuple[str, str], list[Evidence]] = {}
    for row in rows:
        shapes.setdefault((row.kernel, row.shape), []).append(row)
    lost = sorted(
        min(here, key=lambda row: row.baselines["predicted"]).ours / min(row.ours for row in here)
        - 1.0
        for here in shapes.values()
        if len(here) > 1
    )
    if not lost:
        return ""
    return (
        f" At {len(lost)} shapes the point predicted to be the fastest takes {median(lost):.1%} "
        f"longer than the fastest on the median, {lost[-1]:.1%} at most."
    )


def fastest_baselines(rows: list[Evidence]) -> dict[tuple[str, str], float]:
    """The best rate of any baseline in any run, by shape and type: as the rows have it, or say."""
    fastest: dict[tuple[str, str], float] = {}
    for row in rows:
        key = row.shape, row.dtype
        other = row.checks.get("fastest baseline", 0.0)
        fastest[key] = max(fastest.get(key, 0.0), other, *row.baselines.values())
    return fastest


def rendered(text: str) -> str:
    """The text with every table and every claim made anew."""
    text = MARKER.sub(
        lambda match: f"{match[1]}{table(match[2], match[3].split())}{match[5]}", text
    )
    text = ERRORS.sub(
        lambda match: f"{match[1]}{errors(read_rows(RESULTS / match[2]))}\n{match[4]}", text
    )
    text = EXTREMES.sub(
        lambda match: (
            f"{match[1]}{extremes(match[2], match[3], int(match[4]), int(match[5]))}{match[7]}"
        ),
        text,
    )
    text = RULE_TABLE.sub(lambda match: f"{match[1]}{rules()}{match[3]}", text)
    return CLAIM.sub(lambda match: f"{match[1]}{claim(match[2], match[3])}{match[5]}", text)


def main(arguments: list[str]) -> int:
    """Rewrite or check every page; returns the exit status."""
    status = 0
    for page in PAGES:
        text = page.read_text()
        new = rendered(text)
        if new == text:
            continue
        if "--check" in arguments:
            name = page.relative_to(ROOT)
            print(f"{name} disagrees with bench/results: run `make tables`", file=sys.stderr)
            status = 1
        else:
            write_text_atomically(page, new)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
