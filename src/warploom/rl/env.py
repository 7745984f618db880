"""The assembly game as a Gymnasium environment.

A step takes one legal action; the reward is CuAsmRL's: (T_before - T_after) / T_original * 100, and
-1 for a candidate that fails. An episode ends after `horizon` steps, with a failure, or when no
action is legal. `action_masks` is exact: it comes from the verifier's rules. An action outside the
mask changes nothing, scores -1 and says so in `info`.

A profile with a `stride` asks for a score only after so many accepted steps. Between two scores the
timing model rewards each step and takes slower ones back; a score worse than the best takes all
steps since the last score back.

    env = gymnasium.make("warploom/AssemblyGame-v0", cubin="kernel.cubin", profile="wide")
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from warploom.errors import InputError
from warploom.rl.board import Board
from warploom.rl.observe import GraphView, Listing, Observation
from warploom.rl.offers import BlockNow
from warploom.rl.profile import Profile, profile_named
from warploom.sass.decode.cubin import Cubin, load
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.timing.timing_model import ModelSettings, TimingModel
from warploom.search.game import Family, Game
from warploom.search.players import Score

PENALTY: Final = -1.0
PERCENT: Final = 100.0
REMEMBERED: Final = 8
ENVIRONMENT: Final = "warploom/AssemblyGame-v0"


class Scorer(Protocol):
    """Scores a board's state against the original."""

    def score(self, board: Board) -> Score:
        """The state's speed-up over the original, and whether it was right."""
        ...


class ModelScorer:
    """The timing model: no GPU, no noise. It ranks schedules and measures nothing."""

    def __init__(self, board: Board, settings: ModelSettings | None = None) -> None:
        self._model = TimingModel(board.kernel, settings)
        self._kept: dict[int, tuple[BlockNow, Any]] = {}
        compiled = tuple(
            (
                tuple(range(block.start, block.end)),
                tuple(i.control for i in board.kernel.items(block)),
            )
            for block in board.kernel.blocks
        )
        self._original = self._model.kernel_cycles(compiled)
        # The last few states by identity: what is taken back has just been asked about.
        self._last: deque[tuple[list[BlockNow], Score]] = deque(maxlen=REMEMBERED)

    def score(self, board: Board) -> Score:
        """Original cycles over the state's cycles."""
        for state, score in self._last:
            if all(one is other for one, other in zip(state, board.now, strict=False)):
                return score
        signature: list[Any] = []
        for block, now in enumerate(board.now):
            known = self._kept.get(block)
            if known is None or known[0] is not now:
                known = self._kept[block] = (now, board.controls(block))
            signature.append(known[1])
        score = Score(self._original / self._model.kernel_cycles(signature))
        self._last.append((list(board.now), score))
        return score


