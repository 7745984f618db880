"""Several runs at once, each in a process of its own; one GPU measures for all of them in turn.

Editing, verifying and climbing under the model are CPU work; only measurements must not overlap.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from bench.comparison.runs import RemoteEvaluator
from warploom.runtime import LocalMeasurer
from warploom.sass.decode.cubin import parse
from warploom.sass.flow.aliasing import AliasMode
from warploom.search.driver import Budget, SearchOptions, SearchResult, run_search
from warploom.search.game import Game
from warploom.search.players import PLAYERS

IN_FLIGHT: Final = 6
CHAINS: Final = 2
GRACE_S: Final = 5.0
_GAMES: Final[dict[bytes, Game]] = {}  # what the processes are forked with


@dataclass(frozen=True)
class Task:
    """One run: a kernel, where to start, and for how long."""

    number: int
    image: bytes
    start: bytes | None
    kernel: str
    player: str
    seed: int
    seconds: float
    confirmations: int


class Players:
    """The processes of some tasks, each with its game decoded and waiting to play.

    They are forked from here before a GPU is opened, so that decoding is done once a kernel:

        with Players(tasks) as players, LocalMeasurer() as measurer:
            results = players.play(measurer)
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        for task in tasks:
            if task.image not in _GAMES:
                cubin = parse(task.image, task.kernel)
                _GAMES[task.image] = Game(cubin, task.kernel, AliasMode.TRITON)
        context = multiprocessing.get_context("fork")
        self._go: Any = context.Event()
        self._requests: Any = context.Queue()
        self._replies: list[Any] = [context.Queue() for _ in tasks]
        self._processes = [
            context.Process(target=_play, args=(task, self._go, self._requests, reply), daemon=True)
            for task, reply in zip(tasks, self._replies, strict=True)
        ]
        for process in self._processes:
            process.start()
        _GAMES.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()

    def play(self, measurer: LocalMeasurer) -> list[SearchResult]:
        """Play all tasks at once; what came of each, that of the best score first."""
        self._go.set()
        results: dict[int, SearchResult] = {}
        flying: dict[int, tuple[int, int]] = {}
        deadline = time.monotonic() + max(task.seconds for task in self.tasks) + GRACE_S
        while len(results) < len(self.tasks) and time.monotonic() < deadline:
            while len(flying) < IN_FLIGHT:
                try:
                    kind, number, ticket, value = self._requests.get(
                        timeout=0.0005 if flying else 0.02
                    )
                except queue.Empty:
                    break
                if kind == "score":
                    flying[measurer.submit(value)] = (number, ticket)
                else:
                    results[number] = value
            for ticket, result in measurer.poll(0.0 if not flying else 0.02):
                if ticket in flying:
                    number, theirs = flying.pop(ticket)
                    right = result.outcome == "ok"
                    score = result.speedup if right else 0.0
                    self._replies[number].put((theirs, score, result.outcome))
        for process in self._processes:
            process.kill()
        while flying and time.monotonic() < deadline + GRACE_S:
            for ticket, _ in measurer.poll(0.1):
                flying.pop(ticket, None)
        return sorted(results.values(), key=lambda found: -found.best_speedup)


def _play(task: Task, go: Any, requests: Any, replies: Any) -> None:
    game = _GAMES[task.image]
    go.wait()
    found = run_search(
        parse(task.image, task.kernel),
        PLAYERS[task.player],
        RemoteEvaluator(task.number, requests, replies),
        Budget(task.seconds),
        SearchOptions(
            task.kernel,
            AliasMode.TRITON,
            seed=task.seed,
            chains=CHAINS,
            confirmations=task.confirmations,
            start=None if task.start is None else parse(task.start, task.kernel),
            game=game,
        ),
    )
    found.on_best = None
    requests.put(("done", task.number, 0, found))
    time.sleep(4 * GRACE_S)
