"""Which boxes to fuse, and with which nest: a shortest path over what is already computed.

A node of the search is a down-set of boxes (all computed so far); an edge fuses a convex region
into one kernel with its best nest and tiles. Before a region is solved its compulsory traffic
bounds it from below, so most are never solved (A*). Not fusing is just another path, and wins when
the memory is small (attention with M below about 0.69 d²).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from warploom.derive.cost.cost import FULL, Accounting
from warploom.derive.cost.integers import Score, choose, padded_score
from warploom.derive.formula.graph import Diagram
from warploom.derive.kernel.kernel import Kernel, Loop, subdiagram
from warploom.derive.kernel.legal import fuse, group, make_kernel
from warploom.derive.lemmas.cascade import Refusal
from warploom.errors import InputError

MAX_STREAMS = 2
"""Most stream loops in one nest."""
MOST_KERNELS = 6
"""Of a plan."""


@dataclass(frozen=True)
class Setting:
    """What the search optimises and within what."""

    capacity: float
    multiples: Mapping[str, int]
    score: Score = padded_score
    accounting: Accounting = FULL
    floor: Callable[[Diagram, int], float] | None = None
    """A lower bound of `score` from a region and its compulsory values; None for traffic itself."""
    split: bool = False
    streams: int = MAX_STREAMS
    lemmas: bool = True
    """Whether registered lemmas may be tried before one is searched for."""
    allowed: Callable[[Kernel], bool] = lambda _: True
    """Which nests are looked at."""


@dataclass(frozen=True)
class Plan:
    """Kernels in order, the score, and how much was tried."""

    kernels: tuple[Kernel, ...]
    score: float
    regions: int
    nests: int


def search(diagram: Diagram, setting: Setting) -> Plan:
    """The best fusion plan. Raises `InputError` when some box fits no level."""
    fusions = _Fusions(diagram, setting)
    everything = frozenset(range(len(fusions.clusters)))
    counter = itertools.count()
    best: tuple[tuple[Kernel, ...], float] | None = None
    whole = fusions.solve(everything)
    if whole is not None:
        best = (whole[0],), whole[1]
    queue: list[tuple[float, int, frozenset[int], tuple[Kernel, ...], frozenset[int], float]] = []
    heapq.heappush(queue, (0.0, next(counter), frozenset(), (), frozenset(), 0.0))
    settled: dict[frozenset[int], float] = {}
    while queue:
        estimate, _, done, kernels, region, spent = heapq.heappop(queue)
        if best is not None and estimate >= best[1] * (1 - 1e-9):
            break
        if region:
            solved = fusions.solve(region)
            if solved is None:
                continue
            kernels, spent, done = (*kernels, solved[0]), spent + solved[1], done | region
        if settled.get(done, float("inf")) <= spent:
            continue
        settled[done] = spent
        if done == everything:
            if best is None or spent < best[1]:
                best = kernels, spent
            continue
        if len(kernels) >= MOST_KERNELS:
            continue
        for nxt in fusions.regions(done):
            low = spent + fusions.floor(nxt)
            rest = everything - done - nxt
            low += fusions.floor(rest) if rest else 0.0
            if best is None or low < best[1] * (1 - 1e-9):
                heapq.heappush(queue, (low, next(counter), done, kernels, nxt, spent))
    if best is None:
        raise InputError(
            f"{diagram.name}: no fusion fits in {setting.capacity:.0f} values; the widest "
            f"box alone does not fit: raise the capacity or cut its axes smaller"
        )
    return Plan(_named(best[0]), best[1], fusions.solved, fusions.nests)


def alone(diagram: Diagram, capacity: float) -> float:
    """Values moved when every box is a kernel of its own with its best tiles; 0 when one does not
    fit."""
    moved = 0.0
    for node in diagram.nodes:
        if node.kind == "const":
            continue
        try:
            moved += search(subdiagram(diagram, (node.name,), "box"), Setting(capacity, {})).score
        except InputError:
            return 0.0
    return moved


def _named(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """Kernels called k0, k1, ..., without groups of a whole axis (they partition nothing)."""
    named: list[Kernel] = []
    for index, kernel in enumerate(kernels):
        whole = {
            loop
            for loop in kernel.loops
            if loop.kind == "group" and kernel.tile[loop.symbol] == kernel.body.size[loop.axis]
        }
        loops = tuple(loop for loop in kernel.loops if loop not in whole)
        kept = {loop.symbol for loop in loops}
        tiles = tuple((name, tile) for name, tile in kernel.tiles if name in kept)
        named.append(replace(kernel, name=f"k{index}", loops=loops, tiles=tiles))
    return tuple(named)


@cache
def _clusters(diagram: Diagram) -> tuple[tuple[str, ...], ...]:
    """Boxes that are always fused: a map with the producer of an input that has all its axes,
    when the producer is read by nothing else, as keeping them apart can only add traffic; and what
    the gates of a chunked recurrence are made of with it, which takes logarithms of the formula."""
    owner: dict[str, int] = {}
    members: list[list[str]] = []
    gates = _gates(diagram)
    for node in diagram.nodes:
        if node.kind == "const" or node.name in gates:
            continue
        hosts = [
            s
            for s in node.inputs
            if s in owner and diagram.consumers[s] == (node.name,) and s not in diagram.outputs
        ]
        wide = [s for s in hosts if set(node.axes) <= set(diagram.axes_of(s))]
        others = [s for s in node.inputs if s in owner and s not in wide]
        if node.kind in ("map", "mask") and wide and not others:
            owner[node.name] = owner[wide[0]]
            members[owner[node.name]].append(node.name)
            continue
        owner[node.name] = len(members)
        members.append([*(name for name, last in gates.items() if last == node.name), node.name])
    return tuple(tuple(names) for names in members)


def _gates(diagram: Diagram) -> dict[str, str]:
    """The maps that only gates and weights of one chunked recurrence are made of, with its box."""
    found: dict[str, str] = {}
    for node in reversed(diagram.nodes):
        users = diagram.consumers[node.name]
        if node.kind != "map" or not users or node.name in diagram.outputs:
            continue
        homes = {found.get(user, user) for user in users}
        home = diagram.node[homes.pop()]
        ends = [diagram.node[user] for user in users if user not in found]
        gating = all(node.name not in one.factors for one in ends)
        if not homes and home.kind == "scan_contract" and gating:
            found[node.name] = home.name
    return dict(reversed(found.items()))


@cache
def _reads(diagram: Diagram) -> tuple[frozenset[int], ...]:
    """For each cluster the clusters it reads."""
    clusters = _clusters(diagram)
    owner = {name: i for i, names in enumerate(clusters) for name in names}
    return tuple(
        frozenset(
            owner[s]
            for name in names
            for s in diagram.node[name].inputs
            if s in owner and owner[s] != i
        )
        for i, names in enumerate(clusters)
    )


@cache
def _boundary(diagram: Diagram, names: tuple[str, ...]) -> tuple[Diagram, int]:
    """A region as a diagram, and the values that must cross its border."""
    body = subdiagram(diagram, names, "region")
    crossing = sum(body.elements(a.name) for a in body.inputs if not _viewed(body, a.name))
    return body, crossing + sum(body.elements(o) for o in body.outputs)


def _viewed(body: Diagram, array: str) -> bool:
    """Whether an array is read through a window (which may skip elements) or a mask bounds it."""
    if any(node.kind == "mask" for node in body.nodes):
        return True
    return any(body.node[user].kind == "view" for user in body.consumers[array])


class _Fusions:
    """The regions of a diagram that a setting may fuse, and how many were solved and with how many
    nests. A region is a set of clusters by number."""

    def __init__(self, diagram: Diagram, setting: Setting) -> None:
        self.diagram, self.setting = diagram, setting
        self.clusters, self.reads = _clusters(diagram), _reads(diagram)
        self.solved = self.nests = 0

    def regions(self, done: frozenset[int]) -> Iterator[frozenset[int]]:
        """Every region that can be computed next: closed under reading what is not done, linked."""
        seen: set[frozenset[int]] = set()
        stack: list[frozenset[int]] = [frozenset()]
        while stack:
            region = stack.pop()
            for i in range(len(self.clusters)):
                if i in done or i in region or not self.reads[i] <= done | region:
                    continue
                bigger = region | {i}
                if bigger in seen or (region and not self._linked(region, i)):
                    continue
                seen.add(bigger)
                stack.append(bigger)
                yield bigger

    def _linked(self, region: frozenset[int], new: int) -> bool:
        """Whether a cluster shares data with a region: fusing strangers saves nothing."""
        node = self.diagram.node
        inside = {name for i in region for name in self.clusters[i]}
        touched = inside | {s for name in inside for s in node[name].inputs}
        return bool({s for name in self.clusters[new] for s in node[name].inputs} & touched)

    def _members(self, region: frozenset[int]) -> tuple[str, ...]:
        """The boxes of a region in topological order."""
        inside = {name for i in region for name in self.clusters[i]}
        return tuple(node.name for node in self.diagram.nodes if node.name in inside)

    def floor(self, region: frozenset[int]) -> float:
        """A lower bound on a region's score."""
        body, crossing = _boundary(self.diagram, self._members(region))
        given = self.setting.floor
        return float(crossing) if given is None else given(body, crossing)

    def solve(self, region: frozenset[int]) -> tuple[Kernel, float] | None:
        """The best nest and tiles of one region with their score, or None when it fits nowhere."""
        names, asked = self._members(region), self.setting
        if fuse(self.diagram, names) is not None:
            return None
        body, _ = _boundary(self.diagram, names)
        self.solved += 1
        best: tuple[Kernel, float] | None = None
        for kernel in nests(body, asked.split, asked.streams, asked.lemmas):
            self.nests += 1
            if not asked.allowed(kernel):
                continue
            multiples = {axis: m for axis, m in asked.multiples.items() if axis in kernel.body.size}
            try:
                choice = choose(kernel, asked.capacity, multiples, asked.score, asked.accounting)
            except InputError:
                continue
            if best is None or choice.score < best[1] * (1 - 1e-9):
                best = kernel.tiled(choice.tiles), choice.score
        return best


