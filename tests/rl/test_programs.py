"""Other programs as actions: chosen as an episode begins, masked by their own checkers."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from warploom.flows.targets import Target
from warploom.flows.tune import tune
from warploom.flows.tuned import TuneSettings
from warploom.rl import programs
from warploom.rl.board import Board
from warploom.rl.env import AssemblyGame
from warploom.rl.profile import PROFILES, PROGRAMS, Profile
from warploom.rl.replay import Replay
from warploom.rl.train import Trainer
from warploom.sass.decode.control import Control
from warploom.sass.decode.cubin import Cubin, parse
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verdict import Finding
from warploom.search.evaluate import ModelEvaluator
from warploom.search.game import Game
from warploom.search.lineage import Base, Step, prove, prove_lineage
from warploom.search.play import Score

RMSNORM = "triton_rmsnorm_2x4096_w8_s2_sm90"
SMALL = replace(
    PROGRAMS,
    lines=96,
    hot=96,
    horizon=8,
    stride=2,
    programs=2,
    ppo=replace(PROGRAMS.ppo, steps=8, minibatch=4, epochs=1),
)
CubinOf = Callable[[str], Cubin]


_MADE: dict[object, Base] = {}


@pytest.fixture(autouse=True)
def made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A base takes seconds to make: the same one is made once."""
    make = programs.make_base

    def known(original: Cubin, name: str, rng: random.Random) -> Base:
        key = (original.digest, name, rng.getstate())
        if key not in _MADE:
            _MADE[key] = make(original, name, rng)
        return _MADE[key]

    monkeypatch.setattr(programs, "make_base", known)


@pytest.fixture
def env(cubin_of: CubinOf) -> AssemblyGame:
    return AssemblyGame(Game(cubin_of(RMSNORM), mode=AliasMode.TRITON), SMALL)


def choices(env: AssemblyGame) -> list[int]:
    """The actions that choose a program, the original first."""
    lines = env.board.actions
    return [int(action) for action in np.flatnonzero(env.action_masks()) if action >= lines]


@pytest.mark.filterwarnings("ignore")
def test_gymnasiums_checker_passes(env: AssemblyGame) -> None:
    check_env(env, skip_render_check=True)


def test_an_episode_begins_with_the_choice_of_a_program(env: AssemblyGame) -> None:
    seen, _ = env.reset(seed=0)
    assert isinstance(seen, dict) and seen["programs"].any()
    offered = choices(env)
    assert len(offered) > 1 and len(offered) == env.action_masks().sum()
    seen, reward, ended, _, _ = env.step(offered[1])
    assert isinstance(seen, dict) and not seen["programs"].any()
    assert reward == 0.0 and not ended and env.board is not env.programs[0].board
    assert not choices(env) and env.action_masks().any(), "no second choice"
    _, reward, *_ = env.step(offered[0])
    assert reward == -1.0, "nor by force"


def test_what_a_checker_refuses_is_masked(
    cubin_of: CubinOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = Finding("BOARD_SET", 0, "FADD", "planted")
    monkeypatch.setattr(programs, "prove", lambda *_: [finding])
    env = AssemblyGame(Game(cubin_of(RMSNORM), mode=AliasMode.TRITON), SMALL)
    env.reset(seed=0)
    assert len(env.programs) > 1 and choices(env) == [env.board.actions]


def test_states_on_another_program_are_proved_replayed_and_resumed(
    env: AssemblyGame, cubin_of: CubinOf, tmp_path: Path
) -> None:
    class Rising:
        """Every state is faster than the last."""

        def __init__(self) -> None:
            self.speed = 1.0

        def score(self, board: Board) -> Score:
            self.speed += 0.01
            return Score(self.speed)

    env.scorer = Rising()
    rng = np.random.default_rng(1)
    env.reset(seed=0)
    env.step(choices(env)[-1])
    for _ in range(5):
        env.step(int(rng.choice(np.flatnonzero(env.action_masks()))))
    assert env.best_speedup > 1.0 and env.best_path[0] >= env.board.actions
    program = next(p for p in env.programs if p.board is env.board)
    original = cubin_of(RMSNORM)
    Replay.of(env).write(tmp_path / "replay.json")
    saved = json.loads((tmp_path / "replay.json").read_text())
    assert saved["words"][0].startswith("play on: ")
    other = AssemblyGame(Game(original, mode=AliasMode.TRITON), SMALL)
    other.load_state(json.loads(json.dumps(env.state(), default=int)))
    assert other.board.candidate().digest == env.board.candidate().digest
    assert np.array_equal(other.action_masks(), env.action_masks())
    env.follow(env.best_path)
    image = env.board.candidate().cubin
    last = Step("order", image, "another order")
    assert not prove(original, env.board.kernel.name, (*program.base.steps, last), AliasMode.TRITON)


def test_a_policy_learns_to_choose(env: AssemblyGame) -> None:
    trainer = Trainer([env], SMALL, 1, total=8)
    before = trainer.model.policy.state_dict()["mlp_extractor.chooser.0.weight"].clone()
    trainer.learn()
    after = trainer.model.policy.state_dict()["mlp_extractor.chooser.0.weight"]
    assert not np.array_equal(before.numpy(), after.numpy())


def test_tune_proves_a_result_on_another_program(
    cubin_of: CubinOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cubin = cubin_of(RMSNORM)
    name = cubin.kernel().name
    monkeypatch.setitem(cast(dict[str, Profile], PROFILES), "programs", SMALL)

    def scoreboards(image: Cubin) -> Counter[tuple[int, ...]]:
        """What each instruction is and which scoreboards it sets, wherever it stands."""
        fields = [(low, Control.decode(high)) for low, high in image.kernel().words]
        return Counter((low, field.write_sb, field.read_sb) for low, field in fields)

    compiled = scoreboards(cubin)

    def cycles(self: ModelEvaluator, image: bytes) -> float:
        """Whatever has other scoreboards than the original is faster."""
        same = scoreboards(parse(image, "state")) == compiled
        return self.original_cycles * (1.1 if same else 0.9)

    monkeypatch.setattr(ModelEvaluator, "cycles_of", cycles)
    target = Target(cubin, name, None, source="test")
    report = tune(target, TuneSettings("ppo-programs", steps=40), tmp_path)
    assert report.speedup > 1.0 and report.lineage and report.verdict.legal
    proved = prove_lineage(cubin, report.cubin, name, tmp_path / "lineage", AliasMode.TRITON)
    assert proved.legal
