"""The code of a role: its loops with their prologue and epilogue, around the code of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from warploom.codegen.analysis.kernel_facts import Ending
from warploom.codegen.analysis.role_code import (
    Code,
    Guarded,
    InTurn,
    LoopCode,
    RoleCode,
    first_step,
)
from warploom.codegen.cuda.emit_guards import guarded
from warploom.codegen.cuda.emit_ops import compute_lines
from warploom.codegen.cuda.emit_overlap import Overlap, ahead_lines
from warploom.codegen.cuda.emit_rows import group_sync
from warploom.codegen.cuda.emit_staged import from_slots_lines, read_together
from warploom.codegen.cuda.emit_steps import Here, Names, StepLines
from warploom.codegen.cuda.emit_store import (
    LEADER,
    carried_lines,
    carried_wait,
    store_of,
    where_it_has_rows,
)
from warploom.codegen.cuda.emit_tma import fetch_lines
from warploom.codegen.cuda.lines import indent
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.tasks import element_of, read_line
from warploom.codegen.cuda.values import c_index
from warploom.codegen.ir import steps
from warploom.codegen.ir.block import Pipeline, Role
from warploom.errors import InputError
from warploom.tile import Loop, Op, Read

Emit = Callable[[Sequence[Code], str, int], list[str]]
# ptxas moves nothing over a read of the clock that something uses: here a store that never is.
HOLD = """DEVICE void hold(unsigned at) {
  asm volatile("{ .reg .b64 now; .reg .pred never; mov.u64 now, %%clock64; "
               "setp.lt.s64 never, now, 0; @never st.shared.b64 [%0], now; }" ::"r"(at) : "memory");
}
"""
PREFETCHED = 16  # iterations ahead of which L2 is asked for what they read


class StepCode(StepLines):
    """Writes the steps of roles."""

    def role(self, code: RoleCode) -> list[str]:
        """The code of one task of a role."""
        lines: list[str] = []
        ending: Ending | None = None
        held: list[str] = []  # what is left out where the store of the ending has no rows
        for section, after in zip(code.sections, (*code.sections[1:], None), strict=True):
            parts = (section,) if isinstance(section, LoopCode) else section
            for place, one in enumerate(parts):
                ending = ending or self._ending(parts[place:], after)
                own = (
                    self._loop(code.role, one)
                    if isinstance(one, LoopCode)
                    else self._written(one, Here(self.values), code.role)
                )
                if ending is None:
                    lines += own
                    continue
                held += own
                if _ends(one, ending, code.role):
                    lines += where_it_has_rows(ending.store, held)
                    ending, held = None, []
        return lines

    def _ending(self, some: Sequence[Code | LoopCode], after: object) -> Ending | None:
        """The ending of a loop that these steps are, or are done for alone."""
        loop = some[0] if isinstance(some[0], LoopCode) else after
        if not isinstance(loop, LoopCode):
            return None
        found = self.facts.endings.get(loop.section.loop.index)
        if found is None or isinstance(some[0], LoopCode):
            return found
        early = [isinstance(one, steps.Run) and one.op.id in found.before for one in some]
        return found if all(early) else None

    # ---- loops

    def _loop(self, role: Role, code: LoopCode) -> list[str]:
        loop = code.section.loop
        lines = [*self.range_lines(role, loop), *self._first_reads(role, code)]
        if role.computes and self.carried(loop):
            lines += [f"{LEADER} store_wait_read<0>();", group_sync(self.block.placement.groups)]
        lines += [
            f"const unsigned {name}_first = {name}_cursor.slot;"
            for name in sorted(code.by_iteration - self.facts.kept)
        ]
        write = partial(self._iteration, role, code)
        if code.section.depth == 0:
            lines += self._steady(code, write, f"{loop.index}_start")
            for tail in code.epilogue:
                lines += write(tail, f"{loop.index}_stop", 0)
        else:
            lines += self._started_ahead(code, write)
        for fill in code.zeroed:
            assert fill.dst is not None
            zero = compute_lines(self.values, fill, {})
            lines += [f"if (!{fill.dst.name}_live) {{", *indent(zero), "}"]
        if role.computes and self.block.placement.until(loop) is not None:
            lines += self._left_out(code, write)
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
                path, names = self.facts.stores[op.id], {index: counter}
                map_name = self.facts.parameters.stores.get(op.id, "")
                store = store_of(path, map_name, self.values, op, names, self.helpers)
                copy = carried_lines(store, self.helpers)
                start, step = c_index(loop.start), f"++{counter}"
                if store.alternates:
                    start, step = f"{start} + part", f"{counter} += {self.parts}"
                lines += [
                    f"for (int {counter} = {start}; {counter} < {c_index(loop.stop)}; {step}) {{",
                    *indent(copy),
                    "}",
                ]
        return lines

    def asked_early(self, role: Role) -> list[str]:
        """L2 is asked for what the first iterations load, where numbers say by now that it is: they
        are read again, and copied is what they say then."""
        lines: list[str] = []
        for loop in self.program.loops():
            index, counter = loop.index, c_name(loop.index)
            found = [op for op in loop.body if isinstance(op, Op)]
            copied = [op for op in found if op.id in self.facts.parameters.copies]
            names = {index: counter}
            body = [self._number_now(read, names) for read in loop.reads]
            for op in copied:
                copy = self.facts.parameters.copies[op.id]
                body += fetch_lines(self.block, copy, op, names, self.helpers)
            stop = f"::min({index}_stop, {index}_start + {self.plan.fetch_early})"
            lines += [
                "{",
                *indent(self.range_lines(role, loop)),
                f"  for (int {counter} = {index}_start; {counter} < {stop}; ++{counter}) {{",
                *indent(indent(body)),
                "  }",
                "}",
            ]
        first = [self._number_now(read, {}) for read in self.program.reads]
        return ["{", *indent([*first, *lines]), "}"]

    def _number_now(self, read: Read, names: Names) -> str:
        return read_line(read, True, self.cluster > 1, names, "number_now")

    def _started_ahead(self, code: LoopCode, write: Emit) -> list[str]:
        """A loop whose first iterations are started before the others: a steady state between
        beginning and end; or one iteration after the other, where there are too few."""
        section = code.section
        index, counter = section.loop.index, c_name(section.loop.index)
        body: list[str] = []
        for number, some in enumerate(code.prologue):
            lines = write(some, f"{index}_start", number)
            body += [f"{{  // start iteration {number} ahead", *indent(lines), "}"]
        body += self._steady(code, write, f"{index}_start + {section.depth}")
        for number, some in enumerate(code.epilogue):
            lines = write(some, f"{index}_stop", number)
            body += ["{  // finish what is in flight", *indent(lines), "}"]
        result = [f"if ({index}_stop - {index}_start >= {section.depth}) {{", *indent(body)]
        if section.depth > 1:
            plain = write(code.plain, counter, 0)
            result += [
                "} else {",
                f"  for (int {counter} = {index}_start; {counter} < {index}_stop; ++{counter}) {{",
                *indent(indent(plain)),
                "  }",
            ]
        elif code.section.none:
            result += ["} else {", *indent(write(code.section.none, f"{index}_start", 0))]
        return [*result, "}"]

    def _steady(self, code: LoopCode, write: Emit, start: str) -> list[str]:
        index, counter = code.section.loop.index, c_name(code.section.loop.index)
        return [
            "#pragma unroll 1",
            f"for (int {counter} = {start}; {counter} < {index}_stop; ++{counter}) {{",
            *indent(write(code.steady, counter, 0)),
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
            *indent(write(code.section.skip, counter, 0)),
            "}",
        ]
        if code.section.empty:
            lines += [
                f"if ({index}_stop == {index}_start && {index}_start < {index}_end) {{",
                *indent(write(code.section.empty, f"{index}_start", 0)),
                "}",
            ]
        return lines

    # ---- steps

    def _iteration(
        self, role: Role, code: LoopCode, codes: Sequence[Code], base: str, plus: int
    ) -> list[str]:
        loop = code.section.loop
        here = Here(self.values, loop.index, base, plus, code.by_iteration, loop.reads)
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
        before: Code | None = None
        left = list(codes)
        while left:
            one = left.pop(0)
            if (others := self._reading_with(one, left)) and not here.late:
                some = [one, *(left.pop(0) for _ in range(others))]
                lines += self._read_together(some, here)
                before = some[-1]
                continue
            held = self.plan.hold_arithmetic and self.fences and _computes(before)
            if held and isinstance(one, steps.Join):
                self.helpers["hold"] = HOLD
                lines.append("hold(shared);")
            lines += self._written(one, here, role)
            before = one
        return lines

    def _reading_with(self, one: Code, later: Sequence[Code]) -> int:
        """How many of the next steps read the same slots into registers: together, once."""
        count = 0
        while count < len(later) and isinstance(one, steps.Run):
            other = later[count]
            if not isinstance(other, steps.Run) or other.stage != one.stage or not self.fences:
                break
            if not read_together(self.values, one.op, other.op):
                break
            count += 1
        return count

    def _read_together(self, some: Sequence[Code], here: Here) -> list[str]:
        runs = [one for one in some if isinstance(one, steps.Run)]
        notes = [f"// {one}  {_short(one.op.where)}" for one in runs]
        ops, names = [one.op for one in runs], here.names(runs[0])
        return [*notes, *from_slots_lines(self.block, here.values, ops, names)]

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
        if isinstance(code, InTurn):
            return self._in_turn(code, here, role)
        note = f"// {code}"
        if isinstance(code, steps.OpStep):
            note += f"  {_short(code.op.where)}"
        return [note, *self._code(code, here, role)]

    def _in_turn(self, code: InTurn, here: Here, role: Role) -> list[str]:
        """What the group whose turn it is does, and what the others do."""
        ways = [
            [line for one in some for line in self._written(one, replace(here, mine=mine), role)]
            for some, mine in ((code.own, True), (code.others, False))
        ]
        counter = here.names(first_step(code))[here.index]
        return [
            f"const int whose = ({counter} - {here.index}_start) % {self.parts};",
            "if (whose == part) {",
            *indent(ways[0]),
            "} else {",
            f"  {carried_wait(self.block.placement)}",
            *indent(ways[1]),
            "}",
            "carried_parity ^= 1;",
        ]

    def _code(self, step: steps.Step, here: Here, role: Role) -> list[str]:
        match step:
            case steps.Acquire():
                return self._acquire(step, here)
            case steps.Fill():
                return self._fill(step, here)
            case steps.Publish():
                return self._publish(step)
            case steps.Wait():
                return self._wait(step, role.transposes)
            case steps.Release():
                return self._release(step, role.transposes)
            case steps.Issue():
                return self._issue(step, here)
            case steps.Join():
                return self._join(step)
            case steps.Run() | steps.Send():
                return self._run(step, here)
            case (
                steps.Meet()
                | steps.Share()
                | steps.Take()
                | steps.GroupSync()
                | steps.FencedGroupSync()
                | steps.PanelSync()
            ):
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


def _ends(one: Code | LoopCode, ending: Ending, role: Role) -> bool:
    """Whether a part is the last of what is left out: the store, or in roles that do not compute
    the loop."""
    if isinstance(one, LoopCode):
        return not role.computes
    return isinstance(one, steps.Run) and one.op == ending.store


def _computes(code: Code | None) -> bool:
    """Whether code is arithmetic."""
    step = first_step(code) if code is not None else None
    return isinstance(step, steps.Run) and not step.op.kind.startswith("store")


def _read(read: Read, names: Names) -> str:
    return f"GIVEN({element_of(read.array, read.at, names)})"


def _short(where: str) -> str:
    return where.rsplit("/", 1)[-1]
