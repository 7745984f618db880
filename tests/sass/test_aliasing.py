"""Which memory operations may change places: the rule against every placement of the two."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.sass.decode.kernel import Kernel
from warploom.sass.flow.aliasing import (
    SPACES,
    AliasMode,
    MemoryAccess,
    is_sync,
    memory_accesses,
    must_keep_order,
)
from warploom.sass.flow.provenance import address_pointers

# What each operation touches, from the instruction set: (memories it reads, memories it writes).
# `LD` and `ST` take a generic address, which may point into any of the three.
EVERY = frozenset(("global", "shared", "local"))
TOUCHES = {
    "LDG": ({"global"}, set[str]()),
    "STG": (set[str](), {"global"}),
    "LDS": ({"shared"}, set[str]()),
    "STS": (set[str](), {"shared"}),
    "LDL": ({"local"}, set[str]()),
    "STL": (set[str](), {"local"}),
    "LD": (EVERY, set[str]()),
    "ST": (set[str](), EVERY),
    "LDSM": ({"shared"}, set[str]()),
    "STSM": (set[str](), {"shared"}),
    "LDGSTS": ({"global"}, {"shared"}),
}
NAMES = (
    "triton_attention_128x64_w8_s3_sm90",
    "cuda_sgemm_sm90a",
    "cuda_reduce_sm90a",
    "triton_rmsnorm_2x4096_w8_s2_sm90",
)
# A warp's threads together touch what these touch: one thread's address says little.
TOGETHER = {"LDSM", "STSM", "LDGSTS"}
APART = range(-64, 65)  # how far two address registers may be apart, in bytes

accesses = st.builds(
    lambda base, version, offset, size, pointers: MemoryAccess(
        0, base, *SPACES[base], ((4, version),), offset, size, frozenset(pointers)
    ),
    st.sampled_from(sorted(TOUCHES)),
    st.integers(0, 1),
    st.integers(-4, 6).map(lambda n: 4 * n) | st.integers(-20, 20),
    st.sampled_from((1, 2, 4, 8, 16)),
    st.sets(st.integers(0, 2), max_size=2),
)


def may_meet(first: MemoryAccess, second: MemoryAccess, memory: str, mode: AliasMode) -> bool:
    """Whether some values of the address registers let both touch a byte of this memory."""
    if first.base in TOGETHER or second.base in TOGETHER:
        return mode is AliasMode.STRICT or memory != "global" or not _own_buffers(first, second)
    if first.address == second.address:  # the same registers with the same values
        return bool(_bytes(first, 0) & _bytes(second, 0))
    if mode is AliasMode.TRITON and memory == "global" and _own_buffers(first, second):
        return False
    return any(_bytes(first, distance) & _bytes(second, 0) for distance in APART)


def _own_buffers(first: MemoryAccess, second: MemoryAccess) -> bool:
    """Each is known to point into one argument's buffer, and not the same."""
    return [len(first.pointers), len(second.pointers)] == [1, 1] and (
        first.pointers != second.pointers
    )


def _bytes(access: MemoryAccess, value: int) -> set[int]:
    return set(range(value + access.offset, value + access.offset + access.size))


@given(accesses, accesses, st.sampled_from(list(AliasMode)))
@settings(max_examples=600, deadline=None)
def test_order_is_kept_just_where_two_accesses_may_meet(
    first: MemoryAccess, second: MemoryAccess, mode: AliasMode
) -> None:
    reads, writes = TOUCHES[first.base]
    others, stores = TOUCHES[second.base]
    shared = writes & (others | stores) | stores & reads
    meets = {memory for memory in shared if may_meet(first, second, memory, mode)}
    keeps = must_keep_order(first, second, mode)
    if meets:
        assert keeps, f"both may touch a byte of {meets} memory"
    # The rule asks of global memory alone, or of all: a generic access is not told apart.
    elif first.base not in TOGETHER and (len(shared) <= 1 or first.address == second.address):
        assert not keeps, "they never touch the same byte"


@pytest.mark.parametrize("mode", AliasMode)
def test_what_shares_no_memory_may_change_places(mode: AliasMode) -> None:
    for one, other in itertools.product(TOUCHES, repeat=2):
        first, second = (
            MemoryAccess(at, base, *SPACES[base], ((4, 0),), 0, 4, frozenset())
            for at, base in enumerate((one, other))
        )
        (reads, writes), (others, stores) = TOUCHES[one], TOUCHES[other]
        meets = bool(writes & (others | stores) or stores & reads)
        assert must_keep_order(first, second, mode) is meets, (one, other)


