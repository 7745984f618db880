"""Registers that `setmaxnreg` gave back: not to be touched or moved towards."""

from __future__ import annotations

import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from warploom.sass.decode.cubin import Cubin, parse
from warploom.sass.decode.kernel import Instruction, Kernel, decode
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.flow.pools import REALLOCATES, registers_at
from warploom.sass.rules.constraints import derive
from warploom.sass.rules.lint import lint

DATA = Path(__file__).parent / "data" / "own"
NAMES = ("attention-d64-192x128-prefetch", "gemm-128x256")


@pytest.fixture(scope="module", params=NAMES)
def own(request: pytest.FixtureRequest) -> tuple[Cubin, Kernel]:
    """A generated kernel with warp groups of different sizes."""
    data = lzma.decompress((DATA / f"{request.param}.cubin.xz").read_bytes())
    cubin = parse(data, request.param)
    return cubin, decode(cubin)


def producers(kernel: Kernel) -> list[Instruction]:
    """Moves into a register by the warps that have few."""
    limits = registers_at(kernel)
    return [
        item
        for item in kernel.instructions
        if limits.get(item.index, 255) < 64
        and item.base in ("MOV", "IMAD", "IADD3", "LOP3", "SEL")
        and not item.line.guard
        and len(item.effects.writes) == 1
        and item.effects.writes[0].resource < 255
    ]


def test_every_instruction_stays_inside_its_pool(own: tuple[Cubin, Kernel]) -> None:
    _, kernel = own
    limits = registers_at(kernel)
    assert len(set(limits.values())) >= 3  # at launch, of the producer, of the consumers
    assert not [one for one in lint(kernel) if one.rule == "REGISTER_POOL"]


def test_a_register_out_of_the_pool_is_found(own: tuple[Cubin, Kernel]) -> None:
    """The kernel uses the register, but not in the warps that gave it back."""
    cubin, kernel = own
    highest = max(
        access.resource
        for item in kernel.instructions
        for access in item.effects.writes
        if access.resource < 255
    )
    found = 0
    for item in producers(kernel)[:4]:
        words = list(kernel.code.words)
        words[item.index] = (item.low & ~(0xFF << 16) | highest << 16, item.high)
        other = cubin.replace(kernel.code, words)
        finding = [one for one in lint(decode(other)) if one.rule == "REGISTER_POOL"]
        assert finding and finding[0].offset == item.offset
        assert f"R{highest}" in finding[0].registers
        found += 1
    assert found


def test_registers_do_not_cross_a_change_of_the_pool(own: tuple[Cubin, Kernel]) -> None:
    """Compilers give it a block of its own; where others do not, it is a wall."""
    _, kernel = own
    change = next(item for item in kernel.instructions if item.base == REALLOCATES)
    block = max(kernel.blocks, key=lambda block: block.size)
    middle = (block.start + block.end) // 2
    items = list(kernel.instructions)
    items[middle] = replace(change, index=middle)
    rows = derive(replace(kernel, instructions=tuple(items)), AliasMode.STRICT).order.tolist()
    tied = {one for one, other, *_ in rows if other == middle}
    tied |= {other for one, other, *_ in rows if one == middle}
    users = {
        item.index
        for item in items[block.start : block.end]
        if any(a.resource < 256 for a in (*item.effects.reads, *item.effects.writes))
    }
    assert users - {middle} <= tied and len(users) > 20
