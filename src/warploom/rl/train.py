"""Training a learned player: MaskablePPO, checkpoints at rollout boundaries, exact resumption.

A checkpoint holds everything that decides what comes next: weights, optimiser, step counts, all
random states and where each environment stands. Under the model (which has no noise) a training
that was interrupted and resumed ends with the same bits as one that was not; what had been played
since the last checkpoint is played again.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# Torch and SB3 leave much untyped; what is ours is checked.

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger, TensorBoardOutputFormat
from stable_baselines3.common.vec_env import DummyVecEnv

from warploom.errors import InputError
from warploom.files import write_bytes_atomically
from warploom.rl.env import AssemblyGame
from warploom.rl.policy import policy_of
from warploom.rl.profile import Profile, profile_named

SCHEMA: Final = 2
CHECKPOINT: Final = "checkpoint.pt"
LOGS: Final = "tensorboard"


class Trainer:
    """Trains a policy on a kernel. `folder` keeps checkpoints and logs."""

    def __init__(
        self,
        env: AssemblyGame,
        profile: Profile,
        seed: int = 0,
        folder: Path | None = None,
        total: int | None = None,
        on_rollout: Callable[[Trainer], None] | None = None,
    ) -> None:
        # Small networks: one thread is faster, and the sums come out the same on every machine.
        torch.set_num_threads(1)
        self.env, self.profile, self.folder, self.seed = env, profile, folder, seed
        self.total = total or profile.ppo.total
        self.on_rollout = on_rollout
        rate = profile.ppo.learning_rate
        policy, details = policy_of(profile)
        self._vector = DummyVecEnv([lambda: env])
        self.model = MaskablePPO(
            policy,
            self._vector,
            learning_rate=(lambda _: rate * self.left) if profile.ppo.anneal else rate,
            n_steps=profile.ppo.steps,
            batch_size=profile.ppo.minibatch,
            n_epochs=profile.ppo.epochs,
            gamma=profile.ppo.gamma,
            gae_lambda=profile.ppo.gae_lambda,
            clip_range=profile.ppo.clip,
            ent_coef=profile.ppo.entropy,
            vf_coef=profile.ppo.value,
            max_grad_norm=profile.ppo.max_grad_norm,
            policy_kwargs=details,
            seed=seed,
            device="cpu",
        )
        logged = folder is not None and find_spec("tensorboard") is not None
        outputs = [TensorBoardOutputFormat(str(folder / LOGS))] if folder and logged else []
        self.model.set_logger(Logger(None, [*outputs]))

    @property
    def steps(self) -> int:
        """Environment steps trained on so far."""
        return self.model.num_timesteps

    @property
    def left(self) -> float:
        """The share of the training that is still to come: what the learning rate follows."""
        return max(0.0, 1.0 - self.steps / self.total) if hasattr(self, "model") else 1.0

    def learn(self, steps: int | None = None) -> None:
        """Train for so many steps more (rounded up to a rollout), or until the total."""
        left = self.total - self.steps if steps is None else steps
        while left > 0:
            rollout = min(left, self.profile.ppo.steps)
            # One rollout at a time, so that a checkpoint stands between any two.
            self.model.learn(1, _Progress(self), reset_num_timesteps=False)
            left -= rollout
        self.save()

    # --- checkpoints -------------------------------------------------------------------------

    def save(self) -> None:
        """Write the checkpoint, when there is a folder."""
        if self.folder is not None:
            write_bytes_atomically(self.folder / CHECKPOINT, self.checkpoint())

    def checkpoint(self) -> bytes:
        """The whole state as bytes."""
        name, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
        model = self.model
        starts = model._last_episode_starts  # pyright: ignore[reportPrivateUsage]
        facts = {
            "schema": SCHEMA,
            "profile": self.profile.name,
            "seed": self.seed,
            "total": self.total,
            "steps": model.num_timesteps,
            "updates": model._n_updates,  # pyright: ignore[reportPrivateUsage]
            "kernel": self.env.board.kernel.name,
            "original": self.env.original.digest,
            "env": self.env.state(),
            "starts": None if starts is None else [bool(start) for start in starts],
            "numpy": [str(name), int(place), int(has_gauss), float(cached)],
        }
        buffer = io.BytesIO()
        torch.save(
            {
                "facts": json.dumps(facts, default=int),
                "policy": model.policy.state_dict(),
                "optimizer": model.policy.optimizer.state_dict(),
                "torch": torch.get_rng_state(),
                "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            },
            buffer,
        )
        return buffer.getvalue()

    def resume(self) -> None:
        """Go on from the folder's checkpoint; raises `InputError` when it is not this training."""
        assert self.folder is not None
        saved = _read(self.folder / CHECKPOINT)
        facts: dict[str, Any] = json.loads(saved["facts"])
        ours = {
            "profile": self.profile.name,
            "seed": self.seed,
            "original": self.env.original.digest,
        }
        for name, value in ours.items():
            if facts.get(name) != value:
                raise InputError(
                    f"{self.folder / CHECKPOINT}: {name} is {facts.get(name)}, here it is {value}"
                )
        model = self.model
        model.policy.load_state_dict(saved["policy"])
        model.policy.optimizer.load_state_dict(saved["optimizer"])
        model.num_timesteps = facts["steps"]
        model._n_updates = facts["updates"]  # pyright: ignore[reportPrivateUsage]
        if facts["starts"] is not None:
            seen = self.env.load_state(facts["env"])
            model._last_obs = _alone(seen)  # pyright: ignore[reportPrivateUsage]
            model._last_episode_starts = np.array(facts["starts"])  # pyright: ignore[reportPrivateUsage]
        name, place, has_gauss, cached = facts["numpy"]
        keys = saved["numpy"].numpy().astype(np.uint32)
        np.random.set_state((name, keys, place, has_gauss, cached))
        torch.set_rng_state(saved["torch"])

    def start_from(self, path: Path) -> None:
        """Take over the weights of a trained policy (pre-training): nothing else of it."""
        self.model.policy.load_state_dict(read_policy(path, self.profile)["policy"])


