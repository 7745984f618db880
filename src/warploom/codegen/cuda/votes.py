"""Neighbouring steps under tests of a warp: one test for all of them, or one within another.

*requires*  steps that follow one another, each under a vote on conditions of rows
            (`cuda.voted_skip`); for a test within another, nothing in it writes what the outer
            condition reads, and where the outer condition holds the inner one does
*before -> after*  `if (!all(a)) x; if (!all(a)) y` -> `if (!all(a)) { x; y }`
                   `if (!all(a)) x; if (!all(ab)) y` -> `if (!all(ab)) { if (!all(a)) x; y }`
*keeps*  every value that is read; where the outer condition holds one vote is left of two
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from warploom.codegen.ir.fuse import Fusion
from warploom.tile import Op

OPENING, CLOSING = "if (!(", ")) {"
VOTE = f"{OPENING}__all_sync("


class Votes:
    """Joins the lines of steps, in order."""

    def __init__(self, fusion: Fusion, conditions: Mapping[str, str]) -> None:
        self.fusion, self.conditions = fusion, conditions
        self.guard, self.written = "", set[str]()  # of the last step, and what it writes

    def join(self, lines: Sequence[str], new: Sequence[str], op: Op | None) -> list[str]:
        """The lines so far and those of the next step."""
        opening = next((n for n, text in enumerate(new[:2]) if text.startswith(VOTE)), None)
        name = op.dst.name if op is not None and op.dst is not None else ""
        guard = "" if opening is None else new[opening]
        beside = bool(lines) and lines[-1] == "}" and self.guard != ""
        if opening is None or not beside or not self._holds_all(guard):
            self.guard, self.written = guard, {name}
            return [*lines, *new]
        self.written.add(name)
        rest = [*new[:opening], *new[opening + 1 :]]
        if guard == self.guard:
            return [*lines[:-1], *rest]
        start = max(n for n, text in enumerate(lines) if text == self.guard)
        inner = [f"  {line}" for line in lines[start:]]
        self.guard = guard
        return [*lines[:start], guard, *inner, *rest]

    def _holds_all(self, guard: str) -> bool:
        """Whether the steps written under the last test can stand under another."""
        outer, inner = (self._condition(text) for text in (guard, self.guard))
        if not outer or not inner:
            return guard == self.guard
        read = {var.name for var in self.fusion.sources(self.fusion.inlined[outer])}
        return self._implies(outer, inner) and not read & self.written

    def _condition(self, guard: str) -> str:
        return self.conditions.get(guard[len(OPENING) : -len(CLOSING)], "")

    def _implies(self, outer: str, inner: str) -> bool:
        op = self.fusion.inlined.get(outer)
        if outer == inner or op is None or op.kind != "and":
            return outer == inner
        return any(self._implies(src.name, inner) for src in op.srcs)
