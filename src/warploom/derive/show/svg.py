"""Drawing one diagram as SVG: plain, or as a kernel with its colours, partitions and costs.

Conventions: data flows left to right; an array is a bundle of wires, one for
each axis; a box acts on the wires that end at it, and is weaved over the wires that pass over it
(a dot where they enter and leave). Wires in global memory are dark, wires on chip orange; where an
array crosses, its partition labels stand (g_q: group, s_x: stream). Below each column: what it
adds to H when it crosses, and the tile it leaves on chip.

Everything is laid out from the term; nothing is placed by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape

from warploom.derive.cost.cost import PAPER, columns, tile_of, transfers
from warploom.derive.formula.graph import Diagram, Node
from warploom.derive.formula.ops import op
from warploom.derive.kernel.kernel import Kernel
from warploom.derive.show.svgmarks import FONT, branch, centre, curve, dot, label, line, remark, tag

WIRE = 15
"""Pixels between the wires of one array."""
GAP = 26
"""Pixels between two arrays."""
BOX = 44
STEP = 132
"""Pixels from one column to the next."""
ENTRY = 56
"""Further pixels where an array enters between two boxes."""
LEAD = 30
"""Pixels a wire runs straight behind a box, past its labels."""
MARGIN = 96
COLOUR = {"global": "#263238", "chip": "#e07b00", "box": "#ffffff", "region": "#fff4e3"}


@dataclass(frozen=True)
class Placed:
    """An array at one boundary: its vertical position (of its first wire) and wire count."""

    value: str
    y: float
    wires: int

    def wire(self, index: int) -> float:
        """The y of one wire."""
        return self.y + index * WIRE


@dataclass(frozen=True)
class Column:
    """One box with the arrays on its left (inputs last of their group) and on its right."""

    node: Node
    left: tuple[tuple[str, bool], ...]
    right: tuple[str, ...]
    x: float = 0.0


def columns_of(body: Diagram) -> tuple[Column, ...]:
    """One column a box: (array, is an input of the box) on the left, live arrays on the right.

    Inputs of a box are brought together, so every crossing happens between boxes; an array that is
    needed again is copied, and the copy passes by.
    """
    waiting = {name: len(users) for name, users in body.consumers.items()}
    live: list[str] = []
    result: list[Column] = []
    for node in body.nodes:
        if node.kind == "const":
            continue
        inputs = [i for i in dict.fromkeys(node.inputs) if not _is_const(body, i)]
        position = min((live.index(i) for i in inputs if i in live), default=len(live))
        for name in inputs:
            waiting[name] -= 1
        passing = [v for v in live if v not in inputs or waiting[v] > 0 or v in body.outputs]
        fresh = [i for i in inputs if i not in live and waiting[i] > 0]
        position = min(position, len(passing))
        passing_all = [*passing[:position], *fresh, *passing[position:]]
        at = position + len(fresh)
        left = [(v, False) for v in passing_all[:at]] + [(i, True) for i in inputs]
        left += [(v, False) for v in passing_all[at:]]
        live = [*passing_all[:at], node.name, *passing_all[at:]]
        result.append(Column(node, tuple(left), tuple(live)))
    return tuple(result)


def _is_const(body: Diagram, name: str) -> bool:
    """Whether a value is a number."""
    return name in body.node and body.node[name].kind == "const"


def panel(
    body: Diagram, kernel: Kernel | None, title: str, note: str = ""
) -> tuple[str, float, float]:
    """One diagram: (svg, width, height). `note` stands under it, before the columns' sizes."""
    body = body if kernel is None else replace(body, nodes=_loop_first(kernel))
    cols = _spaced(body, columns_of(body))
    counts = [sum(max(1, len(body.axes_of(v))) for v, _ in c.left) for c in cols]
    arrays = [len(c.left) for c in cols]
    tall = max((n * WIRE + a * GAP for n, a in zip(counts, arrays, strict=True)), default=0)
    streams = len(kernel.stream_index) if kernel is not None else 0
    top = 62.0 + 18 * max(0, streams - 1)
    middle = top + tall / 2
    left = [_stack(body, [v for v, _ in c.left], middle) for c in cols]
    right = [_stack(body, list(c.right), middle) for c in cols]
    width = 2 * MARGIN + STEP + (cols[-1].x - cols[0].x if cols else 0)
    floor = top + tall + 30
    parts = [f"<text x='24' y='26' font-size='17' fill='#111' {FONT}>{escape(title)}</text>"]
    if kernel is not None:
        parts.append(_region(kernel, cols, top - 8, tall + 18))
    for j, column in enumerate(cols):
        parts += _joins(body, kernel, cols, left, right, j)
        parts += _box(body, kernel, column, left[j], right[j], column.x)
    parts += _ends(body, kernel, right[-1], cols[-1].x + BOX) if cols else []
    parts += _rows(body, kernel, cols, floor, note)
    return "".join(parts), width, floor + (74 if kernel is not None else 30)


