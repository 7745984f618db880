"""Registers renamed: what the renamer makes is proved; what is wrong by construction is not.

The faults are planted in the words by hand (operand fields as in the encoding: Rd at bit 16, Ra 24,
Rb 32, Rc 64, guard 12) or asked of the renamer against its own judgement.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from warploom.sass.decode.control import NO_SCOREBOARD
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import Instruction, Kernel, decode
from warploom.sass.edit.edit import Editor
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.flow.paths import block_edges
from warploom.sass.rewrites.renaming.rename import Renamer, Renaming, renamed
from warploom.sass.rewrites.renaming.verify import verify_renaming
from warploom.sass.rules.verify import Verifier, verify

NAMES = (
    "triton_rmsnorm_2x4096_w8_s2_sm90",
    "triton_layernorm_1x4096_w8_s1_sm90",
    "prebuilt_gemm_leaky_relu_sm90a",
)
RD, RA, RB, RC, GUARD = 16, 24, 32, 64, 12


@pytest.fixture(scope="module")
def renamers(cubin_of: Callable[[str], Cubin]) -> dict[str, Renamer]:
    """One renamer for each cubin."""
    return {name: Renamer(cubin_of(name)) for name in NAMES}


def rules(renamer: Renamer, image: Cubin) -> set[str]:
    """The rules that the proof names."""
    name = renamer.kernel.name
    return {finding.rule for finding in verify_renaming(renamer.original, image, name)}


def patched(cubin: Cubin, index: int, bit: int, bits: int, value: int) -> Cubin:
    """The cubin with some bits of one instruction's word replaced."""
    words = list(cubin.kernel(None).words)
    low, high = words[index]
    whole = low | high << 64
    whole = whole & ~(((1 << bits) - 1) << bit) | value << bit
    words[index] = (whole & (1 << 64) - 1, whole >> 64)
    return cubin.replace(cubin.kernel(None), words)


@pytest.mark.parametrize("name", NAMES[:2])
def test_renamed_kernels_are_proved_and_reordered(name: str, renamers: dict[str, Renamer]) -> None:
    renamer = renamers[name]
    kernel = renamer.kernel.name
    image, done = renamed(renamer, random.Random(0), 0.3)
    assert len(done) >= 5
    assert image.data != renamer.original.data
    assert verify_renaming(renamer.original, image, kernel) == []
    # The renamed program is one to play on: its verifier takes an edit of it.
    editor = Editor(image, kernel, AliasMode.TRITON)
    item = next(i for i in editor.kernel.instructions if editor.window(i.index, 4)[0] < i.index)
    editor.move(item.index, editor.window(item.index, 1)[0])
    edited = editor.cubin()
    verdict = verify(image, edited, kernel, AliasMode.TRITON)
    assert verdict.legal and verdict.moved == 1, str(verdict)
    # Of the program it was made from it is none.
    assert not Verifier(renamer.original, kernel, AliasMode.TRITON).check_file(edited).legal


def test_a_file_is_its_own_renaming_and_not_another_files(renamers: dict[str, Renamer]) -> None:
    one, other = renamers[NAMES[0]], renamers[NAMES[1]]
    assert rules(one, one.original) == set()
    findings = verify_renaming(one.original, other.original, one.kernel.name)
    assert [finding.rule for finding in findings] == ["CONTAINER"]


def clobbering(renamer: Renamer) -> Iterator[Renaming]:
    """Renamings whose first write overwrites a value that is read later."""
    for group in renamer.webs.groups:
        if not group.movable or group.registers[0] > 200 or not renamer._encodable(group):
            continue
        writers = [
            item
            for item in (renamer.kernel.instructions[index] for index in sorted(group.touched))
            if any(access.resource in group.registers for access in item.effects.writes)
            and not item.effects.partial
        ]
        step = 4 if group.width > 2 else group.width
        for distance in range(-3 * step, 4 * step, step):
            targets = {register + distance for register in group.registers}
            if distance == 0 or min(targets) < 2 or targets & set(group.registers):
                continue
            for item in writers:
                read = {access.resource for access in item.effects.reads}
                live = renamer.webs.live_out[item.index]
                if any(live >> target & 1 and target not in read for target in targets):
                    yield Renaming(group.number, distance, "planted")
                    break


@pytest.mark.parametrize("name", NAMES[:2])
def test_a_write_over_a_live_value_is_found(name: str, renamers: dict[str, Renamer]) -> None:
    renamer = renamers[name]
    planted = list(clobbering(renamer))
    assert len(planted) > 20
    for row in random.Random(0).sample(planted, 3):
        assert rules(renamer, renamer.rewrite([row])), row


