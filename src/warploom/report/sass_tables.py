"""Statistics, diffs and findings of machine code as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.text import Text

from warploom.report.sass_html import row_note, shown_rows
from warploom.report.sass_words import block_list, control_columns
from warploom.sass.decode.kernel import Kernel
from warploom.sass.flow.diff import Change, KernelDiff, Row
from warploom.sass.rules.lint import ERROR, LintFinding
from warploom.sass.show.stats import KernelStats

ROW_STYLES = {
    Change.MOVED: "blue",
    Change.CHANGED: "yellow",
    Change.REMOVED: "red",
    Change.ADDED: "green",
}
MARKS = {
    Change.SAME: " ",
    Change.MOVED: ">",
    Change.CHANGED: "~",
    Change.REMOVED: "-",
    Change.ADDED: "+",
}
DIFF_TEXT_WIDTH = 54


def stats_lines(one: KernelStats) -> Iterator[Text]:
    """What `sass stats` prints of one kernel."""
    yield Text(f"{one.name}  {one.arch}, {one.compiler}", "bold")
    yield Text(
        f"  {one.instructions} instructions, {one.registers} registers, {one.blocks} blocks, "
        f"{one.movable:.1%} movable"
    )
    yield Text(f"  pipes   {_mix(one.pipes)}")
    yield Text(f"  kinds   {_mix(one.kinds) or 'none of those counted'}")
    spills = one.kinds.get("spill store", 0) + one.kinds.get("spill load", 0)
    if spills:
        yield Text(f"  {spills} local-memory accesses (spills or stack)", "yellow")
    if one.serialised_groups:
        yield Text(
            f"  {one.serialised_groups} of {one.matrix_instructions} warp-group matrix "
            "instructions wait for the one before: serialised by the compiler?",
            "yellow",
        )
    if one.distance_alone:
        yield Text(f"  {one.distance_alone} registers protected by issue distance alone")
    for loop in one.loops:
        cycles = str(loop.shortest_cycles)
        if loop.longest_cycles != loop.shortest_cycles:
            cycles += f"-{loop.longest_cycles}"
        indent = "  " * loop.depth
        yield Text(
            f"{indent}loop {loop.header}  blocks {block_list(loop.blocks)}, "
            f"{loop.instructions} instructions, {cycles} issue cycles an iteration",
            "green",
        )
        yield Text(f"{indent}  pipes {_mix(loop.pipes)}")
        if loop.kinds:
            yield Text(f"{indent}  kinds {_mix(loop.kinds)}")


def _mix(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def diff_lines(one: KernelDiff) -> Iterator[Text]:
    """What `sass diff` prints of one kernel: rows that differ and a little around them."""
    if one.same:
        yield Text(f"{one.after.name}: the code is the same")
        return
    counts = ", ".join(f"{count} {name}" for name, count in one.counts.items() if count)
    kind = (
        "every block holds the same instructions"
        if one.reordering
        else "different instructions, aligned over the whole kernel"
    )
    yield Text(f"{one.after.name}: {counts}; {kind}", "bold")
    last = -1
    block = -1
    for number in shown_rows(one.rows):
        row = one.rows[number]
        home = _block(one, row)
        if home != block:
            yield Text(f"block {home}", "bold blue")
            block = home
        elif number != last + 1:
            yield Text("  ...", "dim")
        last = number
        yield _diff_line(one, row)


def _block(one: KernelDiff, row: Row) -> int:
    if row.after is not None:
        return one.after.block_of[row.after]
    assert row.before is not None
    return one.before.block_of[row.before]


def _diff_line(one: KernelDiff, row: Row) -> Text:
    """`mark before-offset after-offset control text ; what happened`."""
    kernel: Kernel = one.before if row.after is None else one.after
    index = row.before if row.after is None else row.after
    assert index is not None
    item = kernel.instructions[index]
    offsets = " ".join(
        "      " if number is None else f"{number * 16:#06x}" for number in (row.before, row.after)
    )
    mark = "=" if row.change is Change.SAME and row.control else MARKS[row.change]
    note = row_note(one, row)
    line = f"{mark} {offsets}  {control_columns(item.control)}  {item.line.text}"
    style = ROW_STYLES.get(row.change, "magenta" if row.control else "")
    if not note:
        return Text(line, style)
    if row.change is Change.CHANGED and row.before is not None:
        note += f", was {one.before.instructions[row.before].line.text}"
    return Text(f"{line:<{DIFF_TEXT_WIDTH + 34}}  ; {note}", style)


def lint_lines(name: str, findings: Iterable[LintFinding]) -> Iterator[Text]:
    """What `sass lint` prints of one kernel."""
    listed = list(findings)
    errors = sum(finding.severity == ERROR for finding in listed)
    head = f"{name}: {errors} error{'' if errors == 1 else 's'}"
    notes = len(listed) - errors
    yield Text(f"{head}, {notes} note{'' if notes == 1 else 's'}", "bold red" if errors else "bold")
    for finding in listed:
        yield Text(f"  {finding}", "red" if finding.severity == ERROR else "dim")