def legend() -> tuple[str, float, float]:
    """What the marks of the drawings mean: (svg, width, height)."""
    chip, dark = COLOUR["chip"], COLOUR["global"]
    marks = (
        (
            line(24, 0, 64, 0, dark),
            "an axis of an array in global memory; parallel lines: one array",
        ),
        (line(24, 0, 64, 0, chip), "the same on the chip"),
        (line(24, 0, 64, 0, dark, "stroke-dasharray='2 3'"), "a number: an array without axes"),
        (
            line(24, 0, 64, -5, dark) + line(24, 0, 64, 5, dark) + branch(26, 0, dark),
            "a value is read more than once",
        ),
        (
            "<rect x='34' y='-8' width='20' height='16' rx='4' fill='white' stroke='#555'/>"
            + line(24, 0, 64, 0, "#bbb")
            + dot(34, 0)
            + dot(54, 0),
            "a box is done for each place along a wire that goes through it",
        ),
        (
            tag(44, 4, "g_q", "middle", chip),
            "q is grouped: a task has so many, tasks run in parallel",
        ),
        (tag(44, 4, "s_x", "middle", chip), "x is streamed: a loop brings so many at a time"),
        (
            f"<rect x='24' y='-7' width='40' height='14' rx='5' fill='{COLOUR['region']}'/>",
            "one kernel: what lies inside never leaves the chip",
        ),
        (tag(44, 4, "H", "middle", "#111"), "values that cross between the chip and memory there"),
        (tag(44, 4, "M", "middle", "#111"), "values that are held on the chip behind the box"),
    )
    parts = [f"<text x='24' y='26' font-size='17' fill='#111' {FONT}>legend</text>"]
    for number, (mark, words) in enumerate(marks):
        y = 48 + 20 * number
        parts.append(f"<g transform='translate(0,{y})'>{mark}</g>{remark(80, y + 4, words)}")
    return "".join(parts), 620.0, 58.0 + 20 * len(marks)


def _loop_first(kernel: Kernel) -> tuple[Node, ...]:
    """The boxes with those of the innermost loop first, when that order is still topological."""
    innermost = len(kernel.loops)

    def late(node: Node) -> int:
        return innermost - kernel.work_depth(node) if kernel.taint[node.name] else 0

    order = tuple(sorted(kernel.body.nodes, key=late))
    place = {node.name: index for index, node in enumerate(order)}
    legal = all(place.get(s, -1) < place[node.name] for node in order for s in node.inputs)
    return order if legal else kernel.body.nodes


def _spaced(body: Diagram, cols: tuple[Column, ...]) -> tuple[Column, ...]:
    """The columns with the left edges of their boxes: where an array enters between two boxes,
    its name and labels get room beside those of the box before."""
    placed: list[Column] = []
    x = MARGIN + (STEP - BOX) / 2
    known: set[str] = set()
    for j, column in enumerate(cols):
        entering = {value for value, _ in column.left if value in body.array} - known
        known |= entering
        if j:
            x += STEP + (ENTRY if entering else 0)
        placed.append(replace(column, x=x))
    return tuple(placed)


def _stack(body: Diagram, values: list[str], middle: float) -> list[Placed]:
    """Arrays one under the other around the middle line."""
    total = sum(max(1, len(body.axes_of(v))) * WIRE for v in values) + GAP * (len(values) - 1)
    y = middle - total / 2 + WIRE / 2
    placed: list[Placed] = []
    for value in values:
        wires = max(1, len(body.axes_of(value)))
        placed.append(Placed(value, y, wires))
        y += wires * WIRE + GAP
    return placed