@cache
def nests(
    body: Diagram, split: bool = False, most: int = MAX_STREAMS, lemmas: bool = True
) -> tuple[Kernel, ...]:
    """Every legal nest of a region: up to `most` ordered streams, all other weaved axes grouped (a
    group of the whole axis is no partition), and with `split` one cut axis, its parts streamed or
    taken whole."""
    axes = [axis for axis, size in body.sizes if size > 1]
    groups = [axis for axis in axes if group(body, axis) is None]
    kernels: list[Kernel] = []
    for count in range(most + 1):
        for streams in itertools.permutations(axes, count):
            outer = [Loop(axis, "group") for axis in groups if axis not in streams]
            inner = [Loop(axis, "stream") for axis in streams]
            kernels += _made(body, [*outer, *inner], lemmas)
            cut = [a for a in axes if a not in groups and a not in streams[1:]]
            for axis in cut if split and count else ():
                kernels += _made(body, [*outer, Loop(axis, "split"), *inner], lemmas)
    return tuple(kernels)


def _made(body: Diagram, loops: list[Loop], lemmas: bool) -> list[Kernel]:
    """The kernel of a nest when it is legal."""
    kernel = make_kernel(body, loops, lemmas=lemmas)
    return [] if isinstance(kernel, Refusal) else [kernel]
