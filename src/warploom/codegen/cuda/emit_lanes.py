"""Code along a vector that lies over the lanes of every warp: no warp needs another one.

A vector whose axis is neither one of rows nor one of columns is whole in each warp: lane l holds
the elements l * held to l * held + held - 1.
"""

from __future__ import annotations

from warploom.codegen.analysis.exchanges import lane_words
from warploom.codegen.analysis.register_tiles import LANES
from warploom.codegen.cuda.emit_rows import WARP, combining
from warploom.codegen.cuda.lines import indent, unrolled
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.operators import rounded
from warploom.codegen.cuda.values import At, Values
from warploom.tile import Op

Names = dict[str, str]


class _Lanes:
    """What these ops share: how many elements a lane holds, the one at hand and its place."""

    def __init__(self, values: Values, op: Op, names: Names) -> None:
        source = op.srcs[0]
        self.size = source.type.shape[0]
        (self.held,) = values.extents(source.type)
        self.element = values.element(source, At("lane"), names)
        self.place = values.place(source.type.names[0], self.size, At("lane"))
        self.whole = self.size == self.held * LANES

    def there(self, text: str, missing: str) -> str:
        """`text` where the vector has the element at hand."""
        return text if self.whole else f"({self.place} < {self.size} ? {text} : {missing})"


def lane_reduce_lines(values: Values, op: Op, names: Names) -> list[str]:
    """One number, the same in all lanes."""
    assert op.dst is not None
    lanes, name = _Lanes(values, op, names), c_name(op.dst.name)
    _, join, identity = combining(op)
    shuffled = f"__shfl_xor_sync(0xffffffffu, {name}, step)"
    done = rounded(op, name)
    return [
        f"{name} = {identity};",
        *unrolled("i", lanes.held),
        f"  {name} = {join(name, lanes.there(lanes.element, identity))};",
        "#pragma unroll",
        f"for (int step = 1; step < {LANES}; step *= 2) {name} = {join(name, shuffled)};",
        *([] if done == name else [f"{name} = {done};"]),
    ]


def lane_argmax_lines(values: Values, op: Op, names: Names) -> list[str]:
    """One position: the first of the largest; NaN is larger than every number."""
    assert op.dst is not None
    lanes, integer = _Lanes(values, op, names), op.srcs[0].type.dtype.name == "int32"
    word, least = ("FoundInt", "-2147483647 - 1") if integer else ("Found", "-INFINITY")
    nothing = f"{word}{{{least}, 2147483647}}"
    found = lanes.there(f"{word}{{{lanes.element}, {lanes.place}}}", nothing)
    return [
        "{",
        f"  {word} best = {nothing};",
        *indent(unrolled("i", lanes.held)),
        f"    best = better(best, {found});",
        "  #pragma unroll",
        f"  for (int step = 1; step < {LANES}; step *= 2) best = better(best, "
        "swap_with(best, step));",
        f"  {c_name(op.dst.name)} = best.place;",
        "}",
    ]


def lane_cumsum_lines(values: Values, op: Op, names: Names) -> list[str]:
    """Running sums: a lane's own, then after those of the lanes below."""
    assert op.dst is not None
    lanes, into = _Lanes(values, op, names), c_name(op.dst.name)
    word = "int" if op.srcs[0].type.dtype.name == "int32" else "float"
    return [
        "{",
        f"  {word} running = 0;",
        *indent(unrolled("i", lanes.held)),
        f"    {into}[i] = running += {lanes.there(lanes.element, '0')};",
        f"  {word} before = running;",
        "  #pragma unroll",
        f"  for (int step = 1; step < {LANES}; step *= 2) {{",
        f"    const {word} below = __shfl_up_sync(0xffffffffu, before, step);",
        "    if (int(lane) >= step) before += below;",
        "  }",
        "  before = __shfl_up_sync(0xffffffffu, before, 1);",
        "  if (lane == 0) before = 0;",
        *indent(unrolled("i", lanes.held)),
        f"    {into}[i] = {rounded(op, f'{into}[i] + before')};",
        "}",
    ]


def from_lanes_lines(values: Values, op: Op, names: Names, reads: list[str]) -> list[str]:
    """A gather, a slice or a rename: each warp finds what it needs in a copy of its own, `met`,
    from which the lines `reads` take every element of the result."""
    lanes = _Lanes(values, op, names)
    word = "int" if op.srcs[0].type.dtype.name == "int32" else "float"
    before, each = lane_words(values.placement)
    check = "" if lanes.whole else f"if ({lanes.place} < {lanes.size}) "
    return [
        "{",
        f"{word}* const met = reinterpret_cast<{word}*>(scratch) + {before} + {WARP} * {each};",
        "__syncwarp();",
        *unrolled("i", lanes.held),
        f"  {check}met[{lanes.place}] = {lanes.element};",
        "__syncwarp();",
        *reads,
        "}",
    ]


ALONG_LANES = {
    "argmax": lane_argmax_lines,
    "cumsum": lane_cumsum_lines,
    **dict.fromkeys(("reduce_sum", "reduce_prod", "reduce_max", "reduce_min"), lane_reduce_lines),
}
