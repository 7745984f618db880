"""The environment: Gymnasium's checker, exact masks, seeds, vectors, reward, replays."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from warploom.errors import CheckFailed, InputError
from warploom.rl.board import Board
from warploom.rl.env import ENVIRONMENT, AssemblyGame, make_env
from warploom.rl.profile import CUASMRL, GUIDED, WIDE, Kind
from warploom.rl.replay import Replay
from warploom.sass.decode.cubin import Cubin, parse
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verify import verify
from warploom.search.players import Score

RMSNORM = "triton_rmsnorm_2x4096_w8_s2_sm90"
CubinOf = Callable[[str], Cubin]


@pytest.mark.parametrize("profile", ["wide", "cuasmrl"])
@pytest.mark.filterwarnings("ignore")
def test_gymnasiums_checker_passes(cubin_of: CubinOf, profile: str) -> None:
    check_env(make_env(cubin_of(RMSNORM), profile=profile), skip_render_check=True)


def play(env: AssemblyGame, seed: int, steps: int) -> list[float]:
    """Rewards of random legal actions."""
    rng = np.random.default_rng(seed)
    env.reset(seed=seed)
    rewards: list[float] = []
    for _ in range(steps):
        action = rng.choice(np.flatnonzero(env.action_masks()))
        _, reward, ended, cut, _ = env.step(action)
        rewards.append(reward)
        if ended or cut:
            env.reset()
    return rewards


@pytest.mark.parametrize("profile", [WIDE, CUASMRL], ids=lambda profile: profile.name)
def test_the_mask_is_the_verifiers_verdict_on_every_action(
    cubin_of: CubinOf, profile: object
) -> None:
    env = make_env(cubin_of(RMSNORM), profile=profile)  # type: ignore[arg-type]
    board, rng = env.board, np.random.default_rng(1)
    judged = legal = 0
    for _ in range(3):
        mask = board.mask()
        standing = board.snapshot()
        for block in board.scope:
            offers = board.offers(block)
            for row in rng.permutation(len(offers.lines))[:40]:
                kinds = len(env.profile.kinds)
                action = int(offers.lines[row] * kinds + offers.kinds[row])
                if mask[action]:
                    board.take(action)
                    assert board.candidate().verdict.legal, board.words(action)
                    board.restore(standing)
                    legal += 1
                else:
                    with pytest.raises(InputError, match="not legal"):
                        board.take(action)
                judged += 1
        board.take(int(rng.choice(np.flatnonzero(mask))))
    assert legal > 5 and judged > legal


def test_what_the_mask_should_not_have_allowed_is_never_passed_over(
    cubin_of: CubinOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = make_env(cubin_of(RMSNORM), profile=CUASMRL)
    board = env.board
    refused = [
        int(offers.lines[row] * 2 + offers.kinds[row])
        for offers in map(board.offers, board.scope)
        for row in np.flatnonzero(~offers.legal)
    ]
    for block in board.scope:
        board.offers(block).legal[:] = True
    with pytest.raises(CheckFailed, match="the mask allowed"):
        for action in refused:
            board.restore(board.start)
            monkeypatch.setattr(
                board.coupling, "check", lambda b, t: np.ones(len(t.duration), bool)
            )
            board.take(action)
            board.candidate()


def test_equal_seeds_play_equal_games(cubin_of: CubinOf) -> None:
    one, two = (make_env(cubin_of(RMSNORM)) for _ in range(2))
    assert play(one, 5, 12) == play(two, 5, 12)
    assert one.best_path == two.best_path
    assert play(make_env(cubin_of(RMSNORM)), 6, 12) != play(one, 5, 12)


class Scores:
    """Scores in turn."""

    def __init__(self, *scores: Score) -> None:
        self.scores = list(scores)

    def score(self, board: Board) -> Score:
        return self.scores.pop(0)


def test_the_reward_is_the_time_saved_in_percent_of_the_original(cubin_of: CubinOf) -> None:
    env = make_env(cubin_of(RMSNORM), profile=CUASMRL)
    env.scorer = Scores(Score(1.25), Score(1.0), Score(0.0, "wrong"))
    env.reset(seed=0)
    rewards: list[float] = []
    for _ in range(3):
        _, reward, ended, _, _ = env.step(np.flatnonzero(env.action_masks())[0])
        rewards.append(reward)
    assert rewards == pytest.approx([20.0, -20.0, -1.0])
    assert ended, "a failure ends an episode"
    assert env.best_speedup == 1.25 and len(env.best_path) == 1


def test_the_wide_profile_takes_slow_and_failed_steps_back(cubin_of: CubinOf) -> None:
    env = make_env(cubin_of(RMSNORM))
    env.scorer = Scores(Score(0.5), Score(0.0, "crash"), Score(1.02))
    env.reset(seed=0)
    start = env.board.snapshot()
    for number in range(2):
        _, reward, ended, _, _ = env.step(np.flatnonzero(env.action_masks())[number])
        assert reward == -1.0 and not ended and env.path == []
        assert all(a is b for a, b in zip(env.board.snapshot(), start, strict=True))
    env.step(np.flatnonzero(env.action_masks())[2])
    assert env.best_speedup == 1.02 and len(env.path) == 1


def test_between_two_scores_the_model_judges(cubin_of: CubinOf) -> None:
    env = make_env(cubin_of(RMSNORM), profile=replace(GUIDED, stride=3))
    asked: list[int] = []

    class Counting:
        """Slower than the original at the second question."""

        def score(self, board: Board) -> Score:
            asked.append(len(env.path))
            return Score(1.01 if len(asked) == 1 else 0.9)

    env.scorer = Counting()
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    outcomes: list[str] = []
    kept = None
    for _ in range(40):
        _, _, _, _, info = env.step(rng.choice(np.flatnonzero(env.action_masks())))
        outcomes.append(info["outcome"])
        kept = env.board.snapshot() if len(asked) == 1 and kept is None else kept
        if len(asked) == 2:
            break
    assert asked == [3, 6] and outcomes.count("ok") == 2
    assert kept is not None and env.path == env.best_path and len(env.path) == 3
    assert all(a is b for a, b in zip(env.board.snapshot(), kept, strict=True))


def test_a_saved_state_is_the_state(cubin_of: CubinOf) -> None:
    profile = replace(GUIDED, stride=3)
    one, two = (make_env(cubin_of(RMSNORM), profile=profile) for _ in range(2))
    rng = np.random.default_rng(0)
    one.reset(seed=0)
    while one.state()["scored"] == len(one.path):  # until a step waits for its score
        one.step(rng.choice(np.flatnonzero(one.action_masks())))
    two.load_state(json.loads(json.dumps(one.state(), default=int)))
    for _ in range(8):
        action = rng.choice(np.flatnonzero(one.action_masks()))
        assert one.step(action)[1:3] == two.step(action)[1:3]
        assert one.path == two.path


def test_an_action_outside_the_mask_changes_nothing(cubin_of: CubinOf) -> None:
    env = make_env(cubin_of(RMSNORM))
    env.reset(seed=0)
    start = env.board.snapshot()
    _, reward, _, _, info = env.step(int(np.flatnonzero(~env.action_masks())[0]))
    assert reward == -1.0 and info["illegal"]
    assert all(a is b for a, b in zip(env.board.snapshot(), start, strict=True))


def test_a_kernel_with_no_legal_action_is_bad_input(cubin_of: CubinOf) -> None:
    with pytest.raises(InputError, match="no "):
        make_env(cubin_of("prebuilt_softmax_sm90a"), profile="cuasmrl")


def test_environments_vectorise(cubin_of: CubinOf) -> None:
    cubin = cubin_of(RMSNORM)
    vector = gymnasium.make_vec(ENVIRONMENT, 2, vectorization_mode="sync", cubin=cubin)
    seen, _ = vector.reset(seed=3)
    assert seen["lines"].shape[:2] == (2, WIDE.lines)
    actions = np.array([np.flatnonzero(mask)[0] for mask in vector.call("action_masks")])
    _, rewards, *_ = vector.step(actions)
    assert rewards.shape == (2,)
    vector.close()


def test_a_replay_gives_the_same_bits_and_only_those(cubin_of: CubinOf, tmp_path: Path) -> None:
    cubin = cubin_of(RMSNORM)
    env = make_env(cubin)
    env.scorer = Scores(*(Score(1.0 + number / 1000) for number in range(12)))
    play(env, 2, 12)
    assert env.best_speedup == 1.011 and len(env.best_path) == 12
    replay = Replay.of(env)
    replay.write(tmp_path / "replay.json")
    image = Replay.read(tmp_path / "replay.json").play(cubin)
    assert verify(cubin, parse(image, "replayed"), mode=AliasMode.TRITON).legal
    assert len(replay.words) == len(replay.actions)
    assert all(word.split(":")[0] in {kind.value for kind in Kind} for word in replay.words)
    saved = json.loads((tmp_path / "replay.json").read_text())
    saved["actions"] = saved["actions"][:-1]
    (tmp_path / "replay.json").write_text(json.dumps(saved))
    with pytest.raises(CheckFailed, match="ends with"):
        Replay.read(tmp_path / "replay.json").play(cubin)
    with pytest.raises(InputError, match="not the cubin"):
        replay.play(cubin_of("triton_softmax_1x4096_w8_s1_sm90"))
