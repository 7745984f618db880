"""The constraint model, part 3: ring depths and the memories of the block.

A ring of depth D lets its filler run D iterations ahead: the slot of iteration i is filled again
by iteration i + D, so life <= D * II, where a life runs from the filler's issue to the release of
the slot by its last reader. Rings take depth * bytes for good; other values take their bytes while
they live (MEMCAP); a hand-off through shared memory takes one buffer.
"""

from __future__ import annotations

from warploom.schedule.solve.encoding import Encoding
from warploom.schedule.solve.encoding_groups import carries_registers, same_group
from warploom.schedule.solve.encoding_lives import longest_life, most_intervals
from warploom.schedule.solve.solver import IntervalVar, Linear, only_if

HANDOFF_MEMORY = "smem"
BYTES_PER_WORD = 4


def add_memory(it: Encoding, *, groups: bool) -> None:
    """Ring depths as variables, and the capacity of every memory over time."""
    for name in it.graph.rings:
        _add_ring(it, name)
    if "memory" in it.without:
        return
    for memory, capacity in it.target.memories.items():
        fixed: list[Linear] = [
            it.depth[name] * it.graph.by_id[name].memory.get(memory, 0) for name in it.graph.rings
        ]
        if groups and memory == HANDOFF_MEMORY and it.rules.spill_memory:
            fixed += _handoff_buffers(it)
        transient = [
            node
            for node in it.graph.nodes
            if node.memory.get(memory, 0) and node.id not in it.depth
        ]
        left = it.model.new_int_var(0, capacity, f"left[{memory}]")
        it.model.add(left == capacity - sum(fixed))
        if not transient:
            continue
        copies: list[IntervalVar] = []
        demands: list[int] = []
        for node in transient:
            # More live copies than fit are refused by the capacity, so need not be laid out.
            most = capacity // node.memory[memory]
            it.model.add(it.life[node.id] <= most * it.interval)
            # What lives n intervals is still there when its n-th copy after it is born.
            for k in range(min(most, most_intervals(it, node)) + 1):
                last = (k + 1) * it.longest + longest_life(it, node)
                end = it.model.new_int_var(0, last, "")
                copies.append(
                    it.model.new_interval_var(
                        it.copy(node.id, k), it.life[node.id], end, f"{memory}[{node.id}]+{k}"
                    )
                )
                demands.append(node.memory[memory])
        it.model.add_cumulative(copies, demands, left)


def _add_ring(it: Encoding, name: str) -> None:
    node = it.graph.by_id[name]
    most = most_intervals(it, node)
    for memory, capacity in it.target.memories.items():
        if node.memory.get(memory, 0):
            most = min(most, max(1, capacity // node.memory[memory]))
    depth = it.model.new_int_var(1, most, f"depth[{name}]")
    it.depth[name] = depth
    if isinstance(it.interval, int):
        it.model.add(it.life[name] <= depth * it.interval)
        return
    for k in range(1, most + 1):
        chosen = it.model.new_bool_var(f"depth[{name}]={k}")
        only_if(it.model.add(depth == k), chosen)
        only_if(it.model.add(depth != k), chosen.negated())
        only_if(it.model.add(it.life[name] <= k * it.interval), chosen)


def _handoff_buffers(it: Encoding) -> list[Linear]:
    """Bytes of the buffers that values crossing groups pass through, one for each value."""
    buffers: list[Linear] = []
    for node in it.graph.nodes:
        readers = [e for e in it.graph.outgoing[node.id] if carries_registers(it.graph, e)]
        same = [same_group(it, e.src, e.dst) for e in readers if e.src != e.dst]
        if not same:
            continue
        crosses = it.model.new_bool_var(f"crosses[{node.id}]")
        it.model.add_max_equality(crosses, [1 - literal for literal in same])
        buffers.append(crosses * (node.registers * BYTES_PER_WORD))
    return buffers
