"""The search through a space of kernels: bounds first, then what compiles, replayed.

Stages, each from the best of the one before:

    known       points that were tried at other sizes of the arrays, ranked by the model from their
                replays there
    sizes       choices of open sizes, with all rewrites, in the usual order, those first whose
                launch is shortest with its loops at their bounds; where that spills, in the order
                that needs fewest registers
    forms       other choices of rewrites for the fastest sizes
    plans       launch plans of the fastest, ranked by the model from what is known of the loops;
                the first ones are compiled
    orders      other pipelines of the fastest
    variations  options that change the code: what of the next task begins early, stores, registers,
                blocks that share an SM; again, until none is a gain
    solved      the solver's order for the fastest

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
from dataclasses import dataclass, field, replace
from math import floor, inf, log, prod
from multiprocessing import get_context, parent_process

from warploom import toolchain
from warploom.autosched.plans import (
    GRID,
    LEFT_TO_SOLVER,
    fits,
    growing_axis,
    ordered,
    plans,
    values,
    variations,
)
from warploom.autosched.points import Point
from warploom.autosched.selected import Selected
from warploom.codegen.compile.build import program_key
from warploom.codegen.ir.place import place
from warploom.codegen.ir.plan import KernelSchedule
from warploom.engine.points import Space, orders
from warploom.engine.store import PointStore, Row
from warploom.errors import CheckFailed, ToolMissing, WarploomError
from warploom.perf.extract import extract
from warploom.perf.launch_time import MODEL, Launch, at_bounds
from warploom.perf.replay import Replay, machine_bound, replay
from warploom.rewrites.rules import NEARLY_ALWAYS, Form
from warploom.schedule.model.bounds import lower_bounds
from warploom.schedule.model.costs import costs
from warploom.tile import Op, Program

SECONDS = {"quick": 15.0, "normal": 180.0, "thorough": 1200.0}  # of a search, by effort
# How many of the fastest get other rewrites, plans, orders, variations and the solver's order.
BEST_OF = {"quick": (1, 1, 1, 0, 0), "normal": (2, 4, 3, 2, 1), "thorough": (6, 8, 8, 4, 2)}
# How many points of other array sizes are tried, and how many choices of open sizes.
FIRST = {"quick": (2, 1), "normal": (8, 16), "thorough": (16, 1000)}
TIE = 1.005  # times that close are taken as equal: the model's error is larger
MOST_SECONDS = 300  # of one point, in the slowest search; then its process is ended
BESIDE_SUMS = 32  # registers of a thread for addresses and operands
WARP_GROUP = 128  # threads
NEAR = 1.25  # times the best at other sizes
ROUNDING = 1e-6  # of a prediction that is made again
STEP = 1.05  # times between which bounds do not tell
PLANS = 3  # of a point that are compiled, of all that were ranked
EFFORTS = tuple(SECONDS)
SOLVED = "solve"  # the order whose outcome depends on the seconds that a solver has
Say = Callable[[str], None]
Outcome = dict[str, object]
Evaluate = Callable[[Space, Point, Mapping[str, int], str, float], Outcome]


@dataclass(frozen=True)
class Found:
    """A point with its outcome."""

    point: Point
    row: Row

    @property
    def microseconds(self) -> float:
        """Predicted; infinite where the point is of no use."""
        return float("inf") if self.row.predicted is None else self.row.predicted


@dataclass
class Explored:
    """What a search tried; `keys` of its rows by point, `pruned` by bounds, `known` from before."""

    found: list[Found] = field(default_factory=list[Found])
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    pruned: int = 0
    known: int = 0
    late: int = 0

    @property
    def useful(self) -> list[Found]:
        """Points that compile, the fastest first; of those that tie with it the plainest first."""
        ranked = [one for one in self.found if one.row.predicted is not None]
        ranked.sort(key=lambda one: one.microseconds)
        near = sum(one.microseconds <= TIE * self.best for one in ranked)
        plain = sorted(ranked[:near], key=lambda one: len(one.point.rules) + len(one.point.plan))
        return plain + ranked[near:]

    @property
    def best(self) -> float:
        """The least time predicted."""
        return min((one.microseconds for one in self.found), default=float("inf"))

    def __str__(self) -> str:
        refused = sum(bool(one.row.refused) for one in self.found)
        told = [f"{len(self.found)} points"]
        told += [f"{self.known} of them known from before"] * bool(self.known)
        told += [f"{refused} refused"] * bool(refused)
        told += [f"{self.pruned} pruned by their bounds"] * bool(self.pruned)
        told += [f"{self.late} left out, as the time was over"] * bool(self.late)
        return ", ".join(told)


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
        self.end = time.monotonic() + SECONDS[effort]
        self.explored = Explored()
        self.tried: set[Point] = set()
        self.told = float("inf")
        self.compiler = compiler()
        self.evaluate: Evaluate = tried
        self.workers = os.cpu_count() or 1
        self.pool: ProcessPoolExecutor | None = None
        self.programs: dict[tuple[tuple[str, str], ...], str] = {}

    def run(self) -> Explored:
        """All stages."""
        of_forms, of_plans, of_orders, of_variations, of_solved = BEST_OF[self.effort]
        of_known, of_sizes = FIRST[self.effort]
        try:
            self._try(self._elsewhere(of_known))
            self._try(self._sizes(of_sizes))
            self._try(self._spilled())
            self._try(self._varied(of_forms, self._forms, lambda point: point.settings))
            self._try(self._refused())
            self._try(self._spilled())
            self._try(self._varied(of_plans, self._plans))
            self._try(self._varied(of_orders, self._orders))
            best = float("inf")
            while of_variations and self.explored.best < best and time.monotonic() < self.end:
                best = self.explored.best
                self._try(self._varied(of_variations, self._variations))
            self._try(self._varied(of_solved, self._solved))
        finally:
            self._close()
        return self.explored

    def _elsewhere(self, count: int) -> list[Point]:
        """The points of least predicted time, by replays of them at other array sizes; what was far
        from the best there is not asked for."""
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
        best: dict[str, float] = {}
        for sizes, _, row in known:
            best[sizes] = min(row.predicted or inf, best.get(sizes, inf))
        fastest: dict[Point, float] = {}
        for sizes, point, row in known:
            if point not in fastest and (row.predicted or inf) <= NEAR * best[sizes]:
                fastest[point] = self._guess(point, row)
        ranked = sorted(fastest, key=lambda point: fastest[point])
        return [point for point in ranked[:count] if fastest[point] < inf]

    def _guess(self, point: Point, row: Row) -> float:
        """Microseconds at the sizes of this search, from a replay at others; infinite where there
        is none that can be read, or the plan does not fit."""
        try:
            walked = Replay.from_json((row.told or {})["replay"])
            laid_out = self.space.laid_out(self._program(point), point)
            return Launch(*laid_out, self.sizes, self.gpu).time(walked).microseconds
        except (WarploomError, KeyError, TypeError, ValueError):
            return float("inf")

    def _sizes(self, count: int) -> Iterator[Point]:
        """Choices of open sizes: the author's first one, or those of the shortest launch with
        loops at their bounds; of those within `STEP` of another first what loads fewest bytes."""
        found: list[tuple[tuple[float, float], tuple[Point, ...]]] = []
        for settings in self.space.sizes():
            try:
                most = max(self.space.forms(settings), key=lambda form: len(form.rules))
            except WarploomError as error:
                self.say(f"sizes {dict(settings)}: {error}")
                continue
            points = tuple(self._usual(settings, most))
            if not points:
                continue
            if count == 1:
                yield from points
                return
            found.append((self._ideal(points[0]), points))
        best = min((time_ for (time_, _), _ in found), default=inf)

        def rank(one: tuple[tuple[float, float], tuple[Point, ...]]) -> tuple[float, float]:
            (time_, loaded), _ = one
            return (floor(log(time_ / best, STEP)) if 0 < time_ < inf else time_), loaded

        for _, points in sorted(found, key=rank)[:count]:
            yield from points

    def _ideal(self, point: Point) -> tuple[float, float]:
        """Time with loops at their bounds and nothing around them, tasks shared out as evenly as
        they can be; and the bytes that its tasks load. Infinite for a point that is not legal, or
        likely to spill."""
        program = self._program(point)
        plan = ("balance=dynamic",) * bool(growing_axis(program))
        try:
            selected = self.space.selected(point, self.gpu)
            if crowded(selected):
                return inf, inf
            cycles = bounds_of(selected, self.gpu)
            laid_out = self.space.laid_out(program, replace(point, plan=plan))
            launch = Launch(*laid_out, self.sizes, self.gpu)
            time_ = launch.time(at_bounds(cycles)).microseconds
        except WarploomError:
            return inf, inf
        return time_, launch.loaded

    def _forms(self, one: Found) -> Iterator[Point]:
        """Other rewrites, each with the most that a form allows to begin of the next task: one
        loop may go on where the last task's ends, and is worth more with it than without."""
        kept = NEARLY_ALWAYS.intersection(one.point.rules if one.row.predicted is not None else ())
        for form in self.space.forms(one.point.settings):
            if not kept.issubset(form.rules):
                continue
            tasks = values(form.program, "task")
            plan = (f"task={tasks[-1]}",) if tasks and self.effort != "quick" else ()
            for point in self._usual(one.point.settings, form):
                yield replace(point, plan=plan)

    @staticmethod
    def _usual(settings: tuple[tuple[str, str], ...], form: Form) -> Iterator[Point]:
        for name in orders(form.program)[:1]:
            yield Point(settings, form.rules, name)

    def _spilled(self) -> Iterator[Point]:
        """Forms that need more registers than there are, in the order that needs fewest: groups
        do not hold one result while another one takes its turn."""
        for one in list(self.explored.found):
            if "spills" in one.row.refused and one.point.order.startswith("pingpong"):
                yield replace(one.point, order="overlapped-early")

    def _refused(self) -> Iterator[Point]:
        """Other forms of the first sizes, where no point is of use with all rewrites."""
        if not self.explored.useful:
            for one in self.explored.found[:1]:
                yield from self._forms(one)

    def _orders(self, one: Found) -> list[Point]:
        return [replace(one.point, order=name) for name in orders(self._program(one.point))]

    def _program(self, point: Point) -> Program:
        return self.space.rewritten(point)

    def _plans(self, one: Found) -> list[Point]:
        """The plans of least predicted time, as if they left the machine code as it is."""
        point, walked = one.point, Replay.from_json((one.row.told or {})["replay"])
        program = self._program(point)
        fastest: dict[tuple[str, ...], tuple[float, Point]] = {}  # of those that differ in rasters
        code = [word for word in point.plan if word.partition("=")[0] not in GRID]
        for words in plans(program):
            if time.monotonic() > self.end:
                break
            if not fits((*words, *code)):
                continue
            other = replace(point, plan=ordered((*words, *code)))
            try:
                launch = Launch(*self.space.laid_out(program, other), self.sizes, self.gpu)
                found = launch.time(walked).microseconds
            except WarploomError:
                continue
            alike = tuple(word for word in other.plan if not word.startswith("raster="))
            if alike not in fastest or found < fastest[alike][0]:
                fastest[alike] = found, other
        ranked = sorted(fastest.values(), key=lambda pair: pair[0])
        return [other for _, other in ranked[:PLANS]]

    def _variations(self, one: Found) -> list[Point]:
        found = variations(self._program(one.point), one.point.plan)
        return [replace(one.point, plan=words) for words in found]

    @staticmethod
    def _solved(one: Found) -> list[Point]:
        left_to_it = (f"{option}=" for option in LEFT_TO_SOLVER)
        return [replace(one.point.having(*left_to_it), order=SOLVED)]

    def _varied(
        self,
        count: int,
        vary: Callable[[Found], Iterable[Point]],
        apart: Callable[[Point], object] = lambda point: point.rules,
    ) -> Iterator[Point]:
        """Neighbours of the fastest point of each of so many forms, or of what else is `apart`:
        what a form is worth shows with the plans and orders that suit it."""
        fastest: dict[object, Found] = {}
        for one in self.explored.useful:
            fastest.setdefault(apart(one.point), one)
        for one in [*fastest.values()][:count]:
            yield from vary(one)

    # ---- trying points

    def _try(self, points: Iterable[Point]) -> None:
        fresh = [point for point in points if point not in self.tried]
        self.tried.update(fresh)
        ahead: list[Point] = []
        for point in fresh:
            row = self.store.find(self._key(point))
            if row is None or not self._holds(point, row):
                ahead.append(point)
            else:
                self.explored.known += 1
                self._note(point, row)
        if ahead:
            self._in_workers(ahead)

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

    def _in_workers(self, points: list[Point]) -> None:
        left = list(reversed(points))
        while left:
            running: dict[Future[Outcome], Point] = {}
            try:
                while left or running:
                    while left and len(running) < self.workers and time.monotonic() < self.end:
                        point = left.pop()
                        running[self._submit(point)] = point
                    if not running:
                        self.explored.late += len(left)
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
                    left += list(running.values())
                self.workers = 1

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
        self.explored.found.append(Found(point, row))
        self.explored.keys[str(point)] = self._key(point)
        if row.predicted is not None and row.predicted < self.told:
            self.told = row.predicted
            left = max(0.0, self.end - time.monotonic())
            self.say(
                f"{len(self.explored.found)} points, best {row.predicted:.1f} us predicted: "
                f"{point} (at most {left:.0f} s left)"
            )

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
        return self.programs[settings], f"{self.gpu}, model {MODEL}", self.compiler


