"""The search through a space of kernels: bounds first, then what compiles, replayed.

    known       points that were tried at other sizes of the arrays: those whose loads come as fast
                here are told by the model from their replays there, and of the others it ranks
                those that are tried again
    first       the author's sizes with all rewrites, in the usual order of the loops
    explored    whatever is likely to be the fastest by what was tried so far (`engine.estimate`):
                open sizes, rewrites, orders, and of the fastest points of several forms other
                launch plans and options that change the code
    solved      the solver's order for the fastest

Open sizes come with the launch plan that is fastest with their loops at their bounds. Other plans
of a point that was tried are ranked by the model from its replay, and only the first are compiled.
A point whose bound lies above the best time predicted so far is not compiled: no schedule of its
loops is faster. Points are tried in worker processes, and every outcome is a row of the store as
soon as it is known; a worker that dies or hangs costs the point that it was at.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import islice
from math import inf
from multiprocessing import get_context, parent_process

from warploom import toolchain
from warploom.autosched.plans import LEFT_TO_SOLVER
from warploom.autosched.points import Point
from warploom.codegen.compile.build import program_key
from warploom.engine.candidates import SOLVED, Candidates, Sizes
from warploom.engine.explored import Explored, Found
from warploom.engine.outcome import Outcome, elsewhere, tried
from warploom.engine.points import Space
from warploom.engine.store import PointStore, Row
from warploom.errors import ToolMissing, WarploomError
from warploom.perf.launch_time import MODEL, Launch
from warploom.perf.replay import Replay

# Of a search, by effort; of three and twenty minutes the rest is for what `optimize` does after it.
SECONDS = {"quick": 15.0, "normal": 165.0, "thorough": 1185.0}
KNOWN = {"quick": 2, "normal": 8, "thorough": 16}  # points of other array sizes that are tried
SOLVED_OF = {"quick": 0, "normal": 1, "thorough": 2}  # forms that get the solver's order
FIRST = 8  # sizes that are tried where the author's are of no use
LOOK, SOLVING = 0.1, 0.2  # of the seconds: for the bounds of open sizes, and for the solver
MOST_SECONDS = 300  # of one point, in the slowest search; then its process is ended
NEAR = 1.25  # times the best at other sizes
SEARCH = 3  # version of what is tried next: what another one found is searched again
ROUNDING = 1e-6  # of a prediction that is made again
EFFORTS = tuple(SECONDS)
Say = Callable[[str], None]
Evaluate = Callable[[Space, Point, Mapping[str, int], str, float], Outcome]


def search(
    space: Space,
    sizes: Mapping[str, int],
    gpu: str,
    store: PointStore,
    effort: str = "normal",
    say: Say = lambda _: None,
    evaluate: Evaluate | None = None,
) -> Explored:
    """Explore a space for array sizes on a GPU, as long as the effort allows.

    `evaluate` gives the outcome of a point in a worker process (`tried`, unless another is given).
    Raises `ToolMissing` where there is no compiler for the points that are to be tried.
    """
    made = _Search(space, sizes, gpu, store, effort, say)
    made.evaluate = evaluate or tried
    return made.run()


class _Search:
    def __init__(
        self,
        space: Space,
        sizes: Mapping[str, int],
        gpu: str,
        store: PointStore,
        effort: str,
        say: Say,
    ) -> None:
        self.space, self.sizes, self.gpu, self.store = space, dict(sizes), gpu, store
        self.effort, self.say = effort, say
        solving = SOLVING if SOLVED_OF[effort] else 0.0
        self.end = time.monotonic() + SECONDS[effort]
        self.explored_until = self.end - solving * SECONDS[effort]
        self.explored = Explored()
        self.candidates = Candidates(space, self.sizes, gpu)
        self.told = float("inf")
        self.compiler = compiler()
        self.evaluate: Evaluate = tried
        self.workers = _processors()
        self.pool: ProcessPoolExecutor | None = None
        self.programs: dict[Sizes, str] = {}

    def run(self) -> Explored:
        """What an earlier search with as much effort found here, or else all stages."""
        if self._told_before():
            return self.explored
        if self.evaluate is tried:
            toolchain.find("nvcc")
        try:
            self._try(self._elsewhere(KNOWN[self.effort]))
            self._try(islice(self.candidates.first(), 1))
            if not self.explored.useful:
                self._try(islice(self.candidates.first(), 1, FIRST))
            self._explore()
            self._try(self._solved(SOLVED_OF[self.effort]))
        finally:
            self._close()
        points = [one.point.to_json() for one in self.explored.found]
        if self.evaluate is tried:
            self.store.put(self._search_key(), Row(told={"points": points}))
        return self.explored

    def _told_before(self) -> bool:
        """Whether the store has what a search with this effort found, point by point."""
        row = self.store.find(self._search_key())
        points = [Point.from_json(one) for one in (row.told or {}).get("points", ())] if row else []
        known: list[Found] = []
        for point in points:
            if (row := self.store.find(self._key(point))) is None:
                return False
            known.append(Found(point, row))
        # The fastest alone is told again by the model; of the others each says something.
        fastest = min(known, key=lambda one: one.microseconds, default=None)
        if fastest is None or not self._holds(fastest.point, fastest.row):
            return False
        if any(one.row.predicted is None and not one.row.refused for one in known):
            return False
        for one in known:
            self.explored.known += 1
            self._keep(one)
        return True

    def _explore(self) -> None:
        """What is likely to be the fastest, one after the other."""
        self._look_at_sizes()
        self._in_workers(self._next)
        if time.monotonic() >= self.explored_until:
            self.explored.late += self.candidates.left(self.explored.goal)

    def _look_at_sizes(self) -> None:
        """Open sizes become candidates, the author's first, as long as the effort allows."""
        until = time.monotonic() + LOOK * SECONDS[self.effort]
        for settings in self.space.sizes():
            self.candidates.ideal(settings)
            if time.monotonic() > until:
                break
        self.candidates.trim()

    def _next(self) -> Point | None:
        """The next point that no row of the store tells of."""
        while time.monotonic() < self.explored_until:
            point = self.candidates.next(self.explored.goal)
            if point is None or not self._is_known(point):
                return point
        return None

    def _elsewhere(self, count: int) -> list[Point]:
        """The points of least predicted time, by replays of them at other array sizes, that have to
        be tried here; others are told at once. What was far from the best there is not asked
        for."""
        known = self._rows()
        best: dict[str, float] = {}
        for sizes, _, row in known:
            best[sizes] = min(row.predicted or inf, best.get(sizes, inf))
        here = json.dumps(dict(sorted(self.sizes.items())))
        self._try(point for sizes, point, _ in known if sizes == here)
        fastest: dict[Point, tuple[float, Outcome | None]] = {}
        for sizes, point, row in known:
            if point in self.candidates.taken:
                continue
            _, exact = fastest.get(point, (inf, None))
            if exact is None and (row.predicted or inf) <= NEAR * best[sizes]:
                fastest[point] = self._there(point, row)
        ranked = sorted(fastest, key=lambda point: fastest[point][0])
        for point in ranked:
            if (outcome := fastest[point][1]) is not None:
                self.explored.known += 1
                self._take(point, outcome)
        left = [point for point in ranked if fastest[point][0] < inf and not fastest[point][1]]
        return left[:count]

    def _rows(self) -> list[tuple[str, Point, Row]]:
        """(sizes of the arrays, point, row) of what the store has of the space, but for orders of
        the solver."""
        known: list[tuple[str, Point, Row]] = []
        for settings in self.space.sizes():
            try:
                rows = list(self.store.useful(*self._program_key(settings)))
            except WarploomError:
                continue
            made = {form.rules for form in self.space.forms(settings)} if rows else ()
            for sizes, text, row in rows:
                point = Point.from_json(json.loads(text.partition(" in ")[0]))
                known += [(sizes, point, row)] * (point.order != SOLVED and point.rules in made)
        return known

    def _there(self, point: Point, row: Row) -> tuple[float, Outcome | None]:
        """Microseconds at the sizes of this search of a point that was tried at others; and its
        outcome, where its loads come as fast there."""
        exact = None
        if self.evaluate is tried:
            exact = elsewhere(self.space, point, row.told or {}, self.sizes, self.gpu)
        predicted = (exact or {}).get("predicted")
        return predicted if isinstance(predicted, float) else self._guess(point, row), exact

    def _guess(self, point: Point, row: Row) -> float:
        """Microseconds at the sizes of this search, from a replay at others; infinite where there
        is none that can be read, or the plan does not fit."""
        try:
            walked = Replay.from_json((row.told or {})["replay"])
            laid_out = self.space.laid_out(self.space.rewritten(point), point)
            return Launch(*laid_out, self.sizes, self.gpu).time(walked).microseconds
        except (WarploomError, KeyError, TypeError, ValueError):
            return float("inf")

    def _solved(self, count: int) -> Iterator[Point]:
        """The solver's order for the fastest point of so many forms."""
        left_to_it = tuple(f"{option}=" for option in LEFT_TO_SOLVER)
        for one in islice(list(self.explored.fastest(lambda point: point.rules)), count):
            yield replace(one.point.having(*left_to_it), order=SOLVED)

    # ---- trying points

    def _try(self, points: Iterable[Point]) -> None:
        fresh = [point for point in dict.fromkeys(points) if point not in self.candidates.taken]
        self.candidates.taken.update(fresh)
        ahead = iter([point for point in fresh if not self._is_known(point)])
        self._in_workers(lambda: next(ahead, None))
        self.explored.late += len(list(ahead))

    def _is_known(self, point: Point) -> bool:
        """Whether a row of the store tells of a point, which then counts as tried."""
        row = self.store.find(self._key(point))
        if row is None or not self._holds(point, row):
            return False
        self.explored.known += 1
        self._note(point, row)
        return True

    def _holds(self, point: Point, row: Row) -> bool:
        """Whether a row of the store says what the model says of its replay: one that does not is
        tried again. Asked of those that would be the best, or that say nothing at all."""
        if row.predicted is None:
            return bool(row.refused)
        if self.evaluate is not tried or row.predicted >= self.explored.best:
            return True
        known = row.told or {}
        again = self._guess(point, row)
        below = float(known.get("bound", inf)) > row.predicted
        return not below and abs(again - row.predicted) <= ROUNDING * again < inf

    def _in_workers(self, ahead: Callable[[], Point | None]) -> None:
        """Try points, as long as there are any and the time is not over."""
        again: list[Point] = []
        running: dict[Future[Outcome], Point] = {}
        while True:
            try:
                while len(running) < self.workers and time.monotonic() < self.end:
                    point = again.pop() if again else ahead()
                    if point is None:
                        break
                    running[self._submit(point)] = point
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    outcome = done.result()  # raises where a worker died
                    self._take(running.pop(done), outcome)
            except BrokenProcessPool:
                self._close()
                if len(running) == 1:
                    (point,) = running.values()
                    died = f"the process that tried it died, or took over {MOST_SECONDS} s"
                    self._take(point, {"refused": died})
                else:
                    # Which of them did it is not known: all are tried again, one at a time.
                    again += list(running.values())
                self.workers = 1
                running = {}

    def _close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
        self.pool = None

    def _submit(self, point: Point) -> Future[Outcome]:
        if self.pool is None:
            context = get_context("forkserver")  # whose processes have imported all this already
            context.set_forkserver_preload(["__main__", __name__])
            self.pool = ProcessPoolExecutor(
                self.workers, mp_context=context, initializer=_end_with_search
            )
        return self.pool.submit(
            _limited, self.evaluate, self.space, point, self.sizes, self.gpu, self.explored.best
        )

    def _take(self, point: Point, outcome: Mapping[str, object]) -> None:
        if outcome.get("pruned"):
            self.explored.pruned += 1
            return
        predicted = outcome.get("predicted")
        row = Row(
            float(predicted) if isinstance(predicted, float) else None,
            None,
            str(outcome.get("refused", "")),
            {key: value for key, value in outcome.items() if key not in ("predicted", "refused")},
        )
        self.store.put(self._key(point), row)
        self._note(point, row)

    def _note(self, point: Point, row: Row) -> None:
        found = Found(point, row)
        self._keep(found)
        self.candidates.note(found, self.explored)
        if row.predicted is not None and row.predicted < self.told:
            self.told = row.predicted
            left = max(0.0, self.end - time.monotonic())
            count = len(self.explored.found)
            self.say(
                f"{count} point{'s' * (count != 1)}, best {row.predicted:.1f} us predicted: "
                f"{point} (at most {left:.0f} s left)"
            )

    def _keep(self, found: Found) -> None:
        self.explored.found.append(found)
        self.explored.keys[str(found.point)] = self._key(found.point)

    def _search_key(self) -> tuple[str, ...]:
        """What a search depends on, beside its points; no program has such a key."""
        text = f"{self.space.free} {self.space.textbook(next(iter(self.space.sizes())))}"
        sizes = json.dumps(dict(sorted(self.sizes.items())))
        effort = f"{self.effort}, {SECONDS[self.effort]:g} s, solver {self.space.seconds:g} s"
        return f"search {SEARCH} {program_key(text)}", effort, sizes, self._machine, self.compiler

    @property
    def _machine(self) -> str:
        return f"{self.gpu}, model {MODEL}"

    def _key(self, point: Point) -> tuple[str, ...]:
        """What the outcome of a point depends on."""
        program, machine, made_by = self._program_key(point.settings)
        sizes = json.dumps(dict(sorted(self.sizes.items())))
        told = json.dumps(point.to_json())
        if point.order == SOLVED:
            told += f" in {self.space.seconds:g} s"
        return program, told, sizes, machine, made_by

    def _program_key(self, settings: tuple[tuple[str, str], ...]) -> tuple[str, str, str]:
        """(program, GPU and model, compiler) of rows at a choice of open sizes."""
        if settings not in self.programs:
            self.programs[settings] = program_key(str(self.space.textbook(settings)))
        return self.programs[settings], self._machine, self.compiler


def _processors() -> int:
    """Processors that this process may use: a container or `taskset` may leave it fewer than the
    machine has."""
    allowed = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def compiler() -> str:
    """The compiler of this machine, or that there is none."""
    try:
        return f"nvcc {toolchain.find('nvcc').version}"
    except ToolMissing:
        return "none"


def _limited(
    evaluate: Evaluate, space: Space, point: Point, sizes: Mapping[str, int], gpu: str, best: float
) -> Outcome:
    """The outcome of a point, in a worker that is ended by a signal where it hangs."""
    signal.alarm(MOST_SECONDS)
    try:
        return evaluate(space, point, sizes, gpu, best)
    finally:
        signal.alarm(0)


def _end_with_search() -> None:
    """Let this worker end when the search's process is gone, however it ended."""

    def watch() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the search's to tell
    threading.Thread(target=watch, daemon=True).start()
