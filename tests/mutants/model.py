"""Mutants: what is changed in a source file, and which tests should notice.

`checkers.toml` holds the semantic ones, written by hand, by the checker they are of. `generated`
makes the others from the syntax tree of the modules that the same file names.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).with_name("checkers.toml")
PACKAGE = "src/warploom/"


class MutantError(Exception):
    """The data of a mutant do not fit the sources."""


@dataclass(frozen=True)
class Mutant:
    """One fault. `at` is where it is in the file; `equivalent` argues that nothing can tell it;
    `quick` is a test that catches it soon. `place` tells a generated one from the others: its line,
    and a number where it is not the first such fault of such a line."""

    kind: str
    checker: str
    file: str
    before: str
    after: str
    why: str
    tests: tuple[str, ...]
    equivalent: str = ""
    quick: str = ""
    at: int = -1
    place: str = ""

    def applied(self, source: str) -> str:
        """The file's text with the fault in it; raises `MutantError` where it does not fit."""
        start = self.at
        if start < 0:
            count = source.count(self.before)
            if count != 1:
                raise MutantError(f"{self.file}: {self.before!r} occurs {count} times, expected 1")
            start = source.index(self.before)
        end = start + len(self.before)
        if source[start:end] != self.before:
            raise MutantError(f"{self.file}: {self.before!r} is not at {start}")
        return source[:start] + self.after + source[end:]

    def line(self, source: str) -> int:
        """The line of the file the fault is in."""
        start = self.at if self.at >= 0 else source.find(self.before)
        return source.count("\n", 0, max(0, start)) + 1

    def key(self, root: Path = ROOT) -> str:
        """A digest of the fault, its file and its tests: a result holds while it is the same."""
        digest = hashlib.sha256()
        argued = (self.equivalent,) if self.equivalent else ()
        for text in (self.file, self.before, self.after, str(self.at), *self.tests, *argued):
            digest.update(text.encode() + b"\0")
        paths = [root / PACKAGE / self.file]
        for test in self.tests:
            path = root / test.partition("::")[0]
            paths += sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for path in dict.fromkeys(paths):
            digest.update(path.read_bytes() if path.is_file() else b"none")
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Equivalent:
    """A generated mutant that nothing can tell: `before` becomes `after` where `file` reads `line`;
    `why` argues it. Lines before it stand in `line`, too, where others read the same."""

    file: str
    line: str
    before: str
    after: str
    why: str

    def ends(self, lines: Sequence[str]) -> bool:
        """Whether these lines, without the blanks around them, end with `line`."""
        own = [line.strip() for line in self.line.splitlines()]
        return list(lines[-len(own) :]) == own


@dataclass(frozen=True)
class Checker:
    """What is tested: its mutants, the modules that more are generated of, which of these are
    equivalent, and its tests."""

    name: str
    tests: tuple[str, ...]
    modules: tuple[str, ...]
    mutants: tuple[Mutant, ...]
    equivalents: tuple[Equivalent, ...] = ()


def load(path: Path = DATA) -> list[Checker]:
    """The checkers of a file and their semantic mutants."""
    data = tomllib.loads(path.read_text())
    found: list[Checker] = []
    for row in data["checker"]:
        tests = tuple(row["tests"])
        mutants = tuple(
            Mutant(
                "semantic",
                row["name"],
                item["file"],
                item["before"],
                item["after"],
                item["why"],
                tuple(item.get("tests", tests)),
                item.get("equivalent", ""),
                item.get("quick", ""),
            )
            for item in row.get("mutant", ())
        )
        equivalents = tuple(Equivalent(**item) for item in row.get("equivalent", ()))
        modules = tuple(row.get("modules", ()))
        found.append(Checker(row["name"], tests, modules, mutants, equivalents))
    return found
