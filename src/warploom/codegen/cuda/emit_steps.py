"""The code of single steps: waits, signals, copies, matmuls, ops.

What is left out, zeroed, merged or addressed in which way stands in the role's code
(`analysis.role_code`) and the kernel's facts; here it is written as C++.
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.codegen.analysis.kernel_facts import KernelFacts
from warploom.codegen.analysis.stores import STORES, over_ring
from warploom.codegen.cuda.emit_cluster_reduce import cluster_reduce_lines
from warploom.codegen.cuda.emit_mma import issue_lines
from warploom.codegen.cuda.emit_ops import (
    compute_lines,
    direct_store_lines,
    share_lines,
    wide_store_lines,
)
from warploom.codegen.cuda.emit_rows import group_sync
from warploom.codegen.cuda.emit_staged import (
    fenced_as_met,
    from_slots_lines,
    hand_lines,
    held_lines,
    moves_on,
    stage_lines,
    take_lines,
    takes_turns,
    turn_lines,
    vectors_of,
)
from warploom.codegen.cuda.emit_store import LEADER, carried_wait, store_lines, store_of
from warploom.codegen.cuda.emit_tma import fill_lines
from warploom.codegen.cuda.lines import indent
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.tasks import in_grid
from warploom.codegen.cuda.values import Values
from warploom.codegen.ir import steps
from warploom.codegen.ir.block import BlockProgram, Ring
from warploom.tile import Op, Read

Names = dict[str, str]


@dataclass(frozen=True)
class Here:
    """Where steps are written.

    values       the tiles as this place sees them
    index        of the loop at hand; "" outside of loops
    base, plus   the iteration of its newest steps, as C++
    late         rings whose slot follows from the iteration
    reads        numbers that the producer reads in every iteration
    mine         of what groups do in turn: whether it is what the one does whose turn it is
    """

    values: Values
    index: str = ""
    base: str = ""
    plus: int = 0
    late: frozenset[str] = frozenset()
    reads: tuple[Read, ...] = ()
    mine: bool | None = None

    def names(self, step: steps.Step) -> Names:
        """What the loop's counter is for a step: the newest iteration, less the step's stage. What
        an older iteration reads has names of its own."""
        if not self.index:
            return {}
        shift = self.plus - step.stage
        sign = "+" if shift > 0 else "-"
        own = {self.index: f"({self.base} {sign} {abs(shift)})" if shift else self.base}
        older = self.reads if step.stage else ()
        return own | {read.name: f"{read.name}_before{step.stage}" for read in older}


Syncs = steps.GroupSync | steps.FencedGroupSync | steps.PanelSync
Together = steps.Meet | steps.Share | steps.Take | Syncs


class StepLines:
    """Writes steps; adds the device functions that they call to `helpers`."""

    fences = True  # wgmma reads shared memory through a proxy of its own

    def __init__(self, block: BlockProgram, facts: KernelFacts, helpers: dict[str, str]) -> None:
        self.block, self.facts, self.helpers = block, facts, helpers
        self.program = block.placement.program
        self.plan = block.launch
        self.cluster = self.plan.cluster[1]
        self.parts = block.placement.parts
        self.values = Values(block.placement, self.plan.keep_masks, self.plan.lower_rows)

    def _acquire(self, step: steps.Acquire, here: Here) -> list[str]:
        ring = self.block.ring(step.ring)
        name = ring.name
        if name in self.facts.kept:
            return []
        wait = f"barrier_wait({name}_empty + {name}_cursor.slot * 8, {name}_cursor.parity ^ 1);"
        if self.block.is_turned(ring):
            return [wait]
        copied = self.block.copied_bytes(ring, here.index)
        return [
            wait,
            f"barrier_expect({name}_full + {name}_cursor.slot * 8, {copied});",
        ]

    def _fill(self, step: steps.Fill, here: Here) -> list[str]:
        if self.block.is_turned(self.block.ring(step.ring)):
            return turn_lines(self.block, step.op)
        if step.ring in self.facts.kept:
            return []
        return self.filled(step.op, here.names(step))

    def filled(self, op: Op, names: Names | None = None) -> list[str]:
        """The copies of a load into the producer's slot."""
        return fill_lines(
            self.block, self.facts.parameters.copies[op.id], op, names or {}, self.helpers
        )

    def _publish(self, step: steps.Publish) -> list[str]:
        ring, name = self.block.ring(step.ring), step.ring
        if name in self.facts.kept:
            return []
        full = f"{name}_full + {name}_cursor.slot * 8"
        written = [
            "fence_async();",
            "__syncwarp();  // every lane has written its part of the slot",
            f"if (lane == 0) barrier_arrive({full});",
        ]
        advance = f"advance<{ring.depth}>({name}_cursor);"
        return [*written, advance] if self.block.is_turned(ring) else [advance]

    def _wait(self, step: steps.Wait, turns: bool = False) -> list[str]:
        ring, name = self.block.ring(step.ring), step.ring
        if name in self.facts.kept:
            return []
        if turns:
            cursor = raw_cursor(self.block, ring)
            return [
                f"const unsigned {name}_slot = {cursor}.slot;",
                f"barrier_wait({name}_full + {name}_slot * 8, {cursor}.parity);",
                f"const unsigned {name}_at = in_block({name}_base) + {name}_slot * "
                f"{ring.slot_bytes};",
                *([f"advance<{ring.depth}>({cursor});"] if cursor.startswith(name + "_c") else []),
            ]
        slot, phase, moves = f"{name}_cursor.slot", f"{name}_cursor.parity", True
        head: list[str] = []
        if of := self.facts.cursors.get(name):
            moves = of == name
            head = [f"const unsigned {of}_slot = {slot}, {of}_phase = {phase};"] if moves else []
            slot, phase = f"{of}_slot", f"{of}_phase"
        return [
            *head,
            f"barrier_wait({name}_full + {slot} * 8, {phase});",
            f"const unsigned {name}_at = in_block({name}_base) + {slot} * {ring.slot_bytes};",
            *vectors_of(self.values, ring),
            *([f"advance<{ring.depth}>({name}_cursor);"] if moves else []),
            *held_lines(self.block, self.values, ring),
        ]

    def _release(self, step: steps.Release, turns: bool = False) -> list[str]:
        ring, name = self.block.ring(step.ring), step.ring
        if name in self.facts.kept:
            return []
        of = self.facts.cursors.get(name, name if turns else "")
        bar = f"{name}_empty + {f'{of}_slot' if of else f'{name}_oldest'} * 8"
        if name in self.facts.crossing:
            arrive = f"if (lane < {self.cluster}) barrier_arrive_at({bar}, lane);"
        else:
            arrive = f"if (lane == 0) barrier_arrive({bar});"
        stored: list[str] = []
        over = over_ring(self.plan, self.block.rings)
        if over is not None and over.name == name:
            # The group's rows of the slot are free when its stores have read them.
            stored = [f"{LEADER} store_wait_read<0>();", group_sync(self.block.placement.groups)]
        if name in self.facts.read_by_lanes:
            stored.append("__syncwarp();  // every lane has read its part of the slot")
        if of:
            return [*stored, arrive]
        return [*stored, arrive, f"if (++{name}_oldest == {ring.depth}) {name}_oldest = 0;"]

    def _issue(self, step: steps.Issue, here: Here) -> list[str]:
        assert step.op.dst is not None
        first = step.op.dst.name in self.facts.overwritten
        return self._addressed(
            step, here, issue_lines(self.block, here.values, step.op, self.helpers, first)
        )

    def _addressed(
        self, step: steps.OpStep | steps.Send, here: Here, lines: list[str]
    ) -> list[str]:
        """The lines of an op, with the slots of its own iteration of late rings."""
        found: list[str] = []
        for ring in self.block.rings_read(step.op):
            name, index = ring.name, here.index
            if name in here.late and name not in self.facts.kept:
                number = f"({here.names(step)[index]} - {index}_start)"
                slot = f"({name}_first + {number}) % {ring.depth}u"
                found.append(
                    f"const unsigned {name}_at = in_block({name}_base) + {slot} * "
                    f"{ring.slot_bytes};"
                )
                found += vectors_of(here.values, ring)
        return ["{", *indent([*found, *lines]), "}"] if found else lines

    def _join(self, step: steps.Join) -> list[str]:
        return [f"wgmma_wait<{step.count}>();", *[f"pin({c_name(name)});" for name in step.names]]

    def _run(self, step: steps.Run | steps.Send, here: Here) -> list[str]:
        op, values, names = step.op, here.values, here.names(step)
        if op.kind in STORES:
            lines = self._store(values, op, names, isinstance(step, steps.Send))
            if isinstance(step, steps.Run) or not step.stage:
                return lines
            some = f"{names[here.index]} >= {here.index}_start"
            return [f"if ({some}) {{", *indent(lines), "}"]
        if op.kind == "reduce_scatter":
            return cluster_reduce_lines(values, op, self.facts.layout.parts_bytes)
        assert op.dst is not None
        name, copied = op.dst.name, list[str]()
        if self.fences and moves_on(self.block.placement, op):
            return self._addressed(step, here, from_slots_lines(self.block, values, [op], names))
        if name in self.block.placement.staged:
            slot = self.facts.layout.common_bytes[name] if takes_turns(self.block, name) else 0
            later = fenced_as_met(self.block, name)
            kept = self.plan.kept_places and bool(slot)
            copied = stage_lines(values, op, names, self.fences, slot, later, kept)
        read = self.block.placement.slots_read(op)
        if any(len(var.type.axes) == 2 for var in read):
            lines = from_slots_lines(self.block, values, [op], names)
            return self._addressed(step, here, [*lines, *copied])
        if name in self.facts.overwritten and op.kind == "fill":
            return [f"{name}_live = 0;"]
        if name in self.facts.layout.handed:
            copied = hand_lines(values, op.dst)
        return self._addressed(step, here, [*compute_lines(values, op, names), *copied])

    def _take(self, step: steps.Take, here: Here) -> list[str]:
        """What a group takes of what one has made for all; matmuls read staged tiles where they
        are."""
        assert step.op.dst is not None
        name = step.op.dst.name
        if takes_turns(self.block, name):
            return [f"{name}_turn ^= {self.facts.layout.common_bytes[name]};"]
        return [] if name in self.block.placement.staged else take_lines(here.values, step.op.dst)

    def _store(self, values: Values, op: Op, names: Names, sends: bool) -> list[str]:
        """A store, or of a late one the copies alone."""
        path = self.facts.stores[op.id]
        if path.panels is not None:
            map_name = self.facts.parameters.stores.get(op.id, "")
            store = store_of(path, map_name, values, op, names, self.helpers)
            lines = store.sent() if sends else store_lines(store, path)
            if self.plan.store_warps and not path.carried:  # one room for the panels of all stores
                lines = [carried_wait(self.block.placement), *lines]
        elif path.wide:
            lines = wide_store_lines(values, op, names)
        else:
            lines = direct_store_lines(values, op, names)
        checks = [in_grid(self.program, self.plan)] if path.held_back else []
        checks += ["part == 0"] if path.first_group else []
        return [f"if ({' && '.join(checks)}) {{", *indent(lines), "}"] if checks else lines

    def _together(self, step: Together, here: Here) -> list[str]:
        if isinstance(step, steps.Take):
            return self._take(step, here)
        if isinstance(step, steps.PanelSync):
            return [f"{LEADER} store_wait_read<0>();", group_sync(self.block.placement.groups)]
        if isinstance(step, steps.GroupSync | steps.FencedGroupSync):
            fenced = self.fences and isinstance(step, steps.FencedGroupSync)
            return [
                *(["fence_async();"] if fenced else []),
                group_sync(self.block.placement.groups),
            ]
        if isinstance(step, steps.Meet):
            # Of the two meetings around what groups hand on, the second one fences.
            last = max(self.block.placement.common) if self.plan.divided else step.tile
            fenced = self.fences and fenced_as_met(self.block, last) and step.tile == last
            return [*(["fence_async();"] if fenced else []), *self._meet(step, here)]
        tiles = {op.dst.name: op.dst for op in self.program.ops() if op.dst is not None}
        return share_lines(here.values, [tiles[name] for name in step.tiles])

    def _meet(self, step: steps.Meet, here: Here) -> list[str]:
        """Wait for the other groups; where one reads the tile in turn, that one alone waits."""
        first, threads = 1 + 2 * self.parts, 128 * self.parts
        if not self.block.placement.read_in_turn(step.tile):
            return [f"named_sync<{first}, {threads}>();"]
        who, how = ("part", "sync") if here.mine else ("whose", "arrive")
        return [
            f"if ({who} == {p}) named_{how}<{first + p}, {threads}>();" for p in range(self.parts)
        ]

    def _turn_wait(self) -> list[str]:
        return [
            f"if (part == {p}) named_sync<{1 + self.parts + p}, 256>();" for p in range(self.parts)
        ]

    def _turn_pass(self) -> list[str]:
        return [
            f"if (part == {p}) {self.turn_arrive((p + 1) % self.parts)}" for p in range(self.parts)
        ]

    def turn_arrive(self, part: int) -> str:
        """Give a group its turn."""
        return f"named_arrive<{1 + self.parts + part}, 256>();"


def raw_cursor(block: BlockProgram, ring: Ring) -> str:
    """The position of warps that turn in the ring that they take: that in the ring that they fill,
    where it has as many slots, as each of its slots is made of one of these."""
    turned = next(one for one in block.rings if block.is_turned(one))
    alike = sum(map(block.is_turned, block.rings)) == 1 and turned.depth == ring.depth
    return f"{turned.name if alike else ring.name}_cursor"