def _region(kernel: Kernel, cols: tuple[Column, ...], top: float, tall: float) -> str:
    """The on-chip background and a bracket over the columns of each stream loop."""
    last = cols[-1].x + BOX
    parts = [
        f"<rect x='{cols[0].x - 26:.0f}' y='{top:.0f}' width='{last - cols[0].x + 52:.0f}' "
        f"height='{tall:.0f}' rx='10' fill='{COLOUR['region']}'/>"
    ]
    for level, (axis, index) in enumerate(kernel.stream_index.items()):
        inside = [j for j, c in enumerate(cols) if kernel.work_depth(c.node) >= index]
        if not inside:
            continue
        x0, x1, y = (
            cols[inside[0]].x - 16,
            cols[inside[-1]].x + BOX + 16,
            top - 4 - 18 * (len(kernel.stream_index) - 1 - level),
        )
        symbol = kernel.loops[index].symbol
        parts.append(
            f"<path d='M{x0:.0f} {y + 7:.0f} V{y:.0f} H{x1:.0f} V{y + 7:.0f}' fill='none' "
            f"stroke='#8a4b00' stroke-width='1.3'/>"
            f"<text x='{x0 + 6:.0f}' y='{y - 5:.0f}' font-size='12' "
            f"fill='#8a4b00' {FONT}>"
            f"stream {escape(axis)} by {label(symbol)}</text>"
        )
    return "".join(parts)


def _joins(
    body: Diagram,
    kernel: Kernel | None,
    cols: tuple[Column, ...],
    left: list[list[Placed]],
    right: list[list[Placed]],
    j: int,
) -> Iterator[str]:
    """Wires from the previous column's right side to this column's left side; new arrays enter."""
    before = {p.value: p for p in right[j - 1]} if j else {}
    x1 = cols[j].x
    for placed, (value, used) in zip(left[j], cols[j].left, strict=True):
        colour = _colour(kernel)
        copies = sum(v == value for v, _ in cols[j].left)
        source = before.get(value)
        if source is None and not used and copies > 1:
            # A copy of an array that enters at this very column branches off the entering wires.
            twin = next(p for p, c in zip(left[j], cols[j].left, strict=True) if c == (value, True))
            for w in range(placed.wires):
                yield curve(x1 - 18, twin.wire(w), x1, placed.wire(w), colour)
                yield branch(x1 - 18, twin.wire(w), colour)
            continue
        if source is None:
            yield from _entry(body, kernel, placed, x1)
            continue
        x0 = cols[j - 1].x + BOX
        for w in range(placed.wires):
            yield line(x0, source.wire(w), x0 + LEAD, source.wire(w), colour)
            yield curve(x0 + LEAD, source.wire(w), x1, placed.wire(w), colour)
            if copies > 1:
                yield branch(x0 + LEAD, source.wire(w), colour)


def _entry(body: Diagram, kernel: Kernel | None, placed: Placed, x: float) -> Iterator[str]:
    """An external array coming in: dark stub, name, axis labels, partition labels at the edge."""
    start = x - 62
    crossing = x - 24
    chip = kernel is not None
    axes = body.axes_of(placed.value)
    yield (
        f"<text x='{start - 4:.0f}' y='{placed.y - 8:.1f}' font-size='14' font-weight='bold' "
        f"fill='#111' {FONT}>{escape(placed.value)}</text>"
    )
    for w in range(placed.wires):
        y = placed.wire(w)
        style = "stroke-dasharray='2 3'" if not axes else ""
        end = crossing if chip else x
        yield line(start, y, end, y, COLOUR["global"], style)
        if chip:
            yield line(crossing, y, x, y, COLOUR["chip"], style)
        if axes:
            yield tag(start - 4, y + 4, axes[w], "end", "#555")
            if kernel is not None and axes[w] in kernel.depth_of_axis:
                symbol = kernel.loops[kernel.depth_of_axis[axes[w]]].symbol
                yield tag(crossing + 3, y - 3, symbol, "start", "#8a4b00", 11)
    if chip:
        y0, y1 = placed.y - 5, placed.wire(placed.wires - 1) + 5
        yield line(crossing, y0, crossing, y1, "#8a4b00", "stroke-width='2.2'")


