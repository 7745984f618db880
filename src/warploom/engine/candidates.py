"""Which point a search tries next.

Every choice of open sizes, rewrites and order is a candidate, with the launch plan that is fastest
with the loops of these sizes at their bounds. So are the points that differ from a fast one in one
option, and those with other launch plans, which the model ranks by the fast one's replay. What is
tried next is likely to be the fastest by what was tried so far (`engine.estimate`); where nothing
may be faster than what is known, there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from math import inf, log, prod

import numpy as np

from warploom.autosched.plans import GRID, fits, growing_axis, ordered, plans, values, variations
from warploom.autosched.points import Point
from warploom.engine.estimate import NOISE, Estimate
from warploom.engine.explored import SHARED_OUT, TIE, Explored, Found
from warploom.engine.outcome import bounds_of, crowded
from warploom.engine.points import Space, orders
from warploom.errors import WarploomError
from warploom.machine import load as load_machine
from warploom.perf.launch_time import Launch, at_bounds
from warploom.perf.replay import Replay
from warploom.tile import Program

VARIED = 4  # forms whose fastest point gets other plans and options
PLANS = 3  # of a point that are candidates, of all that were ranked
WIDE = 1.5  # times the least ideal: open sizes beyond are none
NEAR = 1.1  # times the best: what is slower gets no other plans or options
BOLD, HOPE = 1.0, 2.0  # standard deviations below what is likely: to compare points, to give one up
AHEAD = ("overlapped", "pingpong")  # orders that begin an iteration ahead, as overlapping tasks do
SOLVED = "solve"  # the order whose outcome depends on the seconds that a solver has
Sizes = tuple[tuple[str, str], ...]  # a choice of the open sizes


@dataclass
class Candidates:
    """The points of a space that may be tried, for array sizes on a GPU."""

    space: Space
    sizes: Mapping[str, int]
    gpu: str
    # Points that may be tried, with the log of their time where the model has it from a replay.
    open: dict[Point, float | None] = field(default_factory=dict[Point, float | None])
    taken: set[Point] = field(default_factory=set[Point])
    ideals: dict[Sizes, float] = field(default_factory=dict[Sizes, float])
    varied: set[Point] = field(default_factory=set[Point])

    @cached_property
    def estimate(self) -> Estimate:
        """What was tried tells of the others."""
        return Estimate(self._base)

    def first(self) -> Iterator[Point]:
        """The author's sizes, with all rewrites, in the usual order: or the first ones that have
        such a point."""
        for settings in self.space.sizes():
            yield from islice(self._usual(settings), 1)

    def ideal(self, settings: Sizes) -> float:
        """Microseconds of the launch with its loops at their bounds; infinite where it would
        spill."""
        if settings not in self.ideals:
            self.ideals[settings], plan = self._laid_out(settings)
            if self.ideals[settings] < inf:
                self._offer_sizes(settings, plan)
        return self.ideals[settings]

    def note(self, found: Found, explored: Explored) -> None:
        """A point was tried: what follows of others, and which ones are near to it."""
        self.taken.add(found.point)
        self.estimate.add(found.point, None if found.row.predicted is None else found.goal)
        if "registers" in found.row.refused and found.point.order != SOLVED:
            for point in self._roomy(found.point):
                self._offer(point)
        for one in islice(explored.fastest(_form), VARIED):
            if one.point not in self.varied and one.microseconds <= NEAR * explored.best:
                self.varied.add(one.point)
                self._offer_near(one)

    def next(self, best: float) -> Point | None:
        """The one to try next; None where none may take less than the best."""
        while True:
            points, likely, hope = self._judged()
            if not len(points) or hope.min() >= log(best):
                return None
            point = points[int(np.argmin(likely))]
            del self.open[point]
            self.taken.add(point)
            for other in islice(self._roomy(point), 1):
                if other == point or other not in self.taken:
                    self.taken.add(other)
                    self.open.pop(other, None)
                    return other

    def left(self, best: float) -> int:
        """How many may take less than the best."""
        _, _, hope = self._judged()
        return int((hope < log(best)).sum()) if best < inf else len(hope)

    def ranked_plans(self, one: Found) -> list[tuple[float, Point]]:
        """Other launch plans of a point, of least predicted time, as if they left its machine code
        as it is."""
        point, walked = one.point, Replay.from_json((one.row.told or {})["replay"])
        program = self.space.rewritten(point)
        fastest: dict[tuple[str, ...], tuple[float, Point]] = {}  # of those that differ in rasters
        code = [word for word in point.plan if word.partition("=")[0] not in GRID]
        for words in plans(program):
            if not fits((*words, *code)):
                continue
            other = replace(point, plan=ordered((*words, *code)))
            time = self._time(program, other, walked)
            alike = tuple(word for word in other.plan if not word.startswith("raster="))
            if time < inf and (alike not in fastest or time < fastest[alike][0]):
                fastest[alike] = time, other
        return sorted(fastest.values(), key=lambda pair: pair[0])[:PLANS]

    # ---- what is open

    def _judged(self) -> tuple[list[Point], np.ndarray, np.ndarray]:
        """Open points; log of the least time that is likely for each, and of the least at all."""
        points = list(self.open)
        if not points:
            return points, np.zeros(0), np.zeros(0)
        mean, off = self.estimate.asked(points)
        for at, known in enumerate(self.open.values()):
            if known is not None:
                mean[at], off[at] = known, NOISE
        return points, mean - BOLD * off, mean - HOPE * off

    def _base(self, point: Point) -> float:
        """The ideal that a point's time is compared with: where its sizes have none, the least."""
        known = self.ideals.get(point.settings, inf)
        if known < inf:
            return known
        return min((one for one in self.ideals.values() if one < inf), default=1.0)

    def _offer(self, point: Point, time: float | None = None) -> None:
        if point not in self.taken and (time is not None or point not in self.open):
            self.open[point] = None if time is None else log(time)

    def _offer_sizes(self, settings: Sizes, plan: tuple[str, ...]) -> None:
        """All rewrites and orders at these sizes, each with the most that a form allows to begin of
        the next task: one loop may go on where the last task's ends."""
        for form in sorted(self.space.forms(settings), key=lambda form: -len(form.rules)):
            tasks = values(form.program, "task")
            for order in orders(form.program):
                ahead = order.startswith(AHEAD)
                task = [f"task={name}" for name in tasks[-1:] if ahead or name != "overlap"]
                words = (*plan, *task) if fits((*plan, *task)) else plan
                self._offer(Point(settings, form.rules, order, ordered(words)))

    def _offer_near(self, one: Found) -> None:
        """Points that differ from a fast one in an option, and with other launch plans."""
        program = self.space.rewritten(one.point)
        for words in variations(program, one.point.plan):
            self._offer(replace(one.point, plan=words))
        shared = ordered((*one.point.plan, SHARED_OUT))
        open_ = "dynamic" in values(program, "balance") and "balance" not in one.point.options
        if one.waits_for_memory and open_ and fits(shared):
            self._offer(replace(one.point, plan=shared), one.goal)
        if "replay" in (one.row.told or {}):
            for time, point in self.ranked_plans(one):
                self._offer(point, time)

    def trim(self) -> None:
        """Leave out open sizes whose ideal is far from the least."""
        most = WIDE * min(self.ideals.values(), default=inf)
        far = {settings for settings, ideal in self.ideals.items() if ideal > most}
        self.open = {p: known for p, known in self.open.items() if p.settings not in far}

    def _usual(self, settings: Sizes) -> Iterator[Point]:
        """Points at these sizes in the usual order, those with most rewrites first, whose groups
        hold the sums; a rewrite may be what does not fit the sizes."""
        try:
            made = sorted(self.space.forms(settings), key=lambda form: -len(form.rules))
        except WarploomError:
            return
        for form in made:
            for name in orders(form.program)[:1]:
                yield from islice(self._roomy(Point(settings, form.rules, name)), 1)

    def _roomy(self, point: Point) -> Iterator[Point]:
        """The point, then with fewer and fewer groups, whose threads have more registers, where
        these hold the sums."""
        program = self.space.rewritten(point)
        fewer = reversed(values(program, "groups"))
        own = point.options.get("groups")
        for groups in (own, *(name for name in fewer if own is None or int(name) < int(own))):
            other = point.having(f"groups={groups or ''}")
            try:
                if not crowded(self.space.selected(other, self.gpu)):
                    yield other
            except WarploomError:
                continue

    def _laid_out(self, settings: Sizes) -> tuple[float, tuple[str, ...]]:
        """The time of a launch whose loops are at their bounds, and the words of the plan that is
        the fastest with them, found option by option."""
        point = next(self._usual(settings), None)
        if point is None:
            return inf, ()
        program = self.space.rewritten(point)
        walked = at_bounds(bounds_of(self.space.selected(point, self.gpu), self.gpu))
        words, best = (), self._time(program, point, walked)
        balanced = ("balance",) * bool(growing_axis(program))
        for name in (*balanced, *(name for name in GRID if name != "balance")):
            # Parts of a sum are added up by a second kernel or by a cluster, not by both.
            kept = words if name != "parts" else tuple(w for w in words if "slices=" not in w)
            for value in values(program, name):
                other = ordered((*kept, f"{name}={value}"))
                time = inf
                if fits(other):
                    time = self._time(program, replace(point, plan=other), walked)
                if time * TIE < best:
                    words, best = other, time
        return best, words

    def _time(self, program: Program, point: Point, walked: Replay) -> float:
        """Microseconds by the model; infinite where the plan is not legal, or cuts sums into parts
        where the results alone are tasks for every SM."""
        if "parts" in point.options and self._tasks(program) > self._sms:
            return inf
        try:
            laid_out = self.space.laid_out(program, point)
            return Launch(*laid_out, self.sizes, self.gpu).time(walked).microseconds
        except WarploomError:
            return inf

    def _tasks(self, program: Program) -> int:
        return prod(max(0, extent.evaluate(self.sizes)) for _, extent in program.grid)

    @cached_property
    def _sms(self) -> int:
        return load_machine(self.gpu).integer("sm.count")


def _form(point: Point) -> object:
    """What makes points neighbours of each other: what a form is worth shows with the plans and
    options that suit it."""
    return point.settings, point.rules, point.order
