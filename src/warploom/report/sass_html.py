"""Annotated machine code and diffs as one self-contained HTML file each."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from warploom.report.pages import Figure, rendered
from warploom.report.sass_words import (
    block_list,
    control_columns,
    control_sentence,
    count,
    defs_and_uses,
    reasons,
    size_words,
)
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import Instruction, Kernel
from warploom.sass.decode.opcodes import Pipe
from warploom.sass.flow.diff import Change, KernelDiff, Row
from warploom.sass.flow.loops import Loop, depths, natural_loops
from warploom.sass.flow.paths import block_edges
from warploom.sass.flow.steady import MATRIX
from warploom.sass.show.explain import Explanation

CONTEXT = 3
HEAT_STEPS = 5
_CLASSES = {
    Pipe.MMA: "tensor",
    Pipe.ASYNC: "tensor",
    Pipe.LSU: "memory",
    Pipe.CONSTANT: "memory",
    Pipe.XU: "special",
    Pipe.CONTROL: "control",
    Pipe.UNIFORM: "uniform",
}
_TOKENS = re.compile(r"\b(U?R\d+|UR?Z|RZ|U?P\d|U?PT)\b")


@dataclass(frozen=True)
class _Line:
    offset: str
    control: str
    control_words: str
    text: str
    kind: str
    heat: int
    reasons: list[str]
    writes: str
    reads: str
    source: str
    related: str


@dataclass(frozen=True)
class _Block:
    number: int
    title: str
    after: str
    depth: int
    loop: str
    lines: list[_Line]


def show_html(
    cubin: Cubin, kernel: Kernel, explanation: Explanation, block: int | None = None
) -> str:
    """The listing of a kernel (or of one block): blocks fold, reasons show on hover."""
    loops = natural_loops(kernel)
    depth = depths(kernel, loops)
    following = block_edges(kernel)
    blocks: list[_Block] = []
    for entry in kernel.blocks:
        if block is not None and entry.index != block:
            continue
        items = kernel.items(entry)
        inside = [loop.header for loop in loops if entry.index in loop.blocks]
        preceding = [number for number, to in enumerate(following) if entry.index in to]
        cycles = sum(item.control.stall for item in items)
        blocks.append(
            _Block(
                number=entry.index,
                title=f"{count(len(items), 'instruction')}, {cycles} issue cycles",
                after=f"from {block_list(preceding)} to {block_list(following[entry.index])}",
                depth=depth[entry.index],
                loop=f"loop {inside[-1]}, depth {depth[entry.index]}" if inside else "",
                lines=[_line(kernel, item, explanation) for item in items],
            )
        )
    return rendered(
        "sass_show.html.j2",
        cubin=cubin,
        kernel=kernel,
        size=size_words(kernel),
        blocks=blocks,
        loops=loops,
        loop_list=[loop_row(kernel, loop) for loop in loops],
    )


def loop_row(kernel: Kernel, loop: Loop) -> dict[str, object]:
    """A loop in the list of them; cycles are those that its instructions hold the issue for."""
    items = [item for block in loop.blocks for item in kernel.items(kernel.blocks[block])]
    return {
        "header": loop.header,
        "blocks": block_list(loop.blocks),
        "depth": loop.depth,
        "instructions": len(items),
        "cycles": sum(item.control.stall for item in items),
        "matrix": sum(item.base in MATRIX for item in items),
    }


def _line(kernel: Kernel, item: Instruction, explanation: Explanation) -> _Line:
    writes, reads = defs_and_uses(item)
    source = item.line.source
    related: set[int] = set()
    for wait in explanation.waits.get(item.index, ()):
        related.update(setter.instruction for setter in wait.setters)
        related.update(wait.consumers[:1])
    if (stall := explanation.stalls.get(item.index)) is not None:
        related.update(number for number in (stall.producer, stall.consumer) if number is not None)
    return _Line(
        offset=f"{item.offset:04x}",
        control=control_columns(item.control),
        control_words=control_sentence(item.control),
        text=_coloured(item.line.text),
        kind=_CLASSES.get(item.effects.info.pipe, "math"),
        heat=min(HEAT_STEPS, item.control.stall // 3),
        reasons=reasons(kernel, explanation, item.index),
        writes=writes,
        reads=reads,
        source=f"{source[0].rsplit('/', 1)[-1]}:{source[1]}" if source else "",
        related=" ".join(f"{kernel.instructions[number].offset:04x}" for number in sorted(related)),
    )


def _coloured(text: str) -> Markup:
    """The instruction with its registers marked up."""
    marked = _TOKENS.sub(r"<i>\1</i>", html.escape(text))
    return Markup(marked)


@dataclass(frozen=True)
class _DiffLine:
    change: str
    gap: bool
    before: str
    before_control: str
    before_text: str
    after: str
    after_control: str
    after_text: str
    note: str


@dataclass(frozen=True)
class Summary:
    """What stands above a diff: figures, (question, sentences), (seconds, best so far)."""

    figures: Sequence[Figure] = ()
    answers: Sequence[tuple[str, Sequence[str]]] = ()
    curve: Sequence[tuple[float, float]] = ()


def diff_html(
    before: Cubin, after: Cubin, diffs: list[KernelDiff], summary: Summary | None = None
) -> str:
    """Two files side by side: what moved, what was edited, with some lines of context."""
    parts = [(one, _diff_lines(one), kinds_of_moves(one)) for one in diffs]
    return rendered(
        "sass_diff.html.j2",
        before=before,
        after=after,
        parts=parts,
        context=CONTEXT,
        summary=summary or Summary(),
    )


@dataclass
class KindOfMove:
    """What became of the instructions of one base opcode; `farthest` is in instructions."""

    name: str
    up: int = 0
    down: int = 0
    farthest: int = 0
    edits: int = 0
    others: int = 0


def kinds_of_moves(one: KernelDiff) -> list[KindOfMove]:
    """By opcode, those with most changes first; what stayed as it was is left out."""
    found: dict[str, KindOfMove] = {}
    for row in one.rows:
        if row.change is Change.SAME and not row.control:
            continue
        side, index = (one.before, row.before) if row.after is None else (one.after, row.after)
        assert index is not None
        name = side.instructions[index].base
        kind = found.setdefault(name, KindOfMove(name))
        kind.edits += bool(row.control)
        if row.change is Change.MOVED and row.before is not None and row.after is not None:
            step = row.after - row.before
            kind.up += step < 0
            kind.down += step > 0
            kind.farthest = max(kind.farthest, abs(step))
        else:
            kind.others += row.change is not Change.SAME
    return sorted(found.values(), key=lambda kind: -(kind.up + kind.down + kind.edits))


def _diff_lines(one: KernelDiff) -> list[_DiffLine]:
    shown = shown_rows(one.rows)
    lines: list[_DiffLine] = []
    last = -1
    for number in shown:
        lines.append(_diff_line(one, one.rows[number], number != last + 1))
        last = number
    return lines


def shown_rows(rows: tuple[Row, ...], context: int = CONTEXT) -> list[int]:
    """Numbers of the rows that differ and of `context` rows around each."""
    different = (
        number for number, row in enumerate(rows) if row.change is not Change.SAME or row.control
    )
    return sorted(
        {
            near
            for number in different
            for near in range(number - context, number + context + 1)
            if 0 <= near < len(rows)
        }
    )


def row_note(one: KernelDiff, row: Row) -> str:
    """What became of a row, in words."""
    parts: list[str] = []
    if row.change is Change.MOVED and row.before is not None and row.after is not None:
        step = row.after - row.before
        parts.append(f"moved {'down' if step > 0 else 'up'} {abs(step)}" if step else "moved")
        home, away = one.before.block_of[row.before], one.after.block_of[row.after]
        if home != away:
            parts.append(f"from block {home} to {away}")
    elif row.change is not Change.SAME:
        parts.append(row.change.value)
    parts.extend(
        f"{name} {_value(name, old)} → {_value(name, new)}" for name, old, new in row.control
    )
    return ", ".join(parts)


def _value(name: str, value: int) -> str:
    if name == "wait":
        return ",".join(f"SB{k}" for k in range(6) if value >> k & 1) or "none"
    if name in ("write_sb", "read_sb"):
        return "none" if value == 7 else f"SB{value}"
    if name == "reuse":
        return "".join(letter for k, letter in enumerate("abcd") if value >> k & 1) or "none"
    return str(value)


def _diff_line(one: KernelDiff, row: Row, gap: bool) -> _DiffLine:
    before = None if row.before is None else one.before.instructions[row.before]
    after = None if row.after is None else one.after.instructions[row.after]
    change = row.change.value
    if row.change is Change.SAME and row.control:
        change = "control-edit"
    return _DiffLine(
        change=change,
        gap=gap,
        before=f"{before.offset:04x}" if before else "",
        before_control=control_columns(before.control) if before else "",
        before_text=before.line.text if before else "",
        after=f"{after.offset:04x}" if after else "",
        after_control=control_columns(after.control) if after else "",
        after_text=after.line.text if after else "",
        note=row_note(one, row),
    )
