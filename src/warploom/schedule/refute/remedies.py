"""What would have to change in times that ask for too much memory or too many registers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from warploom.schedule.model.graph import Node
from warploom.schedule.refute.refute_rules import Choice, Gap, Limits, Rulebook

WORD_BYTES = 4
Remedy = tuple[Sequence[Gap], Sequence[Choice], Limits]


def remedies(
    book: Rulebook, times: list[int], interval: int, home: tuple[int, ...], limits: Limits
) -> list[Remedy] | None:
    """What would have to change in times that ask for too much; None where nothing does.

    Every schedule with the same choices takes one of the ways.
    """
    deaths = [
        max(
            [
                times[number],
                *(
                    times[book.place[e.dst]] + e.distance * interval + held
                    for e, held in book.readers(node)
                ),
            ]
        )
        for number, node in enumerate(book.graph.nodes)
    ]
    it = _Moment(book, times, deaths, interval, home, limits)
    for memory in book.target.memories:
        if (found := it.memory(memory)) is not None:
            return found
    return it.registers() if book.target.groups else None


@dataclass(frozen=True)
class _Moment:
    """Times at one interval, and what is alive when."""

    book: Rulebook
    times: list[int]
    deaths: list[int]
    interval: int
    home: tuple[int, ...]
    limits: Limits

    def copies(self, value: int, moment: int) -> int:
        """How many copies of a value are alive."""
        newest = (moment - self.times[value]) // self.interval
        return newest - (moment - self.deaths[value]) // self.interval

    def memory(self, memory: str) -> list[Remedy] | None:
        nodes, rings = self.book.graph.nodes, self.book.graph.rings
        fixed, fewer = 0, list[Remedy]()
        for name in rings:
            number = self.book.place[name]
            depth = max(1, -(-(self.deaths[number] - self.times[number]) // self.interval))
            size = nodes[number].memory.get(memory, 0)
            fixed += size * depth
            if size and depth > 1:
                fewer.append((self.book.dies(number, depth - 1), (), self.limits))
        if memory == "smem" and self.book.rules.spill_memory and self.book.target.groups:
            fixed += sum(WORD_BYTES * node.registers for node in nodes if self._hands_over(node))
        sizes = {
            number: node.memory[memory]
            for number, node in enumerate(nodes)
            if node.memory.get(memory, 0) and node.id not in rings
        }
        return self._over(sizes, self.book.target.memories[memory] - fixed, fewer)

    def _hands_over(self, node: Node) -> bool:
        place = self.book.place
        return node.registers > 0 and any(
            edge.kind == "data" and self.home[place[node.id]] != self.home[place[edge.dst]]
            for edge in self.book.graph.outgoing[node.id]
        )

    def registers(self) -> list[Remedy] | None:
        peaks: list[int] = []
        for w, limit in enumerate(self.limits.words):
            words = {
                number: self.book.words(node)
                for number, node in enumerate(self.book.graph.nodes)
                if node.registers and self.home[number] == w
            }
            if (found := self._over(words, limit, [])) is not None:
                return found
            peaks.append(max((self._held(words, self.times[b]) for b in words), default=0))
        return self._pool(peaks) if self.book.target.register_pool else None

    def _held(self, sizes: Mapping[int, int], moment: int) -> int:
        return sum(size * self.copies(value, moment) for value, size in sizes.items())

    def _over(
        self, sizes: Mapping[int, int], limit: int, fewer: list[Remedy]
    ) -> list[Remedy] | None:
        """The first birth at which too much is alive: one of those alive is dead there, or ..."""
        if limit < 0:
            return fewer
        for born in sizes:
            moment = self.times[born]
            if self._held(sizes, moment) <= limit:
                continue
            found = list(fewer)
            ways = (self._dead(value, born) for value in self._needed(sizes, limit, moment))
            return found + [remedy for remedy in ways if remedy is not None]
        return None

    def _needed(self, sizes: Mapping[int, int], limit: int, moment: int) -> list[int]:
        """Few of the values alive that are too much together already."""
        alive = sorted((v for v in sizes if self.copies(v, moment)), key=lambda v: -sizes[v])
        total, found = 0, list[int]()
        for value in alive:
            if total > limit:
                break
            total += sizes[value] * self.copies(value, moment)
            found.append(value)
        return found

    def _dead(self, value: int, born: int) -> Remedy | None:
        """One copy of the value fewer is alive when another is born."""
        older = self.copies(value, self.times[born]) - 1
        if value == born:
            return (self.book.dies(value, older), (), self.limits) if older else None
        later = tuple(
            replace(gap, turns=gap.turns - older) for gap in self.book.dies(value, 0, born)
        )
        choice = Choice(later, (Gap(born, value, 1),))
        return ((), (choice,), self.limits)

    def _pool(self, peaks: list[int]) -> list[Remedy] | None:
        """setmaxnreg: some group has to do with eight registers a thread fewer."""
        target = self.book.target
        service = any(group.warps < 4 for group in target.groups)
        wide = [w for w, g in enumerate(target.groups) if g.warps >= 4 and w in self.home]
        launched = len(wide) + service
        entry = target.register_pool // (128 * max(1, launched))
        most = min(target.registers_per_thread, entry) // 8 * 8 * launched
        need = [max(24, -(-(-(-p // 32) + target.reserved_registers) // 8) * 8) for p in peaks]
        if sum(need[w] for w in wide) + 24 * service <= most:
            return None
        found: list[Remedy] = []
        for w in wide:
            words = 32 * (need[w] - 8 - target.reserved_registers)
            if need[w] > 24 and words >= 0:
                less = (*self.limits.words[:w], words, *self.limits.words[w + 1 :])
                found.append(((), (), Limits(less)))
        return found
