"""Re-deriving one block's control fields for any order of its instructions.

Stalls come from the latency table, waits from a forward scan over what is outstanding, `stay` and
`reuse` from the original where they still make sense. A block nobody touched keeps its fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Final

from warploom.errors import InputError
from warploom.sass.decode.control import MAX_STALL, MAX_STALL_STAYING, NO_SCOREBOARD, Control
from warploom.sass.decode.kernel import Block, Instruction, Kernel
from warploom.sass.decode.opcodes import Pipe
from warploom.sass.decode.operand_slots import slot_registers
from warploom.sass.decode.resources import Access
from warploom.sass.flow.aliasing import is_sync
from warploom.sass.flow.dependence import Dependence, Hazard
from warploom.sass.flow.distances import BETWEEN_SYNCS, fixed_latency, key_of, pipe_neighbours
from warploom.sass.flow.latency import LONGEST, SPACED, LatencyTable, family, sync_key
from warploom.sass.flow.scoreboard import (
    UNATTACHED,
    Pending,
    attaches,
    protected_sources,
    releases,
    waited_scoreboards,
)

REUSE_WINDOW: Final = 6


@dataclass(frozen=True)
class BlockState:
    """An immutable snapshot of one block: its order and wished-for control fields."""

    order: tuple[int, ...]
    wishes: Mapping[int, Control]
    kept: bool  # control fields stay exactly as wished (no re-derivation), as SIP does


class BlockDeriver:
    """Derives one block's control fields for any order of its instructions."""

    def __init__(
        self, kernel: Kernel, block: Block, entry: frozenset[Pending], table: LatencyTable
    ) -> None:
        self.kernel = kernel
        self.items = {item.index: item for item in kernel.items(block)}
        self.table = table
        self.original = tuple(range(block.start, block.end))
        self.times: dict[int, int] = {}
        now = 0
        for index in self.original:
            self.times[index] = now
            now += self.items[index].control.stall
        self.duration = now
        self.next_of = dict(pairwise(self.original))
        self.entry = entry
        self.releases = {index: tuple(releases(item)) for index, item in self.items.items()}
        self.own = {index: self.table.own_stall(item) for index, item in self.items.items()}
        self.syncs = {index: is_sync(item) for index, item in self.items.items()}
        ordered = tuple(self.items[index] for index in self.original)
        self.neighbours = {
            later.index: earlier.index for earlier, later in pipe_neighbours(ordered)
        }
        self.tails = self._tails()
        self._accesses: list[tuple[int, Access]] = []
        self._touched = {index: self._touches(item) for index, item in self.items.items()}
        self._slots = {index: _Sources.of(item) for index, item in self.items.items()}
        self._gaps: dict[int, int] = {}
        # Instructions that keep a distance from neighbours they share no register with.
        self._neighbourly = {
            index
            for index, item in self.items.items()
            if item.effects.info.pipe in SPACED
            or self.syncs[index]
            or item.effects.info.name in BETWEEN_SYNCS
        }
        self._spacings: dict[tuple[int, int], int] = {}
        self._waited: tuple[tuple[int, ...], dict[int, int]] = ((), {})
        # Waits we cannot explain stay with their instruction; pairs the compiler covered by
        # other means are not given a wait they never had.
        self.ignored = self._uncovered()
        self.sticky: dict[int, int] = {}
        explained = self._scan(self.original, {}).waits
        self.sticky = {
            index: self.items[index].control.wait & ~(0 if self.syncs[index] else explained[index])
            for index in self.original
        }
        self.cleared = self._scan(self.original, self.sticky).cleared

    def _touches(self, item: Instruction) -> _Touched:
        """What an instruction reads and writes, each access under a number of its own."""

        def numbered(accesses: Iterable[Access]) -> tuple[tuple[int, int], ...]:
            found: list[tuple[int, int]] = []
            for access in accesses:
                found.append((access.resource, len(self._accesses)))
                self._accesses.append((item.index, access))
            return tuple(found)

        return numbered(item.effects.reads), numbered(item.effects.writes)

    def _tails(self) -> dict[int, int]:
        """Cycles a fixed-latency result that leaves the block must keep to the block's end."""
        last: dict[int, int] = {}
        for index in self.original:
            for access in self.items[index].effects.writes:
                last[access.resource] = index
        tails: dict[int, int] = {}
        for index in set(last.values()):
            item = self.items[index]
            if fixed_latency(item):
                tail = self.duration - self.times[index]
                tails[index] = min(tail, _reach(self.table, item))
        return tails

    def derive(self, state: BlockState) -> tuple[Control, ...]:
        """The control fields of the block's instructions in the state's order."""
        if state.kept:
            return tuple(
                state.wishes.get(index, self.items[index].control) for index in state.order
            )
        if state.order == self.original and not state.wishes:
            return tuple(self.items[index].control for index in state.order)
        waits = self._final_waits(state.order)
        stalls = self._stalls(state, waits)
        controls: list[Control] = []
        for place, index in enumerate(state.order):
            wish = state.wishes.get(index, self.items[index].control)
            stall = stalls[place]
            stay = wish.stay and 1 <= stall <= MAX_STALL_STAYING
            reuse = self._reuse(state.order, place, wish.reuse) if stay and wish.reuse else 0
            controls.append(_field(stall, stay, wish.write_sb, wish.read_sb, waits[index], reuse))
        return tuple(controls)

    # --- waits -----------------------------------------------------------------------------

    def _final_waits(self, order: tuple[int, ...]) -> dict[int, int]:
        if self._waited[0] == order:
            return self._waited[1]
        scan = self._scan(order, self.sticky)
        missing = 0
        for key, scoreboard in self.cleared.items():
            if key not in scan.cleared:
                missing |= 1 << scoreboard
        scan.waits[order[-1]] |= missing
        self._waited = order, scan.waits
        return scan.waits

    def _scan(self, order: tuple[int, ...], sticky: Mapping[int, int]) -> _WaitScan:
        """Walk an order and wait for whatever an instruction would otherwise overtake."""
        scan = _WaitScan(self.kernel, self.entry)
        for index in order:
            item = self.items[index]
            need = sticky.get(index, 0)
            for producer, scoreboard in scan.conflicts(item):
                if (producer, index) not in self.ignored:
                    need |= 1 << scoreboard
            scan.issue(item, need, self.releases[index])
        return scan

    def _uncovered(self) -> frozenset[tuple[int, int]]:
        """Pairs of the original order that conflict although the compiler put no wait there."""
        scan = _WaitScan(self.kernel, self.entry)
        found: set[tuple[int, int]] = set()
        for index in self.original:
            item = self.items[index]
            waited = waited_scoreboards(item)
            found.update(
                (producer, index)
                for producer, scoreboard in scan.conflicts(item)
                if not waited >> scoreboard & 1
            )
            scan.issue(item, item.control.wait, self.releases[index])
        return frozenset(found)

    # --- stalls ----------------------------------------------------------------------------

    def _need(self, producer: int, consumer: int, hazard: Hazard) -> int:
        """Cycles that one access needs after another, both by number."""
        pair = producer * len(self._accesses) + consumer
        found = self._gaps.get(pair)
        if found is None:
            (first, written), (second, access) = self._accesses[producer], self._accesses[consumer]
            dependence = Dependence(
                first, second, hazard, access.resource, written.slot, access.slot
            )
            key = key_of(dependence, self.items[first], self.items[second])
            original = self.times[second] - self.times[first]
            found = self._gaps[pair] = 0 if key is None else self.table.gap(key, original)
        return found

    def _stalls(self, state: BlockState, waits: Mapping[int, int]) -> list[int]:
        """Least stalls that keep every distance, given each instruction's floor."""
        walk = _Walk()
        stalls: list[int] = []
        places: dict[int, int] = {}
        now = 0
        for place, index in enumerate(state.order):
            earliest, binding = self._earliest(index, walk, now)
            if index in self._neighbourly:
                neighbour = self._after_neighbours(self.items[index], walk)
                earliest, binding = max((earliest, binding), neighbour)
            if earliest > now:
                _spread(stalls, earliest - now, places[binding])
                now = earliest
            places[index] = place
            walk.issue[index] = now
            self._note(index, walk, now)
            stalls.append(self._floor(state, place, waits))
            now += stalls[-1]
        issue = walk.issue
        short = max((tail - (now - issue[index]) for index, tail in self.tails.items()), default=0)
        if short > 0:
            _spread(stalls, short, 0)
        return stalls

    def _note(self, index: int, walk: _Walk, now: int) -> None:
        """An instruction has issued."""
        reads, writes = self._touched[index]
        for resource, number in reads:
            walk.readers.setdefault(resource, []).append((now, index, number))
        for resource, number in writes:
            walk.writer[resource] = (now, index, number)
            walk.readers[resource] = []
        if index in self._neighbourly:
            item = self.items[index]
            walk.last_in_pipe[item.effects.info.pipe] = item
            if self.syncs[index]:
                walk.last_sync, walk.since = item, []
            elif item.effects.info.name in BETWEEN_SYNCS:
                walk.since.append(item)

    def _earliest(self, index: int, walk: _Walk, now: int) -> tuple[int, int]:
        """(first cycle an instruction may issue in, the producer that says so); what is longer ago
        than any distance says nothing."""
        bound = (0, index)
        recent = now - LONGEST
        reads, writes = self._touched[index]
        for resource, number in reads:
            found = walk.writer.get(resource)
            if found and found[0] > recent:
                need = self._need(found[2], number, Hazard.RAW)
                bound = max(bound, (found[0] + need, found[1]))
        for resource, number in writes:
            found = walk.writer.get(resource)
            if found and found[0] > recent:
                need = self._need(found[2], number, Hazard.WAW)
                bound = max(bound, (found[0] + need, found[1]))
            for read, reader, number_of_read in reversed(walk.readers.get(resource, ())):
                if read <= recent:
                    break
                need = self._need(number_of_read, number, Hazard.WAR)
                bound = max(bound, (read + need, reader))
        return bound

    def _after_neighbours(self, item: Instruction, walk: _Walk) -> tuple[int, int]:
        """(first cycle for `item` after its pipe's last instruction and the last sync, which)."""
        bounds = [(0, item.index)]
        pipe = item.effects.info.pipe
        if pipe in SPACED and pipe in walk.last_in_pipe:
            before = walk.last_in_pipe[pipe]
            bounds.append((walk.issue[before.index] + self._spacing(before, item), before.index))
        sync = self.syncs[item.index]
        partners = [walk.last_sync] if sync or item.effects.info.name in BETWEEN_SYNCS else []
        for before in [*partners, *(walk.since if sync else [])]:
            if before is not None:
                original = self.times[item.index] - self.times[before.index]
                need = self.table.gap(sync_key(before, item), original)
                bounds.append((walk.issue[before.index] + need, before.index))
        return max(bounds)

    def _spacing(self, before: Instruction, item: Instruction) -> int:
        """Cycles between two instructions that follow each other in one pipe."""
        pair = before.index, item.index
        found = self._spacings.get(pair)
        if found is None:
            found = self.table.spacing(before, item)
            if self.neighbours.get(item.index) == before.index:
                found = min(found, self.times[item.index] - self.times[before.index])
            self._spacings[pair] = found
        return found

    def _floor(self, state: BlockState, place: int, waits: Mapping[int, int]) -> int:
        """The stall an instruction keeps when no distance asks for more."""
        index = state.order[place]
        item = self.items[index]
        following = state.order[place + 1] if place + 1 < len(state.order) else None
        if index in state.wishes:
            floor = max(state.wishes[index].stall, self.own[index])
        elif following == self.next_of.get(index) or item.pinned:
            floor = item.control.stall
        else:
            floor = self.own[index]
        if following is not None:
            # A scoreboard's increment shows one cycle after issue.
            numbers = {item.control.write_sb, item.control.read_sb} - {NO_SCOREBOARD}
            if any(waits[following] >> number & 1 for number in numbers):
                floor = max(floor, 2)
        return floor

    # --- reuse -----------------------------------------------------------------------------

    def _reuse(self, order: tuple[int, ...], place: int, wanted: int) -> int:
        """The reuse bits whose register is read again in the same slot before it changes."""
        kept = 0
        here = self._slots[order[place]]
        for slot, words in here.words.items():
            if not wanted >> slot & 1 or not here.written.isdisjoint(words):
                continue
            for later in order[place + 1 : place + 1 + REUSE_WINDOW]:
                item = self._slots[later]
                if item.registers.get(slot) == words[0]:
                    kept |= 1 << slot
                    break
                if not item.written.isdisjoint(words):
                    break
        return kept


