"""The dependence graph of one loop body: what is scheduled, before any decision is made.

A node is a tile-level operation of the whole block; an edge says how long after its source its
destination may issue. Cycles are machine cycles, never normalised.

Source: Soi et al., "Optimal Software Pipelining and Warp Specialization for Tensor Core GPUs"
(arXiv 2512.18134), section 3; what is ours is said at the field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

from warploom.errors import InputError
from warploom.files import read_json

SCHEMA = "warploom.graph"
VERSION = 1
SOLVED = "warploom.solved"  # what `warploom schedule --json` writes: graph, target and schedule
EDGE_KINDS = ("data", "order", "ring", "alias")


@dataclass(frozen=True)
class UnitUse:
    """One reservation: `amount` instances of `unit` from `start` cycles after issue on."""

    unit: str
    cycles: int
    start: int = 0
    amount: int = 1


@dataclass(frozen=True)
class Node:
    """One tile operation.

    latency     cycles from issue to result; the span of the operation
    issue       cycles the issuing warp group's instruction stream is taken (0: not modelled)
    registers   32-bit words of the whole result tile (64x128 fp32 = 8192)
    memory      bytes (shared memory) or columns (tensor memory) its result holds while alive
    min_warps   fewest warps that can issue it: 4 for a tile in registers, 1 for TMA and tcgen05
    asynchronous    the issuing group goes on at once (wgmma, tcgen05, TMA); its operands are read
                    until it completes
    variable_latency    completes after an unknown time (TMA); `latency_range` bounds it
    in_place    the operand whose storage the result takes over (an accumulator)
    subtile     which of several interchangeable sub-tiles it belongs to
    """

    id: str
    op: str
    uses: tuple[UnitUse, ...] = ()
    latency: int = 0
    issue: int = 0
    registers: int = 0
    memory: Mapping[str, int] = field(default_factory=dict[str, int])
    min_warps: int = 4
    asynchronous: bool = False
    variable_latency: bool = False
    latency_range: tuple[int, int] | None = None
    in_place: str | None = None
    subtile: int | None = None

    @property
    def span(self) -> int:
        """Rows of its reservation table: cycles counted in the length of a schedule."""
        return max(1, self.latency)

    @property
    def drain(self) -> int:
        """Cycles after its issue until it has read its operands: the end of its reservations."""
        return max((use.start + use.cycles for use in self.uses), default=self.span)

    @property
    def words_per_warp(self) -> int:
        """Registers its result charges each warp of its group, in 32-bit words."""
        return -(-self.registers // self.min_warps)


@dataclass(frozen=True)
class Edge:
    """`dst` of iteration i issues at least `delay` cycles after `src` of iteration i - distance.

    kind        data: a value; order: no value (write after read, named barrier);
                ring: a value through a multi-buffered slot that `src` fills and `dst` releases;
                alias: `dst` takes over the storage of `src`, ordered by other edges already
    spill_cost  extra cycles when the two sit in different groups
    blocking    `dst` must wait at a barrier before it may use the value
    """

    src: str
    dst: str
    delay: int = 0
    distance: int = 0
    kind: str = "data"
    spill_cost: int = 0
    blocking: bool = False

    def __str__(self) -> str:
        return f"{self.src}->{self.dst} (delay {self.delay}, distance {self.distance})"


@dataclass(frozen=True)
class Graph:
    """A loop body. `flops` is the useful work of one iteration; `params` say how it was made."""

    name: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    flops: int = 0
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        _check_nodes(self)
        _check_edges(self)
        if culprit := zero_distance_cycle(self.nodes, self.edges):
            raise InputError(
                f"graph {self.name}: cycle {' -> '.join(culprit)} has distance 0, so it waits for "
                "itself at any initiation interval; give its back edge distance 1"
            )

    @cached_property
    def by_id(self) -> dict[str, Node]:
        """Nodes by their id."""
        return {node.id: node for node in self.nodes}

    @cached_property
    def incoming(self) -> dict[str, list[Edge]]:
        """Edges by destination."""
        found: dict[str, list[Edge]] = {node.id: [] for node in self.nodes}
        for edge in self.edges:
            found[edge.dst].append(edge)
        return found

    @cached_property
    def outgoing(self) -> dict[str, list[Edge]]:
        """Edges by source."""
        found: dict[str, list[Edge]] = {node.id: [] for node in self.nodes}
        for edge in self.edges:
            found[edge.src].append(edge)
        return found

    @cached_property
    def rings(self) -> tuple[str, ...]:
        """Nodes that fill a ring, in graph order; the ring bears its filler's name."""
        filled = {edge.src for edge in self.edges if edge.kind == "ring"}
        return tuple(node.id for node in self.nodes if node.id in filled)

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.nodes)} nodes, {len(self.edges)} edges"]
        for node in self.nodes:
            uses = " ".join(f"{use.unit}:{use.cycles}" for use in node.uses) or "-"
            lines.append(f"  {node.id:10} {node.op:16} latency {node.latency:5}  {uses}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The graph as plain JSON data; fields at their default are left out."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "name": self.name,
            "flops": self.flops,
            "params": dict(self.params),
            "nodes": [_node_to_json(node) for node in self.nodes],
            "edges": [_without_defaults(edge, Edge("", "")) for edge in self.edges],
        }

    @classmethod
    def from_json(cls, data: Any, origin: str = "graph") -> Graph:
        """A graph back from JSON data, or from what `warploom schedule --json` wrote.

        `origin` names the file in messages.
        """
        table = expect_schema(part_of(data, "graph"), SCHEMA, VERSION, origin)
        known = {"schema", "version", "name", "flops", "params", "nodes", "edges"}
        refuse_unknown(table, known, origin)
        nodes = tuple(_node_from_json(item, origin) for item in _list(table, "nodes", origin))
        edges = tuple(
            _build(Edge, item, f"{origin}: edge {item!r}") for item in _list(table, "edges", origin)
        )
        name = str(table.get("name", origin))
        params = cast("dict[str, Any]", table.get("params", {}))
        return cls(name, nodes, edges, int(table.get("flops", 0)), params)

    @classmethod
    def read(cls, path: Path) -> Graph:
        """Read a graph from a JSON file."""
        return cls.from_json(read_json(path), str(path))


