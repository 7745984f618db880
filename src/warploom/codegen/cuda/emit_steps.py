"""The code of a role's steps: loops with their prologue and epilogue, waits, signals, ops.

What is left out, zeroed, merged or addressed in which way stands in the role's code
(`analysis.role_code`) and the kernel's facts; here it is written as C++.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from warploom.codegen.analysis.kernel_facts import KernelFacts
from warploom.codegen.analysis.role_code import (
    Code,
    Guarded,
    LoopCode,
    RoleCode,
    Rotated,
    first_step,
)
from warploom.codegen.analysis.stores import STORES, over_ring
from warploom.codegen.cuda.emit_cluster_reduce import cluster_reduce_lines
from warploom.codegen.cuda.emit_expand import Emit, Expanded
from warploom.codegen.cuda.emit_guards import guarded
from warploom.codegen.cuda.emit_mma import issue_lines
from warploom.codegen.cuda.emit_ops import (
    compute_lines,
    direct_store_lines,
    share_lines,
    wide_store_lines,
)
from warploom.codegen.cuda.emit_overlap import Overlap, ahead_lines
from warploom.codegen.cuda.emit_rows import group_sync
from warploom.codegen.cuda.emit_staged import (
    fenced_as_met,
    from_slots_lines,
    hand_lines,
    moves_on,
    stage_lines,
    take_lines,
    takes_turns,
    turn_lines,
    vectors_of,
)
from warploom.codegen.cuda.emit_store import CARRIED, LEADER, carried_lines, store_lines
from warploom.codegen.cuda.emit_tma import fill_lines
from warploom.codegen.cuda.lines import indent
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.tasks import element_of, in_grid, read_line
from warploom.codegen.cuda.values import Values, c_index
from warploom.codegen.ir import steps
from warploom.codegen.ir.block import BlockProgram, Pipeline, Ring, Role
from warploom.errors import InputError
from warploom.tile import Loop, Op, Read

PREFETCHED = 16  # iterations ahead of which L2 is asked for what they read
Names = dict[str, str]


@dataclass(frozen=True)
class Here:
    """Where steps are written.

    values       the tiles as this place sees them
    index        of the loop at hand; "" outside of loops
    base, plus   the iteration of its newest steps, as C++
    late         rings whose slot follows from the iteration
    reads        numbers that the producer reads in every iteration
    declared     rings whose slot's address has been declared before
    """

    values: Values
    index: str = ""
    base: str = ""
    plus: int = 0
    late: frozenset[str] = frozenset()
    reads: tuple[Read, ...] = ()
    declared: frozenset[str] = frozenset()

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


class StepCode:
    """Writes the steps of roles; adds the device functions that they call to `helpers`."""

    fences = True  # wgmma reads shared memory through a proxy of its own

    def __init__(self, block: BlockProgram, facts: KernelFacts, helpers: dict[str, str]) -> None:
        self.block, self.facts, self.helpers = block, facts, helpers
        self.program = block.placement.program
        self.plan = block.launch
        self.cluster = self.plan.cluster[1]
        self.parts = block.placement.parts
        self.values = Values(block.placement)

    def role(self, code: RoleCode) -> list[str]:
        """The code of one task of a role."""
        lines: list[str] = []
        for section in code.sections:
            if isinstance(section, LoopCode):
                lines += self._loop(code.role, section)
            else:
                here = Here(self.values)
                lines += [line for one in section for line in self._written(one, here, code.role)]
        return lines

    # ---- loops

    def _loop(self, role: Role, code: LoopCode) -> list[str]:
        loop = code.section.loop
        lines = [*self.range_lines(role, loop), *self._first_reads(role, code)]
        if role.computes and self.carried(loop):
            lines += [f"{LEADER} store_wait_read<0>();", group_sync(self.parts)]
        lines += [
            f"const unsigned {name}_first = {name}_cursor.slot;"
            for name in sorted(code.by_iteration)
        ]
        write = partial(self._iteration, role, code)
        if code.section.copies:
            lines += Expanded(self.values, code, write).lines()
        elif code.rotated is not None:
            lines += self._entered_in_its_middle(role, code, code.rotated)
        elif code.section.depth == 0:
            lines += self._steady(code, write, f"{loop.index}_start")
            for tail in code.epilogue:
                lines += write(self.values, tail, f"{loop.index}_stop", 0)
        else:
            lines += self._started_ahead(code, write)
        if role.computes and self.block.placement.until(loop) is not None:
            lines += self._left_out(code, write)
        for fill in code.zeroed:
            assert fill.dst is not None
            zero = compute_lines(self.values, fill, {})
            lines += [f"if (!{fill.dst.name}_live) {{", *indent(zero), "}"]
        return ["{", *indent(lines), "}"]

    def carried(self, loop: Loop) -> list[Op]:
        """The stores of a loop whose panels a warp of the loading group copies."""
        stores = [op for op in loop.body if isinstance(op, Op) and op.id in self.facts.stores]
        return [op for op in stores if self.facts.stores[op.id].carried]

    def carriers(self) -> list[str]:
        """One task of the warp that copies the panels of a group's loops."""
        lines: list[str] = []
        for loop in self.program.loops():
            index, counter = loop.index, c_name(loop.index)
            for op in self.carried(loop):
                panels = self.facts.stores[op.id].panels
                assert panels is not None
                map_name = self.facts.parameters.stores.get(op.id, "")
                names = {index: counter}
                copy = carried_lines(panels, map_name, self.values, op, names, self.helpers)
                lines += [
                    f"for (int {counter} = {c_index(loop.start)}; "
                    f"{counter} < {c_index(loop.stop)}; ++{counter}) {{",
                    *indent(copy),
                    "}",
                ]
        return lines

    def _started_ahead(self, code: LoopCode, write: Emit) -> list[str]:
        """A loop whose first iterations are started before the others: a steady state between
        beginning and end; or one iteration after the other, where there are too few."""
        section = code.section
        index, counter = section.loop.index, c_name(section.loop.index)
        body: list[str] = []
        for number, some in enumerate(code.prologue):
            lines = write(self.values, some, f"{index}_start", number)
            body += [f"{{  // start iteration {number} ahead", *indent(lines), "}"]
        body += self._steady(code, write, f"{index}_start + {section.depth}")
        for number, some in enumerate(code.epilogue):
            lines = write(self.values, some, f"{index}_stop", number)
            body += ["{  // finish what is in flight", *indent(lines), "}"]
        result = [f"if ({index}_stop - {index}_start >= {section.depth}) {{", *indent(body)]
        if section.depth > 1:
            plain = write(self.values, code.plain, counter, 0)
            result += [
                "} else {",
                f"  for (int {counter} = {index}_start; {counter} < {index}_stop; ++{counter}) {{",
                *indent(indent(plain)),
                "  }",
            ]
        elif code.section.none:
            result += [
                "} else {",
                *indent(write(self.values, code.section.none, f"{index}_start", 0)),
            ]
        return [*result, "}"]

    def _entered_in_its_middle(self, role: Role, code: LoopCode, rotated: Rotated) -> list[str]:
        """A rotated loop, which ends behind the rest of its last iteration."""
        index, counter = code.section.loop.index, c_name(code.section.loop.index)
        waited = [one.ring for one in rotated.first if isinstance(one, steps.Wait)]
        declared = frozenset(waited)
        write = partial(self._iteration, role, code, self.values)
        first = write(rotated.first, counter, 0, declared)
        body = [f"unsigned {name}_at;" for name in waited]
        vectors = [line for name in waited for line in vectors_of(self.block.ring(name))]
        body += [line.split(" = ")[0].replace("* const ", "* ") + ";" for line in vectors]
        body += [
            f"int {counter} = {index}_start;",
            *first,
            "#pragma unroll 1",
            "for (;;) {",
            *indent(write(rotated.rest, counter, 0)),
            f"  if (++{counter} == {index}_stop) break;",
            *indent([*first, *write(rotated.older, counter, 0)]),
            "}",
            *write(code.epilogue[0], f"{index}_stop", 0),
        ]
        result = [f"if ({index}_stop > {index}_start) {{", *indent(body)]
        if code.section.none:
            none = write(code.section.none, f"{index}_start", 0)
            result += ["} else {", *indent(none)]
        return [*result, "}"]

    def _steady(self, code: LoopCode, write: Emit, start: str) -> list[str]:
        index, counter = code.section.loop.index, c_name(code.section.loop.index)
        return [
            "#pragma unroll 1",
            f"for (int {counter} = {start}; {counter} < {index}_stop; ++{counter}) {{",
            *indent(write(self.values, code.steady, counter, 0)),
            "}",
        ]

    def range_lines(self, role: Role, loop: Loop) -> list[str]:
        """The bounds of a loop as this role sees them."""
        index, placement = loop.index, self.block.placement
        until = placement.until(loop) if role.computes else None
        start, stop = c_index(loop.start), c_index(loop.stop)
        if until is None:
            return [f"const int {index}_start = {start}, {index}_stop = {stop};"]
        size, split = placement.part_size, placement.split
        names = {f"{split}.begin": f"(part * {size})", f"{split}.end": f"((part + 1) * {size})"}
        own = f"::max({index}_start, ::min({index}_end, {c_index(until, names)}))"
        return [
            f"const int {index}_start = {start}, {index}_end = {stop};",
            f"const int {index}_stop = {own};  // later iterations leave this part as it is",
        ]

    def _left_out(self, code: LoopCode, write: Emit) -> list[str]:
        """What a group owes for the iterations in which its part has ended already."""
        index, counter = code.section.loop.index, c_name(code.section.loop.index)
        lines = [
            "#pragma unroll 1",
            f"for (int {counter} = {index}_stop; {counter} < {index}_end; ++{counter}) {{",
            *indent(write(self.values, code.section.skip, counter, 0)),
            "}",
        ]
        if code.section.empty:
            lines += [
                f"if ({index}_stop == {index}_start && {index}_start < {index}_end) {{",
                *indent(write(self.values, code.section.empty, f"{index}_start", 0)),
                "}",
            ]
        return lines

    # ---- steps

    def _iteration(
        self,
        role: Role,
        code: LoopCode,
        values: Values,
        codes: Sequence[Code],
        base: str,
        plus: int,
        declared: frozenset[str] = frozenset(),
    ) -> list[str]:
        loop = code.section.loop
        here = Here(values, loop.index, base, plus, code.by_iteration, loop.reads, declared)
        # Numbers are read before slots are waited for, so that nobody waits for both.
        fills = {one.stage: one for one in codes if isinstance(one, steps.Fill)}
        if self.plan.reads_ahead and fills and loop.reads and role.loads:
            lines = self._reads_ahead(loop, code.section, base)
        else:
            lines = [
                read_line(read, True, self.cluster > 1, here.names(fill))
                for fill in fills.values()
                for read in loop.reads
            ]
        return lines + [line for one in codes for line in self._written(one, here, role)]

    def _reads_ahead(self, loop: Loop, section: Pipeline, base: str) -> list[str]:
        """The numbers of an iteration, which the one before has read, and those of the next; what
        later ones read is fetched into L2."""
        if section.depth or self.cluster > 1:
            raise InputError(
                f"launch plan: reads_ahead: loop {loop.index} starts {section.depth} iterations "
                f"ahead in a cluster of {self.cluster}; expected none, and single blocks"
            )
        index = loop.index
        soon, late = (
            {index: f"::min({base} + {ahead}, {index}_stop - 1)"} for ahead in (1, PREFETCHED)
        )
        taken = [f"const int {c_name(r.name)} = {r.name}_next;" for r in loop.reads]
        following = [f"{r.name}_next = {_read(r, soon)};" for r in loop.reads]
        far = loop.reads[0]
        return [*taken, *following, f"prefetch_l2({element_of(far.array, far.at, late)});"]

    def _first_reads(self, role: Role, code: LoopCode) -> list[str]:
        """What a loop whose numbers are read ahead begins with."""
        loop = code.section.loop
        if not (role.loads and self.plan.reads_ahead and loop.reads):
            return []
        first = {loop.index: f"{loop.index}_start"}
        some = f"{loop.index}_start < {loop.index}_stop"
        names = {read.name for read in loop.reads}
        if any(names & place.symbols() for read in loop.reads for place in read.at):
            raise InputError(
                f"launch plan: reads_ahead: loop {loop.index} reads a number at the place of one "
                "that it reads; leave it out"
            )
        return [f"int {r.name}_next = {some} ? {_read(r, first)} : 0;" for r in loop.reads]

    def _written(self, code: Code, here: Here, role: Role) -> list[str]:
        if isinstance(code, Guarded):
            body = [line for one in code.body for line in self._written(one, here, role)]
            return guarded(here.values, code.guard, body, here.names(first_step(code)))
        note = f"// {code}"
        if isinstance(code, steps.OpStep):
            note += f"  {_short(code.op.where)}"
        return [note, *self._code(code, here, role)]

    def _code(self, step: steps.Step, here: Here, role: Role) -> list[str]:
        match step:
            case steps.Acquire():
                return self._acquire(step)
            case steps.Fill():
                return self._fill(step, here)
            case steps.Publish():
                return self._publish(step)
            case steps.Wait():
                return self._wait(step, here)
            case steps.Release():
                return self._release(step)
            case steps.Issue():
                return self._issue(step, here)
            case steps.Join():
                return self._join(step)
            case steps.Run():
                return self._run(step, here)
            case steps.Meet() | steps.Share() | steps.Take():
                return self._together(step, here)
            case steps.TurnWait():
                return self._turn_wait()
            case steps.TurnPass():
                return self._turn_pass()
            case steps.Ahead():
                return self.ahead(role)

    def ahead(self, role: Role) -> list[str]:
        """Take the next task and do what the role does ahead of it."""
        found = Overlap.of(self.block, role)
        first = self._written(found.first, Here(self.values), role)
        return ahead_lines(found, self.range_lines(role, found.loop), first)

    def _acquire(self, step: steps.Acquire) -> list[str]:
        ring = self.block.ring(step.ring)
        name = ring.name
        wait = f"barrier_wait({name}_empty + {name}_cursor.slot * 8, {name}_cursor.parity ^ 1);"
        if self.block.is_turned(ring):
            return [wait]
        return [
            wait,
            f"barrier_expect({name}_full + {name}_cursor.slot * 8, {ring.copied_bytes});",
        ]

    def _fill(self, step: steps.Fill, here: Here) -> list[str]:
        if self.block.is_turned(self.block.ring(step.ring)):
            return turn_lines(self.block, step.op)
        copy = self.facts.parameters.copies[step.op.id]
        return fill_lines(self.block, copy, step.op, here.names(step), self.helpers)

    def _publish(self, step: steps.Publish) -> list[str]:
        ring, name = self.block.ring(step.ring), step.ring
        full = f"{name}_full + {name}_cursor.slot * 8"
        written = [
            "fence_async();",
            "__syncwarp();  // every lane has written its part of the slot",
            f"if (lane == 0) barrier_arrive({full});",
        ]
        advance = f"advance<{ring.depth}>({name}_cursor);"
        return [*written, advance] if self.block.is_turned(ring) else [advance]

    def _wait(self, step: steps.Wait, here: Here) -> list[str]:
        ring, name = self.block.ring(step.ring), step.ring
        if self.block.is_raw(ring):
            cursor = raw_cursor(self.block, ring)
            return [
                f"const unsigned {name}_slot = {cursor}.slot;",
                f"barrier_wait({name}_full + {name}_slot * 8, {cursor}.parity);",
                f"const unsigned {name}_at = in_block({name}_base) + {name}_slot * "
                f"{ring.slot_bytes};",
                *([f"advance<{ring.depth}>({cursor});"] if cursor.startswith(name + "_c") else []),
            ]
        found = [
            f"const unsigned {name}_at = in_block({name}_base) + {name}_cursor.slot * "
            f"{ring.slot_bytes};",
            *vectors_of(ring),
        ]
        if name in here.declared:
            found = [re.sub(r"^.*?(\w+ = )", r"\1", line) for line in found]
        return [
            f"barrier_wait({name}_full + {name}_cursor.slot * 8, {name}_cursor.parity);",
            *found,
            f"advance<{ring.depth}>({name}_cursor);",
        ]

    def _release(self, step: steps.Release) -> list[str]:
        ring, name = self.block.ring(step.ring), step.ring
        raw = self.block.is_raw(ring)
        bar = f"{name}_empty + {name}_{'slot' if raw else 'oldest'} * 8"
        if name in self.facts.crossing:
            arrive = f"if (lane < {self.cluster}) barrier_arrive_at({bar}, lane);"
        else:
            arrive = f"if (lane == 0) barrier_arrive({bar});"
        stored: list[str] = []
        over = over_ring(self.plan, self.block.rings)
        if over is not None and over.name == name:
            # The group's rows of the slot are free when its stores have read them.
            stored = [f"{LEADER} store_wait_read<0>();", group_sync(self.parts)]
        if name in self.facts.read_by_lanes:
            stored.append("__syncwarp();  // every lane has read its part of the slot")
        if raw:
            return [*stored, arrive]
        return [*stored, arrive, f"if (++{name}_oldest == {ring.depth}) {name}_oldest = 0;"]

    def _issue(self, step: steps.Issue, here: Here) -> list[str]:
        assert step.op.dst is not None
        first = step.op.dst.name in self.facts.overwritten
        return self._addressed(
            step, here, issue_lines(self.block, here.values, step.op, self.helpers, first)
        )

    def _addressed(self, step: steps.OpStep, here: Here, lines: list[str]) -> list[str]:
        """The lines of an op, with the slots of its own iteration of late rings."""
        found: list[str] = []
        for ring in self.block.rings_read(step.op):
            name, index = ring.name, here.index
            if name in here.late:
                number = f"({here.names(step)[index]} - {index}_start)"
                slot = f"({name}_first + {number}) % {ring.depth}u"
                found.append(
                    f"const unsigned {name}_at = in_block({name}_base) + {slot} * "
                    f"{ring.slot_bytes};"
                )
                found += vectors_of(ring)
        return ["{", *indent([*found, *lines]), "}"] if found else lines

    def _join(self, step: steps.Join) -> list[str]:
        return [f"wgmma_wait<{step.count}>();", *[f"pin({c_name(name)});" for name in step.names]]

    def _run(self, step: steps.Run, here: Here) -> list[str]:
        op, values, names = step.op, here.values, here.names(step)
        if op.kind in STORES:
            return self._store(values, op, names)
        if op.kind == "reduce_scatter":
            return cluster_reduce_lines(values, op, self.facts.layout.parts_bytes)
        assert op.dst is not None
        name, copied = op.dst.name, list[str]()
        if self.fences and moves_on(self.block.placement, op):
            return self._addressed(step, here, from_slots_lines(self.block, values, op, names))
        if name in self.block.placement.staged:
            slot = self.facts.layout.common_bytes[name] if takes_turns(self.block, name) else 0
            later = fenced_as_met(self.block, name)
            copied = stage_lines(values, op, names, self.fences, slot, later)
        read = self.block.placement.slots_read(op)
        if any(len(var.type.axes) == 2 for var in read):
            lines = from_slots_lines(self.block, values, op, names)
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
        return [] if name in self.block.placement.staged else take_lines(here.values, step.op.dst)

    def _store(self, values: Values, op: Op, names: Names) -> list[str]:
        path = self.facts.stores[op.id]
        if path.panels is not None:
            map_name = self.facts.parameters.stores.get(op.id, "")
            lines = store_lines(path.panels, map_name, values, op, names, self.helpers, path)
            if self.plan.store_warps and not path.carried:  # one room for the panels of all stores
                lines = [f"barrier_wait(carried_empty + part * 8, {CARRIED});", *lines]
        elif path.wide:
            lines = wide_store_lines(values, op, names)
        else:
            lines = direct_store_lines(values, op, names)
        checks = [in_grid(self.program, self.plan)] if path.held_back else []
        checks += ["part == 0"] if path.first_group else []
        return [f"if ({' && '.join(checks)}) {{", *indent(lines), "}"] if checks else lines

    def _together(self, step: steps.Meet | steps.Share | steps.Take, here: Here) -> list[str]:
        if isinstance(step, steps.Take):
            return self._take(step, here)
        if isinstance(step, steps.Meet):
            meet = f"named_sync<{1 + 2 * self.parts}, {128 * self.parts}>();"
            fenced = self.fences and fenced_as_met(self.block, step.tile)
            return ["fence_async();", meet] if fenced else [meet]
        tiles = {op.dst.name: op.dst for op in self.program.ops() if op.dst is not None}
        return share_lines(here.values, [tiles[name] for name in step.tiles])

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


def _read(read: Read, names: Names) -> str:
    return f"__ldg({element_of(read.array, read.at, names)})"


def _short(where: str) -> str:
    return where.rsplit("/", 1)[-1]
