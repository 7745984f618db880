"""Workers as Ray actors: one host or a cluster, with the same interface.

Needs `pip install ray`. With `num_gpus=1` Ray gives each actor a GPU of its own
(`CUDA_VISIBLE_DEVICES`), wherever in the cluster it stands.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from bench.scaling.evaluator import Event, Scorer, Task
from warploom.errors import ToolMissing
from warploom.search.play import Score


def import_ray() -> Any:
    """The `ray` module; `ToolMissing` with the way to install it."""
    try:
        return import_module("ray")
    except ImportError:
        raise ToolMissing("a Ray cluster needs Ray; install it with: pip install ray") from None


class Actor:
    """The body of an actor: a scorer that is opened where the actor lives."""

    def __init__(self, task: Task, worker: int) -> None:
        self._scorer: Scorer = task.open(worker)

    def score(self, image: bytes) -> tuple[float, str]:
        """(speed-up, outcome) of one image."""
        found = self._scorer.score(image)
        return found.speedup, found.outcome

    def pid(self) -> int:
        """The actor's process id."""
        return os.getpid()


class RayCluster:
    """`count` actors; `num_cpus` and `num_gpus` are what each asks of the cluster.

    Joins the cluster that `ray.init` was called for, or starts one on this host.
    """

    depth = 2

    def __init__(
        self, task: Task, count: int, num_cpus: float = 1.0, num_gpus: float = 0.0
    ) -> None:
        self.count = count
        self._ray = import_ray()
        self._owns = not self._ray.is_initialized()
        if self._owns:
            self._ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        self._task = self._ray.put(task)
        options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_restarts": 0}
        self._actor = self._ray.remote(Actor).options(**options)
        self._actors: dict[int, Any] = {}
        self._pending: dict[Any, tuple[int, int]] = {}

    def pid(self, worker: int) -> int:
        """The process id of a worker (on its host)."""
        return int(self._ray.get(self._actors[worker].pid.remote()))

    def start(self, worker: int) -> None:
        """Start a worker's actor."""
        self._forget(worker)
        self._actors[worker] = self._actor.remote(self._task, worker)

    def send(self, worker: int, key: int, image: bytes) -> None:
        """Queue an image on an actor; a dead one is noticed by `wait`."""
        self._pending[self._actors[worker].score.remote(image)] = (worker, key)

    def wait(self, timeout_s: float) -> Iterable[Event]:
        """Answers and losses, waiting up to `timeout_s` for the first."""
        if not self._pending:
            return []
        ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=timeout_s)
        events: list[Event] = []
        lost: set[int] = set()
        for reference in ready:
            worker, key = self._pending.pop(reference)
            if worker in lost:
                continue
            try:
                speedup, outcome = self._ray.get(reference)
            except self._ray.exceptions.RayActorError:
                lost.add(worker)
                events.append(Event(worker))
            else:
                events.append(Event(worker, key, Score(speedup, outcome)))
        for worker in lost:
            self._forget(worker)
        return events

    def _forget(self, worker: int) -> None:
        actor = self._actors.pop(worker, None)
        if actor is not None:
            self._ray.kill(actor)
        self._pending = {
            reference: place for reference, place in self._pending.items() if place[0] != worker
        }

    def close(self) -> None:
        """Stop the actors, and the cluster when this backend started it."""
        for number in list(self._actors):
            self._forget(number)
        if self._owns:
            self._ray.shutdown()