def part_of(data: Any, name: str) -> Any:
    """That part of what `warploom schedule --json` wrote; other data as it is."""
    if is_solved(data):
        return data.get(name)
    return data


def is_solved(data: Any) -> bool:
    """Whether the data is what `warploom schedule --json` wrote."""
    return isinstance(data, dict) and cast("dict[str, Any]", data).get("schema") == SOLVED


def expect_schema(data: Any, schema: str, version: int, origin: str) -> dict[str, Any]:
    """The data as a table of the wanted schema and version, or an `InputError`."""
    if not isinstance(data, dict):
        raise InputError(f"{origin}: expected a JSON object with schema {schema!r}")
    table = cast("dict[str, Any]", data)
    found = (table.get("schema"), table.get("version"))
    if found != (schema, version):
        raise InputError(
            f"{origin}: schema {found[0]!r} version {found[1]!r}, "
            f"this reads {schema!r} version {version}"
        )
    return table


def refuse_unknown(table: Mapping[str, Any], known: Iterable[str], origin: str) -> None:
    """A field nobody reads is a typing slip: say so instead of ignoring it."""
    if unknown := sorted(set(table) - set(known)):
        names = ", ".join(sorted(known))
        raise InputError(f"{origin}: unknown field {unknown[0]!r}, expected one of {names}")


def zero_distance_cycle(nodes: Iterable[Node], edges: Iterable[Edge]) -> list[str]:
    """The nodes of a cycle whose distances sum to 0, first node repeated; empty when none."""
    nexts: dict[str, list[str]] = {node.id: [] for node in nodes}
    for edge in edges:
        if edge.distance == 0:
            nexts[edge.src].append(edge.dst)
    done: set[str] = set()
    for start, first in nexts.items():
        if start in done:
            continue
        path: list[str] = [start]
        on_path = {start}
        branches = [iter(first)]
        while branches:
            following = next(branches[-1], None)
            if following is None:
                branches.pop()
                done.add(path[-1])
                on_path.discard(path.pop())
            elif following in on_path:
                return [*path[path.index(following) :], following]
            elif following not in done:
                path.append(following)
                on_path.add(following)
                branches.append(iter(nexts[following]))
    return []


def _check_nodes(graph: Graph) -> None:
    if not graph.nodes:
        raise InputError(f"graph {graph.name}: no nodes, expected at least one")
    seen: set[str] = set()
    for node in graph.nodes:
        where = f"graph {graph.name}: node {node.id}"
        if node.id in seen:
            raise InputError(f"{where} appears twice, ids must be unique")
        seen.add(node.id)
        for name in ("latency", "issue", "registers"):
            if getattr(node, name) < 0:
                raise InputError(f"{where} has {name} {getattr(node, name)}, expected >= 0")
        for use in node.uses:
            if use.cycles < 0 or use.start < 0 or use.amount < 1:
                raise InputError(
                    f"{where} uses {use.unit} for {use.cycles} cycles from {use.start}, "
                    f"amount {use.amount}: expected cycles, start >= 0 and amount >= 1"
                )
        for memory, size in node.memory.items():
            if size < 0:
                raise InputError(f"{where} holds {size} of {memory}, expected >= 0")
        if node.min_warps < 1:
            raise InputError(f"{where} has min_warps {node.min_warps}, expected >= 1")
        if node.latency_range and not 0 <= node.latency_range[0] <= node.latency_range[1]:
            raise InputError(
                f"{where} has latency_range {node.latency_range}, expected low <= high"
            )


