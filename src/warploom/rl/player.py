"""The learned player behind the players' interface: the trainer thinks in a thread of its own.

PPO drives its environment, a search driver drives its players; between the two stands a handover:
the environment hands over the candidate it wants scored and sleeps until the score is there. Only
one of the two threads runs at a time.
"""

from __future__ import annotations

import queue
import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from warploom.rl.board import Board
from warploom.rl.env import AssemblyGame
from warploom.rl.profile import Profile, profile_named
from warploom.rl.replay import Replay
from warploom.rl.train import CHECKPOINT, Trainer, read_policy
from warploom.search.game import Candidate, Family, Game
from warploom.search.players import Play, Player, Score

REPLAY: Final = "replay.json"
JOIN_S: Final = 30.0


class Stopped(Exception):
    """The search is over: the trainer's thread ends here."""


class Handover:
    """A scorer whose scores come from the other thread."""

    def __init__(self, remember: bool, tally: Counter[str]) -> None:
        self._tally = tally
        self.asked: queue.Queue[Candidate | BaseException | None] = queue.Queue()
        self.answers: queue.Queue[Score | None] = queue.Queue()
        self._known: dict[str, Score] | None = {} if remember else None

    def score(self, board: Board) -> Score:
        """Ask for a score and wait for it; a state scored before is not asked for again."""
        candidate = board.candidate()
        self._tally.update(("proposed", "legal"))
        if self._known is not None and candidate.digest in self._known:
            return self._known[candidate.digest]
        self.asked.put(candidate)
        answer = self.answers.get()
        if answer is None:
            raise Stopped
        if self._known is not None:
            self._known[candidate.digest] = answer
        return answer


def learned(
    profile: Profile,
    seed: int,
    game: Game,
    folder: Path | None = None,
    resume: bool = False,
    policy: Path | None = None,
    steps: int | None = None,
) -> Play:
    """Play a game by training on it. With a folder: checkpoints, logs and the best's replay."""
    handover = Handover(profile.remember, game.tally)
    env = AssemblyGame(game, profile, handover)
    keep = partial(_keep_replay, env, folder)
    trainer = Trainer(env, profile, seed, folder, steps, keep)
    if policy is not None:
        trainer.start_from(policy)
    if resume and folder is not None and (folder / CHECKPOINT).is_file():
        trainer.resume()

    def train() -> None:
        try:
            trainer.learn()
            handover.asked.put(None)
        except Stopped:
            pass
        except BaseException as error:
            handover.asked.put(error)

    thread = threading.Thread(target=train, name="ppo", daemon=True)
    thread.start()
    try:
        while True:
            asked = handover.asked.get()
            if asked is None:
                return
            if isinstance(asked, BaseException):
                raise asked
            score = yield asked
            handover.answers.put(score)
    finally:
        handover.answers.put(None)
        thread.join(JOIN_S)
        if not thread.is_alive():
            _keep_replay(env, folder, trainer)


def _keep_replay(env: AssemblyGame, folder: Path | None, _: Trainer) -> None:
    if folder is not None and env.best_path:
        Replay.of(env).write(folder / REPLAY)


def player_for(
    profile: str,
    seed: int,
    folder: Path | None = None,
    resume: bool = False,
    policy: Path | None = None,
    steps: int | None = None,
) -> Player:
    """The learned player of a profile, for the search driver (one chain: PPO is sequential).

    It ends after `steps` training steps (the profile's total when not given), counted over all
    runs in a folder. Raises `InputError` for a policy that is none of the profile's.
    """
    chosen = profile_named(profile)
    if policy is not None:
        read_policy(policy, chosen)

    def play(game: Game, _: random.Random) -> Play:
        return learned(chosen, seed, game, folder, resume, policy, steps)

    about = f"proximal policy optimisation, profile {profile}"
    made: Callable[[Game, random.Random], Play] = play
    return Player(f"ppo-{profile}", Family.WIDE, made, about, 1)
