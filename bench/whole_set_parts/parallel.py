"""Several runs at once, each in a process of its own; one GPU measures for all of them in turn.

Editing, verifying and climbing under the model are CPU work; only measurements must not overlap.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from comparison.runs import RemoteEvaluator
from warploom.runtime import LocalMeasurer
from warploom.sass.aliasing import AliasMode
from warploom.sass.cubin import parse
from warploom.search.driver import Budget, SearchResult, run_search
from warploom.search.lineage import Base
from warploom.search.players import PLAYERS
from warploom.search.tournament import Entry

IN_FLIGHT: Final = 6
CHAINS: Final = 2
GRACE_S: Final = 6.0


@dataclass(frozen=True)
class Task:
    """One run: a program to play on, where to start, and for how long once it is decoded."""

    number: int
    image: bytes
    start: bytes | None
    elsewhere: bool
    kernel: str
    player: str
    seed: int
    seconds: float
    confirmations: int


def together(tasks: Sequence[Task], bases: Sequence[Base], measurer: LocalMeasurer) -> list[Entry]:
    """Play all tasks at once; entries by score, best first. `bases` is each task's base."""
    context = multiprocessing.get_context("spawn")
    requests: Any = context.Queue()
    replies: list[Any] = [context.Queue() for _ in tasks]
    processes = [
        context.Process(target=_play, args=(task, requests, reply), daemon=True)
        for task, reply in zip(tasks, replies, strict=True)
    ]
    for process in processes:
        process.start()
    results: dict[int, SearchResult] = {}
    flying: dict[int, tuple[int, int]] = {}
    deadline = time.monotonic() + max(task.seconds for task in tasks) + 4 * GRACE_S
    while len(results) < len(tasks) and time.monotonic() < deadline:
        while len(flying) < IN_FLIGHT:
            try:
                kind, number, ticket, value = requests.get(timeout=0.0005 if flying else 0.02)
            except queue.Empty:
                break
            if kind == "score":
                flying[measurer.submit(value)] = (number, ticket)
            else:
                results[number] = value
                deadline = min(deadline, time.monotonic() + GRACE_S)
        for ticket, result in measurer.poll(0.0 if not flying else 0.02):
            if ticket in flying:
                number, theirs = flying.pop(ticket)
                right = result.outcome == "ok"
                replies[number].put((theirs, result.speedup if right else 0.0, result.outcome))
    for process in processes:
        process.kill()
    while flying and time.monotonic() < deadline + GRACE_S:
        for ticket, _ in measurer.poll(0.1):
            flying.pop(ticket, None)
    entries = [Entry.of(bases[number], found) for number, found in results.items()]
    return sorted(entries, key=lambda entry: -entry.score)


def _play(task: Task, requests: Any, replies: Any) -> None:
    evaluator = RemoteEvaluator(task.number, requests, replies)
    found = run_search(
        parse(task.image, task.kernel),
        PLAYERS[task.player],
        evaluator,
        Budget(task.seconds),
        task.kernel,
        AliasMode.TRITON,
        seed=task.seed,
        chains=CHAINS,
        confirmations=task.confirmations,
        start=None if task.start is None else parse(task.start, task.kernel),
        elsewhere=task.elsewhere,
    )
    found.on_best = None
    requests.put(("done", task.number, 0, found))
    time.sleep(2 * GRACE_S)
