"""Actions worked out as patches are those worked out as whole versions: versions and verdicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.errors import CheckFailed
from warploom.rl.board import Board
from warploom.rl.env import make_env
from warploom.rl.offers import BlockNow
from warploom.rl.trace import Trace
from warploom.sass.decode.cubin import Cubin

KERNELS = (
    "triton_rmsnorm_2x4096_w8_s2_sm90",
    "triton_attention_128x64_w8_s3_sm90",
    "triton_rmsnorm_2x4096_w8_s2_sm80",
)
FIELDS = ("order", "stall", "stay", "wait", "reuse")
CubinOf = Callable[[str], Cubin]


@pytest.fixture(scope="module")
def boards(cubin_of: CubinOf) -> Callable[[str], Board]:
    """One board a kernel, back at its start."""
    made: dict[str, Board] = {}

    def board(name: str) -> Board:
        found = made.setdefault(name, make_env(cubin_of(name)).board)
        found.restore(found.start)
        return found

    return board


def same(board: Board) -> None:
    """Offers of every block as they stand, from patches and as whole versions."""
    for block in board.scope:
        offers, now = board.offers(block), board.now[block]
        assert offers.patched is not None, "the version that stands has no trace"
        whole = board.wide[block].whole_offers(now)
        assert np.array_equal(offers.lines, whole.lines)
        assert np.array_equal(offers.kinds, whole.kinds)
        found, expected = (each.fitting(block, board.coupling) for each in (offers, whole))
        wrong = [offers.patched.patches[row].action for row in np.flatnonzero(found != expected)]
        assert not wrong, f"block {block}: {wrong}"
        every = np.arange(len(offers.lines))
        versions, _ = board.wide[block].made(now, offers, every)
        plain = np.array([not patch.odd for patch in offers.patched.patches])
        assert whole.versions is not None
        for name in FIELDS:
            differ = (getattr(versions, name) != getattr(whole.versions, name)).any(1)
            assert not differ[plain | expected].any(), name


@settings(max_examples=2, deadline=None, derandomize=True)
@given(name=st.sampled_from(KERNELS), seed=st.integers(0, 1 << 20))
def test_patches_are_what_whole_versions_would_be(
    boards: Callable[[str], Board], name: str, seed: int
) -> None:
    board, rng = boards(name), np.random.default_rng(seed)
    for step in range(7):
        mask = board.mask()  # patches are kept from step to step
        if step % 6 == 0:
            same(board)
        board.take(int(rng.choice(np.flatnonzero(mask))))


def test_a_return_to_an_older_state_keeps_nothing_of_the_newer(
    boards: Callable[[str], Board],
) -> None:
    board, rng = boards(KERNELS[0]), np.random.default_rng(3)
    states: list[list[BlockNow]] = []
    for _ in range(5):
        states.append(board.snapshot())
        board.take(int(rng.choice(np.flatnonzero(board.mask()))))
    board._memory.clear()
    for state in (states[1], states[4]):
        board.restore(state)
        same(board)
        board._memory.clear()


def test_a_patch_that_ends_too_early_is_found_out(
    boards: Callable[[str], Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison sees a derivation that takes itself for settled too soon."""
    board = boards(KERNELS[1])
    monkeypatch.setattr(Trace, "_settled", lambda self, walk, settling, place: True)
    board._memory.clear()
    board._offers.clear()
    with pytest.raises(AssertionError):
        same(board)
    board._memory.clear()
    board._offers.clear()


def test_what_stands_is_judged_as_a_whole(boards: Callable[[str], Board]) -> None:
    """What a mask allowed wrongly does not become a state."""
    board, rng = boards(KERNELS[1]), np.random.default_rng(1)
    refused = 0
    for _ in range(4):
        for block in board.scope:
            offers, now = board.offers(block), board.now[block]
            assert offers.patched is not None
            fits = offers.fitting(block, board.coupling)
            board._offers[block] = (now, replace(offers, legal=fits | True, coupled=[]))
            for row in np.flatnonzero(~fits):
                if not offers.patched.patches[row].cells:
                    continue
                action = int(offers.lines[row]) * len(board.profile.kinds) + int(offers.kinds[row])
                with pytest.raises(CheckFailed, match="the mask allowed"):
                    board.take(action)
                refused += 1
            board._offers[block] = (now, offers)
        board.take(int(rng.choice(np.flatnonzero(board.mask()))))
    assert refused
