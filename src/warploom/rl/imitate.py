"""Imitation: a policy learns which actions the timing model likes before it plays for scores.

Few actions gain anything: a policy that starts from nothing sees almost only rewards of zero, and a
few hundred scores are not enough to learn from. The model can score many actions of one state, so
lessons are dense: states along climbs under the model, and for a sample of each state's legal
actions what the model says they gain. The policy is trained to put its choice on those that gain.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from sb3_contrib import MaskablePPO

from warploom.errors import InputError
from warploom.rl.env import PERCENT, AssemblyGame, ModelScorer

LEAST_GAIN: Final = 1e-4  # percent of the original's time; less is rounding
TEMPER: Final = 2e-3  # percent of the original's time
STRONGEST: Final = 6.0
MINIBATCH: Final = 8
CLIMB: Final = 24


@dataclass(frozen=True)
class Lesson:
    """One state: what is seen, some legal actions [A], and what each gains under the model [A],
    in percent of the original's time."""

    seen: dict[str, npt.NDArray[np.float32]]
    actions: npt.NDArray[np.int64]
    gains: npt.NDArray[np.float64]

    @property
    def share(self) -> float:
        """The share of the sampled actions that gain."""
        return float((self.gains > LEAST_GAIN).mean())


def lessons(env: AssemblyGame, states: int, actions: int, seed: int) -> list[Lesson]:
    """Lessons along climbs from the compiled code, `CLIMB` states each."""
    rng = np.random.default_rng(seed)
    board, model = env.board, ModelScorer(env.board)
    found: list[Lesson] = []
    for number in range(states):
        if number % CLIMB == 0:
            board.restore(board.start)
        legal = np.flatnonzero(board.mask())
        if not len(legal):
            board.restore(board.start)
            legal = np.flatnonzero(board.mask())
        chosen = rng.choice(legal, min(actions, len(legal)), replace=False)
        here, standing = 1.0 / model.score(board).speedup, board.snapshot()
        gains = np.zeros(len(chosen))
        for row, action in enumerate(chosen):
            board.take(int(action))
            gains[row] = PERCENT * (here - 1.0 / model.score(board).speedup)
            board.restore(standing)
        seen = env.observe()
        if not isinstance(seen, dict):
            raise InputError(f"profile {env.profile.name!r} has no graph to learn from")
        found.append(Lesson(seen, chosen, gains))
        # On along one of those that gain, or along one that costs nothing.
        better = np.flatnonzero(gains > LEAST_GAIN)
        even = np.flatnonzero(gains >= 0.0)
        pool = better if len(better) else even
        for step in rng.choice(pool, 1) if len(pool) else ():
            board.take(int(chosen[step]))
    board.restore(board.start)
    return found


def imitate(model: MaskablePPO, taught: Sequence[Lesson], epochs: int, seed: int) -> list[float]:
    """Train a policy on lessons; returns the mean loss of each epoch.

    The loss of a lesson is the cross entropy between the policy's choice among the sampled actions
    and a choice that prefers what gains and avoids what costs (softmax of the gains / `TEMPER`).
    """
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.Adam(model.policy.parameters(), 1e-3)
    losses: list[float] = []
    for _ in range(epochs):
        total = 0.0
        order = rng.permutation(len(taught))
        for begin in range(0, len(order), MINIBATCH):
            batch = [taught[number] for number in order[begin : begin + MINIBATCH]]
            loss = _loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.policy.parameters(), 0.5)
            optimizer.step()
            total += float(loss.detach()) * len(batch)
        losses.append(total / len(taught))
    return losses


def hit_rates(model: MaskablePPO, taught: Sequence[Lesson]) -> tuple[float, float]:
    """How often an action gains: chosen blindly, and by the policy, among the sampled actions."""
    blind = float(np.mean([lesson.share for lesson in taught]))
    chosen: list[float] = []
    with torch.no_grad():
        for lesson in taught:
            weights = _logits(model, [lesson])[0][torch.from_numpy(lesson.actions)].softmax(0)
            chosen.append(float(weights.numpy()[lesson.gains > LEAST_GAIN].sum()))
    return blind, float(np.mean(chosen))


def _loss(model: MaskablePPO, batch: Sequence[Lesson]) -> torch.Tensor:
    total = torch.zeros(())
    for logits, lesson in zip(_logits(model, batch), batch, strict=True):
        wanted = torch.from_numpy(np.clip(lesson.gains / TEMPER, -STRONGEST, STRONGEST)).float()
        scores = logits[torch.from_numpy(lesson.actions)].log_softmax(0)
        total = total - (wanted.softmax(0) * scores).sum()
    return total / len(batch)


def _logits(model: MaskablePPO, batch: Sequence[Lesson]) -> torch.Tensor:
    """Logits of all actions [B, actions]."""
    policy: Any = model.policy
    names = batch[0].seen
    seen = {n: torch.from_numpy(np.stack([one.seen[n] for one in batch])) for n in names}
    return policy.action_net(policy.mlp_extractor.forward_actor(policy.extract_features(seen)))