def read_policy(path: Path, profile: Profile) -> dict[str, Any]:
    """A checkpoint whose weights fit a profile; raises `InputError` for any other file."""
    saved = _read(path)
    try:
        facts: dict[str, Any] = json.loads(saved["facts"])
        trained = profile_named(facts["profile"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: not a checkpoint ({type(error).__name__})") from None
    if trained.weights != profile.weights:
        raise InputError(f"{path}: a policy of profile {trained.name!r}, not {profile.name!r}")
    return saved


def _read(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, weights_only=True)
    except FileNotFoundError:
        raise InputError(f"{path}: there is no checkpoint") from None
    except Exception as error:
        raise InputError(f"{path}: not a checkpoint ({type(error).__name__})") from None


def _alone(seen: Any) -> Any:
    """An observation as a vectorised environment of one hands it out."""
    if isinstance(seen, Mapping):
        return {name: one[None] for name, one in seen.items()}
    return seen[None]


class _Progress(BaseCallback):
    """Checkpoints when a rollout begins (all before it has been learned from) and logs."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.trainer = trainer
        self._rewards: list[float] = []

    def _on_rollout_start(self) -> None:
        self.trainer.save()
        if self.trainer.on_rollout is not None:
            self.trainer.on_rollout(self.trainer)

    def _on_step(self) -> bool:
        self._rewards.extend(float(reward) for reward in self.locals["rewards"])
        return True

    def _on_rollout_end(self) -> None:
        record, env = self.logger.record, self.trainer.env
        record("kernel/best_speedup", env.best_speedup)
        record("kernel/legal_actions", int(env.action_masks().sum()))
        record("game/reward_per_step", float(np.mean(self._rewards)))
