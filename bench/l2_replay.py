"""DRAM traffic of a tiled kernel behind a cache: its tasks in order, every slice looked up.

The cost floor counts what enters an SM. How much of it the L2 cache serves depends on the order of
the tasks and on which run at the same time, so it is not a posynomial: this module replays the
dispatch. Workers (SMs, or clusters of them) take tasks in the launch's order and do one stream step
each in turn; each step looks its slices up in a cache that holds `capacity` bytes; a miss is read
from DRAM, a displaced written slice is written to it. What is still dirty at the end stays.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from warploom.derive.cost.counts import tile_lengths, visited_starts
from warploom.derive.kernel.kernel import Kernel
from warploom.errors import InputError


@dataclass(frozen=True)
class TaskOrder:
    """How a dispatch visits its tasks (the fields of `plan.LaunchPlan` that matter here).

    `workers`: tasks in flight; `supergroup`: rows of the last two axes a band, 0 for row-major;
    `grouped`: whether a row is the axis before the last ("row") or all before the last ("all");
    `cluster`: neighbours along an axis that form one task; `reverse`: axes taken from the end;
    `queue`: the next free worker takes the next task, else worker w takes w, w + workers, ...;
    `serpentine`: every second round backwards.
    """

    workers: int
    supergroup: int = 0
    grouped: str = "row"
    cluster: tuple[str, int] = ("", 1)
    reverse: tuple[str, ...] = ()
    queue: bool = False
    serpentine: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1 or self.cluster[1] < 1 or self.supergroup < 0:
            raise InputError(
                f"order of {self.workers} workers, clusters of {self.cluster[1]}, super-groups of "
                f"{self.supergroup}: workers and cluster are at least 1, the super-group at least 0"
            )


@dataclass(frozen=True)
class Level2:
    """The cache: `slices` partitions of `capacity / slices` bytes, least recently used goes first.

    Every address has a home partition. An SM asks its own partition; what is at home elsewhere is
    kept there and in the asking one. Data that all SMs read fills every partition, so that only
    `capacity / slices` bytes of it fit. Written data is at home only, and no more than `dirty`
    bytes wait to be written. `foreign` bytes written by someone else lie there at the start and go
    to DRAM when they are displaced.
    """

    capacity: float
    slices: int = 1
    dirty: float = math.inf
    foreign: float = 0.0


@dataclass(frozen=True)
class Moved:
    """Bytes of one dispatch from a cold cache: DRAM reads and writes, and requests of the SMs."""

    read: float
    written: float
    requested: float
    stored: float

    @property
    def dram(self) -> float:
        """Read and written."""
        return self.read + self.written


Piece = tuple[Hashable, int]
"""What an address range holds at one home."""


@dataclass
class _Part:
    """One partition: items with sizes, oldest first."""

    capacity: float
    items: OrderedDict[Piece, float] = field(default_factory=OrderedDict[Piece, float])
    held: float = 0.0

    def has(self, key: Piece) -> bool:
        """Whether an item is here; it is then the youngest."""
        if key not in self.items:
            return False
        self.items.move_to_end(key)
        return True

    def admit(self, key: Piece, size: float) -> list[Piece]:
        """Take an item in; what it displaced."""
        gone: list[Piece] = []
        while self.items and self.held + size > self.capacity:
            old, freed = self.items.popitem(last=False)
            self.held -= freed
            gone.append(old)
        self.items[key] = size
        self.held += size
        return gone


FOREIGN = "foreign"


class _Cache:
    """The partitions; an item is spread evenly over all homes."""

    def __init__(self, level: Level2) -> None:
        self.level = level
        self.parts = [_Part(level.capacity / level.slices) for _ in range(level.slices)]
        self.dirty: OrderedDict[Piece, float] = OrderedDict()
        self.waiting = 0.0
        self.read = 0.0
        self.written = 0.0
        for home, part in enumerate(self.parts):
            part.admit((FOREIGN, home), level.foreign / level.slices)

    def touch(self, key: Hashable, size: float, asking: int, write: bool = False) -> None:
        """Look an item up from partition `asking`; fetch what is not there (a write fetches
        nothing)."""
        share = size / self.level.slices
        for home in range(self.level.slices):
            piece = (key, home)
            if write:
                self._write(piece, share, home)
                if home != asking and not self.parts[asking].has(piece):
                    self._admit(piece, share, asking)
            elif not self.parts[asking].has(piece):
                if home == asking or not self.parts[home].has(piece):
                    self.read += share
                    self._admit(piece, share, home)
                if home != asking:
                    self._admit(piece, share, asking)

    def _write(self, piece: Piece, share: float, home: int) -> None:
        if not self.parts[home].has(piece):
            self._admit(piece, share, home)
        if piece not in self.dirty:
            self.dirty[piece] = share
            self.waiting += share
        while self.waiting > self.level.dirty:
            self._clean(next(iter(self.dirty)))

    def _admit(self, piece: Piece, share: float, where: int) -> None:
        for old in self.parts[where].admit(piece, share):
            if old[0] == FOREIGN:
                self.written += self.level.foreign / self.level.slices
            elif old[1] == where:
                self._clean(old)

    def _clean(self, piece: Piece) -> None:
        size = self.dirty.pop(piece, 0.0)
        self.waiting -= size
        self.written += size


def task_order(counts: Mapping[str, int], order: TaskOrder) -> Iterator[dict[str, int]]:
    """Positions of the tasks (of clusters, along the clustered axis) in launch order."""
    names = list(counts)
    total = math.prod(counts.values())
    if order.supergroup and len(names) < 2:
        raise InputError(f"super-group {order.supergroup} needs two group axes, there are {names}")
    for task in range(total):
        place = _position(task, names, counts, order)
        yield {n: counts[n] - 1 - p if n in order.reverse else p for n, p in place.items()}


def _position(
    task: int, names: list[str], counts: Mapping[str, int], order: TaskOrder
) -> dict[str, int]:
    """From a task's number to its position on each axis."""
    place: dict[str, int] = {}
    if not order.supergroup:
        for name in reversed(names):
            task, place[name] = divmod(task, counts[name])
        return {name: place[name] for name in names}
    column = names[-1]
    outer = names[:-1] if order.grouped == "all" else names[:-2]
    height = math.prod(counts[n] for n in names[:-1]) if order.grouped == "all" else 0
    height = height or counts[names[-2]]
    width = counts[column]
    rest, plane = divmod(task, height * width)
    band, inside = divmod(plane, order.supergroup * width)
    rows = min(order.supergroup, height - band * order.supergroup)
    row = band * order.supergroup + inside % rows
    place[column] = inside // rows
    if order.grouped == "all":
        rest = row
    else:
        place[names[-2]] = row
    for name in reversed(outer):
        rest, place[name] = divmod(rest, counts[name])
    return {name: place[name] for name in names}


