"""One run of the comparison: a method with a seed plays one kernel in a process of its own."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

from warploom.errors import InputError
from warploom.sass.decode.cubin import parse
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verify import Verifier
from warploom.search.driver import Budget, SearchOptions, SearchResult, run_search
from warploom.search.evaluate import Evaluator
from warploom.search.game import Candidate
from warploom.search.players import PLAYERS, Player, Score

CONFIRMATIONS = 2
LONGEST_S = 3600.0
METHODS: Mapping[str, str] = {
    "random": "random",
    "greedy": "greedy",
    "sip": "sip",
    "anneal": "anneal",
    "evolve": "evolve",
    "block-exact": "block-exact",
    "guided": "climbs under the timing model between measurements",
    "ppo-cuasmrl": "ppo with CuAsmRL's actions, network and parameters",
    "ppo": "ppo with the wide actions and the graph network",
    "ppo-guided": "ppo with a measurement after 4 steps that the model does not call slower",
    "ppo-pre": "ppo-guided, starting from a policy trained by PPO on the timing model",
}
PROFILE_OF: Mapping[str, str] = {
    "ppo-cuasmrl": "cuasmrl",
    "ppo": "wide",
    "ppo-guided": "guided",
    "ppo-pre": "guided",
}
TRAINED = ("ppo-pre",)


@dataclass(frozen=True)
class Run:
    """One cell of the comparison. `policy` is the pre-trained policy, for those of `TRAINED`."""

    kernel: str
    method: str
    seed: int
    measurements: int
    policy: str | None = None

    @property
    def key(self) -> str:
        """A name that is unique within the comparison and fit for a file."""
        return f"{self.kernel}-{self.method}-{self.seed}"


class RemoteEvaluator:
    """Scores candidates in the process that owns the GPU; results come back by ticket."""

    name = "remote"

    def __init__(self, number: int, requests: Queue[Any], replies: Queue[Any]) -> None:
        self.number, self.requests, self.replies = number, requests, replies
        self._next = 0

    def submit(self, candidate: Candidate) -> int:
        """Send a candidate over."""
        self._next += 1
        self.requests.put(("score", self.number, self._next, candidate.cubin))
        return self._next

    def poll(self, timeout_s: float) -> Mapping[int, Score]:
        """What has come back."""
        try:
            ticket, speedup, outcome = self.replies.get(timeout=max(timeout_s, 0.001))
        except queue.Empty:
            return {}
        return {ticket: Score(speedup, outcome)}


def player_of(run: Run) -> Player:
    """The player of a run; raises `InputError` when this build does not have it."""
    if run.method.startswith("ppo"):
        from warploom.rl.player import player_for  # noqa: PLC0415 - needs torch

        profile = PROFILE_OF[run.method]
        start = Path(run.policy) if run.method in TRAINED and run.policy else None
        if run.method in TRAINED and start is None:
            raise InputError(f"{run.method} needs --policy, a policy trained on the model")
        return player_for(profile, run.seed, policy=start)
    if run.method not in PLAYERS:
        raise InputError(f"no player {run.method!r}")
    return PLAYERS[run.method]


def play(
    run: Run, image: bytes, kernel: str, number: int, requests: Queue[Any], replies: Queue[Any]
) -> None:
    """Entry of a run's process: play until the measurements are spent, then report what it did."""
    began = time.monotonic()
    evaluator: Evaluator = RemoteEvaluator(number, requests, replies)
    try:
        original = parse(image, run.kernel)
        found: SearchResult = run_search(
            original,
            player_of(run),
            evaluator,
            Budget(LONGEST_S, None, run.measurements),
            SearchOptions(
                kernel,
                AliasMode.TRITON,
                seed=run.seed,
                chains=1,
                confirmations=CONFIRMATIONS,
                verifier=Verifier(original, kernel, AliasMode.TRITON),
            ),
        )
        summary = {
            "scored": found.scored,
            "measured": found.measured,
            "outcomes": dict(found.outcomes),
            "tally": dict(found.tally),
            "seconds": round(time.monotonic() - began, 2),
        }
    except Exception as error:  # the process must always say how it ended
        summary = {"error": f"{type(error).__name__}: {error}"}
    requests.put(("done", number, 0, summary))
