"""Is a lower bound on the interval true? Re-proved by code that knows nothing of the solver's.

`refute` searches for a schedule at any interval of a range. It shares no line with the constraint
model (`encoding*`), with CP-SAT or with `bounds`: no phases, no Booleans, no wrapped copies. A
schedule is a set of times; everything that forbids one is a *gap*,

    time[after] - time[before] >= cycles + turns * II,

and every decision is an integer: how many intervals lie between two operations that may not be on
at the same time (`refute_rules`). The longest paths of the gaps decide whether a partial choice is
possible: a cycle longer than 0 refutes it. A whole range of intervals is refuted at once with each
gap at its least over the range, and is halved where that is too weak.

A choice that is left without a contradiction gives times. What they break of the registers and
memories is forbidden by further choices; if nothing is broken, and `check` agrees, a schedule has
been found and the bound is false.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from warploom.errors import CheckFailed, InputError
from warploom.schedule.check.checker import check
from warploom.schedule.model.assemble import assemble
from warploom.schedule.model.graph import Graph
from warploom.schedule.model.rules import Rules
from warploom.schedule.model.schedule import Proof, Schedule
from warploom.schedule.model.target import Target
from warploom.schedule.refute.refute_rules import Choice, Gap, Limits, Rulebook
from warploom.schedule.refute.remedies import Remedy, remedies

Matrix = NDArray[np.int64]
NEVER = -(10**12)  # a path that does not exist
CONFIRMED = "confirmed by a second search"
ALONE = "second search"  # the status of a proof that the solver had no time for
Say = Callable[[str], None]


class Question(Protocol):
    """What a bound is claimed of (`solve.Problem`): a graph on a target under rules, operations
    whose group is decided, and whether sub-tiles must run one program at a shift."""

    @property
    def graph(self) -> Graph: ...
    @property
    def target(self) -> Target: ...
    @property
    def rules(self) -> Rules: ...
    @property
    def pins(self) -> Mapping[str, str]: ...
    @property
    def uniform(self) -> bool: ...


@dataclass(frozen=True)
class Verdict:
    """What became of a range of intervals.

    status      "refuted": none has a schedule; "found": `schedule` is one; "open": time was up, or
                what was found breaks a rule that this search does not know
    reached     every interval below is refuted
    """

    status: str
    reached: int
    schedule: Schedule | None = None


@dataclass(frozen=True)
class _Table:
    """The gaps of some choices as arrays, one row a gap."""

    choice: Matrix
    before: Matrix
    after: Matrix
    cycles: Matrix
    turns: Matrix
    sign: Matrix
    size: Matrix
    count: int

    @staticmethod
    def of(choices: Sequence[Choice]) -> _Table:
        rows = [
            (number, gap.before, gap.after, gap.cycles, gap.turns - (sign < 0), sign)
            for number, choice in enumerate(choices)
            for sign, gaps in ((1, choice.later), (-1, choice.sooner))
            for gap in gaps
        ]
        at = np.array(rows, dtype=np.int64).reshape(-1, 6).T
        size = [sum(gap.cycles for gap in (*c.later, *c.sooner)) for c in choices]
        sizes = np.array(size, dtype=np.int64)
        return _Table(at[0], at[1], at[2], at[3], at[4], at[5], sizes, len(choices))


@dataclass
class _State:
    """A partial choice: the range of intervals, homes, longest paths, and what is not decided."""

    low: int
    high: int
    home: tuple[int, ...]
    made: tuple[Gap, ...]
    paths: Matrix
    choices: tuple[Choice, ...]
    table: _Table
    limits: Limits

    def weight(self, gap: Gap) -> int:
        """The least that the gap asks for at any interval of the range."""
        return gap.cycles + min(gap.turns * self.low, gap.turns * self.high)

    def add(self, gap: Gap) -> bool:
        """Longest paths with one gap more; False where they close a cycle longer than 0."""
        weight = self.weight(gap)
        if self.paths[gap.before, gap.after] >= weight:
            return True
        if self.paths[gap.after, gap.before] + weight > 0:
            return False
        through = self.paths[:, gap.before, None] + (weight + self.paths[gap.after])
        np.maximum(self.paths, through, out=self.paths)
        return True

    def possible(self, counts: range) -> NDArray[np.bool_]:
        """Which numbers of intervals each choice has left, by each of its gaps alone."""
        table = self.table
        found = np.ones((len(counts), table.count), dtype=np.bool_)
        back = self.paths[table.after, table.before]
        for row, k in enumerate(counts):
            turns = table.turns + k * table.sign
            least = table.cycles + np.minimum(turns * self.low, turns * self.high)
            found[row, table.choice[back + least > 0]] = False
        return found

    def copy(self) -> _State:
        return replace(self, paths=self.paths.copy())


class _Search:
    """Depth first through the choices of one range; see the module."""

    def __init__(self, rules: Rulebook, deadline: float) -> None:
        self.rules, self.deadline = rules, deadline
        self.counts = range(0)
        self.unknown = False

    def run(self, low: int, high: int) -> Schedule | None:
        """A schedule at some interval of the range; None where all are refuted or time is up."""
        # Issues are less than `stages` intervals apart, reservations by their start more.
        most = self.rules.stages + 2 + self.rules.latest // low
        self.counts = range(-most, most)
        root = self._root(low, high, choices=True)
        stack = [iter([root] if root else [])]
        while stack:
            if time.perf_counter() > self.deadline:
                self.unknown = True
                return None
            state = next(stack[-1], None)
            if state is None:
                stack.pop()
                continue
            settled = self._settle(state)
            if settled is None:
                continue
            children = self._children(state, settled)
            if isinstance(children, Schedule):
                return children
            stack.append(children)
        return None

    def hopeless(self, low: int, high: int) -> bool:
        """Whether units and gaps that hold whatever is chosen refute the range."""
        return self._root(low, high, choices=False) is None

    def _root(self, low: int, high: int, *, choices: bool) -> _State | None:
        home, limits = self.rules.homes(), self.rules.limits()
        state = self._state(low, high, home, (), limits)
        if state is not None and choices:
            self._keep(state, self.rules.choices(home, limits))
        return state

    def _state(
        self, low: int, high: int, home: tuple[int, ...], made: tuple[Gap, ...], limits: Limits
    ) -> _State | None:
        """A state from the gaps made so far; None where they contradict each other."""
        size = len(self.rules.graph.nodes)
        paths = np.full((size, size), NEVER, dtype=np.int64)
        np.fill_diagonal(paths, 0)
        state = _State(low, high, home, made, paths, (), _Table.of(()), limits)
        for gap in (*made, *self.rules.gaps(home)):
            at = (gap.before, gap.after)
            paths[at] = max(paths[at], state.weight(gap))
        for k in range(size):
            np.maximum(paths, paths[:, k, None] + paths[k], out=paths)
        state.paths = np.maximum(paths, NEVER)
        return state if self.rules.enough(high) and not paths.diagonal().any() else None

    def _settle(self, state: _State) -> NDArray[np.bool_] | None:
        """What is left of every open choice once those with one way are made; None: none is."""
        while state.choices:
            left = state.possible(self.counts)
            ways = left.sum(axis=0)
            if not ways.all():
                return None
            single = np.flatnonzero(ways == 1)
            if not len(single):
                return left
            for number in single:
                k = self.counts[int(left[:, number].argmax())]
                if not self._make(state, state.choices[number].made(k)):
                    return None
            done = set(single.tolist())
            self._keep(state, [c for n, c in enumerate(state.choices) if n not in done])
        return np.ones((0, 0), dtype=np.bool_)

    def _make(self, state: _State, gaps: Sequence[Gap]) -> bool:
        state.made = (*state.made, *gaps)
        return all(map(state.add, gaps))

    def _keep(self, state: _State, choices: Sequence[Choice]) -> None:
        state.choices = tuple(choices)
        state.table = _Table.of(state.choices)

    def _children(self, state: _State, left: NDArray[np.bool_]) -> Iterator[_State] | Schedule:
        if -1 in state.home:
            return self._homes(state)
        if state.choices:
            # Few ways first, and of those the longest: it decides most.
            ways = left.sum(axis=0)
            number = int(np.where(ways == ways.min(), state.table.size, -1).argmax())
            return self._ways(state, number, left[:, number])
        if state.low < state.high:
            return self._halves(state)
        return self._mend(state)

    def _homes(self, state: _State) -> Iterator[_State]:
        """A group for the next operation that has none."""
        for home in self.rules.next_homes(state.home):
            child = state.copy()
            child.home = home
            if all(map(child.add, self.rules.dependences(home))):
                self._keep(child, self.rules.choices(home, state.limits))
                yield child

    def _ways(self, state: _State, number: int, left: NDArray[np.bool_]) -> Iterator[_State]:
        """Every number of intervals that one choice has left."""
        rest = [c for n, c in enumerate(state.choices) if n != number]
        for row in np.flatnonzero(left):
            child = state.copy()
            if self._make(child, state.choices[number].made(self.counts[int(row)])):
                self._keep(child, rest)
                yield child

    def _halves(self, state: _State) -> Iterator[_State]:
        middle = (state.low + state.high) // 2
        for low, high in ((state.low, middle), (middle + 1, state.high)):
            child = self._state(low, high, state.home, state.made, state.limits)
            if child is not None:
                yield child

    def _mend(self, state: _State) -> Iterator[_State] | Schedule:
        """One interval, everything decided: a schedule, or ways round what it breaks."""
        times = [int(t) for t in state.paths.max(axis=0)]
        ways = remedies(self.rules, times, state.low, state.home, state.limits)
        if ways is not None:
            return self._remedied(state, ways)
        names = [node.id for node in self.rules.graph.nodes]
        groups = [self.rules.target.groups[w].name for w in state.home]
        at = {name: t - min(times) for name, t in zip(names, times, strict=True)}
        schedule = assemble(
            self.rules.graph,
            self.rules.target,
            self.rules.rules,
            state.low,
            at,
            dict(zip(names, groups, strict=True)),
        )
        if check(self.rules.graph, self.rules.target, schedule).passed:
            return schedule
        self.unknown = True  # a rule is broken that this search does not state
        return iter(())

    def _remedied(self, state: _State, ways: Sequence[Remedy]) -> Iterator[_State]:
        for gaps, choices, limits in ways:
            child = state.copy()
            child.limits = limits
            if self._make(child, gaps):
                self._keep(child, choices)
                yield child


def refute(
    problem: Question, low: int, high: int, stages: int, seconds: float, say: Say = lambda _: None
) -> Verdict:
    """Whether an interval in [low, high] has a schedule of at most `stages` overlapped iterations.

    `stages` 0 is any number: then only units and dependences can refute. From `low` up, so that
    `reached` says how far a search that ran out of time came. Raises `InputError` for a target
    without groups.
    """
    begin = time.perf_counter()
    if not problem.target.groups:
        raise InputError(f"target {problem.target.name} has no groups: there is nothing to refute")
    rules = Rulebook(problem.graph, problem.target, problem.rules, problem.pins, stages)
    search = _Search(rules, begin + seconds)
    reached = bisect_left(range(low, high + 1), True, key=lambda n: not search.hopeless(low, n))
    reached += low
    if reached <= high and not stages:
        return Verdict("open", reached)
    width = 1 + (high - reached) // 4
    while reached <= high:
        last = min(high, reached + width - 1)
        share = begin + seconds if width == 1 else time.perf_counter() + seconds / 16
        search.deadline = min(begin + seconds, share)
        found = search.run(reached, last)
        if found is not None and problem.uniform:  # more is free here than the problem allows
            return Verdict("open", reached)
        if found is not None:
            return Verdict("found", reached, found)
        if not search.unknown:
            reached, width = last + 1, 2 * width
            say(f"checking the bound: intervals below {reached} are refuted again")
            continue
        if time.perf_counter() - begin >= seconds or width == 1:
            return Verdict("open", reached)
        search.unknown, width = False, max(1, width // 8)
    return Verdict("refuted", reached)


def settled(
    problem: Question, schedule: Schedule, seconds: float, say: Say = lambda _: None
) -> Schedule:
    """The schedule with its proof confirmed; and where the solver left intervals open and time is
    left, proved by this search alone, with that said."""
    begin = time.perf_counter()
    proof = confirmed(problem, schedule.proof, seconds, say)
    interval, stages = schedule.initiation_interval, proof.stages or schedule.stages + 1
    left = seconds - (time.perf_counter() - begin)
    if proof.status == "unproved" and proof.confirmed == CONFIRMED and left > 0:
        low = proof.lower_bound
        if refute(problem, low, interval - 1, stages, left, say).status == "refuted":
            reason = (
                f"every interval below {interval} is refuted with up to {stages} stages by the "
                f"second search; the solver was open from {low} up"
            )
            alone = {"lower_bound": interval, "stages": stages, "reason": reason}
            proof = replace(proof, status=ALONE, confirmed="by the second search alone", **alone)
    return replace(schedule, proof=proof)


def confirmed(problem: Question, proof: Proof, seconds: float, say: Say = lambda _: None) -> Proof:
    """The proof with what `refute` says of its lower bound, interval by interval from 1 up.

    Raises `CheckFailed` with the schedule where one is found below the bound.
    """
    below = proof.lower_bound - 1
    verdict = Verdict("refuted", 1)
    if below > 0:
        verdict = refute(problem, 1, below, proof.stages, seconds, say)
    if verdict.schedule is not None:
        raise CheckFailed(
            f"false bound: {proof.lower_bound} is claimed ({proof.reason}), but an interval of "
            f"{verdict.schedule.initiation_interval} has a schedule: {verdict.schedule}"
        )
    if verdict.status == "refuted":
        return replace(proof, confirmed=CONFIRMED)
    open_ = f"not confirmed in {seconds:g} s: intervals from {verdict.reached} on are left"
    return replace(proof, confirmed=open_)