@dataclass
class _Walk:
    """What has issued, in a walk through a block: when, and who touched a resource last.

    `writer` and `readers`: resource -> cycle of issue, instruction, number of the access.
    """

    issue: dict[int, int] = field(default_factory=dict[int, int])
    writer: dict[int, tuple[int, int, int]] = field(default_factory=dict[int, tuple[int, int, int]])
    readers: dict[int, list[tuple[int, int, int]]] = field(
        default_factory=dict[int, list[tuple[int, int, int]]]
    )
    last_in_pipe: dict[Pipe, Instruction] = field(default_factory=dict[Pipe, Instruction])
    last_sync: Instruction | None = None
    since: list[Instruction] = field(default_factory=list[Instruction])


_Touched = tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]
_field = cache(Control)  # one object a field: versions of a block share those they have in common


@dataclass(frozen=True)
class _Sources:
    """Where an instruction reads registers, and which it writes."""

    registers: Mapping[int, int]
    words: Mapping[int, tuple[int, ...]]
    written: frozenset[int]

    @classmethod
    def of(cls, item: Instruction) -> _Sources:
        written = frozenset(access.resource for access in item.effects.writes)
        return cls(slot_registers(item), item.slot_words, written)


@dataclass
class _Open:
    """Something outstanding during a scan."""

    pending: Pending
    scoreboard: int
    done: bool = False