def _box(
    body: Diagram,
    kernel: Kernel | None,
    column: Column,
    left: list[Placed],
    right: list[Placed],
    x: float,
) -> Iterator[str]:
    """A box, the wires that end at it, the wires weaved over it, and arrays passing by."""
    node = column.node
    inputs = [p for p, (_, used) in zip(left, column.left, strict=True) if used]
    output = next(p for p in right if p.value == node.name)
    passing = [p for p, (_, used) in zip(left, column.left, strict=True) if not used]
    for placed in passing:
        target = next(p for p in right if p.value == placed.value)
        for w in range(placed.wires):
            colour = _colour(kernel)
            yield curve(x, placed.wire(w), x + BOX, target.wire(w), colour)
    ys = [p.wire(w) for p in (*inputs, output) for w in range(p.wires)]
    low, high = min(ys) - 9, max(ys) + 9
    yield (
        f"<rect x='{x:.0f}' y='{low:.1f}' width='{BOX}' height='{high - low:.1f}' rx='6' "
        f"fill='{COLOUR['box']}' stroke='#333' stroke-width='1.2'/>"
    )
    weaved = {axis: output.wire(w) for w, axis in enumerate(body.axes_of(node.name))}
    for placed in inputs:
        for w, axis in enumerate(body.axes_of(placed.value)):
            y = placed.wire(w)
            if axis in weaved and axis not in node.over:
                yield curve(x, y, x + BOX, weaved[axis], "#c3ccd1", "stroke-width='1'")
                yield dot(x, y)
    for axis, y in weaved.items():
        carried = any(axis in body.axes_of(p.value) for p in inputs)
        if carried:
            yield dot(x + BOX, y)
    glyph = op(node.op).glyph or node.op
    constants = [body.node[i] for i in node.inputs if _is_const(body, i)]
    text = f"{glyph}{constants[0].attr('value'):g}" if constants else glyph
    size = 15 if len(text) <= 4 else 11
    yield (
        f"<text x='{x + BOX / 2:.0f}' y='{(low + high) / 2 + 5:.1f}' text-anchor='middle' "
        f"font-size='{size}' fill='#111' {FONT}>"
        f"{escape(text)}</text>"
    )
    yield (
        f"<text x='{x + BOX + 5:.0f}' y='{output.y - 15:.1f}' font-size='13' font-style='italic' "
        f"fill='#333' {FONT}>{escape(node.name)}</text>"
    )
    for w, axis in enumerate(body.axes_of(node.name)):
        label, colour = axis, "#555"
        if kernel is not None and axis in kernel.depth_of_axis:
            label, colour = kernel.loops[kernel.depth_of_axis[axis]].symbol, "#8a4b00"
        yield tag(x + BOX + 5, output.wire(w) - 3, label, "start", colour, 11)


def _ends(body: Diagram, kernel: Kernel | None, right: list[Placed], x: float) -> Iterator[str]:
    """Outputs leaving: the save at the region's edge, then global memory."""
    for placed in right:
        if placed.value not in body.outputs:
            continue
        axes = body.axes_of(placed.value)
        edge = x + 26
        for w in range(placed.wires):
            y = placed.wire(w)
            colour = COLOUR["chip"] if kernel is not None else COLOUR["global"]
            yield line(x, y, edge, y, colour, "" if axes else "stroke-dasharray='2 3'")
            yield line(
                edge, y, x + 62, y, COLOUR["global"], "" if axes else "stroke-dasharray='2 3'"
            )
            if axes:
                yield tag(x + 66, y + 4, axes[w], "start", "#555")
        if kernel is not None:
            y0, y1 = placed.y - 5, placed.wire(placed.wires - 1) + 5
            yield line(edge, y0, edge, y1, "#8a4b00", "stroke-width='2.2'")


def _rows(
    body: Diagram, kernel: Kernel | None, cols: tuple[Column, ...], y: float, note: str
) -> Iterator[str]:
    """Under the columns: transferred values where arrays enter or leave, and tiles left on chip."""
    if kernel is None:
        yield remark(24, y + 14, note)
        return
    first: dict[str, int] = {}
    for j, column in enumerate(cols):
        for value, used in column.left:
            if used and value in body.array:
                first.setdefault(value, j)
    crossings = transfers(kernel)
    yield remark(24, y + 14, "H")
    yield remark(24, y + 34, "M")
    for j, column in enumerate(cols):
        entering = [str(crossings[v]) for v, at in first.items() if at == j]
        if len(entering) > 2:
            entering = [entering[0], " + ".join(entering[1:])]
        for place, text in enumerate(entering):
            yield centre(
                column.x - 34, y + 14 - 13 * (len(entering) - 1) * (place == 0), text, "#263238"
            )
        tile = str(tile_of(kernel, column.node.name))
        yield centre(column.x + BOX / 2 + 20, y + 34, tile, "#8a4b00")
    stores = [str(crossings[f"{o} (store)"]) for o in body.outputs if f"{o} (store)" in crossings]
    yield centre(cols[-1].x + BOX + 50, y + 14, ", ".join(stores), "#263238")
    resident = max(columns(kernel, PAPER).values(), key=lambda c: len(c.terms))
    tiles = ", ".join(f"{name} = {size}" for name, size in kernel.tiles)
    chosen = f", chosen {tiles}" if tiles else ""
    lead = f"{note}; " if note else ""
    yield remark(24, y + 58, f"{lead}resident inputs and sums: {resident} ≤ M{chosen}")


def _colour(kernel: Kernel | None) -> str:
    """Dark in global memory, orange on chip."""
    return COLOUR["global"] if kernel is None else COLOUR["chip"]
