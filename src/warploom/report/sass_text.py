"""Annotated machine code as text: colour on a terminal, plain when piped."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.text import Text

from warploom.report.sass_words import (
    CONTROL_HEADING,
    block_list,
    control_columns,
    count,
    defs_and_uses,
    reasons,
    size_words,
)
from warploom.sass.decode.kernel import Block, Instruction, Kernel
from warploom.sass.decode.opcodes import Pipe
from warploom.sass.flow.loops import Loop, depths, natural_loops
from warploom.sass.flow.paths import block_edges
from warploom.sass.show.explain import Explanation

TEXT_WIDTH = 58
PIPE_STYLES = {
    Pipe.MMA: "bold magenta",
    Pipe.ASYNC: "bold magenta",
    Pipe.LSU: "cyan",
    Pipe.CONSTANT: "cyan",
    Pipe.XU: "yellow",
    Pipe.CONTROL: "bold red",
    Pipe.UNIFORM: "green",
}


def show(
    kernel: Kernel,
    explanation: Explanation,
    block: int | None = None,
    defuse: bool = False,
    sources: Mapping[str, Path | None] | None = None,
) -> Iterator[Text]:
    """The lines of a kernel's listing (or of one block of it), with source lines where `sources`
    says which file a recorded name is (`source_files`)."""
    loops = natural_loops(kernel)
    depth = depths(kernel, loops)
    following = block_edges(kernel)
    yield Text(
        f"{kernel.name}  sm_{kernel.sm}, {size_words(kernel)}, "
        f"{count(kernel.code.registers, 'register')}, {count(len(kernel.blocks), 'block')}, "
        f"{count(len(loops), 'loop')}",
        "bold",
    )
    yield Text(f"offset   {CONTROL_HEADING}  instruction", "dim")
    for entry in kernel.blocks:
        if block is not None and entry.index != block:
            continue
        yield Text()
        yield _heading(kernel, entry, loops, depth[entry.index], following)
        yield from _lines(kernel, entry, explanation, depth[entry.index], defuse, sources)


def _heading(
    kernel: Kernel,
    block: Block,
    loops: tuple[Loop, ...],
    depth: int,
    following: list[tuple[int, ...]],
) -> Text:
    items = kernel.items(block)
    cycles = sum(item.control.stall for item in items)
    inside = [loop.header for loop in loops if block.index in loop.blocks]
    preceding = [other for other, targets in enumerate(following) if block.index in targets]
    names = ", ".join(kernel.labels.get(items[0].offset, ()))
    text = Text("│" * depth)
    text.append(f"block {block.index}", "bold blue")
    text.append(
        f"  {items[0].offset:#06x}-{items[-1].offset:#06x}  {count(block.size, 'instruction')}, "
    )
    text.append(f"{cycles} issue cycles  from {block_list(preceding)}  ")
    text.append(f"to {block_list(following[block.index])}")
    if inside:
        role = "header of" if block.index in inside else "in"
        text.append(f"  {role} loop {inside[-1]}, depth {depth}", "bold green")
    if names:
        text.append(f"  {names}", "dim")
    return text


def _lines(
    kernel: Kernel,
    block: Block,
    explanation: Explanation,
    depth: int,
    defuse: bool,
    sources: Mapping[str, Path | None] | None,
) -> Iterator[Text]:
    last: tuple[str, int] | None = None
    for item in kernel.items(block):
        if sources is not None and item.line.source is not None and item.line.source != last:
            last = item.line.source
            line = _source_line(sources[last[0]], *last)
            yield Text("│" * depth).append(line, "italic blue")
        yield _line(kernel, item, explanation, depth)
        if defuse:
            writes, reads = defs_and_uses(item)
            yield Text("│" * depth + " " * 26).append(
                f"def {writes or '-'}  use {reads or '-'}", "dim"
            )


def source_files(kernel: Kernel, folder: Path) -> dict[str, Path | None]:
    """The files that the kernel's lines name: each in `folder`, where the cubin is, else where it
    was compiled; None for one that is in neither place."""
    named = dict.fromkeys(i.line.source[0] for i in kernel.instructions if i.line.source)
    places = {name: (folder / Path(name).name, Path(name)) for name in named}
    return {
        name: next((path for path in paths if path.is_file()), None)
        for name, paths in places.items()
    }


def _source_line(path: Path | None, name: str, number: int) -> str:
    """`file:line`, with the line itself where the file is at hand."""
    code = linecache.getline(str(path), number).strip() if path else ""
    return f"  {path or name}:{number}  {code}".rstrip()


def _line(kernel: Kernel, item: Instruction, explanation: Explanation, depth: int) -> Text:
    text = Text("│" * depth)
    text.append(f" {item.offset:#06x}  ", "dim")
    text.append(control_columns(item.control), "yellow" if item.control.wait else "")
    shown = item.line.text
    text.append(f"  {shown:<{TEXT_WIDTH}}", PIPE_STYLES.get(item.effects.info.pipe, ""))
    found = reasons(kernel, explanation, item.index)
    if found:
        text.append("  ; " + " | ".join(found), "dim")
    text.rstrip()
    return text
