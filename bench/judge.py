"""Candidates that are right, wrong and cheat: does the judge find each, and blame none?

    python -m bench.judge            judge the corpus and keep what was found
    python -m bench.judge --table    write the table of docs/judge.md from what was kept

The corpus is `bench/judged`: its `corpus.toml` names what finds each.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from warploom.files import write_text_atomically
from warploom.judge import Referee, Verdict, load_problem

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).parent / "judged"
KEPT = ROOT / "bench" / "results" / "raw" / "judge.json"
PAGE = ROOT / "docs" / "judge.md"
BEGIN, END = "<!-- judged -->\n", "<!-- end -->"


@dataclass(frozen=True)
class Case:
    """A candidate of the corpus; `check` finds it, "" where it is right."""

    problem: str
    file: str
    name: str
    what: str
    check: str

    @property
    def key(self) -> str:
        """Its name in what is kept."""
        return f"{self.file}:{self.name}"

    @property
    def candidate(self) -> str:
        """As `warploom judge` takes it."""
        if self.file.endswith(".cu"):
            return str(FOLDER / f"{self.name}.toml")
        return f"{FOLDER / self.file}:{self.name}"


def cases() -> list[Case]:
    """The corpus."""
    data = tomllib.loads((FOLDER / "corpus.toml").read_text())
    return [
        Case(problem, file, name, *said)
        for problem, files in data.items()
        for file, candidates in files.items()
        for name, said in candidates.items()
    ]


@cache
def referee(problem: str) -> Referee:
    """The judge of a problem of the corpus, kept for all its candidates."""
    name = f"{FOLDER / 'problems.py'}:{problem}"
    return Referee(*load_problem(name), name)


def judged(case: Case) -> Verdict:
    """The verdict on a candidate."""
    return referee(case.problem).judge(case.candidate)


def table(found: dict[str, list[str]]) -> Iterator[str]:
    """The corpus with the checks that found something."""
    known = cases()
    bad = [case for case in known if case.check]
    caught = sum(case.check in found[case.key] for case in bad)
    alarms = sum(bool(found[case.key]) for case in known if not case.check)
    yield (
        f"{len(bad)} candidates that are wrong or cheat, over {len({c.problem for c in bad})} "
        f"problems: {caught} found by the check named for them. {len(known) - len(bad)} right "
        f"ones: {alarms} blamed.\n"
    )
    yield "| problem | candidate | what it does | found by |"
    yield "|---|---|---|---|"
    for case in known:
        checks = ", ".join(found[case.key]) or "nothing: it passes"
        yield f"| {case.problem} | `{case.name}` | {case.what} | {checks} |"


def write_table(found: dict[str, list[str]]) -> str:
    """The page with the table."""
    text = PAGE.read_text()
    start = text.index(BEGIN) + len(BEGIN)
    return text[:start] + "\n".join(table(found)) + "\n" + text[text.index(END, start) :]


def main() -> int:
    """Exit 1 where a candidate is missed or blamed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="only write the table")
    if not parser.parse_args().table:
        found = {}
        for case in cases():
            verdict = judged(case)
            found[case.key] = list(verdict.checks)
            right = case.check in verdict.checks if case.check else verdict.passed
            print(f"{'' if right else 'WRONG '}{verdict}", flush=True)
        write_text_atomically(KEPT, json.dumps(found, indent=1) + "\n")
    found = json.loads(KEPT.read_text())
    write_text_atomically(PAGE, write_table(found))
    wrong = [c for c in cases() if bool(c.check) != (c.check in found[c.key])]
    return int(bool(wrong or any(found[c.key] for c in cases() if not c.check)))


if __name__ == "__main__":
    sys.exit(main())
