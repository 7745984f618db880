"""Scoreboards given out anew: what the maker makes is proved; what is wrong by construction is not.

Faults are planted in the control fields by hand (write scoreboard at bit 46 of the high word, read
scoreboard 49, wait mask 52, stall 41).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from warploom.errors import InputError
from warploom.sass.decode.control import NO_SCOREBOARD, Control
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.kernel import Kernel, decode
from warploom.sass.flow.aliasing import AliasMode, is_sync
from warploom.sass.flow.scoreboard import takes_no_wait
from warploom.sass.rules.verify import Verifier
from warploom.sass.scoreboards.renumber import Renumberer
from warploom.sass.scoreboards.verify import (
    events,
    lates,
    named_scoreboards,
    number_of,
    verify_scoreboards,
)
from warploom.search.lineage import Base, Step, make_base, prove, read_steps, write_steps

NAMES = (
    "triton_layernorm_1x4096_w8_s1_sm90",
    "triton_attention_128x64_w8_s3_sm90",
)


@pytest.fixture(scope="module")
def makers(cubin_of: Callable[[str], Cubin]) -> dict[str, Renumberer]:
    """A maker for each cubin."""
    return {name: Renumberer(cubin_of(name), cubin_of(name).kernel(None).name) for name in NAMES}


@pytest.fixture(scope="module")
def made(makers: dict[str, Renumberer]) -> dict[str, Cubin]:
    """Each kernel with other scoreboards."""
    found = {name: maker.renumbered(random.Random(0), 12) for name, maker in makers.items()}
    return {name: image for name, (image, _) in found.items()}


def rules(maker: Renumberer, image: Cubin) -> set[str]:
    """The rules that the proof names."""
    return {finding.rule for finding in verify_scoreboards(maker.original, image, maker.name)}


def edited(maker: Renumberer, base: Cubin, index: int, **fields: int) -> Cubin:
    """A cubin with control fields of one instruction replaced."""
    words = list(base.kernel(maker.name).words)
    low, high = words[index]
    words[index] = low, replace(Control.decode(high), **fields).encode(high)
    return base.replace(base.kernel(maker.name), words)


def setters(kernel: Kernel) -> Iterator[int]:
    """Every event of a kernel."""
    for item in kernel.instructions:
        yield from events(item)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_made_is_proved_and_can_be_played_on(
    name: str, makers: dict[str, Renumberer], made: dict[str, Cubin]
) -> None:
    maker = makers[name]
    assert rules(maker, maker.original) == set()
    assert made[name].data != maker.original.data
    assert rules(maker, made[name]) == set()
    assert Verifier(made[name], maker.name, AliasMode.TRITON).check_file(made[name]).legal
    # It is no reordering: the checker of orders names the scoreboards.
    verdict = Verifier(maker.original, maker.name, AliasMode.TRITON).check_file(made[name])
    assert {finding.rule for finding in verdict.findings} & {"SCOREBOARD"}


def changed(kernel: Kernel, index: int, **fields: int) -> Kernel:
    """A kernel with control fields of one instruction replaced: what the bytes would decode to."""
    items = list(kernel.instructions)
    items[index] = replace(items[index], control=replace(items[index].control, **fields))
    return replace(kernel, instructions=tuple(items))


@pytest.mark.parametrize("name", NAMES)
def test_a_setter_with_another_number_is_waited_for_in_vain(
    name: str, makers: dict[str, Renumberer]
) -> None:
    maker = makers[name]
    kernel = maker.kernel
    refused: list[int] = []
    for event in list(setters(kernel))[::3]:
        part = "read_sb" if event & 1 else "write_sb"
        number = number_of(kernel, event)
        for other in (n for n in maker.free if n != number and number in maker.free):
            other_kernel = changed(kernel, event // 2, **{part: other})
            found = lates(kernel, other_kernel, maker.relation)
            # What the checker names is the event whose number nobody waits for.
            assert {(late.setter, late.result) for late in found} <= {(event // 2, not event & 1)}
            assert all(("result" if late.result else "sources") in late.reason for late in found)
            refused += [event] * bool(found)
    assert len(refused) >= 16 and len(set(refused)) >= 6
    for event in sorted(set(refused))[:1]:
        part = "read_sb" if event & 1 else "write_sb"
        number = number_of(kernel, event)
        found = set[str]()
        for other in (n for n in maker.free if n != number):
            found |= rules(maker, edited(maker, maker.original, event // 2, **{part: other}))
        assert "BOARD_LATE" in found


@pytest.mark.parametrize("name", NAMES)
def test_a_dropped_wait_is_missed(
    name: str, makers: dict[str, Renumberer], made: dict[str, Cubin]
) -> None:
    maker = makers[name]
    base = decode(made[name], maker.name)
    missed: list[int] = []
    total = 0
    for item in base.instructions:
        for number in item.control.waits():
            if maker.named >> number & 1:
                continue
            wait = item.control.wait & ~(1 << number)
            total += 1
            if lates(maker.kernel, changed(base, item.index, wait=wait), maker.relation):
                missed.append(item.index)
    assert len(missed) >= 0.75 * total >= 12
    found = rules(maker, edited(maker, made[name], missed[0], wait=0))
    assert found & {"BOARD_LATE", "BOARD_NAMED"}


def test_barriers_keep_everything_they_could_wait_for(makers: dict[str, Renumberer]) -> None:
    maker = makers[NAMES[1]]
    checked = 0
    for item in maker.kernel.instructions:
        if is_sync(item) and item.control.wait & ~maker.named:
            found = lates(maker.kernel, changed(maker.kernel, item.index, wait=0), maker.relation)
            assert found, str(item)
            checked += 1
    assert checked >= 2


def test_other_fields_and_numbers_stay(
    makers: dict[str, Renumberer], made: dict[str, Cubin]
) -> None:
    maker, base = makers[NAMES[1]], made[NAMES[1]]
    items = maker.kernel.instructions
    setter = next(i for i in items if i.control.write_sb in maker.free)
    assert "BOARD_SET" in rules(maker, edited(maker, base, setter.index, write_sb=7))
    long = next(i for i in items if i.control.stall > 2)
    assert "BOARD_WORD" in rules(maker, edited(maker, base, long.index, stall=1))
    assert "BOARD_WORD" in rules(maker, edited(maker, base, setter.index, write_sb=6))
    assert maker.named, "the kernel counts copies"
    named = maker.named.bit_length() - 1
    assert "BOARD_NAMED" in rules(maker, edited(maker, base, setter.index, write_sb=named))
    words = list(base.kernel(maker.name).words)
    words[5], words[6] = words[6], words[5]
    assert "BOARD_WORD" in rules(maker, base.replace(base.kernel(maker.name), words))
    data = bytearray(base.data)
    data[-1] ^= 1
    broken = replace(base, data=bytes(data))
    assert rules(maker, broken) == {"CONTAINER"}


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1000))
def test_whatever_the_maker_makes_is_proved(makers: dict[str, Renumberer], seed: int) -> None:
    maker = makers[NAMES[0]]
    found = maker.renumbered(random.Random(seed), 6)
    assert found is None or rules(maker, found[0]) == set()


def test_a_base_with_other_scoreboards_has_a_lineage(
    makers: dict[str, Renumberer], tmp_path: Path
) -> None:
    maker = makers[NAMES[0]]
    bases = [make_base(maker.original, maker.name, random.Random(seed)) for seed in range(2)]
    base = next((one for one in bases if one.steps), Base(maker.original))
    assert [step.kind for step in base.steps] == ["scoreboards"]
    write_steps(tmp_path, base.steps)
    steps = read_steps(tmp_path)
    assert steps == base.steps
    assert prove(maker.original, maker.name, steps, AliasMode.TRITON) == []
    # A step of another kind, or of one that nobody knows, is no proof.
    for kind in ("order", "rotation"):
        wrong = Step(kind, base.cubin.data, "planted")
        assert prove(maker.original, maker.name, (wrong,), AliasMode.TRITON)
    (tmp_path / "lineage.json").write_text("[{}]")
    with pytest.raises(InputError, match="no lineage"):
        read_steps(tmp_path)


def test_an_increment_shows_one_cycle_after_its_issue(makers: dict[str, Renumberer]) -> None:
    """A wait in the next cycle does not see it, a wait in the one after does."""
    maker = makers[NAMES[0]]
    kernel = decode(maker.original, maker.name)
    named = named_scoreboards(kernel)
    planted = [
        (setter.index, setter.control.write_sb)
        for setter, waiter in itertools.pairwise(kernel.instructions)
        if setter.control.write_sb != NO_SCOREBOARD
        and not named >> setter.control.write_sb & 1
        and setter.control.stall == 1
        and not takes_no_wait(waiter)
        and not waiter.control.wait >> setter.control.write_sb & 1
    ]
    assert planted
    index, board = planted[0]
    wait = kernel.instructions[index + 1].control.wait | 1 << board
    early = edited(maker, maker.original, index + 1, wait=wait)
    assert rules(maker, early) == {"BOARD_VISIBLE"}
    assert "BOARD_VISIBLE" not in rules(maker, edited(maker, early, index, stall=2))
