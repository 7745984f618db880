"""Training: exact resumption, policies that move between kernels, the player, Ctrl-C on tune."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from warploom.errors import InputError
from warploom.flows.targets import Target
from warploom.flows.tune import tune
from warploom.flows.tuned import TuneReport, TuneSettings
from warploom.rl.env import make_env
from warploom.rl.player import learned, player_for
from warploom.rl.profile import CUASMRL, PROFILES, WIDE, Profile
from warploom.rl.train import CHECKPOINT, Trainer
from warploom.rl.waits import waits
from warploom.sass.decode.control import Control
from warploom.sass.decode.cubin import Cubin
from warploom.sass.decode.opcodes import Pipe
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.timing.slots import Slot
from warploom.search.driver import Budget, SearchOptions, run_search
from warploom.search.evaluate import ModelEvaluator
from warploom.search.game import Game
from warploom.search.players import Score

RMSNORM = "triton_rmsnorm_2x4096_w8_s2_sm90"
SMALL = replace(WIDE, lines=96, horizon=6, ppo=replace(WIDE.ppo, steps=8, minibatch=4, epochs=2))
CubinOf = Callable[[str], Cubin]


def saved(folder: Path) -> dict[str, Any]:
    return torch.load(folder / CHECKPOINT, weights_only=True)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Facts (steps, environments, numpy's state) and all weights, bit for bit."""
    same = one["facts"] == other["facts"] and torch.equal(one["torch"], other["torch"])
    return same and all(torch.equal(one["policy"][k], other["policy"][k]) for k in one["policy"])


def test_training_in_pieces_is_training_at_once(cubin_of: CubinOf, tmp_path: Path) -> None:
    whole = Trainer(make_env(cubin_of(RMSNORM), profile=SMALL), SMALL, 1, tmp_path / "a", 16)
    whole.learn()
    first = Trainer(make_env(cubin_of(RMSNORM), profile=SMALL), SMALL, 1, tmp_path / "b", 16)
    first.learn(8)
    assert not equal(saved(tmp_path / "a"), saved(tmp_path / "b"))
    second = Trainer(make_env(cubin_of(RMSNORM), profile=SMALL), SMALL, 1, tmp_path / "b", 16)
    second.resume()
    second.learn()
    assert equal(saved(tmp_path / "a"), saved(tmp_path / "b"))
    assert list((tmp_path / "a" / "tensorboard").iterdir())


def test_a_checkpoint_of_another_training_is_refused(cubin_of: CubinOf, tmp_path: Path) -> None:
    cubin = cubin_of(RMSNORM)
    Trainer(make_env(cubin, profile=SMALL), SMALL, 1, tmp_path, 8).learn()
    with pytest.raises(InputError, match="seed is 1, here it is 2"):
        Trainer(make_env(cubin, profile=SMALL), SMALL, 2, tmp_path).resume()
    (tmp_path / CHECKPOINT).write_bytes(b"nonsense")
    with pytest.raises(InputError, match="not a checkpoint"):
        Trainer(make_env(cubin, profile=SMALL), SMALL, 1, tmp_path).resume()


def test_one_policy_plays_kernels_of_any_size(cubin_of: CubinOf, tmp_path: Path) -> None:
    Trainer(make_env(cubin_of(RMSNORM), profile=SMALL), SMALL, 0, tmp_path, 16).learn()
    wider: Profile = replace(SMALL, lines=160)
    layernorm = cubin_of("triton_layernorm_1x4096_w8_s1_sm90")
    other = Trainer(make_env(layernorm, profile=wider), wider, 0)
    other.start_from(tmp_path / CHECKPOINT)
    weights = saved(tmp_path)["policy"]
    assert all(torch.equal(v, weights[k]) for k, v in other.model.policy.state_dict().items())
    with pytest.raises(InputError, match="not 'cuasmrl'"):
        Trainer(make_env(cubin_of(RMSNORM), profile=CUASMRL), CUASMRL).start_from(
            tmp_path / CHECKPOINT
        )


