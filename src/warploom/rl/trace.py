"""One version of a block with what its derivation knew at every place, and actions beside it.

An action changes a few places of a block, and a little further on everything runs as before, only
earlier or later. A `Patch` derives it from the first place it touches to where it has converged,
with the result that `derive` has of the whole version.
"""

from __future__ import annotations

import numpy as np

from warploom.rl.patches import Asked, Cell, Move, Patch, Wish
from warploom.rl.rules import BlockRules
from warploom.rl.walk import Settling, Walk
from warploom.sass.decode.control import MAX_STALL, MAX_STALL_STAYING


class Trace:
    """One version of a block and what the derivation knew at each of its places.

    Times are issue times from the block's start; `out[p]`: wait pairs outstanding before place p;
    `horizon[p]`: when all before p hold up nothing any more; `open[p]`: places of reuse hints
    whose operand is neither read again nor overwritten before p.
    """

    def __init__(self, rules: BlockRules, order: list[int], asked: Asked) -> None:
        self.rules, self.order, self.asked = rules, order, asked
        size = self.size = rules.size
        names = rules.batch.canonical(np.array([order], np.int64))[0].tolist()
        self.position, self.name, self.place_of = [0] * size, [0] * size, [0] * size
        for place, (number, name) in enumerate(zip(order, names, strict=True)):
            self.position[number], self.name[number], self.place_of[name] = place, name, place
        self.now, self.stalls, self.waits = [0] * size, [0] * size, [0] * size
        self.out, self.horizon = [0] * (size + 1), [0] * (size + 1)
        self.pipes: list[tuple[int, ...]] = []
        self._run()
        self._summarise()
        self.stays = [self._stay(number, self.stalls[p]) for p, number in enumerate(order)]
        self.alive = [0] * size
        self.open: list[list[int]] = [[] for _ in range(size + 1)]
        for place, number in enumerate(order):
            self.alive[place], stop = self._operands(place, number, {})
            for later in range(place + 1, min(stop, size) + 1) if asked.reuse[number] else ():
                self.open[later].append(place)
        self.reuses = [a * s for a, s in zip(self.alive, self.stays, strict=True)]
        columns = (order, self.stalls, self.stays, self.waits, self.reuses)
        self.cells = [Cell(*values) for values in zip(*columns, strict=True)]
        self.regular = max(self.stalls) <= MAX_STALL
        self.duration = self.now[-1] + self.stalls[-1]

    def _run(self) -> None:
        rules, walk = self.rules, Walk(self.rules, self.asked.stall)
        horizon = 0
        for place, mine in enumerate(self.order):
            self.out[place], self.horizon[place] = walk.out, horizon
            self.pipes.append(tuple(walk.pipes))
            stall, self.waits[place] = walk.step(mine)
            if place:
                self.stalls[place - 1] = stall
            self.now[place] = walk.now
            horizon = max(horizon, walk.now + rules.reach[mine])
        self.out[-1], self.horizon[-1] = walk.out, horizon
        self.pipes.append(tuple(walk.pipes))
        self.waits[-1] |= rules.leaving(walk.out)
        self.floor = walk.floor(rules.size)

    def _summarise(self) -> None:
        """How long the instructions before and from each place on ask the block to last, the
        latest first issue that those from each place on ask for, the next in each pipe."""
        rules, size = self.rules, self.size
        self.tails_before, self.tails_from = [0] * (size + 1), [0] * (size + 1)
        self.heads_from = [0] * (size + 1)
        self.next_in_pipe: list[tuple[int, ...]] = [(-1,) * rules.pipes] * (size + 1)
        for place, mine in enumerate(self.order):
            asked = self.now[place] + rules.tail[mine]
            self.tails_before[place + 1] = max(self.tails_before[place], asked)
        following = list(self.next_in_pipe[size])
        for place in range(size - 1, -1, -1):
            mine = self.order[place]
            asked = self.now[place] + rules.tail[mine]
            self.tails_from[place] = max(self.tails_from[place + 1], asked)
            self.heads_from[place] = max(self.heads_from[place + 1], rules.head[mine])
            if rules.pipe[mine] >= 0:
                following[rules.pipe[mine]] = mine
            self.next_in_pipe[place] = tuple(following)
        self.stalls[-1] = self.rules.last_stall(self.now[-1], self.tails_from[0], self.floor)

    def _stay(self, number: int, stall: int, wish: Wish | None = None) -> int:
        asked = self.asked.stay[number]
        if wish is not None and wish.name == "stay" and wish.number == number:
            asked = wish.value
        return asked if 1 <= stall <= MAX_STALL_STAYING else 0

    def _operands(
        self, place: int, number: int, moved: dict[int, int], wanted: int | None = None
    ) -> tuple[int, int]:
        """(the reuse hints of an instruction that are read again in time, the last place that had
        to be looked at)."""
        rules, name = self.rules, self.name[number]
        wish = self.asked.reuse[number] if wanted is None else wanted
        last = place
        for slot in range(3) if wish else ():
            if not wish >> slot & 1:
                continue
            found = rules.writers.get((name, slot))
            if found is None:
                continue
            bank, writers, leaves = found
            loose = rules.loose.get((name, slot), ())
            if any(self._place(writer, moved) <= place for writer in loose):
                wish &= ~(1 << slot)
                continue
            for later in range(place + 1, self.size):
                other = self.name[moved.get(later, self.order[later])]
                if rules.bank[other][slot] == bank:
                    break
                if other in writers:
                    wish &= ~(1 << slot)
                    break
            else:
                later = self.size
                wish &= ~(leaves << slot)
            last = max(last, later)
        return wish, last

    def _place(self, name: int, moved: dict[int, int]) -> int:
        """Where an instruction stands after a move."""
        place = self.place_of[name]
        if place not in moved:
            return place
        return next(at for at, number in moved.items() if self.name[number] == name)

    # --- actions ---------------------------------------------------------------------------

    def patch(self, action: Move | Wish) -> Patch:
        """An action, derived as far as it changes anything."""
        if isinstance(action, Wish) and action.name != "stall":
            return self._hint(action)
        return self._timed(action)

    def _hint(self, wish: Wish) -> Patch:
        """A yield or reuse hint: one place, no time."""
        number, place = wish.number, self.position[wish.number]
        stay = self._stay(number, self.stalls[place], wish)
        wanted = wish.value if wish.name == "reuse" else None
        alive, looked = self._operands(place, number, {}, wanted)
        cell = Cell(number, self.stalls[place], stay, self.waits[place], alive * stay)
        cells = {} if cell == self.cells[place] else {place: cell}
        reads = (place - 1, max(looked, place + 1) + 1)
        patch = Patch(wish, cells, place, place, 0, {}, 0, 0, self.floor, self.waits[-1], reads)
        self.finish(patch)
        return patch

    def origin(self, first: int) -> int:
        """When the place before `first` is issued: what a patch's times count from."""
        return self.now[first - 1] if first else 0

    def _timed(self, action: Move | Wish) -> Patch:
        """A move or another least stall: time from its first place on."""
        size, base = self.size, self.order
        moved: dict[int, int] = {}
        wish = (-1, 0)
        if isinstance(action, Move):
            step = 1 if action.here < action.to else -1
            for place in range(action.here, action.to, step):
                moved[place] = base[place + step]
            moved[action.to] = base[action.here]
            first, high = action.span
        else:
            wish = (action.number, action.value)
            first = self.position[action.number] + 1
            high = first - 1
        walk = Walk(self.rules, self.asked.stall, self.position, self.now, first, wish)
        if first:
            walk.now, walk.before = self.now[first - 1], base[first - 1]
        walk.out, walk.pipes = self.out[first], list(self.pipes[first])
        end, settling, stalls, waits, tails = self._follow(walk, first, high, moved)
        floor, last_wait = self.floor, self.waits[-1]
        if end == size:
            floor = walk.floor(size)
            if first < size:
                waits[size - 1] |= self.rules.leaving(walk.out)
                last_wait = waits[size - 1]
        origin = self.origin(first)
        issue = {self.name[number]: when - origin for number, when in walk.issued.items()}
        now, tails = walk.now - origin, tails - origin
        patch = Patch(
            action, {}, first, end, settling.delta, issue, now, tails, floor, last_wait, (0, 0)
        )
        self._cells(patch, moved, stalls, waits, (first, high))
        self.finish(patch)
        return patch

    def _follow(
        self, walk: Walk, first: int, high: int, moved: dict[int, int]
    ) -> tuple[int, Settling, dict[int, int], dict[int, int], int]:
        """Walk until nothing differs but time: (where, how, stalls, waits by place, the latest
        that one of them asks the block to last)."""
        rules = self.rules
        settling = Settling(first)
        stalls: dict[int, int] = {}
        waits: dict[int, int] = {}
        tails = 0
        for place in range(first, self.size):
            if place > max(high + 1, first) and self._settled(walk, settling, place):
                return place, settling, stalls, waits, tails
            base = self.order[place]
            mine = moved.get(place, base)
            stalls[place - 1], waits[place] = walk.step(mine)
            then = self.now[place]
            expires, expired = walk.now + rules.reach[mine], then + rules.reach[base]
            settling.note(place, high, expires, expired, walk.now - then)
            tails = max(tails, walk.now + rules.tail[mine])
        stalls.pop(-1, None)
        return self.size, settling, stalls, waits, tails

    def _settled(self, walk: Walk, settling: Settling, place: int) -> bool:
        """Whether from a place on all goes as in this version, only earlier or later."""
        if walk.out != self.out[place]:
            return False
        now, then = walk.now, self.now[place - 1]
        if now == then:
            return max(settling.theirs, settling.ours) <= now
        return (
            max(settling.theirs, self.horizon[settling.first]) <= now
            and self.horizon[settling.since] <= then
            and self.heads_from[place] <= min(now, then)
        )

    def _cells(
        self,
        patch: Patch,
        moved: dict[int, int],
        stalls: dict[int, int],
        waits: dict[int, int],
        span: tuple[int, int],
    ) -> None:
        """The places that differ; the last stall is left to `finish`."""
        low, high = span
        begin, looked = patch.first - 2, patch.end
        for place in range(max(patch.first - 1, 0), patch.end):
            number = moved.get(place, self.order[place])
            stall = stalls.get(place, self.stalls[place])
            if place not in moved and stall == self.stalls[place]:
                wait = waits.get(place, self.waits[place])
                if wait != self.waits[place]:
                    patch.cells[place] = self.cells[place]._replace(wait=wait)
                continue
            alive = self.alive[place]
            if moved and low <= place <= high:
                alive, last = self._operands(place, number, moved)
                looked = max(looked, last)
            stay = self._stay(number, stall)
            cell = Cell(number, stall, stay, waits.get(place, self.waits[place]), alive * stay)
            if cell != self.cells[place]:
                patch.cells[place] = cell
        for place in self.open[low] if moved else ():
            begin = min(begin, place - 1)
            alive, last = self._operands(place, self.order[place], moved)
            looked = max(looked, last)
            there = patch.cells.get(place, self.cells[place])
            cell = Cell(there.number, there.stall, there.stay, there.wait, alive * there.stay)
            if cell != self.cells[place]:
                patch.cells[place] = cell
            else:
                patch.cells.pop(place, None)
        patch.reads = (begin, looked + 1)
        patch.twisted = bool(moved) and self._crosses_twin(patch.action, moved)
        patch.twisted |= any(stall > MAX_STALL for stall in stalls.values())

    def _crosses_twin(self, action: Move | Wish, moved: dict[int, int]) -> bool:
        assert isinstance(action, Move)
        twin = self.rules.twin
        mine = moved[action.to]
        return twin[mine] >= 0 and any(
            twin[number] == twin[mine] for number in moved.values() if number != mine
        )

    def finish(self, patch: Patch) -> None:
        """The last place of a patch, which depends on the whole block."""
        last = self.size - 1
        patch.last_stall, patch.longer = self.ending(patch)
        patch.odd = patch.twisted or patch.last_stall > MAX_STALL or not self.regular
        if patch.first >= patch.end and patch.first < last:
            return
        there = patch.cells.get(last, self.cells[last])
        number = there.number
        wish = patch.action if isinstance(patch.action, Wish) else None
        stay = self._stay(number, patch.last_stall, wish)
        wanted = wish.value if wish and wish.name == "reuse" and wish.number == number else None
        alive = self._operands(last, number, {}, wanted)[0]
        cell = Cell(number, patch.last_stall, stay, patch.last_wait, alive * stay)
        if cell == self.cells[last]:
            patch.cells.pop(last, None)
        else:
            patch.cells[last] = cell

    def ending(self, patch: Patch) -> tuple[int, int]:
        """(the last stall, how much longer the block lasts)."""
        first, end, size = patch.first, patch.end, self.size
        if first >= end and end < size:
            return self.stalls[-1], 0
        origin = self.origin(first)
        now = patch.now + origin if end == size and patch.issue else self.now[-1] + patch.delta
        if first >= end:
            tails = self.tails_from[0]
        else:
            tails = max(self.tails_before[first], patch.tails + origin)
            if end < size:
                tails = max(tails, self.tails_from[end] + patch.delta)
        stall = self.rules.last_stall(now, tails, patch.floor)
        return stall, now + stall - self.duration