def test_a_misaligned_tuple_is_found(renamers: dict[str, Renamer]) -> None:
    renamer = renamers[NAMES[0]]
    wide = [
        group
        for group in renamer.webs.groups
        if group.movable and group.width in (2, 4) and renamer._encodable(group)
    ]
    assert wide
    for group in wide[:2]:
        for distance in {1, group.width // 2}:
            image = renamer.rewrite([Renaming(group.number, distance, "planted")])
            assert rules(renamer, image), (group, distance)


def test_alignment_is_a_rule_of_its_own(renamers: dict[str, Renamer]) -> None:
    # Into registers that are free: nothing but the alignment is wrong.
    renamer = renamers[NAMES[2]]
    found: set[str] = set()
    for group in renamer.webs.groups:
        if not group.movable or group.width != 4 or not renamer._encodable(group):
            continue
        free = [
            distance
            for distance in (1, 2, 3, 5, 6)
            if max(group.registers) + distance <= renamer._top["R"]
            and all(renamer._is_free(group, r + distance, {}) for r in group.registers)
        ]
        for distance in free[:1]:
            found |= rules(renamer, renamer.rewrite([Renaming(group.number, distance, "planted")]))
    assert found & {"ALIGNMENT", "INSTRUCTION", "UNREADABLE"}


def test_predicates_uniform_registers_and_results_alone_are_found(
    renamers: dict[str, Renamer],
) -> None:
    renamer = renamers[NAMES[0]]
    items = renamer.kernel.instructions
    guarded = next(i for i in items if i.line.guard.lstrip("!")[:1] == "P" and i.base != "BRA")
    number = int(guarded.line.guard[-1])
    assert "DATAFLOW" in rules(
        renamer, patched(renamer.original, guarded.index, GUARD, 3, (number + 1) % 6)
    )
    uniform = next(i for i in items if i.base == "ULEA")
    assert "DATAFLOW" in rules(renamer, patched(renamer.original, uniform.index, RD, 6, 11))
    result = next(i for i in items if i.base == "FMUL")
    old = result.low >> RD & 0xFF
    assert "DATAFLOW" in rules(renamer, patched(renamer.original, result.index, RD, 8, old ^ 4))
    source = result.low >> RA & 0xFF
    assert "DATAFLOW" in rules(renamer, patched(renamer.original, result.index, RA, 8, source ^ 4))


def test_the_stack_pointer_and_registers_beyond_the_allocation_are_found(
    renamers: dict[str, Renamer],
) -> None:
    renamer = renamers[NAMES[0]]
    result = next(i for i in renamer.kernel.instructions if i.base == "FMUL")
    assert "ALLOCATION" in rules(renamer, patched(renamer.original, result.index, RD, 8, 1))
    assert "ALLOCATION" in rules(renamer, patched(renamer.original, result.index, RD, 8, 250))


def test_control_fields_are_not_a_renamings_business(
    renamers: dict[str, Renamer],
) -> None:
    renamer = renamers[NAMES[0]]
    item = next(i for i in renamer.kernel.instructions if i.control.stall == 2)
    assert rules(renamer, patched(renamer.original, item.index, 105, 4, 3)) == {"CONTROL_FIELD"}
    reused = next(i for i in renamer.kernel.instructions if i.control.reuse)
    assert rules(renamer, patched(renamer.original, reused.index, 122, 4, 0))


def test_registers_of_asynchronous_matrix_instructions_are_pinned(
    renamers: dict[str, Renamer],
) -> None:
    renamer = renamers[NAMES[2]]
    matrix = [i for i in renamer.kernel.instructions if i.base == "HGMMA"]
    assert matrix
    held = {a.resource for i in matrix for a in (*i.effects.reads, *i.effects.writes)}
    for group in renamer.webs.groups:
        if group.movable:
            assert not any(item.index in group.touched for item in matrix)
    image = patched(renamer.original, matrix[0].index, RD, 8, (matrix[0].low >> RD & 0xFF) ^ 8)
    assert rules(renamer, image)
    assert held


def test_a_new_dependence_that_is_too_close_is_found(renamers: dict[str, Renamer]) -> None:
    renamer = renamers[NAMES[1]]
    found: set[str] = set()
    for group in renamer.webs.groups:
        if not group.movable or not renamer._encodable(group) or len(group.touched) > 4:
            continue
        free = renamer.free_distances(group, {})
        for distance in sorted(free, key=lambda d: renamer._rest(group, d))[:1]:
            found |= rules(renamer, renamer.rewrite([Renaming(group.number, distance, "planted")]))
        if "NEW_DEPENDENCE" in found:
            break
    assert "NEW_DEPENDENCE" in found


def carried(kernel: Kernel) -> Iterator[tuple[int, int, int]]:
    """(writer, register, reader): blocks meet where the register is read; one of them writes it
    last with `writer`, which nothing else reads, and all others write it too."""
    before: dict[int, set[int]] = {}
    for block, following in enumerate(block_edges(kernel)):
        for other in following:
            before.setdefault(other, set()).add(block)
    for place, sources in before.items():
        written: set[int] = set()
        for item in _items(kernel, place):
            for access in item.effects.reads:
                register = access.resource
                if register in written or not 1 < register < 250:
                    continue
                last = {source: _last_write(kernel, source, register) for source in sources}
                writer = last.get(place - 1)
                if len(sources) > 1 and all(last.values()) and writer is not None:
                    yield writer.index, register, item.index
            written |= {access.resource for access in item.effects.writes}


def _items(kernel: Kernel, block: int) -> tuple[Instruction, ...]:
    shape = kernel.blocks[block]
    return kernel.instructions[shape.start : shape.end]


def _last_write(kernel: Kernel, block: int, register: int) -> Instruction | None:
    """What leaves this block in the register, when it is written for certain and not read there."""
    for item in reversed(_items(kernel, block)):
        if any(access.resource == register for access in item.effects.writes):
            alone = len(item.effects.writes) == 1 and not item.effects.partial
            return item if alone and item.low >> RD & 0xFF == register else None
        if any(access.resource == register for access in item.effects.reads):
            return None
    return None


def test_where_paths_meet_only_what_all_of_them_say_holds(
    cubin_of: Callable[[str], Cubin],
) -> None:
    """One of two writers of a loop's register goes elsewhere; then its reader follows it, and is
    right for that path only."""
    cubin = cubin_of("cuda_sgemm_sm90a")
    kernel = decode(cubin)
    rows = list(carried(kernel))
    assert rows
    for writer, register, reader in rows[:2]:
        image = patched(cubin, writer, RD, 8, register ^ 1)
        assert ("DATAFLOW", 16 * reader) in _broken(cubin, image, kernel.name)
        item = kernel.instructions[reader]
        whole = item.low | item.high << 64
        field = next(bit for bit in (RA, RB, RC) if whole >> bit & 0xFF == register)
        image = patched(image, reader, field, 8, register ^ 1)
        assert ("DATAFLOW", 16 * reader) in _broken(cubin, image, kernel.name)


def _broken(original: Cubin, image: Cubin, name: str) -> set[tuple[str, int]]:
    return {(one.rule, one.offset) for one in verify_renaming(original, image, name)}


def overwriting(renamer: Renamer) -> Iterator[tuple[Renaming, int]]:
    """Renamings into a register that an instruction has still to read, and that instruction."""
    kernel = renamer.kernel
    for block in kernel.blocks:
        for item in kernel.instructions[block.start : block.end]:
            board = item.control.read_sb
            if board == NO_SCOREBOARD:
                continue
            open_until = next(
                (
                    later.index
                    for later in kernel.instructions[item.index + 1 : block.end]
                    if later.control.wait >> board & 1
                ),
                block.end,
            )
            sources = {access.resource for access in item.effects.reads}
            for group in renamer.webs.groups:
                if not group.movable or not renamer._encodable(group) or not group.touched:
                    continue
                if not item.index < min(group.touched) < open_until or group.width > 1:
                    continue
                for source in sources:
                    if source < 250 and renamer._is_free(group, source, {}):
                        yield (
                            Renaming(group.number, source - group.registers[0], "planted"),
                            item.index,
                        )


def test_a_register_still_to_be_read_is_found(renamers: dict[str, Renamer]) -> None:
    """The values are right: only what is outstanding speaks against it."""
    renamer = renamers[NAMES[0]]
    planted = [(row, reader) for row, reader in overwriting(renamer) if row.distance]
    assert planted
    for row, reader in planted[:2]:
        image, name = renamer.rewrite([row]), renamer.kernel.name
        found = verify_renaming(renamer.original, image, name)
        assert "DATAFLOW" not in {one.rule for one in found}
        before = decode(image).instructions[reader]
        assert any(f"still in use by {before}, and nothing waits" in one.reason for one in found)


def test_registers_that_live_through_a_call_keep_their_meaning(
    cubin_of: Callable[[str], Cubin],
) -> None:
    cubin = cubin_of("cuda_calls_sm90a")
    for name in cubin.kernels:
        kernel = decode(cubin, name)
        calls = [item for item in kernel.instructions if item.base == "CALL"]
        if not calls:
            continue
        before = [
            item
            for item in kernel.instructions[: calls[0].index]
            if item.base in ("MOV", "IMAD", "FADD", "FMUL") and item.effects.writes
        ]
        item = before[-1]
        words = list(cubin.kernel(name).words)
        low, high = words[item.index]
        words[item.index] = (low ^ 2 << RD, high)
        image = cubin.replace(cubin.kernel(name), words)
        assert verify_renaming(cubin, image, name)
        return
    pytest.fail("the corpus holds no call")


@settings(
    max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 1 << 20), share=st.sampled_from((0.1, 0.5)))
def test_whatever_is_renamed_is_proved_or_left_alone(
    seed: int, share: float, renamers: dict[str, Renamer]
) -> None:
    renamer = renamers[NAMES[0]]
    image, done = renamed(renamer, random.Random(seed), share)
    assert bool(done) == (image.data != renamer.original.data)
    assert rules(renamer, image) == set()