def test_lost_cycles_are_those_of_the_scoreboard() -> None:
    load = Slot(Pipe.LSU, occupancy=1, result=50, sources=10)
    code = [
        (load, Control(2, False, 0, 7, 0, 0)),
        (replace(load, pipe=Pipe.ALU), Control(1, False, 7, 7, 1, 0)),
    ]
    assert waits(code, False).tolist() == [0.0, 48.0]
    assert waits(code, True).tolist() == [0.0, 48.0]


def test_the_player_measures_each_state_once_and_keeps_legal_ones(
    cubin_of: CubinOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    cubin = cubin_of(RMSNORM)
    monkeypatch.setitem(cast(dict[str, Profile], PROFILES), "wide", SMALL)
    evaluator = ModelEvaluator(cubin, next(iter(cubin.kernels)))
    budget = Budget(60.0, None, 16)
    player = player_for("wide", 0)
    found = run_search(cubin, player, evaluator, budget, SearchOptions(mode=AliasMode.TRITON))
    assert found.measured == found.scored == 16
    assert len({candidate.digest for _, candidate in found.best}) == len(found.best)
    assert all(candidate.verdict.legal for _, candidate in found.best)


def test_a_trainers_error_reaches_the_one_who_plays(
    cubin_of: CubinOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Trainer) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Trainer, "learn", fail)
    with pytest.raises(RuntimeError, match="planted"):
        next(learned(SMALL, 0, Game(cubin_of(RMSNORM))))


def test_tune_goes_on_after_ctrl_c_as_if_nothing_had_happened(
    cubin_of: CubinOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cubin = cubin_of(RMSNORM)
    monkeypatch.setitem(cast(dict[str, Profile], PROFILES), "wide", SMALL)
    # Scores that differ for every state, so that there is something to find in a few steps.
    monkeypatch.setattr(
        ModelEvaluator,
        "cycles",
        lambda self, candidate: self.original_cycles * (0.9 + int(candidate.digest[:2], 16) / 1e3),
    )
    polled = ModelEvaluator.poll
    polls = 0

    def poll(self: ModelEvaluator, timeout_s: float) -> Mapping[int, Score]:
        nonlocal polls
        polls += 1
        if polls == 11:
            raise KeyboardInterrupt
        return polled(self, timeout_s)

    monkeypatch.setattr(ModelEvaluator, "poll", poll)

    def start(folder: str, resume: bool = False) -> TuneReport:
        target = Target(cubin, next(iter(cubin.kernels)), None, source="test")
        settings = TuneSettings("ppo", seconds=200.0, steps=24, resume=resume)
        return tune(target, settings, tmp_path / folder)

    assert start("cut").search.interrupted and polls >= 11
    cut = saved(tmp_path / "cut" / "ppo")
    found = [start("cut", resume=True), start("whole")]
    assert not any(report.search.interrupted for report in found)
    whole = saved(tmp_path / "whole" / "ppo")
    assert equal(saved(tmp_path / "cut" / "ppo"), whole) and not equal(cut, whole)
    assert found[0].cubin.data == found[1].cubin.data != cubin.data


def test_a_learner_goes_on_in_its_own_kernels_folder_only(
    cubin_of: CubinOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cast(dict[str, Profile], PROFILES), "wide", SMALL)

    def start(name: str, folder: str, resume: bool) -> None:
        cubin = cubin_of(name)
        target = Target(cubin, next(iter(cubin.kernels)), None, source=name)
        tune(target, TuneSettings("ppo", steps=8, resume=resume), tmp_path / folder)

    with pytest.raises(InputError, match="holds no earlier search"):
        start(RMSNORM, "empty", True)
    start(RMSNORM, "one", False)
    with pytest.raises(InputError, match=r"another kernel|originals is"):
        start("triton_softmax_1x4096_w8_s1_sm90", "one", True)
