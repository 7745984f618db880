"""The dependence graph of a loop of a tile program, as the schedule floor wants it.

A node is one op of the loop body on one sub-tile (`mma.6/0`), or a load of the whole block
(`load.5`); ops that are inlined into others cost time in those. Sub-tiles are the parts of the
split axis, one warp group each. Nothing here knows a kernel: costs follow from types, instruction
counts (`analysis.instructions`) and the cost table of the machine.

Edges, for every register tile v and shared tile s of the loop:

    data    the op that wrote v -> each reader, one iteration on where v is carried
    ring    the load of s -> each matmul that reads it, or what turns it for them
    order   each reader of v -> the next op that writes v
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, prod

from warploom.codegen.analysis.instructions import Work, work
from warploom.codegen.analysis.register_tiles import RegisterTiles
from warploom.codegen.analysis.role_code import Skips, guard_of
from warploom.codegen.ir.memory_order import memory_chains
from warploom.codegen.ir.place import Placement, contracted
from warploom.errors import InputError
from warploom.perf.contend import crowded as crowded_nodes
from warploom.schedule.model.costs import CostTable, target
from warploom.schedule.model.graph import Edge, Graph, Node, UnitUse
from warploom.schedule.model.target import WARP, GroupSpec, Target, Unit
from warploom.tile import Loop, Op, TileType
from warploom.tile.ops import OPS

LANES = 128  # threads of a warp group
WORD = 4  # bytes
KIB = 1024
TURN_WARPS, TURN_COLUMNS, TURN_KEYS = 3, 16, 32  # that turn operands, and of a step of one
TURN_ISSUE = 18  # cycles in which a step is issued, of four permutations two each
GUARD = 8  # instructions of a thread that find out that an op changes nothing
HALF_RATE = "HALF"  # the unit of comparisons, selections and conversions


@dataclass(frozen=True)
class Extraction:
    """A loop as a problem: its graph, what it is scheduled onto, the group of every node."""

    loop: str
    graph: Graph
    target: Target
    pins: Mapping[str, str]


def extract(
    placement: Placement,
    loop: Loop,
    costs: CostTable,
    shared_bytes: int = 0,
    skip_unit: bool = False,
    crowded: bool = False,
) -> Extraction:
    """The graph of one loop and the block it runs on.

    shared_bytes    shared memory that other tiles of the block take for good
    skip_unit       as in the launch plan: a product with row factors of 1, and what a condition on
                    rows corrects, cost a test
    crowded         ops as long as they take beside the others (`perf.contend`): what the solver
                    needs; without, as long as alone
    """
    found = _Extractor(placement, loop, costs, Skips(skip_unit, skip_unit))
    return found.result(shared_bytes, crowded)


class _Extractor:
    def __init__(self, placement: Placement, loop: Loop, costs: CostTable, skips: Skips) -> None:
        self.placement, self.loop, self.costs = placement, loop, costs
        self.tiles, self.skips = RegisterTiles(placement), skips
        body = [op for op in loop.body if isinstance(op, Op)]
        if len(body) != len(loop.body):
            raise InputError(f"{loop.where}: a loop inside a scheduled loop cannot be extracted")
        self.loads = [op for op in body if op.dst is not None and placement.is_shared(op.dst)]
        self.ops = [op for op in body if op.id in placement.fusion.kept and op not in self.loads]
        self.nodes: dict[str, Node] = {}
        self.edges: dict[tuple[str, str, int, str], Edge] = {}

    def result(self, shared_bytes: int, beside: bool) -> Extraction:
        for op in self.loads:
            turned = op.kind != "load"
            self._add(_turn(self.costs, op) if turned else _load(self.costs, op))
        parts = self.placement.parts
        for part in range(parts):
            for op in self.ops:
                self._add(self._node(op, part))
        if beside:
            self.nodes = {node.id: node for node in crowded_nodes(self.nodes.values(), self.costs)}
        for part in range(parts):
            self._rings(part)
            self._registers(part)
        flops = sum(_flops(op) for op in self.ops if op.kind == "mma")
        params = {"split": self.placement.split, "parts": parts}
        graph = Graph(
            f"{self.placement.program.name}.{self.loop.index}",
            tuple(self.nodes.values()),
            tuple(self.edges.values()),
            flops,
            params,
        )
        pins = {
            node.id: "load" if node.variable_latency else f"compute{node.subtile or 0}"
            for node in graph.nodes
        }
        return Extraction(self.loop.index, graph, self._target(shared_bytes), pins)

    def _add(self, node: Node) -> None:
        self.nodes[node.id] = node

    def _target(self, shared_bytes: int) -> Target:
        base = target(self.costs, self.placement.parts)
        groups = (GroupSpec("load", 1, loads=True),)
        groups += tuple(GroupSpec(f"compute{p}", WARP // 8) for p in range(self.placement.parts))
        left = base.memories["smem"] - shared_bytes
        invariant = sum(self._words(v) for v in self._invariant()) // LANES
        return replace(
            base,
            units=(*base.units, Unit(HALF_RATE, rate=True)),
            groups=groups,
            memories={**base.memories, "smem": left},
            reserved_registers=base.reserved_registers + invariant,
        )

    def _invariant(self) -> list[TileType]:
        """Register tiles that live through the loop without being written in it."""
        inside = {op.dst.name for op in self.ops if op.dst is not None}
        ids = {op.id for op in self.loop.body if isinstance(op, Op)}
        kept = [o for o in self.placement.program.ops() if o.id in self.placement.fusion.kept]
        before = {o.dst.name: o.dst.type for o in kept if o.dst and o.id < min(ids)}
        needed = {
            var.name for o in kept if o.id >= min(ids) for var in self.placement.fusion.sources(o)
        }
        return [
            kind
            for name, kind in before.items()
            if name in needed and name not in inside and name not in self.placement.shared
        ]

    # ---- nodes

    def _elements(self, kind: TileType) -> float:
        """Elements the 128 threads of a group work on: rows are held four times, columns 32."""
        local = self.placement.local(kind)
        form = self.tiles.form(kind)
        size = prod(local.shape)
        held = {"tile": 1, "row": 4, "col": 32, "lane": 4, "scalar": LANES}  # times an element
        return held[form] * size

    def _words(self, kind: TileType) -> int:
        """Registers of a tile over the threads of a group."""
        packed = 2 if kind.dtype.bytes == 2 and len(kind.axes) == 2 else 1
        return ceil(self._elements(kind) / packed)

    def _node(self, op: Op, part: int) -> Node:
        name = f"{op.label}/{part}"
        if op.kind == "mma":
            return self._mma(op, name, part)
        done = work(self.placement.fusion, op, self._sizes(op), self.placement.rows)
        if guard_of(self.tiles, op, self.skips) is not None:
            # In the steady state the op is left out: what remains is the test.
            done = Work({"fma": 0.0, "alu": GUARD * LANES, "mufu": 0.0})
        costs, uses = self.costs, list[UnitUse]()
        fma, half = done.pipes["fma"], done.pipes["alu"]
        special = ceil(done.pipes["mufu"] / costs.rate("mufu.rate"))
        slots = max(1, costs.issue_slots(done.issued))
        for unit, cycles in (
            ("ALU", ceil(fma / costs.rate("lanes.fp32"))),
            (HALF_RATE, ceil(half / costs.rate("lanes.int32"))),
            ("SFU", special),
            ("ISSUE", slots),
        ):
            if cycles:
                uses.append(UnitUse(unit, cycles))
        busy = max(use.cycles for use in uses)
        return Node(
            name,
            op.kind,
            tuple(uses),
            latency=busy + self._tail(op, done),
            issue=slots,
            registers=0 if op.dst is None else self._words(op.dst.type),
            min_warps=4,
            subtile=part,
        )

    def _sizes(self, op: Op) -> dict[str, float]:
        found: dict[str, float] = {}

        def visit(one: Op) -> None:
            for var in (*one.srcs, *((one.dst,) if one.dst is not None else ())):
                found[var.name] = self._elements(var.type)
                inner = self.placement.fusion.inlined.get(var.name)
                if inner is not None and inner is not one:
                    visit(inner)

        visit(op)
        return found

    def _tail(self, op: Op, done: Work) -> int:
        """Cycles from the last issue to the last result."""
        if done.reads_global:
            return ceil(self.costs.rate("l2.latency"))
        if OPS[op.kind].group == "reduce":
            return self.costs.cycles("reduce.latency")
        return self.costs.cycles("mufu.latency" if done.pipes["mufu"] else "alu.latency")

    def _mma(self, op: Op, name: str, part: int) -> Node:
        assert op.dst is not None
        costs = self.costs
        local = self.placement.local(op.dst.type)
        a, b = op.srcs[:2]
        dtype = a.type.dtype
        kinds = op.dst.type, a.type, b.type
        shared = any(self.placement.local(kind) != kind for kind in kinds)
        # Without the axis that groups share out, every group does all of it.
        flops = _flops(op) // (self.placement.parts if shared else 1)
        busy = costs.tensor(flops, dtype.rate)
        depth = a.type.size(contracted(op))
        read = prod(b.type.shape) * dtype.bytes
        if self.placement.is_shared(a):
            read += local.shape[0] * depth * dtype.bytes
        issue = costs.cycles("mma.issue")
        # A block of 64 rows reads all of b again.
        blocks = max(1, local.shape[0] // 64)
        read += (blocks - 1) * prod(b.type.shape) * dtype.bytes
        return Node(
            name,
            "mma",
            (UnitUse("TC", busy), UnitUse("SMEM", costs.shared(read)), UnitUse("ISSUE", issue)),
            latency=busy + costs.cycles("mma.latency"),
            issue=issue,
            registers=self._words(op.dst.type),
            min_warps=4,
            asynchronous=True,
            in_place=self._accumulates(op, part),
            subtile=part,
        )

    def _accumulates(self, op: Op, part: int) -> str | None:
        """The node whose storage a matmul adds into: the last writer of its accumulator."""
        assert op.dst is not None
        if len(op.srcs) < 3:
            return None
        writers = [o for o in self.ops if o.dst is not None and o.dst.name == op.dst.name]
        earlier = [o for o in writers if o.id < op.id]
        return f"{(earlier or writers)[-1].label}/{part}"

    # ---- edges

    def _edge(self, edge: Edge) -> None:
        key = (edge.src, edge.dst, edge.distance, edge.kind)
        known = self.edges.get(key)
        if known is None or edge.delay > known.delay:
            self.edges[key] = edge

    def _rings(self, part: int) -> None:
        wait = self.costs.cycles("barrier.wait")
        by_name = {op.dst.name: op for op in self.loads if op.dst is not None}
        for op in self.ops:
            for var in op.srcs if op.kind == "mma" else ():
                if var.name in by_name:
                    load = by_name[var.name].label
                    delay = self.nodes[load].latency
                    self._edge(Edge(load, f"{op.label}/{part}", delay, 0, "ring", wait, True))
        for operand, source in self.placement.turned.items():
            if operand in by_name:
                load, turn = by_name[source].label, by_name[operand].label
                self._edge(Edge(load, turn, self.nodes[load].latency, 0, "ring", wait, True))

    def _registers(self, part: int) -> None:
        names = {op.dst.name for op in self.ops if op.dst is not None}
        for name in sorted(names):
            self._tile_edges(name, part)
        for together in memory_chains(self.ops):
            labels = [f"{op.label}/{part}" for op in together]
            for first, then in pairwise(labels):
                self._after(first, then, 0)
            self._after(labels[-1], labels[0], 1)

    def _tile_edges(self, name: str, part: int) -> None:
        """Read after write, write after read and write after write of one register tile."""
        touching = [op for op in self.ops if _touches(self.placement, op, name)]
        writers = [op for op in touching if op.dst is not None and op.dst.name == name]
        for op in touching:
            here = f"{op.label}/{part}"
            before = [w for w in writers if w.id < op.id]
            reads = name in {v.name for v in self.placement.fusion.sources(op)}
            if reads:
                source = (before or writers)[-1]
                self._data(f"{source.label}/{part}", here, 0 if before else 1)
            after = [w for w in writers if w.id > op.id]
            following, distance = (after[0], 0) if after else (writers[0], 1)
            if following is not op:
                self._after(here, f"{following.label}/{part}", distance)

    def _data(self, src: str, dst: str, distance: int) -> None:
        source, sink = self.nodes[src], self.nodes[dst]
        spill = self.costs.cycles("handoff.fixed")
        spill += self.costs.cycles("handoff.per_kib", source.registers * WORD / KIB)
        if source.asynchronous and sink.in_place == src:
            # Matmuls into one accumulator follow each other in the tensor core.
            busy = next(use.cycles for use in source.uses if use.unit == "TC")
            self._edge(Edge(src, dst, busy, distance, "data", spill))
            return
        if source.asynchronous:
            self._edge(Edge(src, dst, source.latency, distance, "data", 0, True))
            return
        delay = source.latency
        if not sink.asynchronous and _streams(source):
            # The compiler interleaves elementwise code: the reader follows element by element and
            # ends after its source.
            delay = max(self._start(source), delay - sink.latency + self._start(source))
        self._edge(Edge(src, dst, max(1, delay), distance, "data", spill))

    def _start(self, node: Node) -> int:
        """Cycles until a synchronous node's first element is there."""
        special = any(use.unit == "SFU" for use in node.uses)
        return self.costs.cycles("mufu.latency" if special else "alu.latency")

    def _after(self, first: str, then: str, distance: int) -> None:
        """`then` overwrites what `first` touches."""
        node, writer = self.nodes[first], self.nodes[then]
        if node.asynchronous:
            self._edge(Edge(first, then, node.latency, distance, "order", 0, True))
            return
        delay = node.span if writer.asynchronous else max(1, node.issue)
        self._edge(Edge(first, then, delay, distance, "order"))


