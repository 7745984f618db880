"""The code of a loop whose tiles have several copies: unrolled until every copy is known by name.

    start `depth` iterations ahead
    for whole rounds of u iterations: steady, steady, ... each with its own names
    what is left of a round (0 ... u - 1 iterations), then what is in flight, by the remainder

*requires*  a pipeline with copies; u = the least common multiple of their numbers
*keeps*  the steps of every iteration and their order
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from warploom.codegen.analysis.guards import renamed_guard
from warploom.codegen.analysis.role_code import Code, Guarded, LoopCode, first_step
from warploom.codegen.cuda.lines import indent
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.values import Values
from warploom.codegen.ir.copies import copy_name, names_at, rename, renamed, unroll_of
from warploom.codegen.ir.steps import Join, OpStep

Emit = Callable[[Values, Sequence[Code], str, int], list[str]]


class Expanded:
    """Writes one pipeline; `emit` writes steps of one iteration, as `StepCode` does."""

    def __init__(self, values: Values, code: LoopCode, emit: Emit) -> None:
        self.code, self.section, self.emit = code, code.section, emit
        self.unroll = unroll_of(self.section.copies)
        self.views = [
            Values(renamed(values.placement, names_at(self.section.copies, number)))
            for number in range(self.unroll)
        ]

    def lines(self) -> list[str]:
        """The loop, without its range and its surroundings."""
        section, index = self.section, self.section.loop.index
        counter, depth = c_name(index), section.depth
        body: list[str] = []
        for number, steps in enumerate(self.code.prologue):
            inner = self._block(steps, f"{index}_start", number, number)
            body += [f"{{  // start iteration {number} ahead", *indent(inner), "}"]
        body += [
            f"int {counter} = {index}_start + {depth};",
            "#pragma unroll 1",
            f"for (; {counter} + {self.unroll - 1} < {index}_stop; {counter} += {self.unroll}) {{",
        ]
        for ahead in range(self.unroll):
            inner = self._block(self.code.steady, counter, ahead, depth + ahead)
            body += indent([f"{{  // copies of iteration {ahead} of a round", *indent(inner), "}"])
        body.append("}")
        for rest in range(self.unroll):
            head = f"if ({counter} + {rest} == {index}_stop) {{"
            body += [head if rest == 0 else f"else {head}", *indent(self._tail(rest)), "}"]
        result = [f"if ({index}_stop - {index}_start >= {depth}) {{", *indent(body), "}"]
        if depth > 1:
            # The first copies alone: one iteration ends before the next begins.
            inner = self.emit(self.views[0], self.code.plain, counter, 0)
            result += [
                "else {",
                f"  for (int {counter} = {index}_start; {counter} < {index}_stop; ++{counter}) {{",
                *indent(indent(inner)),
                "  }",
                "}",
            ]
        return result

    def _tail(self, rest: int) -> list[str]:
        section, counter = self.section, c_name(self.section.loop.index)
        lines: list[str] = []
        for ahead in range(rest):
            inner = self._block(self.code.steady, counter, ahead, section.depth + ahead)
            lines += ["{  // left of a round", *indent(inner), "}"]
        for number, steps in enumerate(self.code.epilogue):
            newest = section.depth + rest + number
            inner = self._block(steps, f"{section.loop.index}_stop", number, newest)
            lines += ["{  // finish what is in flight", *indent(inner), "}"]
        return lines

    def _block(self, codes: Sequence[Code], base: str, plus: int, newest: int) -> list[str]:
        """One iteration's steps; `newest` is its number from the loop's first, modulo the unroll.

        Each step works on the iteration `stage` before it, so on that one's copies.
        """
        lines: list[str] = []
        for code in codes:
            number = (newest - first_step(code).stage) % self.unroll
            own = self._renamed(code, number, newest)
            lines += self.emit(self.views[number], (own,), base, plus)
        return lines

    def _renamed(self, code: Code, number: int, newest: int) -> Code:
        copies = self.section.copies
        names = names_at(copies, number)
        if isinstance(code, Guarded):
            body = tuple(self._renamed(one, number, newest) for one in code.body)
            return Guarded(renamed_guard(code.guard, names), body)
        if isinstance(code, OpStep):
            return replace(code, op=rename(code.op, names))
        if not isinstance(code, Join):
            return code
        joined = tuple(
            copy_name(name, (newest - lag) % copies.get(name, 1))
            for name, lag in zip(code.names, code.lags, strict=True)
        )
        return replace(code, names=joined)
