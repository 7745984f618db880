"""What a graph is scheduled onto: units, memories, registers and the warp groups on offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from warploom.errors import InputError
from warploom.schedule.model.graph import Graph, expect_schema, part_of

SCHEMA = "warploom.target"
VERSION = 1
REGISTER_STEP = 8  # setmaxnreg counts in eights (PTX ISA, setmaxnreg)
REGISTER_FLOOR = 24  # its smallest value
WARP = 32
WARP_GROUP = 4

UNIT_TITLES = {
    "TC": "the tensor core",
    "SFU": "the special-function unit",
    "ALU": "the arithmetic unit",
    "TMA": "the copy engine",
}


@dataclass(frozen=True)
class Unit:
    """A shared unit. A `rate` unit interleaves finely: only the sum over an interval counts."""

    name: str
    capacity: int = 1
    rate: bool = False


@dataclass(frozen=True)
class GroupSpec:
    """A warp group on offer: a schedule may leave it empty, and then it is not launched."""

    name: str
    warps: int
    loads: bool = False


@dataclass(frozen=True)
class Target:
    """One block on one SM. Without groups only the modulo problem is posed.

    registers_per_thread    most a thread can name (255)
    reserved_registers      of those, kept for addresses, counters and the compiler
    register_pool           words the groups share through setmaxnreg; 0: not modelled
    own_load_group          variable-latency operations sit alone in the `loads` group (Hopper on)
    """

    name: str
    units: tuple[Unit, ...]
    memories: Mapping[str, int]
    groups: tuple[GroupSpec, ...]
    registers_per_thread: int = 255
    reserved_registers: int = 0
    register_pool: int = 0
    own_load_group: bool = True

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise InputError(f"target {self.name}: groups {names}, expected distinct names")

    @property
    def words_per_warp(self) -> int:
        """Most 32-bit words of values a warp can hold."""
        return WARP * (self.registers_per_thread - self.reserved_registers)

    def unit(self, name: str) -> Unit:
        """The unit of that name; raises `InputError` listing those there are."""
        for unit in self.units:
            if unit.name == name:
                return unit
        raise InputError(
            f"target {self.name} has no unit {name!r}, it has {[unit.name for unit in self.units]}"
        )

    def fits(self, graph: Graph, node: str, group: GroupSpec) -> bool:
        """Whether the group may hold the node: enough warps, and loads with loads only."""
        it = graph.by_id[node]
        if self.own_load_group and it.variable_latency != group.loads:
            return False
        return it.min_warps <= group.warps

    def with_groups(self, compute: int, single: int | None = None) -> Target:
        """The same target with that many 4-warp and, if given, 1-warp compute groups."""
        if compute < 0:
            raise InputError(f"{compute} compute groups, expected at least 0")
        loads = tuple(group for group in self.groups if group.loads)
        singles = tuple(g for g in self.groups if not g.loads and g.warps < WARP_GROUP)
        if single is not None:
            singles = tuple(GroupSpec(f"issue{index}", 1) for index in range(single))
        wide = tuple(GroupSpec(f"compute{index}", WARP_GROUP) for index in range(compute))
        return replace(self, groups=loads + singles + wide)

    def register_budget(self, warp_groups: int) -> int:
        """Registers a thread of each of `warp_groups` warp groups can have, summed over them.

        The pool is reserved at launch with one entry count for all, a multiple of 8; setmaxnreg
        moves it between groups (PTX ISA, setmaxnreg).
        """
        if not self.register_pool or warp_groups == 0:
            return self.registers_per_thread * max(1, warp_groups)
        threads = WARP * WARP_GROUP
        entry = min(self.registers_per_thread, self.register_pool // (warp_groups * threads))
        return entry // REGISTER_STEP * REGISTER_STEP * warp_groups

    def validate(self, graph: Graph) -> None:
        """Refuse a graph that this target cannot hold; the message names node and rule."""
        for node in graph.nodes:
            where = f"graph {graph.name}: node {node.id}"
            for use in node.uses:
                if use.amount > self._known_unit(use.unit, where).capacity:
                    raise InputError(
                        f"{where} needs {use.amount} of unit {use.unit}, target {self.name} has "
                        f"{self.unit(use.unit).capacity}"
                    )
            for memory in node.memory:
                if memory not in self.memories:
                    raise InputError(
                        f"{where} holds {memory!r}, target {self.name} has {sorted(self.memories)}"
                    )
            fits = any(self.fits(graph, node.id, group) for group in self.groups)
            if self.groups and not fits:
                offer = [f"{g.name}: {g.warps} warps{', loads' * g.loads}" for g in self.groups]
                raise InputError(
                    f"{where} ({node.min_warps} warps"
                    f"{', variable latency' * node.variable_latency}) fits no group of target "
                    f"{self.name}: {offer}"
                )
            if node.words_per_warp > self.words_per_warp:
                raise InputError(
                    f"{where} holds {node.words_per_warp} words in each warp, target {self.name} "
                    f"has {self.words_per_warp}; split the tile into sub-tiles"
                )
        self._check_rings(graph)

    def _known_unit(self, name: str, where: str) -> Unit:
        for unit in self.units:
            if unit.name == name:
                return unit
        raise InputError(
            f"{where} uses unknown unit {name!r}, target {self.name} has "
            f"{[unit.name for unit in self.units]}"
        )

    def _check_rings(self, graph: Graph) -> None:
        """One slot of every ring and one copy of the largest value must fit together."""
        for memory, capacity in self.memories.items():
            rings = {name: graph.by_id[name].memory.get(memory, 0) for name in graph.rings}
            other = [n for n in graph.nodes if n.id not in rings and n.memory.get(memory, 0)]
            largest = max(other, key=lambda n: n.memory[memory], default=None)
            need = sum(rings.values()) + (largest.memory[memory] if largest else 0)
            if need > capacity:
                parts = [f"{name} {size}" for name, size in rings.items() if size]
                if largest:
                    parts.append(f"{largest.id} {largest.memory[memory]}")
                raise InputError(
                    f"graph {graph.name}: one iteration needs {need} of {memory} "
                    f"({', '.join(parts)}), target {self.name} has {capacity}; use smaller tiles"
                )

    def to_json(self) -> dict[str, Any]:
        """The target as plain JSON data."""
        table = asdict(self)
        table["memories"] = dict(self.memories)
        return {"schema": SCHEMA, "version": VERSION, **table}

    @classmethod
    def from_json(cls, data: Any, origin: str = "target") -> Target:
        """A target back from JSON data, or from what `warploom schedule --json` wrote.

        Raises `InputError` naming what is wrong.
        """
        table = dict(expect_schema(part_of(data, "target"), SCHEMA, VERSION, origin))
        del table["schema"], table["version"]
        try:
            table["units"] = tuple(Unit(**item) for item in cast("list[Any]", table["units"]))
            groups = cast("list[Any]", table["groups"])
            table["groups"] = tuple(GroupSpec(**item) for item in groups)
            return cls(**table)
        except (KeyError, TypeError) as error:
            raise InputError(f"{origin}: incomplete target: {error}") from None