def _touches(placement: Placement, op: Op, name: str) -> bool:
    """Whether an op reads or writes a register tile, through what is inlined into it too."""
    reads = {var.name for var in placement.fusion.sources(op)}
    return name in reads or (op.dst is not None and op.dst.name == name)


def _streams(node: Node) -> bool:
    """Whether results come element by element; a reduction's come at its end."""
    return OPS[node.op].group != "reduce"


def _flops(op: Op) -> int:
    assert op.dst is not None
    return 2 * prod(op.dst.type.shape) * op.srcs[0].type.size(contracted(op))


def turn_cycles(costs: CostTable, kind: TileType) -> float:
    """Cycles in which warps of the loading group turn a tile into one of that type: for 32 keys of
    16 columns a warp reads matrices, exchanges their bytes and writes them, one after another."""
    columns, keys = kind.shape
    steps = ceil(columns / TURN_COLUMNS / TURN_WARPS) * ceil(keys / TURN_KEYS)
    return steps * (costs.rate("smem.latency") + TURN_ISSUE)


def _turn(costs: CostTable, op: Op) -> Node:
    """What warps of the loading group do to a loaded tile: it goes through registers and back."""
    assert op.dst is not None
    size = prod(op.dst.type.shape) * op.dst.type.dtype.bytes
    takes, issue = ceil(turn_cycles(costs, op.dst.type)), costs.cycles("load.issue")
    return Node(
        op.label,
        op.kind,
        (UnitUse("SMEM", costs.shared(2 * size)), UnitUse("ISSUE", issue)),
        latency=takes,
        issue=issue,
        memory={"smem": size},
        min_warps=1,
        asynchronous=True,
        variable_latency=True,
        latency_range=(takes, takes),
    )


def _load(costs: CostTable, op: Op) -> Node:
    """A bulk load of a whole tile into a slot of its ring."""
    assert op.dst is not None
    size = prod(op.dst.type.shape) * op.dst.type.dtype.bytes
    moving = max(1, costs.cycles("load.per_kib", size / KIB))
    issue, fixed = costs.cycles("load.issue"), costs.costs["load.latency"]
    return Node(
        op.label,
        "load",
        (UnitUse("TMA", moving), UnitUse("SMEM", costs.shared(size)), UnitUse("ISSUE", issue)),
        latency=costs.cycles("load.latency") + moving,
        issue=issue,
        memory={"smem": size},
        min_warps=1,
        asynchronous=True,
        variable_latency=True,
        latency_range=(int(fixed.low) + moving, int(fixed.high) + moving),
    )
