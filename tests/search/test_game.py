"""The assembly game: what it offers, that every state verifies, and that undo is exact."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from warploom.sass.decode.cubin import Cubin, parse
from warploom.sass.rules.verify import Verifier
from warploom.search.actions import Move
from warploom.search.game import MEMORY_MOVES, UNWANTED, Candidate, Family, Game, Refusal

SMALL = ("triton_rmsnorm_2x4096_w8_s2_sm90", "triton_batched_gemm_128x128x64_w8_s4_sm80")


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("start", SMALL)
def test_undo_returns_to_identical_bytes(
    cubin_of: Callable[[str], Cubin], start: str, family: Family
) -> None:
    game = Game(cubin_of(start), family=family)
    rng = random.Random(3)
    applied = 0
    for _ in range(60):
        before, state = game.current(), game.snapshot()
        action = game.propose(rng)
        assert action is not None
        result = game.apply(action)
        if isinstance(result, Refusal):
            assert result.rule
            assert game.current().cubin == before.cubin
            continue
        applied += 1
        assert result.cubin == game.current().cubin
        game.restore(state)
        assert game.current().cubin == before.cubin
        unwanted = game.apply(action, lambda: False)
        assert isinstance(unwanted, Refusal) and unwanted.rule == UNWANTED
        assert game.current().cubin == before.cubin
        if rng.random() < 0.5:
            game.apply(action)
    assert applied >= (20 if family is Family.WIDE else 5)
    assert game.tally["proposed"] == sum(
        count for name, count in game.tally.items() if name != "proposed"
    )


def test_a_snapshot_brings_everything_back(cubin_of: Callable[[str], Cubin]) -> None:
    cubin = cubin_of(SMALL[0])
    game = Game(cubin)
    start = game.snapshot()
    rng = random.Random(1)
    for _ in range(30):
        action = game.propose(rng)
        if action is not None:
            game.apply(action)
    changed = game.snapshot()
    there = game.current()
    assert there.cubin != cubin.data
    game.restore(start)
    assert game.current().cubin == cubin.data
    game.restore(changed)
    assert game.current().digest == there.digest


@pytest.mark.parametrize("start", SMALL)
def test_sip_moves_memory_instructions_one_step_and_keeps_controls(
    cubin_of: Callable[[str], Cubin], start: str
) -> None:
    game = Game(cubin_of(start), family=Family.MEMORY)
    rng = random.Random(5)
    applied = 0
    for _ in range(80):
        action = game.propose(rng)
        assert isinstance(action, Move)
        assert action.kept
        assert game.kernel.instructions[action.index].base in MEMORY_MOVES
        _, here = game.editor.position(action.index)
        assert abs(action.to - here) == 1
        applied += isinstance(game.apply(action), Candidate)
    assert applied
    for state, block in zip(game.editor.states, game.kernel.blocks, strict=True):
        controls = game.editor.controls(block.index)
        for index, control in zip(state.order, controls, strict=True):
            assert control == game.kernel.instructions[index].control


def test_an_illegal_step_changes_nothing(cubin_of: Callable[[str], Cubin]) -> None:
    cubin = cubin_of(SMALL[0])
    game = Game(cubin)
    result = game.apply(Move(0, game.kernel.blocks[0].size - 1))
    assert isinstance(result, Refusal)
    assert game.current().cubin == cubin.data


def test_states_verify_from_bytes(cubin_of: Callable[[str], Cubin]) -> None:
    cubin = cubin_of(SMALL[1])
    game = Game(cubin)
    fresh = Verifier(cubin)
    rng = random.Random(9)
    seen = 0
    for _ in range(60):
        action = game.propose(rng)
        result = game.apply(action) if action else None
        if isinstance(result, Candidate):
            assert fresh.check_file(parse(result.cubin)).legal
            seen += 1
    assert seen >= 30
