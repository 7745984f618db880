"""Training: exact resumption, policies that move between kernels, the player, Ctrl-C on tune."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from warploom.errors import InputError
from warploom.sass.aliasing import AliasMode
from warploom.sass.cubin import Cubin
from warploom.search.driver import Budget, run_search
from warploom.search.evaluate import ModelEvaluator
from warploom.search.game import Game
from warploom.search.rl.env import make_env
from warploom.search.rl.player import learned, player_for
from warploom.search.rl.profile import CUASMRL, WIDE, Profile
from warploom.search.rl.train import CHECKPOINT, Trainer

pytestmark = pytest.mark.usefixtures("disassembled_once")
RMSNORM = "triton_rmsnorm_2x4096_w8_s2_sm90"
SMALL = replace(WIDE, lines=96, horizon=6, ppo=replace(WIDE.ppo, steps=8, minibatch=4, epochs=2))
CubinOf = Callable[[str], Cubin]


def saved(folder: Path) -> dict[str, Any]:
    return torch.load(folder / CHECKPOINT, weights_only=True)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Facts (steps, environments, numpy's state) and all weights, bit for bit."""
    same = one["facts"] == other["facts"] and torch.equal(one["torch"], other["torch"])
    return same and all(torch.equal(one["policy"][k], other["policy"][k]) for k in one["policy"])


@pytest.mark.parametrize("rollouts", [1, 2])
def test_training_in_pieces_is_training_at_once(
    cubin_of: CubinOf, tmp_path: Path, rollouts: int
) -> None:
    whole = Trainer([make_env(cubin_of(RMSNORM), profile=SMALL)], SMALL, 1, tmp_path / "a", 24)
    whole.learn()
    first = Trainer([make_env(cubin_of(RMSNORM), profile=SMALL)], SMALL, 1, tmp_path / "b", 24)
    first.learn(8 * rollouts)
    assert not equal(saved(tmp_path / "a"), saved(tmp_path / "b"))
    second = Trainer([make_env(cubin_of(RMSNORM), profile=SMALL)], SMALL, 1, tmp_path / "b", 24)
    second.resume()
    second.learn()
    assert equal(saved(tmp_path / "a"), saved(tmp_path / "b"))
    assert list((tmp_path / "a" / "tensorboard").iterdir())


def test_a_checkpoint_of_another_training_is_refused(cubin_of: CubinOf, tmp_path: Path) -> None:
    cubin = cubin_of(RMSNORM)
    Trainer([make_env(cubin, profile=SMALL)], SMALL, 1, tmp_path, 8).learn()
    with pytest.raises(InputError, match="seed is 1, here it is 2"):
        Trainer([make_env(cubin, profile=SMALL)], SMALL, 2, tmp_path).resume()
    (tmp_path / CHECKPOINT).write_bytes(b"nonsense")
    with pytest.raises(InputError, match="not a checkpoint"):
        Trainer([make_env(cubin, profile=SMALL)], SMALL, 1, tmp_path).resume()


def test_one_policy_plays_kernels_of_any_size(cubin_of: CubinOf, tmp_path: Path) -> None:
    kernels = (RMSNORM, "triton_layernorm_1x4096_w8_s1_sm90")
    envs = [make_env(cubin_of(name), profile=SMALL) for name in kernels]
    Trainer(envs, SMALL, 0, tmp_path, 16).learn()
    wider: Profile = replace(SMALL, lines=160)
    other = Trainer([make_env(cubin_of("triton_scan_sm90"), profile=wider)], wider, 0)
    other.start_from(tmp_path / CHECKPOINT)
    weights = saved(tmp_path)["policy"]
    assert all(torch.equal(v, weights[k]) for k, v in other.model.policy.state_dict().items())
    with pytest.raises(InputError, match="not 'cuasmrl'"):
        Trainer([make_env(cubin_of(RMSNORM), profile=CUASMRL)], CUASMRL).start_from(
            tmp_path / CHECKPOINT
        )


def test_the_player_measures_each_state_once_and_keeps_legal_ones(cubin_of: CubinOf) -> None:
    cubin = cubin_of(RMSNORM)
    evaluator = ModelEvaluator(cubin, next(iter(cubin.kernels)))
    budget = Budget(60.0, None, 40)
    player = player_for("wide", 0)
    found = run_search(cubin, player, evaluator, budget, mode=AliasMode.TRITON)
    assert found.measured == found.scored == 40
    assert len({candidate.digest for _, candidate in found.best}) == len(found.best)
    assert all(candidate.verdict.legal for _, candidate in found.best)


def test_a_trainers_error_reaches_the_one_who_plays(
    cubin_of: CubinOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Trainer) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Trainer, "learn", fail)
    with pytest.raises(RuntimeError, match="planted"):
        next(learned(SMALL, 0, Game(cubin_of(RMSNORM)), random.Random(0)))


def test_tune_goes_on_after_ctrl_c_as_if_nothing_had_happened(
    cubin_of: CubinOf, tmp_path: Path
) -> None:
    path = tmp_path / "kernel.cubin"
    path.write_bytes(cubin_of("triton_scan_sm90").data)

    def start(folder: str, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", "-m", "warploom", "tune", str(path)]
        command += ["-o", str(tmp_path / folder), "--search", "ppo", "--measure", "model"]
        command += ["--budget", "200s", "--steps", "64", *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    interrupted = start("cut")
    checkpoint = tmp_path / "cut" / "ppo" / CHECKPOINT
    deadline = time.monotonic() + 120
    while not checkpoint.is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    interrupted.send_signal(signal.SIGINT)
    said, _ = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 0 and "interrupted" in said, said
    for folder, more in (("cut", ("--resume",)), ("whole", ())):
        process = start(folder, *more)
        said, _ = process.communicate(timeout=200)
        assert process.returncode == 0, said
    assert equal(saved(tmp_path / "cut" / "ppo"), saved(tmp_path / "whole" / "ppo"))
    results = [(tmp_path / folder / "tuned.cubin").read_bytes() for folder in ("cut", "whole")]
    assert results[0] == results[1] != path.read_bytes()