class _WaitScan:
    """What is outstanding while instructions issue one after the other."""

    def __init__(self, kernel: Kernel, entry: frozenset[Pending]) -> None:
        self.waits: dict[int, int] = {}
        self.cleared: dict[tuple[int, str], int] = {}
        self.writers: dict[int, list[_Open]] = {}
        self.readers: dict[int, list[_Open]] = {}
        self.live: list[_Open] = []
        for pending in sorted(entry, key=lambda item: (item.producer, item.release)):
            self._open(pending, kernel.instructions[pending.producer])

    def _open(self, pending: Pending, item: Instruction) -> None:
        entry = _Open(pending, pending.scoreboard)
        self.live.append(entry)
        if pending.release == "W":
            for access in item.effects.writes:
                self.writers.setdefault(access.resource, []).append(entry)
            return
        for resource in protected_sources(item):
            self.readers.setdefault(resource, []).append(entry)

    def conflicts(self, item: Instruction) -> list[tuple[int, int]]:
        """(producer, scoreboard) of everything outstanding that `item` may not overtake."""
        if not self.live:
            return []
        found: list[_Open] = []
        for access in item.effects.reads:
            found.extend(self.writers.get(access.resource, ()))
        for access in item.effects.writes:
            found.extend(self.writers.get(access.resource, ()))
            found.extend(self.readers.get(access.resource, ()))
        return [
            (other.pending.producer, other.scoreboard)
            for other in found
            if not other.done and other.scoreboard != UNATTACHED
        ]

    def issue(self, item: Instruction, wait: int, releases: tuple[Pending, ...]) -> None:
        """Record the wait of `item` and what it leaves outstanding."""
        self.waits[item.index] = wait
        self._release(wait | waited_scoreboards(item) & ~item.control.wait)
        for access in item.effects.writes:
            self.writers.pop(access.resource, None)
            self.readers.pop(access.resource, None)
        if not item.control.write_sb == item.control.read_sb == NO_SCOREBOARD:
            for other in self.live:
                holder = attaches(other.pending, item) if other.scoreboard == UNATTACHED else None
                if holder is not None:
                    other.scoreboard = holder
        for pending in releases:
            self._open(pending, item)

    def _release(self, mask: int) -> None:
        if not mask:
            return
        for other in self.live:
            if other.scoreboard != UNATTACHED and mask >> other.scoreboard & 1:
                other.done = True
                self.cleared[other.pending.producer, other.pending.release] = other.scoreboard
        self.live = [other for other in self.live if not other.done]


def _reach(table: LatencyTable, item: Instruction) -> int:
    """The longest distance any consumer of this instruction's family may need."""
    prefix = f"{family(item)}."
    known = [min(gap, LONGEST) for key, gap in table.gaps.items() if key.startswith(prefix)]
    return max(known, default=LONGEST)


def _spread(stalls: list[int], cycles: int, after: int) -> None:
    """Add `cycles` to the stalls at or after place `after`, latest first, none above the limit."""
    place = len(stalls) - 1
    while cycles > 0:
        if place < after:
            raise InputError("a distance cannot be kept by stalls of this block")
        room = min(MAX_STALL - stalls[place], cycles)
        if room > 0:
            stalls[place] += room
            cycles -= room
        place -= 1