def _check_edges(graph: Graph) -> None:
    ids = {node.id for node in graph.nodes}
    for edge in graph.edges:
        where = f"graph {graph.name}: edge {edge}"
        for end in (edge.src, edge.dst):
            if end not in ids:
                raise InputError(f"{where} names node {end!r}, which the graph does not have")
        if edge.delay < 0 or edge.distance < 0 or edge.spill_cost < 0:
            raise InputError(
                f"{where} has a negative delay, distance or spill_cost ({edge.spill_cost}), "
                "expected all >= 0"
            )
        if edge.kind not in EDGE_KINDS:
            raise InputError(f"{where} has kind {edge.kind!r}, expected one of {EDGE_KINDS}")
    operands = {(edge.src, edge.dst) for edge in graph.edges if edge.kind in ("data", "alias")}
    for node in graph.nodes:
        if node.in_place is not None and (node.in_place, node.id) not in operands:
            raise InputError(
                f"graph {graph.name}: node {node.id} is in_place on {node.in_place!r}, "
                "which is not one of its data operands"
            )


def _without_defaults(item: Any, default: Any) -> dict[str, Any]:
    names: list[str] = list(item.__dataclass_fields__)
    values = {name: getattr(item, name) for name in names}
    return {
        name: value
        for name, value in values.items()
        if name in ("id", "op", "src", "dst", "unit", "cycles") or value != getattr(default, name)
    }


def _node_to_json(node: Node) -> dict[str, Any]:
    table = _without_defaults(node, Node("", ""))
    if node.uses:
        table["uses"] = [_without_defaults(use, UnitUse("", 0)) for use in node.uses]
    if node.memory:
        table["memory"] = dict(node.memory)
    if node.latency_range:
        table["latency_range"] = list(node.latency_range)
    return table


def _node_from_json(item: Any, origin: str) -> Node:
    name = cast("dict[str, Any]", item).get("id", item) if isinstance(item, dict) else item
    where = f"{origin}: node {name!r}"
    node = _build(Node, item, where)
    uses = tuple(_build(UnitUse, use, f"{where}, use") for use in cast("list[Any]", node.uses))
    span: Any = node.latency_range
    if span is not None and not (len(span) == 2 and all(type(end) is int for end in span)):
        raise InputError(f"{where}: latency_range {span!r}, expected [low, high]")
    return replace(node, uses=uses, latency_range=(span[0], span[1]) if span else None)


Record = TypeVar("Record", Node, Edge, UnitUse)


def _list(table: Mapping[str, Any], name: str, origin: str) -> list[Any]:
    value = table.get(name)
    if not isinstance(value, list):
        raise InputError(f"{origin}: {name!r} is missing or not a list")
    return cast("list[Any]", value)


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "int": (int,),
    "int | None": (int, type(None)),
    "bool": (bool,),
    "tuple[int, int] | None": (list, type(None)),
    "tuple[UnitUse, ...]": (list,),
    "Mapping[str, int]": (dict,),
}


def _build(kind: type[Record], item: Any, where: str) -> Record:
    """Build a dataclass from JSON, refusing unknown fields and values of the wrong type."""
    if not isinstance(item, dict):
        raise InputError(f"{where}: expected a JSON object")
    table = cast("dict[str, Any]", item)
    fields = kind.__dataclass_fields__
    refuse_unknown(table, fields, where)
    for name, value in table.items():
        allowed = _JSON_TYPES[str(fields[name].type)]
        if name == "memory" and isinstance(value, dict):
            sizes = cast("dict[str, Any]", value).values()
            if not all(type(size) is int for size in sizes):
                raise InputError(f"{where}: memory is {value!r}, expected whole numbers")
        if not isinstance(value, allowed) or (bool not in allowed and isinstance(value, bool)):
            raise InputError(f"{where}: {name} is {value!r}, expected {fields[name].type}")
    try:
        return kind(**table)
    except TypeError as error:
        raise InputError(f"{where}: {str(error).split('() ')[-1]}") from None
