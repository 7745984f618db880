"""Workers as processes of this host: the backend that needs nothing installed."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from bench.scaling.evaluator import Event, Task
from warploom.search.play import Score


@dataclass
class _Process:
    handle: Any
    pipe: Connection


class Processes:
    """`count` spawned processes, each with a scorer of its own.

    Spawned, never forked: a script that uses it needs the `if __name__ == "__main__"` guard.
    """

    depth = 2

    def __init__(self, task: Task, count: int) -> None:
        self.count = count
        self._task = task
        self._running: dict[int, _Process] = {}

    def pid(self, worker: int) -> int:
        """The process id of a worker."""
        return int(self._running[worker].handle.pid)

    def start(self, worker: int) -> None:
        """Start a worker's process."""
        self._stop(worker)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        handle = context.Process(target=serve, args=(theirs, self._task, worker))
        handle.start()
        theirs.close()
        self._running[worker] = _Process(handle, ours)

    def send(self, worker: int, key: int, image: bytes) -> None:
        """Hand an image over; a dead process is noticed by the next `wait`."""
        with contextlib.suppress(OSError):
            self._running[worker].pipe.send((key, image))

    def wait(self, timeout_s: float) -> Iterable[Event]:
        """Answers and deaths, waiting up to `timeout_s` for the first."""
        places: dict[Any, int] = {}
        for number, process in self._running.items():
            places[process.pipe] = places[process.handle.sentinel] = number
        ready = {places[item] for item in wait(list(places), timeout_s)}
        return [event for number in sorted(ready) for event in self._of(number)]

    def _of(self, worker: int) -> list[Event]:
        process = self._running[worker]
        events: list[Event] = []
        try:
            while process.pipe.poll():
                key, speedup, outcome = process.pipe.recv()
                events.append(Event(worker, key, Score(speedup, outcome)))
        except (EOFError, OSError):
            events.append(Event(worker))
        return events

    def _stop(self, worker: int) -> None:
        process = self._running.pop(worker, None)
        if process is not None:
            process.handle.kill()
            process.handle.join(10)
            process.pipe.close()

    def close(self) -> None:
        """Stop every process."""
        for number in list(self._running):
            self._stop(number)


def serve(pipe: Connection, task: Task, worker: int) -> None:
    """A worker's process: score what comes until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    scorer = task.open(worker)
    try:
        while True:
            key, image = pipe.recv()
            score = scorer.score(image)
            pipe.send((key, score.speedup, score.outcome))
    except (EOFError, OSError):
        scorer.close()
