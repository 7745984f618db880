"""What a search has tried, the fastest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, log

from warploom.autosched.points import Point
from warploom.engine.estimate import Estimate
from warploom.engine.store import Row

TIE = 1.005  # times that close are taken as equal: the model's error is larger
HIDDEN = 0.25  # power of the share of a floor that tasks take, in what a search makes small
SHARED_OUT = "balance=dynamic"  # each block takes the next free task
WAITING = ("lcsf", "multistage", "unpipelined")  # orders without a matmul in flight


@dataclass(frozen=True)
class Found:
    """A point with its outcome."""

    point: Point
    row: Row

    @property
    def microseconds(self) -> float:
        """Predicted; infinite where the point is of no use."""
        return float("inf") if self.row.predicted is None else self.row.predicted

    @property
    def alone(self) -> float:
        """Predicted without the floor of DRAM: what is left to hide of copies that are late."""
        return float((self.row.told or {}).get("alone", self.microseconds))

    @property
    def waits_for_memory(self) -> bool:
        """Whether DRAM's rate is the floor."""
        return self.alone < self.microseconds

    @property
    def goal(self) -> float:
        """What a search makes small: the time, and where DRAM's rate is the floor of it, a little
        of what is left to hide as well."""
        return self.microseconds * min(1.0, self.alone / self.microseconds) ** HIDDEN

    @property
    def preference(self) -> tuple[object, ...]:
        """Of points that tie the least comes first. Where DRAM's rate is the floor, what takes the
        next free task, since no SM gets the same share of that rate, and then what is the farthest
        above the floor; then what always has a matmul in flight, since waits that the replay
        hides are longer where loads are late; then the plainest."""
        margin = min(0, round(log(self.alone / self.microseconds) / log(TIE)))
        late = not margin or SHARED_OUT not in self.point.plan
        waits = self.point.order.startswith(WAITING)
        return late, margin, waits, len(self.point.rules) + len(self.point.plan)


@dataclass
class Explored:
    """What a search tried; `keys` of its rows by point, `pruned` by bounds, `known` from before,
    `late` those that may be faster and were not tried, as the time was over."""

    found: list[Found] = field(default_factory=list[Found])
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    pruned: int = 0
    known: int = 0
    late: int = 0

    @property
    def useful(self) -> list[Found]:
        """Points that compile, the fastest first; those that tie with it by their `preference`."""
        ranked = [one for one in self.found if one.row.predicted is not None]
        ranked.sort(key=lambda one: one.microseconds)
        near = sum(one.microseconds <= TIE * self.best for one in ranked)
        return sorted(ranked[:near], key=lambda one: one.preference) + ranked[near:]

    def fastest(self, apart: Callable[[Point], object]) -> Iterator[Found]:
        """Of the points that are alike the fastest one, of the fastest first."""
        seen = set[object]()
        for one in self.useful:
            if (kind := apart(one.point)) not in seen:
                seen.add(kind)
                yield one

    def forms(self, count: int) -> list[Found]:
        """Of each form the fastest point, the fastest first, and then all others: points that do
        not share the model's errors."""
        forms = list(self.fastest(lambda point: (point.settings, point.rules, point.order)))
        return [*forms, *(one for one in self.useful if one not in forms)][:count]

    def likely(self, measured: Mapping[Point, float | None]) -> list[Found]:
        """Points that may be faster than those measured (None: of no use), the likeliest first: the
        model's errors are much the same for points near to each other (`engine.estimate`)."""
        predicted = {one.point: one.microseconds for one in self.useful}
        asked = Estimate(predicted.__getitem__)
        for point, time in measured.items():
            if time is not None:
                asked.add(point, time)
        left = [one for one in self.useful if one.point not in measured]
        if not left:
            return []
        most = log(min((time for time in measured.values() if time is not None), default=inf))
        ranked = zip(*asked.asked([one.point for one in left]), left, strict=True)
        likely = sorted(ranked, key=lambda one: one[0])
        return [one for mean, off, one in likely if mean - off < most]

    @property
    def best(self) -> float:
        """The least time predicted."""
        return min((one.microseconds for one in self.found), default=float("inf"))

    @property
    def goal(self) -> float:
        """The least of what a search makes small."""
        return min((one.goal for one in self.useful), default=float("inf"))

    def __str__(self) -> str:
        refused = sum(bool(one.row.refused) for one in self.found)
        told = [f"{len(self.found)} point{'s' * (len(self.found) != 1)}"]
        told += [f"{self.known} of them known from before"] * bool(self.known)
        told += [f"{refused} refused"] * bool(refused)
        told += [f"{self.pruned} pruned by their bounds"] * bool(self.pruned)
        told += [f"{self.late} left out, as the time was over"] * bool(self.late)
        return ", ".join(told)