def dram_bytes(kernel: Kernel, order: TaskOrder, level: Level2, element: float) -> Moved:
    """Replay a tiled kernel: bytes over DRAM from a cold cache, and requests to the cache.

    `element`: bytes a value. At most one stream loop, no split axis and no reindexing view. Raises
    `InputError` otherwise, naming what is in the way.
    """
    if kernel.splits or len(kernel.stream_index) > 1:
        raise InputError(f"kernel {kernel.name}: the replay takes one stream loop and no split")
    if any(node.kind == "view" for node in kernel.body.nodes):
        raise InputError(f"kernel {kernel.name}: the replay has no reindexing views")
    replay = _Replay(kernel, order, level, element)
    return replay.run()


class _Replay:
    """One dispatch in progress."""

    def __init__(self, kernel: Kernel, order: TaskOrder, level: Level2, element: float) -> None:
        self.kernel, self.order, self.element = kernel, order, element
        self.cache = _Cache(level)
        self.groups = [each for each in kernel.loops if each.kind == "group"]
        self.streams = [each for each in kernel.loops if each.kind == "stream"]
        self.lengths = {each.axis: tile_lengths(kernel, each) for each in kernel.loops}
        axis, blocks = order.cluster
        if blocks > 1 and axis not in {each.axis for each in self.groups}:
            raise InputError(f"cluster along {axis!r}: group axes are {sorted(self.lengths)}")
        self.requested = 0.0
        self.stored = 0.0
        streamed = {each.axis for each in self.streams}
        arrays = [(a.name, a.axes) for a in kernel.body.inputs]
        self.once = [(n, axes) for n, axes in arrays if not streamed & set(axes)]
        self.each = [(n, axes) for n, axes in arrays if streamed & set(axes)]
        outputs = [(n, kernel.body.axes_of(n)) for n in kernel.body.outputs]
        self.saved = [(n, axes) for n, axes in outputs if not streamed & set(axes)]
        self.emitted = [(n, axes) for n, axes in outputs if streamed & set(axes)]

    def run(self) -> Moved:
        """All tasks to the end."""
        axis, blocks = self.order.cluster
        counts = {
            each.axis: -(-len(self.lengths[each.axis]) // (blocks if each.axis == axis else 1))
            for each in self.groups
        }
        order = list(task_order(counts, self.order))
        slices = self.cache.level.slices
        shares = enumerate(self._shares(order))
        workers = [self._work(tasks, number % slices) for number, tasks in shares]
        while workers:
            workers = [worker for worker in workers if next(worker, None) is not None]
        return Moved(self.cache.read, self.cache.written, self.requested, self.stored)

    def _shares(self, order: list[dict[str, int]]) -> list[Iterator[dict[str, int]]]:
        """What each worker will do."""
        count = min(self.order.workers, len(order))
        if self.order.queue:
            common = iter(order)
            return [common] * count
        rounds = [order[i : i + count] for i in range(0, len(order), count)]
        shares: list[list[dict[str, int]]] = [[] for _ in range(count)]
        for number, tasks in enumerate(rounds):
            for worker in range(count):
                mine = count - 1 - worker if self.order.serpentine and number % 2 else worker
                if mine < len(tasks):
                    shares[worker].append(tasks[mine])
        return [iter(share) for share in shares]

    def _work(self, tasks: Iterator[dict[str, int]], side: int) -> Iterator[int]:
        """One worker: a task's first loads, its steps, its stores; yields once a step."""
        axis, blocks = self.order.cluster
        for task in tasks:
            places = [task]
            if blocks > 1:
                base = task[axis] * blocks
                last = len(self.lengths[axis])
                places = [{**task, axis: base + r} for r in range(blocks) if base + r < last]
            self._touch(self.once, places, {}, side)
            for step in self._steps(places):
                at = {self.streams[0].axis: step} if self.streams else {}
                self._touch(self.each, places, at, side)
                self._touch(self.emitted, places, at, side, write=True)
                yield 1
            self._touch(self.saved, places, {}, side, write=True)
        return

    def _steps(self, places: Sequence[Mapping[str, int]]) -> Iterator[int]:
        """The stream slices a task visits, fewer where a mask bounds them."""
        if not self.streams:
            yield 0
            return
        loop = self.streams[0]
        box = dict(self.kernel.bound_by).get(loop.axis)
        if box is None:
            yield from range(len(self.lengths[loop.axis]))
            return
        starts = visited_starts(self.kernel, loop.axis, box)
        row = str(self.kernel.body.node[box].attr("row"))
        seen = sorted({start for place in places for start in starts[place[row]]})
        yield from (start // self.kernel.tile[loop.symbol] for start in seen)

    def _touch(
        self,
        arrays: Sequence[tuple[str, tuple[str, ...]]],
        places: Sequence[Mapping[str, int]],
        at: Mapping[str, int],
        side: int,
        write: bool = False,
    ) -> None:
        """The tiles of some arrays; blocks of a cluster that want the same one ask once."""
        for name, axes in arrays:
            wanted: dict[Hashable, float] = {}
            for place in places:
                spot = {**place, **at}
                looped = [a for a in axes if a in self.lengths]
                size = self.element * math.prod(
                    self.lengths[a][spot[a]] if a in self.lengths else self.kernel.body.size[a]
                    for a in axes
                )
                wanted[(name, *(spot[a] for a in looped))] = size
            for key, size in wanted.items():
                if write:
                    self.stored += size
                else:
                    self.requested += size
                self.cache.touch(key, size, side, write)


def compulsory_bytes(kernel: Kernel, element: float) -> float:
    """Inputs once and outputs once."""
    values = sum(kernel.body.elements(a.name) for a in kernel.body.inputs)
    return element * (values + sum(kernel.body.elements(o) for o in kernel.body.outputs))