def compiler() -> str:
    """The compiler of this machine, or that there is none."""
    try:
        return f"nvcc {toolchain.find('nvcc').version}"
    except ToolMissing:
        return "none"


def tried(space: Space, point: Point, sizes: Mapping[str, int], gpu: str, best: float) -> Outcome:
    """The outcome of a point, in a worker: predicted time and why, refused, or pruned."""
    try:
        selected = space.selected(point, gpu)
        bound = bound_of(selected, sizes, gpu)
        if bound >= best:
            return {"pruned": True, "bound": bound}
        built = selected.build()
        assert isinstance(selected.schedule, KernelSchedule)
        launch = Launch(selected.program, selected.launch, sizes, gpu)
        found = replay(selected.program, selected.schedule, built.cubin, gpu, rates=launch.rates())
        outcome = told(launch, found, bound)
        if (predicted := launch.time(found).microseconds) < bound:
            raise CheckFailed(
                f"{predicted:.1f} us predicted, its loops take {bound:.1f} us at least: the model "
                "of a launch is wrong"
            )
        return outcome
    except WarploomError as error:
        return {"refused": str(error)}


def told(launch: Launch, found: Replay, bound: float) -> Outcome:
    """What is kept of a point that is of use, whose loops and ends take as long as `found` says."""
    time_ = launch.time(found)
    return {
        "predicted": time_.microseconds,
        "bound": bound,
        "replay": found.to_json(),
        "mhz": time_.mhz,
        "work": time_.work,
        "limits": time_.limits,
        "busy": time_.busy,
        "overhead": time_.overhead,
    }


