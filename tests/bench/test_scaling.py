"""Many workers: the same search whatever the order of arrival and whoever is killed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator

import pytest

from bench.scaling.evaluator import MOST_RESTARTS, Backend, Event, ModelTask, ScaledEvaluator
from bench.scaling.processes import Processes
from bench.scaling.ray_cluster import RayCluster
from warploom.errors import DeviceError
from warploom.sass.decode.cubin import Cubin
from warploom.sass.rules.verify import Verifier
from warploom.search.driver import Budget, SearchOptions, run_search
from warploom.search.evaluate import ModelEvaluator
from warploom.search.game import Candidate, Game
from warploom.search.play import Score
from warploom.search.players import PLAYERS

RMSNORM = "triton_rmsnorm_2x4096_w8_s2_sm90"
COUNT = 12


class Shuffled:
    """Workers that answer in any order and die when the script says so."""

    depth = 2

    def __init__(
        self,
        score: Callable[[bytes], Score],
        count: int,
        rng: random.Random,
        deaths: float = 0.0,
        deadly: frozenset[int] = frozenset(),
    ) -> None:
        self.score, self.count, self.rng = score, count, rng
        self.deaths, self.deadly = deaths, deadly
        self.held: list[list[tuple[int, bytes]]] = [[] for _ in range(count)]
        self.started = [0] * count

    def start(self, worker: int) -> None:
        self.held[worker] = []
        self.started[worker] += 1

    def send(self, worker: int, key: int, image: bytes) -> None:
        self.held[worker].append((key, image))

    def wait(self, timeout_s: float) -> Iterable[Event]:
        busy = [number for number in range(self.count) if self.held[number]]
        if not busy:
            return []
        worker = self.rng.choice(busy)
        key, image = self.held[worker][0]
        if key in self.deadly or self.rng.random() < self.deaths:
            return [Event(worker)]
        self.held[worker].pop(0)
        return [Event(worker, key, self.score(image))]

    def close(self) -> None:
        self.held = [[] for _ in range(self.count)]


@pytest.fixture(scope="module")
def model(cubin_of: Callable[[str], Cubin]) -> Callable[[bytes], Score]:
    cubin = cubin_of(RMSNORM)
    evaluator = ModelEvaluator(cubin, cubin.kernel().name)
    return lambda image: Score(evaluator.original_cycles / evaluator.cycles_of(image))


Digests = list[tuple[float, str]]


_VERIFIERS: dict[str, Verifier] = {}


def searched(cubin: Cubin, backend: Backend, count: int = COUNT) -> tuple[Digests, ScaledEvaluator]:
    budget = Budget(60.0, count)
    if cubin.digest not in _VERIFIERS:
        _VERIFIERS[cubin.digest] = Verifier(cubin)
    with ScaledEvaluator(backend) as evaluator:
        found = run_search(
            cubin,
            PLAYERS["greedy"],
            evaluator,
            budget,
            SearchOptions(chains=3, seed=3, verifier=_VERIFIERS[cubin.digest]),
        )
    assert found.outcomes["ok"] == found.scored
    return [(score, candidate.digest) for score, candidate in found.best], evaluator


@pytest.fixture(scope="module")
def expected(cubin_of: Callable[[str], Cubin], model: Callable[[bytes], Score]) -> Digests:
    return searched(cubin_of(RMSNORM), Shuffled(model, 1, random.Random(0)))[0]


@pytest.mark.parametrize(("count", "seed", "deaths"), [(5, 1, 0.0), (3, 2, 0.05), (4, 3, 0.1)])
def test_arrival_and_deaths_change_nothing(
    cubin_of: Callable[[str], Cubin],
    model: Callable[[bytes], Score],
    expected: Digests,
    count: int,
    seed: int,
    deaths: float,
) -> None:
    backend = Shuffled(model, count, random.Random(seed), deaths)
    found, evaluator = searched(cubin_of(RMSNORM), backend)
    assert found == expected
    assert sum(backend.started) == count + evaluator.lost


def candidates(cubin: Cubin, count: int) -> Iterator[Candidate]:
    game = Game(cubin)
    for _ in range(count):
        yield game.current()


def test_a_candidate_that_kills_two_workers_is_to_blame(cubin_of: Callable[[str], Cubin]) -> None:
    backend = Shuffled(lambda _: Score(1.5), 2, random.Random(1), deadly=frozenset((3,)))
    with ScaledEvaluator(backend) as evaluator:
        tickets = [evaluator.submit(item) for item in candidates(cubin_of(RMSNORM), 6)]
        scores: dict[int, Score] = {}
        while len(scores) < len(tickets):
            scores.update(evaluator.poll(1.0))
    assert list(scores) == tickets, "handed over in the order of submission"
    assert {key for key, score in scores.items() if score.outcome == "crash"} == {3}
    assert evaluator.lost == 2


class Reporting(Shuffled):
    """Workers that outlive the processes they watch over, and say when one died."""

    def wait(self, timeout_s: float) -> Iterable[Event]:
        return [
            event if event.score else Event(event.worker, self._drop(event), Score(0.0, "crash"))
            for event in super().wait(timeout_s)
        ]

    def _drop(self, event: Event) -> int:
        return self.held[event.worker].pop(0)[0]


def test_a_reported_death_is_another_workers_to_repeat(cubin_of: Callable[[str], Cubin]) -> None:
    backend = Reporting(
        lambda _: Score(1.5), 2, random.Random(6), deaths=0.05, deadly=frozenset((3,))
    )
    with ScaledEvaluator(backend) as evaluator:
        tickets = [evaluator.submit(item) for item in candidates(cubin_of(RMSNORM), 30)]
        scores: dict[int, Score] = {}
        while len(scores) < len(tickets):
            scores.update(evaluator.poll(1.0))
    assert list(scores) == tickets
    assert {key for key, score in scores.items() if score.outcome == "crash"} == {3}
    assert evaluator.lost > 2 and backend.started == [1, 1]


def test_workers_that_always_die_are_an_error(cubin_of: Callable[[str], Cubin]) -> None:
    backend = Shuffled(lambda _: Score(1.0), 1, random.Random(1), deaths=1.0)
    with ScaledEvaluator(backend) as evaluator, pytest.raises(DeviceError, match="kept alive"):
        for item in candidates(cubin_of(RMSNORM), 2 * MOST_RESTARTS):
            evaluator.submit(item)
        for _ in range(2 * MOST_RESTARTS):
            evaluator.poll(5.0)


class Killing:
    """A backend that kills a worker's process just before it would get certain images, once each.

    One image a worker, so that each death is of a known image whatever the order of arrival.
    """

    depth = 1

    def __init__(self, inner: Processes | RayCluster, deadly: set[int]) -> None:
        self.inner, self.deadly = inner, deadly
        self.count = inner.count
        self.start, self.wait, self.close = inner.start, inner.wait, inner.close

    def send(self, worker: int, key: int, image: bytes) -> None:
        if key in self.deadly:
            self.deadly.remove(key)
            os.kill(self.inner.pid(worker), signal.SIGKILL)
        self.inner.send(worker, key, image)


def test_killed_processes_cost_nothing(cubin_of: Callable[[str], Cubin], expected: Digests) -> None:
    cubin = cubin_of(RMSNORM)
    task = ModelTask(cubin.data, cubin.kernel().name)
    found, evaluator = searched(cubin, Killing(Processes(task, 2), {5, COUNT}))
    assert found == expected
    assert evaluator.lost == 2


def test_killed_ray_actors_cost_nothing(
    cubin_of: Callable[[str], Cubin], expected: Digests
) -> None:
    ray = pytest.importorskip("ray")
    cubin = cubin_of(RMSNORM)
    task = ModelTask(cubin.data, cubin.kernel().name)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        cluster = RayCluster(task, 2, num_cpus=1)
        found, evaluator = searched(cubin, Killing(cluster, {7}))
    finally:
        ray.shutdown()
    assert found == expected
    assert evaluator.lost == 1