class AssemblyGame(gymnasium.Env[Observation, np.int64]):
    """One kernel's game. `best_path` leads from the start to the fastest state seen."""

    metadata: dict[str, Any] = {"render_modes": ["ansi"]}  # noqa: RUF012 - Gymnasium's name

    def __init__(
        self, game: Game, profile: Profile, scorer: Scorer | None = None, render_mode: Any = None
    ) -> None:
        super().__init__()
        self.original, self.board = game.original, Board(game, profile)
        self.profile = profile
        self.render_mode = render_mode
        self.scorer: Scorer = scorer or ModelScorer(self.board)
        view = GraphView if profile.network == "graph" else Listing
        self._view = view(self.board)
        self.observation_space = view.space(profile.lines)
        self.action_space = spaces.Discrete(self.board.actions)
        self.path: list[int] = []
        self.best_path: list[int] = []
        self.best_speedup = 1.0
        self._best_state = self.board.snapshot()
        self._steps = 0
        self._time = self._fastest = 1.0
        self._guide = ModelScorer(self.board) if profile.stride > 1 else None
        self._modelled = 1.0
        self._unscored = 0
        self._scored = (self.board.snapshot(), 0)
        self._mask = self.board.mask()
        if not self._mask.any():
            raise InputError(
                f"{self.board.kernel.name}: no action of profile {profile.name!r} is legal"
            )

    # --- Gymnasium -------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Back to the start; with the profile's `restart` share, to the best state so far."""
        super().reset(seed=seed)
        again = self.best_speedup > 1.0 and self.np_random.random() < self.profile.restart
        if again:
            self.board.restore(self._best_state)
        else:
            self.board.restore(self.board.start)
        self.path = list(self.best_path) if again else []
        self._time = 1.0 / self.best_speedup if again else 1.0
        self._steps = 0
        self._mask = self.board.mask()
        if not self._mask.any():
            self.board.restore(self.board.start)
            self.path, self._time, self._mask = [], 1.0, self.board.mask()
        self._fastest = self._time
        self._stand()
        return self.observe(), self._info("ok")

    def words(self, path: list[int]) -> list[str]:
        """The actions of a path in words."""
        return [self.board.words(action) for action in path]

    def _stand(self) -> None:
        """What stands on the board is scored: the next stride begins here."""
        self._unscored = 0
        self._scored = (self.board.snapshot(), len(self.path))
        if self._guide is not None:
            self._modelled = 1.0 / self._guide.score(self.board).speedup

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Take an action and score the state it leads to."""
        self._steps += 1
        truncated = self._steps >= self.profile.horizon
        if not self._mask[int(action)]:
            info = {**self._info("ok"), "illegal": True}
            return self.observe(), PENALTY, False, truncated, info
        before = self.board.snapshot()
        self.board.take(int(action))
        self.path.append(int(action))
        shaped = 0.0
        if self._guide is not None:
            shaped = self._follow_model(before)
            if self._unscored < self.profile.stride and not (truncated and self._unscored):
                self._mask = self.board.mask()
                ended = not self._mask.any()
                return self.observe(), shaped, ended, truncated, self._info("modelled")
            before = self._scored[0]
        score = self.scorer.score(self.board)
        right = score.outcome == "ok" and score.speedup > 0.0
        reward = PENALTY
        if right:
            now = 1.0 / score.speedup
            reward = PERCENT * (self._time - now)
            if self.profile.worst_reward is not None:
                reward = max(reward, self.profile.worst_reward)
            if score.speedup > self.best_speedup:
                self.board.candidate()  # the verifier's own verdict on whatever is kept
                self.best_speedup, self.best_path = score.speedup, list(self.path)
                self._best_state = self.board.snapshot()
            self._settle(now, before)
        elif self.profile.accept is not None:
            self._take_back(before)
            right = True
        self._stand()
        self._mask = self.board.mask()
        terminated = not right or not self._mask.any()
        return (
            self.observe(),
            float(reward + shaped),
            terminated,
            truncated,
            self._info(score.outcome),
        )

    def _follow_model(self, before: list[BlockNow]) -> float:
        """A step between two scores: its modelled reward; a slower step is taken back."""
        assert self._guide is not None
        now = 1.0 / self._guide.score(self.board).speedup
        reward = PERCENT * (self._modelled - now)
        if self.profile.worst_reward is not None:
            reward = max(reward, self.profile.worst_reward)
        if now > self._modelled:
            self.board.restore(before)
            self.path.pop()
        else:
            self._modelled = now
            self._unscored += 1
        return reward

    def _settle(self, now: float, before: list[BlockNow]) -> None:
        """Keep what was scored, or take it back when it is too slow for the profile."""
        accept = self.profile.accept
        if accept is not None and now > self._fastest * (1.0 + accept):
            self._take_back(before)
            return
        self._time = now
        self._fastest = min(self._fastest, now)

    def _take_back(self, before: list[BlockNow]) -> None:
        """Back to the last state that was scored (one step ago where every step is)."""
        self.board.restore(before)
        del self.path[self._scored[1] :]

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """Which actions are legal now: the verifier's rules, nothing guessed."""
        return self._mask

    def observe(self) -> Observation:
        """What is seen of the board as it stands."""
        return self._view.see()

    def render(self) -> str:
        """The state in one line."""
        return f"{self.board.kernel.name}: {len(self.path)} actions, time {self._time:.4f}"

    def _info(self, outcome: str) -> dict[str, Any]:
        return {"time": self._time, "outcome": outcome, "legal": int(self._mask.sum())}

    # --- state, for checkpoints --------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything a later process needs to go on exactly here (JSON)."""
        return {
            "rng": self.np_random.bit_generator.state,
            "path": self.path,
            "steps": self._steps,
            "time": self._time,
            "fastest": self._fastest,
            "scored": self._scored[1],
            "best_path": self.best_path,
            "best_speedup": self.best_speedup,
        }

    def load_state(self, state: Mapping[str, Any]) -> Observation:
        """Go on from a saved state; returns the observation that stands there."""
        self.follow(state["best_path"])
        self._best_state = self.board.snapshot()
        self.best_path, self.best_speedup = list(state["best_path"]), state["best_speedup"]
        path, scored = list(state["path"]), state["scored"]
        self.follow(path[:scored])
        self.path = path[:scored]
        self._stand()
        for action in path[scored:]:
            self.board.take(action)
        self._unscored = len(path) - scored
        if self._guide is not None:
            self._modelled = 1.0 / self._guide.score(self.board).speedup
        self.path, self._steps = list(state["path"]), state["steps"]
        self._time, self._fastest = state["time"], state["fastest"]
        self.np_random.bit_generator.state = state["rng"]
        self._mask = self.board.mask()
        return self.observe()

    def follow(self, path: list[int]) -> None:
        """From the start through a path; raises `InputError` where an action is not legal."""
        self.board.restore(self.board.start)
        for action in path:
            self.board.take(action)


def make_env(
    cubin: Cubin | str | Path,
    kernel: str | None = None,
    profile: str | Profile = "wide",
    mode: str = "triton",
    render_mode: Any = None,
) -> AssemblyGame:
    """The environment of one kernel of a cubin, scored by the timing model."""
    file = cubin if isinstance(cubin, Cubin) else load(cubin)
    chosen = profile if isinstance(profile, Profile) else profile_named(profile)
    game = Game(file, kernel, AliasMode(mode), Family.WIDE)
    return AssemblyGame(game, chosen, render_mode=render_mode)


if ENVIRONMENT not in gymnasium.registry:
    # Gymnasium leaves a parameter of `register` untyped.
    gymnasium.register(  # pyright: ignore[reportUnknownMemberType]
        ENVIRONMENT, entry_point="warploom.rl.env:make_env", disable_env_checker=True
    )