@pytest.mark.parametrize("memory", ["LDG", "LDS", "LDL", "STG", "STS", "STL", "LD", "ST"])
@pytest.mark.parametrize("mode", AliasMode)
def test_a_generic_store_may_go_anywhere(memory: str, mode: AliasMode) -> None:
    store = MemoryAccess(0, "ST", *SPACES["ST"], ((4, 0),), 0, 4, frozenset())
    other = MemoryAccess(1, memory, *SPACES[memory], ((6, 0),), 0, 4, frozenset())
    assert must_keep_order(store, other, mode) and must_keep_order(other, store, mode)


def test_equal_addresses_are_of_registers_nobody_wrote_in_between(
    kernels_of: Callable[[str], list[Kernel]],
) -> None:
    same = rewritten = 0
    for kernel in (kernel for name in NAMES for kernel in kernels_of(name)):
        pointers = address_pointers(kernel)
        for block in kernel.blocks:
            items = kernel.instructions[block.start : block.end]
            for first, second in itertools.combinations(memory_accesses(items, pointers), 2):
                registers = {register for register, _ in first.address}
                written = registers & {
                    access.resource
                    for item in kernel.instructions[first.index : second.index]
                    for access in item.effects.writes
                }
                if first.address == second.address:
                    assert not written, (kernel.name, first.index, second.index)
                    same += 1
                elif registers == {register for register, _ in second.address}:
                    assert written, (kernel.name, first.index, second.index)
                    rewritten += 1
    assert same > 100 and rewritten > 10, "the kernels have both kinds"


def test_an_address_is_another_one_after_each_write_of_a_register_of_it(
    kernels_of: Callable[[str], list[Kernel]],
) -> None:
    """The same access again and again, with one, two or no writes of its registers in between."""
    tried = 0
    for kernel in (kernel for name in NAMES for kernel in kernels_of(name)):
        for access in memory_accesses(kernel.instructions, {}):
            item = kernel.instructions[access.index]
            registers = {register for register, _ in access.address}
            loaded = {write.resource for write in item.effects.writes}
            writes = (
                other
                for other in kernel.instructions
                if registers & {write.resource for write in other.effects.writes}
                and other.base not in SPACES
            )
            write = next(writes, None)
            if write is None or registers & loaded:
                continue
            tried += 1
            for count in range(3):
                items = (item, *[write] * count, item)
                first, second = memory_accesses(items, {})
                assert (first.address == second.address) is (count == 0), (item, write, count)
    assert tried > 50


def test_pointers_are_distinct_in_triton_mode_alone() -> None:
    """Two global accesses through two arguments: a caller of other kernels may pass one buffer."""
    store = MemoryAccess(0, "STG", *SPACES["STG"], ((4, 0),), 0, 4, frozenset((0,)))
    load = MemoryAccess(1, "LDG", *SPACES["LDG"], ((6, 0),), 0, 4, frozenset((1,)))
    for first, second in ((store, load), (load, store), (store, store)):
        assert must_keep_order(first, second, AliasMode.STRICT)
    assert not must_keep_order(store, load, AliasMode.TRITON)
    # Two through one argument, or through one that is not known: anything may meet.
    for pointers in (frozenset((0,)), frozenset[int](), frozenset((0, 1))):
        other = replace(load, pointers=pointers)
        assert must_keep_order(store, other, AliasMode.TRITON)
        assert must_keep_order(other, store, AliasMode.TRITON)


def test_a_load_touches_as_many_bytes_as_it_fills_registers(
    kernels_of: Callable[[str], list[Kernel]],
) -> None:
    widths: set[int] = set()
    for kernel in (kernel for name in NAMES for kernel in kernels_of(name)):
        for access in memory_accesses(kernel.instructions, {}):
            item = kernel.instructions[access.index]
            filled = {write.resource for write in item.effects.writes}
            if access.base in ("LDG", "LDS", "LDL") and access.size >= len(filled) > 0:
                narrow = ".U8" in item.line.opcode or ".U16" in item.line.opcode
                assert access.size == 4 * len(filled) or narrow, item.line.text
                widths.add(access.size)
    assert {4, 16} <= widths


def test_what_synchronises_keeps_its_order_with_all_memory(
    kernels_of: Callable[[str], list[Kernel]],
) -> None:
    barriers = 0
    for kernel in (kernel for name in NAMES for kernel in kernels_of(name)):
        for item in kernel.instructions:
            if item.base in ("BAR", "MEMBAR", "SYNCS"):
                assert is_sync(item), item.line.text
                barriers += 1
            if item.base in ("LDG", "STG") and item.line.guard != "!PT":
                opcode = item.line.opcode
                assert not is_sync(item) or "STRONG" in opcode, item.line.text
                strong = replace(item, line=replace(item.line, opcode=f"{opcode}.STRONG.GPU"))
                assert is_sync(strong), strong.line.text
    assert barriers > 5
