"""A loop body under construction: operations by what they do, costs by the machine's table.

One description serves three families. On Hopper an accumulator lives in registers and its wgmma
runs on after the issue; on Blackwell it lives in tensor memory and must be loaded to be read; on
Ampere mma.sync holds its warps. `read` and `operand` hide which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from warploom.errors import InputError
from warploom.schedule.model.costs import KIB, CostTable
from warploom.schedule.model.graph import Edge, Graph, Node, UnitUse

WORD = 4
WARPS = 4
TMEM_LANES = 128
INSTRUCTION_BYTES = 32  # of K in one wgmma or tcgen05.mma


class Body:
    """Collects nodes and edges; `graph` checks and freezes them."""

    def __init__(self, name: str, costs: CostTable, dtype: str = "bf16") -> None:
        self.name, self.costs, self.dtype = name, costs, dtype
        self.element = 1 if dtype == "fp8" else 2
        self.nodes: dict[str, Node] = {}
        self.edges: list[Edge] = []

    def graph(self, flops: int, params: Mapping[str, Any]) -> Graph:
        """The finished graph; `flops` is the useful work of one iteration."""
        return Graph(self.name, tuple(self.nodes.values()), tuple(self.edges), flops, dict(params))

    def _add(self, node: Node) -> str:
        self.nodes[node.id] = node
        return node.id

    def edge(
        self,
        src: str,
        dst: str,
        distance: int = 0,
        kind: str = "data",
        blocking: bool | None = None,
        delay: int | None = None,
    ) -> None:
        """An edge with the delay, barrier and hand-off price that its source implies.

        A value in registers crosses through shared memory. A blocking edge is a barrier wherever
        its ends sit (the latency of an asynchronous source includes its own), so crossing costs
        it nothing more; an order edge needs a barrier only when it crosses.
        """
        source = self.nodes[src]
        if kind == "alias":
            self.edges.append(Edge(src, dst, 0, distance, kind))
            return
        if kind == "data" and source.variable_latency and source.memory:
            kind = "ring"
        if blocking is None:
            blocking = kind != "order" and source.asynchronous
        spill = self.costs.cycles("barrier.wait")
        if kind == "data" and source.registers:
            size = source.registers * WORD / KIB
            spill = self.costs.cycles("handoff.fixed") + self.costs.cycles("handoff.per_kib", size)
        elif blocking and kind != "ring":
            spill = 0
        cycles = source.latency if delay is None else delay
        if blocking and not source.asynchronous:
            cycles += self.costs.cycles("barrier.wait")
        self.edges.append(Edge(src, dst, cycles, distance, kind, spill, blocking))

    def load(self, name: str, size: int, dram: float = 0.0, subtile: int | None = None) -> str:
        """A bulk load of `size` bytes into a ring; `dram` is the part that misses L2."""
        own = self.costs.asynchronous
        occupancy = self.costs.cycles("load.per_kib", size / KIB)
        fixed = self.costs.costs["load.latency"]
        transfer = max(1, occupancy)
        uses = [UnitUse("TMA", transfer), UnitUse("SMEM", self.costs.shared(size))]
        if dram:
            uses.append(UnitUse("DRAM", self.costs.dram(size * dram)))
        issue = self.costs.cycles("load.issue")
        return self._add(
            Node(
                name,
                "load",
                (*uses, UnitUse("ISSUE", 1)),
                latency=self.costs.cycles("load.latency") + transfer,
                issue=issue,
                memory={"smem": size},
                min_warps=1 if own else WARPS,
                asynchronous=True,
                variable_latency=True,
                latency_range=(int(fixed.low) + transfer, int(fixed.high) + transfer),
                subtile=subtile,
            )
        )

    def store(self, name: str, size: int, dram: float = 0.0, subtile: int | None = None) -> str:
        """A bulk store of a staged tile of `size` bytes."""
        occupancy = max(1, self.costs.cycles("store.per_kib", size / KIB))
        uses = [UnitUse("STORE", occupancy), UnitUse("SMEM", self.costs.shared(size))]
        if dram:
            uses.append(UnitUse("DRAM", self.costs.dram(size * dram)))
        issue = self.costs.cycles("load.issue")
        return self._add(
            Node(
                name,
                "store",
                (*uses, UnitUse("ISSUE", 1)),
                latency=self.costs.cycles("store.latency") + occupancy,
                issue=issue,
                min_warps=1,
                asynchronous=True,
                subtile=subtile,
            )
        )

    def mma(
        self,
        name: str,
        op: str,
        shape: tuple[int, int, int],
        *,
        from_registers: bool = False,
        accumulates: str | None = None,
        subtile: int | None = None,
    ) -> str:
        """A matrix product of shape (m, n, k) into a fp32 accumulator.

        `accumulates` names the node whose storage it adds into (itself for a plain loop sum).
        """
        m, n, k = shape
        costs = self.costs
        if costs.tensor_memory and m > TMEM_LANES:
            raise InputError(f"{self.name}: {name} has {m} rows, tensor memory has {TMEM_LANES}")
        work = costs.tensor(2 * m * n * k, self.dtype)
        operands = (n * k + (0 if from_registers else m * k)) * self.element
        issue = costs.product_issue(k * self.element // 2)
        slots = max(1, k * self.element // INSTRUCTION_BYTES)
        uses = (
            UnitUse("TC", work),
            UnitUse("SMEM", costs.shared(operands)),
            UnitUse("ISSUE", slots),
        )
        tail = "mma.latency_registers" if from_registers else "mma.latency"
        return self._add(
            Node(
                name,
                op,
                uses,
                latency=work + costs.cycles(tail),
                issue=issue,
                registers=0 if costs.tensor_memory else m * n,
                memory={"tmem": n} if costs.tensor_memory else {},
                min_warps=1 if costs.tensor_memory else WARPS,
                asynchronous=costs.asynchronous,
                in_place=accumulates,
                subtile=subtile,
            )
        )

    def accumulate(self, name: str) -> None:
        """The loop-carried sum of a product into itself: the tensor core keeps the order."""
        occupancy = next(use.cycles for use in self.nodes[name].uses if use.unit == "TC")
        self.edge(name, name, distance=1, blocking=False, delay=occupancy)

    def read(self, name: str, elements: int, subtile: int | None = None) -> str:
        """The accumulator in registers: itself, or on Blackwell a load from tensor memory.

        The load also says when the columns are free for the next product (write after read).
        """
        if not self.costs.tensor_memory:
            return name
        size = elements * WORD / KIB
        occupancy = self.costs.cycles("tmem.load_per_kib", size)
        loaded = self._add(
            Node(
                f"L{name}",
                f"{self.nodes[name].op}.load",
                (
                    UnitUse("TMEM", occupancy),
                    UnitUse("ISSUE", self.costs.issue_slots(elements) // 4),
                ),
                latency=occupancy + self.costs.cycles("tmem.load_latency"),
                issue=max(1, self.costs.issue_slots(elements) // 4),
                registers=elements,
                min_warps=WARPS,
                subtile=subtile,
            )
        )
        self.edge(name, loaded)
        return loaded

    def write(
        self, name: str, op: str, elements: int, width: int, into: str | None, subtile: int | None
    ) -> str:
        """Registers to tensor memory: `width` bytes an element, over the columns of `into`."""
        size = elements * width / KIB
        occupancy = max(1, self.costs.cycles("tmem.store_per_kib", size))
        slots = max(1, self.costs.issue_slots(elements * width / WORD) // 4)
        columns = elements * width // WORD // TMEM_LANES
        return self._add(
            Node(
                name,
                op,
                (UnitUse("TMEM", occupancy), UnitUse("ISSUE", slots)),
                latency=occupancy + self.costs.cycles("tmem.store_latency"),
                issue=slots,
                memory={"tmem": columns},
                min_warps=WARPS,
                in_place=into,
                subtile=subtile,
            )
        )

    def rescale(self, name: str, elements: int, into: str, subtile: int | None) -> str:
        """An accumulator in tensor memory, loaded, scaled and stored back a few columns at a time.

        Source: FlashAttention-4's correction step works through 16-column pieces, so only those
        sit in registers; they are part of the reserve, not charged here.
        """
        size = elements * WORD / KIB
        load = self.costs.cycles("tmem.load_per_kib", size)
        store = self.costs.cycles("tmem.store_per_kib", size)
        latency = load + store + self.costs.cycles("alu.latency")
        latency += self.costs.cycles("tmem.load_latency") + self.costs.cycles("tmem.store_latency")
        slots = self.costs.issue_slots(1.5 * elements)
        return self._add(
            Node(
                name,
                "rescale",
                (
                    UnitUse("TMEM", load + store),
                    UnitUse("ALU", self.costs.lanes(elements)),
                    UnitUse("ISSUE", slots),
                ),
                latency=latency,
                issue=slots,
                memory={"tmem": elements // TMEM_LANES},
                min_warps=WARPS,
                in_place=into,
                subtile=subtile,
            )
        )

    def stage(self, name: str, op: str, elements: int, width: int, subtile: int | None) -> str:
        """Registers to a shared-memory buffer, `width` bytes an element, for TMA or an MMA."""
        size = elements * width
        port = self.costs.shared(size)
        slots = max(1, self.costs.issue_slots(elements * width / WORD) // 4)
        return self._add(
            Node(
                name,
                op,
                (UnitUse("SMEM", port), UnitUse("ISSUE", slots)),
                latency=port + self.costs.cycles("handoff.fixed") // 2,
                issue=max(slots, 1),
                memory={"smem": size},
                min_warps=WARPS,
                subtile=subtile,
            )
        )

    def _on_lanes(
        self,
        name: str,
        op: str,
        work: int,
        slots: int,
        tail: str,
        registers: int,
        subtile: int | None,
        into: str | None = None,
    ) -> str:
        """Work on the fp32 lanes, its last result `tail` (a cost) after its last issue."""
        return self._add(
            Node(
                name,
                op,
                (UnitUse("ALU", work), UnitUse("ISSUE", slots)),
                latency=work + self.costs.cycles(tail),
                issue=slots,
                registers=registers,
                min_warps=WARPS,
                in_place=into,
                subtile=subtile,
            )
        )

    def lanes(
        self,
        name: str,
        op: str,
        elements: int,
        *,
        result: int | None = None,
        per_element: float = 1.0,
        into: str | None = None,
        subtile: int | None = None,
    ) -> str:
        """Elementwise fp32 work on `elements` (instructions `per_element`), `result` words out."""
        work = self.costs.lanes(elements * per_element)
        slots = self.costs.issue_slots(elements * per_element)
        held = elements if result is None else result
        return self._on_lanes(name, op, work, slots, "alu.latency", held, subtile, into)

    def narrow(self, name: str, op: str, elements: int, subtile: int | None = None) -> str:
        """fp32 elements to 16 bits, two to a register."""
        work = self.costs.conversions(elements)
        slots = self.costs.issue_slots(elements / 2)
        return self._on_lanes(name, op, work, slots, "alu.latency", elements // 2, subtile)

    def row_reduce(self, name: str, op: str, rows: int, columns: int, subtile: int | None) -> str:
        """A row reduction of a tile, folded into the running value of each row."""
        elements = rows * columns
        lanes = self.costs.comparisons if op == "row_max" else self.costs.lanes
        work, slots = lanes(elements), self.costs.issue_slots(elements)
        return self._on_lanes(name, op, work, slots, "reduce.latency", rows, subtile)

    def exponential(
        self,
        name: str,
        op: str,
        elements: int,
        *,
        emulated: float = 0.0,
        into: str | None = None,
        subtile: int | None = None,
    ) -> str:
        """exp2 of each element; the `emulated` part is a polynomial on the fp32 lanes.

        Source of the emulation: FlashAttention-4 (degree 3: about 6 fp32 instructions an element).
        """
        special = self.costs.exponentials(elements * (1 - emulated))
        slots = self.costs.issue_slots(elements * (1 + 5 * emulated))
        uses = [UnitUse("SFU", max(1, special)), UnitUse("ISSUE", slots)]
        polynomial = self.costs.lanes(6 * elements * emulated)
        if polynomial:
            uses.append(UnitUse("ALU", polynomial))
        return self._add(
            Node(
                name,
                op,
                tuple(uses),
                latency=max(special, polynomial) + self.costs.cycles("mufu.latency"),
                issue=min(slots, max(1, special)),
                registers=elements,
                min_warps=WARPS,
                in_place=into,
                subtile=subtile,
            )
        )