def _limited(
    evaluate: Evaluate,
    space: Space,
    point: Point,
    sizes: Mapping[str, int],
    gpu: str,
    best: float,
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


def bound_of(selected: Selected, sizes: Mapping[str, int], gpu: str) -> float:
    """Microseconds that no order of these loops is below: each iteration at its bound, on all SMs
    all the time, at the highest clock."""
    launch = Launch(selected.program, selected.launch, sizes, gpu)
    ideal = launch.time(at_bounds(bounds_of(selected, gpu)))
    return max(ideal.memory, ideal.busy * ideal.microseconds)


def crowded(selected: Selected) -> bool:
    """Whether the sums of its matmuls leave a thread too few registers for anything else."""
    schedule = selected.schedule
    assert isinstance(schedule, KernelSchedule)
    held = 0
    for loop in selected.program.loops():
        matmuls = [op for op in loop.body if isinstance(op, Op) and op.kind == "mma"]
        sums = {op.dst.name: prod(op.dst.type.shape) for op in matmuls if op.dst is not None}
        held = max(held, sum(sums.values()))
    threads = WARP_GROUP * len(schedule.compute)
    return held / threads + BESIDE_SUMS > schedule.any_loop.groups[-1].registers


def bounds_of(selected: Selected, gpu: str) -> Mapping[str, float]:
    """Cycles of an iteration of each loop that no order is below."""
    schedule, program = selected.schedule, selected.program
    assert isinstance(schedule, KernelSchedule)
    placement = place(program, schedule.launch.split, len(schedule.compute))
    cycles: dict[str, float] = {}
    for loop in placement.program.loops():
        problem = extract(placement, loop, costs(gpu), skip_unit=schedule.launch.skip_unit)
        cycles[loop.index] = float(machine_bound(lower_bounds(problem.graph, problem.target))[0])
    return cycles
