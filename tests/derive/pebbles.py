"""The red-blue pebble game with running sums, played to the end: the least traffic there is.

Fast memory holds so many values. Operands and a sum's running value have to be there for a
multiply-add; the first one of a sum gives it a place (a *birth*), which may be that of an operand.
A load and a store cost one each; dropping a value costs nothing, but a sum that slow memory does
not hold as it stands can be dropped only where it may be computed again, or nobody needs it.

A game is some fixed values and a number of equal *columns* of values (the index of a summed or
streamed axis). Columns are interchangeable, so states that differ in their order are one state.

All plays are tried but those that do too early what can be put off: values are dropped, and
unfinished sums stored, only when fast memory is full, and nothing is loaded that no multiply-add
still needs. One whose operands and sum are there is done at once: it is free, and at any other time
its sum has to be there again, and to be stored again. Knows neither diagrams nor bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush

Column = tuple[int, int, int]  # values in fast memory, in slow memory; multiply-adds done
State = tuple[tuple[int, int], tuple[Column, ...]]  # (fast, slow) of the fixed values; columns


@dataclass(frozen=True)
class Game:
    """Names of values by what they are; products are (sum, operands), once in every column.

    again       sums of the columns, of one product each, that may be computed more than once
    """

    columns: int
    inputs: tuple[str, ...]  # fixed
    outputs: tuple[str, ...]  # fixed sums over all columns
    streamed: tuple[str, ...]  # inputs of a column
    between: tuple[str, ...]  # sums of a column
    products: tuple[tuple[str, tuple[str, ...]], ...]
    again: frozenset[str] = field(default=frozenset())

    @cached_property
    def fixed(self) -> dict[str, int]:
        return {name: 1 << at for at, name in enumerate((*self.inputs, *self.outputs))}

    @cached_property
    def moving(self) -> dict[str, int]:
        return {name: 1 << at for at, name in enumerate((*self.streamed, *self.between))}

    @cached_property
    def makers(self) -> dict[str, int]:
        """Of a sum: its products, as bits."""
        return {
            name: sum(1 << at for at, (target, _) in enumerate(self.products) if target == name)
            for name in (*self.outputs, *self.between)
        }

    @cached_property
    def users(self) -> dict[str, int]:
        """Of a value of a column: the products that read it."""
        return {
            name: sum(1 << at for at, (_, sources) in enumerate(self.products) if name in sources)
            for name in (*self.streamed, *self.between)
        }

    def start(self) -> State:
        given = sum(self.fixed[name] for name in self.inputs)
        streamed = sum(self.moving[name] for name in self.streamed)
        return (0, given), ((0, streamed, 0),) * self.columns

    def over(self, state: State) -> bool:
        """Every output is complete and stored."""
        (_, slow), columns = state
        wanted = sum(self.makers[name] for name in self.outputs)
        stored = all(slow & self.fixed[name] for name in self.outputs)
        return stored and all(done & wanted == wanted for _, _, done in columns)

    def ahead(self, state: State) -> int:
        """What is to come at least: a load of each value that is needed and not there, and a store
        of each output that is not finished and stored."""
        (fast, slow), columns = state
        total = 0
        for name in self.outputs:
            bit, makers = self.fixed[name], self.makers[name]
            done = self._all(columns, makers)
            total += not (done and slow & bit)
            total += not done and bool(slow & bit) and not fast & bit
        for name in self.inputs:
            users = sum(1 << at for at, (_, sources) in enumerate(self.products) if name in sources)
            total += not fast & self.fixed[name] and not self._all(columns, users)
        for here, below, done in columns:
            for name, bit in self.moving.items():
                total += bool(below & bit and not here & bit and self.users[name] & ~done)
        return total

    def held(self, state: State) -> int:
        """Values in fast memory."""
        (fast, _), columns = state
        return fast.bit_count() + sum(column[0].bit_count() for column in columns)

    def moves(self, state: State, room: int) -> Iterator[tuple[int, State]]:
        """(cost, state after) of everything that may be done with `room` places."""
        births: list[State] = []
        for at, column in enumerate(state[1]):
            if at and column == state[1][at - 1]:
                continue
            for number in range(len(self.products)):
                for present, after in self._made(state, at, number):
                    if present:
                        yield 0, after
                        return
                    births.append(after)
        yield from ((0, after) for after in births if self.held(after) <= room)
        free = self.held(state) < room
        (fast, slow), columns = state
        for name, bit in self.fixed.items():
            done = self._all(columns, self.makers.get(name, 0))
            if free and slow & bit and not fast & bit and not (done and name in self.outputs):
                yield 1, ((fast | bit, slow), columns)
            if fast & bit and not slow & bit and (done or not free):
                yield 1, ((fast, slow | bit), columns)
            if not free and fast & slow & bit:
                yield 0, ((fast & ~bit, slow), columns)
        for at, column in enumerate(columns):
            if at and column == columns[at - 1]:
                continue
            for cost, other in self._alone(column, free):
                yield cost, ((fast, slow), _with(columns, at, other))

    def _all(self, columns: tuple[Column, ...], products: int) -> bool:
        return all(done & products == products for _, _, done in columns)

    def _alone(self, column: Column, free: bool) -> Iterator[tuple[int, Column]]:
        fast, slow, done = column
        for name, bit in self.moving.items():
            needed = self.users[name] | self.makers.get(name, 0)
            if free and slow & bit and not fast & bit and needed & done != needed:
                yield 1, (fast | bit, slow, done)
            if not fast & bit or free:
                continue
            if name in self.between and not slow & bit:
                yield 1, (fast, slow | bit, done)
            if slow & bit or needed & done == needed:
                yield 0, (fast & ~bit, slow, done)
            elif name in self.again:
                yield 0, (fast & ~bit, slow, done & ~self.makers[name])

    def _made(self, state: State, at: int, number: int) -> Iterator[tuple[bool, State]]:
        """(whether its sum was there, state after) of one multiply-add of one column; a sum may be
        born in the place of an operand."""
        (fast, slow), columns = state
        here, below, done = columns[at]
        target, sources = self.products[number]
        if done >> number & 1:
            return
        for name in sources:
            there = fast & self.fixed[name] if name in self.fixed else here & self.moving[name]
            makers = self.makers.get(name, 0)
            if not there or done & makers != makers:
                return
        own = self.fixed.get(target, 0), self.moving.get(target, 0)
        present = bool(fast & own[0] or here & own[1])
        if not present and self._begun(state, at, target):
            return
        done |= 1 << number
        fast, slow, here, below = fast | own[0], slow & ~own[0], here | own[1], below & ~own[1]
        yield present, ((fast, slow), _with(columns, at, (here, below, done)))
        for name in () if present else sources:
            if name in self.fixed and slow & self.fixed[name]:
                rest = fast & ~self.fixed[name]
                yield False, ((rest, slow), _with(columns, at, (here, below, done)))
            elif name in self.moving and below & self.moving[name]:
                rest = here & ~self.moving[name]
                yield False, ((fast, slow), _with(columns, at, (rest, below, done)))

    def _begun(self, state: State, at: int, target: str) -> bool:
        (_, slow), columns = state
        if target in self.moving:
            return bool(
                columns[at][2] & self.makers[target] or columns[at][1] & self.moving[target]
            )
        return any(column[2] & self.makers[target] for column in columns) or bool(
            slow & self.fixed[target]
        )


def _with(columns: tuple[Column, ...], at: int, column: Column) -> tuple[Column, ...]:
    return tuple(sorted((*columns[:at], column, *columns[at + 1 :])))


def least(game: Game, room: int) -> int | None:
    """Loads and stores of the best play with `room` places in fast memory; None: there is none."""
    begin = game.start()
    known, waiting = {begin: 0}, [(game.ahead(begin), 0, begin)]
    while waiting:
        _, cost, state = heappop(waiting)
        cost = -cost
        if known[state] < cost:
            continue
        if game.over(state):
            return cost
        for more, after in game.moves(state, room):
            if cost + more < known.get(after, 1 << 30):
                known[after] = cost + more
                heappush(waiting, (cost + more + game.ahead(after), -cost - more, after))
    return None


def greedy(game: Game, room: int) -> int:
    """Loads and stores of one play, no fewer than the least: whatever keeps cost and what is to
    come at least smallest, outputs first, few columns at a time, and their loads before sums."""
    state, cost, seen = game.start(), 0, set[State]()
    last = sum(game.makers[name] for name in game.outputs)

    def eager(option: tuple[int, State]) -> tuple[int, ...]:
        more, after = option
        made = sum((done & last).bit_count() for _, _, done in after[1])
        begun = sum(here > 0 for here, _, _ in after[1])
        return more + game.ahead(after), -made, begun, -more

    while not game.over(state):
        seen.add(state)
        fresh = (option for option in game.moves(state, room) if option[1] not in seen)
        more, state = min(fresh, key=eager)
        cost += more
    return cost


def product(m: int, n: int, k: int) -> Game:
    """C = A·B, of m rows, n columns and k terms a sum."""
    return Game(
        columns=k,
        inputs=(),
        outputs=tuple(f"c{i}{j}" for i in range(m) for j in range(n)),
        streamed=(*(f"a{i}" for i in range(m)), *(f"b{j}" for j in range(n))),
        between=(),
        products=tuple((f"c{i}{j}", (f"a{i}", f"b{j}")) for i in range(m) for j in range(n)),
    )


def sandwich(q: int, x: int, d: int, e: int, shared: bool = False, again: bool = False) -> Game:
    """S = A·B with d terms a sum, O = g(S)·V with e columns; `shared`: V is B."""
    values = "b" if shared else "v"
    scores = [(f"s{i}", (f"a{i}{c}", f"b{c}")) for i in range(q) for c in range(d)]
    sums = [(f"o{i}{c}", (f"s{i}", f"{values}{c}")) for i in range(q) for c in range(e)]
    names = tuple(f"s{i}" for i in range(q))
    return Game(
        columns=x,
        inputs=tuple(f"a{i}{c}" for i in range(q) for c in range(d)),
        outputs=tuple(f"o{i}{c}" for i in range(q) for c in range(e)),
        streamed=tuple(
            dict.fromkeys([f"b{c}" for c in range(d)] + [f"{values}{c}" for c in range(e)])
        ),
        between=names,
        products=(*scores, *sums),
        again=frozenset(names) if again else frozenset(),
    )
