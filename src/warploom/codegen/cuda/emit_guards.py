"""Guards as C++ conditions."""

from __future__ import annotations

from warploom.codegen.analysis.guards import (
    Always,
    Compared,
    Edge,
    Everywhere,
    Guard,
    Position,
    Test,
    UnitRows,
    Vote,
)
from warploom.codegen.cuda.lines import indent
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.values import At, Values, c_index

Names = dict[str, str]
NOT_NEEDED = ["// not needed here"]


def guarded(values: Values, guard: Guard, lines: list[str], names: Names) -> list[str]:
    """The lines of steps, each after its note, under the opposite of their guard.

    The first note stays above the test.
    """
    note, *rest = lines
    if isinstance(guard, Always):
        return [note, *NOT_NEEDED]
    inner = indent(rest)
    return [note, f"if (!({condition(values, guard, names)})) {{", *inner, "}"]


def condition(values: Values, guard: Vote | UnitRows | Everywhere, names: Names) -> str:
    """The condition of a guard; `names` replaces symbols by what they are in C++."""
    if isinstance(guard, Everywhere):
        return _test(guard.test, names)
    if isinstance(guard, UnitRows):
        factor = c_name(guard.factor)
        each = [f"{factor}[{t}][{h}] == 1.0f" for t in range(guard.blocks) for h in (0, 1)]
    else:
        op = values.placement.fusion.inlined[guard.condition]
        assert op.dst is not None
        each = [
            values.expression(op, At("row", str(t), str(h)), {})
            for t in range(values.blocks(op.dst.type))
            for h in (0, 1)
        ]
    return f"__all_sync(0xffffffffu, {' && '.join(each)})"


def _test(test: Test, names: Names) -> str:
    if isinstance(test, Compared):
        return f"{_edge(test.left, names)} {test.sign} {_edge(test.right, names)}"
    return f"({f' {test.sign} '.join(_test(one, names) for one in test.tests)})"


def _edge(edge: Edge, names: Names) -> str:
    if isinstance(edge, int):
        return str(edge)
    if isinstance(edge, Position):
        text = c_index(edge.start, names)
        if edge.part_rows:
            text = f"({text} + part * {edge.part_rows})"
        return text if edge.last is None else f"({text} + {edge.last})"
    left, right = _edge(edge.left, names), _edge(edge.right, names)
    if edge.sign in ("min", "max"):
        return f"::{edge.sign}({left}, {right})"
    return f"({left} {edge.sign} {right})"
