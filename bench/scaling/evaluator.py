"""Scoring on many workers through one interface: processes, the GPUs of a host, a Ray cluster.

    backend = Processes(ModelTask(cubin, kernel), count=4)     # or LocalGpus(...), RayCluster(...)
    with ScaledEvaluator(backend) as evaluator:
        run_search(cubin, player, evaluator, budget, chains=8)

Finished scores are handed to the search in the order of submission, whatever order they come back
in, so that a search with a fixed number of candidates takes the same decisions with one worker or
many. A worker that is lost (killed, crashed, its host gone) loses only what it was running: that
candidate goes to another worker once, and counts as a crash when it takes that one with it too.
The same holds where a worker watches over a process of its own and reports that it died.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol, Self

from warploom.errors import DeviceError
from warploom.runtime.measurer import LocalMeasurer
from warploom.runtime.session import DeviceFactory, Measurement, MeasureSettings, open_cuda
from warploom.runtime.workbench import Workload
from warploom.sass.decode.cubin import parse
from warploom.sass.timing.timing_model import ModelSettings
from warploom.search.evaluate import ModelEvaluator
from warploom.search.game import Candidate
from warploom.search.play import Score

CRASH: Final = "crash"
ATTEMPTS: Final = 2  # workers a candidate may be lost with before it is to blame
MOST_RESTARTS: Final = 8  # of one worker before it is given up


class Scorer(Protocol):
    """Scores images, one at a time; lives in a worker."""

    def score(self, image: bytes) -> Score:
        """The score of one image."""
        ...

    def close(self) -> None:
        """Release what the scorer holds."""
        ...


class Task(Protocol):
    """What workers are to do; picklable, it travels to them once."""

    def open(self, worker: int) -> Scorer:
        """Make a scorer inside worker number `worker`."""
        ...


@dataclass(frozen=True)
class ModelTask:
    """Score by the static timing model."""

    original: bytes
    kernel: str
    settings: ModelSettings | None = None

    def open(self, worker: int) -> Scorer:
        """A model of the original."""
        return _ModelScorer(
            ModelEvaluator(parse(self.original, self.kernel), self.kernel, self.settings)
        )


@dataclass(frozen=True)
class _ModelScorer:
    model: ModelEvaluator

    def score(self, image: bytes) -> Score:
        return Score(self.model.original_cycles / self.model.cycles_of(image))

    def close(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True)
class GpuTask:
    """Measure on the one GPU that the worker sees (a Ray actor with `num_gpus=1`)."""

    workload: Workload
    settings: MeasureSettings | None = None
    open_device: DeviceFactory = open_cuda

    def open(self, worker: int) -> Scorer:
        """A watched measuring process with the workload prepared."""
        measurer = LocalMeasurer(0, self.settings, open_device=self.open_device)
        measurer.prepare(self.workload)
        return _GpuScorer(measurer)


@dataclass(frozen=True)
class _GpuScorer:
    measurer: LocalMeasurer

    def score(self, image: bytes) -> Score:
        return score_of(self.measurer.measure([image])[0])

    def close(self) -> None:
        self.measurer.close()


def score_of(found: Measurement) -> Score:
    """A measurement as a score; a failed candidate scores 0."""
    return Score(found.speedup if found.outcome == "ok" else 0.0, found.outcome)


class Backend(Protocol):
    """A set of workers, numbered from 0. `depth`: how many images one may hold."""

    count: int
    depth: int

    def start(self, worker: int) -> None:
        """Start a worker, or start it again after it was lost."""
        ...

    def send(self, worker: int, key: int, image: bytes) -> None:
        """Give a worker an image to score under `key`."""
        ...

    def wait(self, timeout_s: float) -> Iterable[Event]:
        """What happened, waiting up to `timeout_s` for the first event."""
        ...

    def close(self) -> None:
        """Stop all workers."""
        ...


@dataclass(frozen=True)
class Event:
    """`key` was scored by `worker`; with no score, the worker is lost with all it held."""

    worker: int
    key: int = 0
    score: Score | None = None


@dataclass
class _Worker:
    """What the evaluator knows of one worker."""

    holding: list[int] = field(default_factory=list[int])
    restarts: int = 0
    alive: bool = False


class ScaledEvaluator:
    """An `Evaluator` over a backend's workers. `lost` counts workers that had to be replaced."""

    name = "scaled"

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._workers = [_Worker() for _ in range(backend.count)]
        self._images: dict[int, bytes] = {}
        self._attempts: dict[int, int] = {}
        self._queue: deque[int] = deque()
        self._finished: dict[int, Score] = {}
        self._next = 0
        self._due = 1
        self.lost = 0
        for number in range(backend.count):
            self._start(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def submit(self, candidate: Candidate) -> int:
        """Queue a candidate; returns its ticket."""
        self._next += 1
        self._images[self._next] = candidate.cubin
        self._queue.append(self._next)
        self._dispatch()
        return self._next

    def poll(self, timeout_s: float) -> Mapping[int, Score]:
        """The score that is next in the order of submission, waiting up to `timeout_s`.

        One at a time, so that a budget of candidates ends a search at the same one always.
        Raises `DeviceError` when no worker can be kept alive.
        """
        deadline = time.monotonic() + timeout_s
        while self._images and self._due not in self._finished:
            left = deadline - time.monotonic()
            if left < 0:
                return {}
            for event in self._backend.wait(left):
                self._understand(event)
            self._dispatch()
        score = self._finished.pop(self._due, None)
        if score is None:
            return {}
        self._due += 1
        return {self._due - 1: score}

    def close(self) -> None:
        """Stop all workers; what was queued is dropped."""
        self._backend.close()

    def _understand(self, event: Event) -> None:
        worker = self._workers[event.worker]
        if event.score is None:
            self._replace(event.worker)
        elif event.key in worker.holding:
            worker.holding.remove(event.key)
            if event.score.outcome == CRASH:
                self.lost += 1
                self._blame(event.key)
            else:
                self._finish(event.key, event.score)

    def _finish(self, key: int, score: Score) -> None:
        del self._images[key]
        self._attempts.pop(key, None)
        self._finished[key] = score

    def _replace(self, number: int) -> None:
        """Start a lost worker again; only its first image was running, the rest go back."""
        worker = self._workers[number]
        self.lost += 1
        held, worker.holding, worker.alive = worker.holding, [], False
        for key in reversed(held[1:]):
            self._queue.appendleft(key)
        for key in held[:1]:
            self._blame(key)
        worker.restarts += 1
        if worker.restarts <= MOST_RESTARTS:
            self._start(number)
        elif not any(other.alive for other in self._workers):
            raise DeviceError(
                f"no worker could be kept alive: the last was lost {worker.restarts} times"
            )

    def _blame(self, key: int) -> None:
        """A worker died while it ran this one: another gets it, once."""
        self._attempts[key] = self._attempts.get(key, 0) + 1
        if self._attempts[key] >= ATTEMPTS:
            self._finish(key, Score(0.0, CRASH))
        else:
            self._queue.appendleft(key)

    def _start(self, number: int) -> None:
        self._backend.start(number)
        self._workers[number].alive = True

    def _dispatch(self) -> None:
        """Hand queued images to the workers that hold fewest."""
        while self._queue:
            free = [
                (len(worker.holding), number)
                for number, worker in enumerate(self._workers)
                if worker.alive and len(worker.holding) < self._backend.depth
            ]
            if not free:
                return
            _, number = min(free)
            key = self._queue.popleft()
            self._workers[number].holding.append(key)
            self._backend.send(number, key, self._images[key])


class LocalGpus:
    """Every named GPU of this host, each behind its own watched process."""

    depth = 2  # one runs while the next is on its way

    def __init__(
        self,
        workload: Workload,
        indices: Iterable[int],
        settings: MeasureSettings | None = None,
        open_device: DeviceFactory = open_cuda,
    ) -> None:
        self._workload, self._settings, self._open = workload, settings, open_device
        self._indices = tuple(indices)
        self.count = len(self._indices)
        self._measurers: dict[int, LocalMeasurer] = {}
        self._keys: dict[tuple[int, int], int] = {}

    def start(self, worker: int) -> None:
        """Open a GPU and prepare the workload on it."""
        if worker in self._measurers:
            self._measurers.pop(worker).close()
        measurer = LocalMeasurer(self._indices[worker], self._settings, open_device=self._open)
        measurer.prepare(self._workload)
        self._measurers[worker] = measurer

    def send(self, worker: int, key: int, image: bytes) -> None:
        """Queue an image on one GPU."""
        self._keys[worker, self._measurers[worker].submit(image)] = key

    def wait(self, timeout_s: float) -> Iterable[Event]:
        """Look at every GPU in turn until one has something to say."""
        deadline = time.monotonic() + timeout_s
        pause = min(0.002, timeout_s / max(1, self.count))
        while True:
            events = [
                event for number in list(self._measurers) for event in self._of(number, pause)
            ]
            if events or time.monotonic() >= deadline:
                return events

    def _of(self, worker: int, pause: float) -> list[Event]:
        try:
            found = self._measurers[worker].poll(pause)
        except DeviceError:
            self._keys = {place: key for place, key in self._keys.items() if place[0] != worker}
            return [Event(worker)]
        return [
            Event(worker, self._keys.pop((worker, ticket)), score_of(result))
            for ticket, result in found
        ]

    def close(self) -> None:
        """Stop every measuring process."""
        for measurer in self._measurers.values():
            measurer.close()
