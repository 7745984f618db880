"""The code of a role's steps: loops with their prologue and epilogue, waits, signals, ops."""

from __future__ import annotations

from collections.abc import Callable

from warploom.codegen.analysis.kernel_facts import KernelFacts
from warploom.codegen.analysis.stores import STORES, over_ring
from warploom.codegen.cuda.emit_cluster_reduce import cluster_reduce_lines
from warploom.codegen.cuda.emit_expand import Expanded
from warploom.codegen.cuda.emit_mma import issue_lines
from warploom.codegen.cuda.emit_ops import compute_lines, direct_store_lines, wide_store_lines
from warploom.codegen.cuda.emit_rows import group_sync
from warploom.codegen.cuda.emit_staged import stage_lines
from warploom.codegen.cuda.emit_store import LEADER, store_lines
from warploom.codegen.cuda.emit_tma import fill_lines
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.tasks import in_grid
from warploom.codegen.cuda.values import Values, c_index
from warploom.codegen.cuda.votes import Votes
from warploom.codegen.ir.block import BlockProgram, Pipeline, Ring, Role, Straight
from warploom.codegen.ir.steps import (
    Acquire,
    Ahead,
    Fill,
    Issue,
    Join,
    OpStep,
    Publish,
    Release,
    Run,
    Step,
    TurnPass,
    TurnWait,
    Wait,
)
from warploom.tile import Loop, Op

Names = dict[str, str]


class StepCode:
    """Writes steps; `lazy` are the accumulators whose zeroing the first matmul does itself."""

    def __init__(self, block: BlockProgram, facts: KernelFacts, helpers: dict[str, str]) -> None:
        self.block, self.facts, self.helpers = block, facts, helpers
        self.program = block.placement.program
        self.plan = block.schedule.launch
        self.cluster = self.plan.cluster[1]
        self.parts = block.placement.parts
        self.lazy = self._lazy_zeros()
        self.spread: dict[str, str] = {}
        self._learns = True
        self.fences = True  # wgmma reads shared memory through a proxy of its own
        self.ahead: Callable[[], list[str]] = list[str]  # (`emit_overlap`)

    def _lazy_zeros(self) -> set[str]:
        # Accumulators that are only zeroed before, and only accumulated into by, one loop.
        found: set[str] = set()
        for op in self.program.ops():
            if op.kind != "mma" or len(op.srcs) != 3 or op.dst is None:
                continue
            name = op.dst.name
            touching = [
                other
                for other in self.program.ops()
                if other.id <= op.id and (other.dst == op.dst or op.dst in other.srcs)
            ]
            writers = [o for o in self.program.ops() if o.dst == op.dst]
            inside = {o.id for loop in self.program.loops() for o in loop.body if isinstance(o, Op)}
            in_loops = [
                o
                for o in self.program.ops()
                if o.id in inside and (o.dst == op.dst or op.dst in o.srcs)
            ]
            if (
                [o.kind for o in touching] == ["fill", "mma"]
                and touching[0].value == 0
                and len(in_loops) == 1
                and op.id in inside
                and touching[0].id not in inside
                and writers
            ):
                found.add(name)
        return found

    def section(self, role: Role, values: Values, section: Straight | Pipeline) -> list[str]:
        """The code of one section of a role."""
        values.order = {}
        if isinstance(section, Straight):
            self.spread = {}
            return [line for step in section.steps for line in self.lines_of(values, step, {})]
        loop = section.loop
        values.order = {
            step.op.id: (step.stage, place)
            for place, step in enumerate(section.steady)
            if isinstance(step, OpStep)
        }
        index, counter = loop.index, c_name(loop.index)
        lines = self.range_lines(role, loop)
        self.spread = {} if role.loads else self._spread(section)
        lines += [
            f"const unsigned {name}_first = {name}_cursor.slot;" for name in sorted(self.spread)
        ]
        block = ["{", *indent(lines)]
        inner: list[str] = []
        if section.copies:
            self._learns = False  # an unrolled loop's code is straight only in part
            inner = Expanded(values, section, self._steps).lines()
            self._learns = True
        elif section.depth == 0:
            inner = self._steady(values, section, f"{index}_start")
            for tail in section.epilogue:
                inner += self._steps(values, tail, loop, f"{index}_stop", 0)
        else:
            inner.append(f"if ({index}_stop - {index}_start >= {section.depth}) {{")
            body: list[str] = []
            for number, steps in enumerate(section.prologue):
                ops = tuple(step.op.id for step in steps if isinstance(step, OpStep))
                values.straight = ops if section.depth == 1 else ()
                lines = self._steps(values, steps, loop, f"{index}_start", number)
                body += [f"{{  // start iteration {number} ahead", *indent(lines), "}"]
            values.straight = ()
            body += self._steady(values, section, f"{index}_start + {section.depth}")
            for number, steps in enumerate(section.epilogue):
                lines = self._steps(values, steps, loop, f"{index}_stop", number)
                body += ["{  // finish what is in flight", *indent(lines), "}"]
            inner += indent(body)
            values.known.clear()
            if section.depth > 1:
                inner.append("} else {")
                inner += indent(
                    [
                        f"for (int {counter} = {index}_start; {counter} < {index}_stop; "
                        f"++{counter}) {{",
                        *indent(self._steps(values, section.plain, loop, counter, 0)),
                        "}",
                    ]
                )
            elif section.none:
                inner.append("} else {")
                inner += indent(self._steps(values, section.none, loop, f"{index}_start", 0))
            inner.append("}")
        block += indent(inner)
        values.known.clear()
        block += indent(self._left_out(role, values, section))
        for name in sorted(self.lazy):
            if not role.loads and self._accumulates(loop, name):
                block += indent(self._zero_when_empty(values, name))
        values.known.clear()
        return [*block, "}"]

    def _spread(self, section: Pipeline) -> dict[str, str]:
        """Rings whose slot is read stages after its wait, with the loop's index: there the slot
        follows from the iteration, and is not that of the latest wait."""
        waits = {s.ring: s.stage for s in section.steady if isinstance(s, Wait)}
        late = {
            ring.name
            for step in section.steady
            if isinstance(step, Issue)
            for ring in self._rings(step.op)
            if ring.name in waits and waits[ring.name] != step.stage
        }
        return dict.fromkeys(late, section.loop.index)

    def _rings(self, op: Op) -> list[Ring]:
        shared = [src.name for src in op.srcs[:2] if self.block.placement.is_shared(src)]
        found = {ring.name: ring for ring, _ in map(self.block.home, shared)}
        return list(found.values())

    def _addressed(self, step: Issue, names: Names, lines: list[str]) -> list[str]:
        """The lines of a matmul; where a ring is spread, with the slot of their own iteration."""
        found: list[str] = []
        for ring in self._rings(step.op):
            name, index = ring.name, self.spread.get(ring.name)
            if index is not None:
                number = f"({names[index]} - {index}_start)"
                slot = f"({name}_first + {number}) % {ring.depth}u"
                found.append(
                    f"const unsigned {name}_at = in_block({name}_base) + {slot} * "
                    f"{ring.slot_bytes};"
                )
        return ["{", *indent([*found, *lines]), "}"] if found else lines

    def range_lines(self, role: Role, loop: Loop) -> list[str]:
        """The bounds of a loop as this role sees them."""
        index, placement = loop.index, self.block.placement
        until = None if role.loads else placement.until(loop)
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

    def _left_out(self, role: Role, values: Values, section: Pipeline) -> list[str]:
        loop = section.loop
        if role.loads or self.block.placement.until(loop) is None:
            return []
        index, counter = loop.index, c_name(loop.index)
        lines = [
            "#pragma unroll 1",
            f"for (int {counter} = {index}_stop; {counter} < {index}_end; ++{counter}) {{",
            *indent(self._steps(values, section.skip, loop, counter, 0)),
            "}",
        ]
        if section.empty:
            lines += [
                f"if ({index}_stop == {index}_start && {index}_start < {index}_end) {{",
                *indent(self._steps(values, section.empty, loop, f"{index}_start", 0)),
                "}",
            ]
        return lines

    def _accumulates(self, loop: Loop, name: str) -> bool:
        return any(
            isinstance(o, Op) and o.dst is not None and o.dst.name == name for o in loop.body
        )

    def _zero_when_empty(self, values: Values, name: str) -> list[str]:
        fill = next(
            o for o in self.program.ops() if o.dst and o.dst.name == name and o.kind == "fill"
        )
        return [f"if (!{name}_live) {{", *indent(compute_lines(values, fill, {})), "}"]

    def _steady(self, values: Values, section: Pipeline, start: str) -> list[str]:
        index, counter = section.loop.index, c_name(section.loop.index)
        values.known.clear()
        lines = [
            "#pragma unroll 1",
            f"for (int {counter} = {start}; {counter} < {index}_stop; ++{counter}) {{",
            *indent(self._steps(values, section.steady, section.loop, counter, 0)),
            "}",
        ]
        values.known.clear()  # the loop may have run or not
        return lines

    def _steps(
        self, values: Values, steps: tuple[Step, ...], loop: Loop, base: str, plus: int
    ) -> list[str]:
        lines: list[str] = []
        votes = Votes(values.placement.fusion, values.votes)
        for step in steps:
            shift = plus - step.stage
            value = base if shift == 0 else f"({base} {'+' if shift > 0 else '-'} {abs(shift)})"
            new = self.lines_of(values, step, {loop.index: value})
            lines = votes.join(lines, new, step.op if isinstance(step, OpStep) else None)
        return lines

    def lines_of(self, values: Values, step: Step, names: Names) -> list[str]:
        """The lines of one step."""
        if not isinstance(step, OpStep):
            return [f"// {step}", *self._code(values, step, names)]
        lines = self._code(values, step, names)
        self._learn(values, step.op)
        return [f"// {step}  {_short(step.op.where)}", *lines]

    def _code(self, values: Values, step: Step, names: Names) -> list[str]:
        match step:
            case Acquire():
                return self._acquire(step)
            case Fill():
                return self._fill(step, names)
            case Publish():
                return self._publish(step)
            case Wait():
                return self._wait(step)
            case Release():
                return self._release(step)
            case Issue():
                return self._issue(values, step, names)
            case Join():
                return self._join(step)
            case Run():
                return self._run(values, step, names)
            case TurnWait():
                return self._turn_wait()
            case TurnPass():
                return self._turn_pass()
            case Ahead():
                return self.ahead()

    def _acquire(self, step: Acquire) -> list[str]:
        ring = self.block.ring(step.ring)
        name = ring.name
        return [
            f"barrier_wait({name}_empty + {name}_cursor.slot * 8, {name}_cursor.parity ^ 1);",
            f"barrier_expect({name}_full + {name}_cursor.slot * 8, {ring.copied_bytes});",
        ]

    def _fill(self, step: Fill, names: Names) -> list[str]:
        copy = self.facts.parameters.copies[step.op.id]
        return fill_lines(self.block, copy, step.op, names, self.helpers)

    def _publish(self, step: Publish) -> list[str]:
        return [f"advance<{self.block.ring(step.ring).depth}>({step.ring}_cursor);"]

    def _wait(self, step: Wait) -> list[str]:
        ring, name = self.block.ring(step.ring), step.ring
        return [
            f"barrier_wait({name}_full + {name}_cursor.slot * 8, {name}_cursor.parity);",
            f"const unsigned {name}_at = in_block({name}_base) + {name}_cursor.slot * "
            f"{ring.slot_bytes};",
            f"advance<{ring.depth}>({name}_cursor);",
        ]

    def _release(self, step: Release) -> list[str]:
        ring, name = self.block.ring(step.ring), step.ring
        bar = f"{name}_empty + {name}_oldest * 8"
        if name in self.facts.crossing:
            arrive = f"if (lane < {self.cluster}) barrier_arrive_at({bar}, lane);"
        else:
            arrive = f"if (lane == 0) barrier_arrive({bar});"
        stored: list[str] = []
        over = over_ring(self.plan, self.block.rings)
        if over is not None and over.name == name:
            # The group's rows of the slot are free when its stores have read them.
            stored = [f"{LEADER} store_wait_read<0>();", group_sync(self.parts)]
        return [*stored, arrive, f"if (++{name}_oldest == {ring.depth}) {name}_oldest = 0;"]

    def _learn(self, values: Values, op: Op) -> None:
        """What is known of tiles after an op."""
        if op.dst is not None and self._learns:
            values.known.pop(op.dst.name, None)
            if op.kind == "fill":
                values.known[op.dst.name] = float(op.value or 0)

    def _issue(self, values: Values, step: Issue, names: Names) -> list[str]:
        assert step.op.dst is not None
        lazy = step.op.dst.name in self.lazy
        lines = issue_lines(self.block, values, step.op, self.helpers, lazy)
        return self._addressed(step, names, lines)

    def _join(self, step: Join) -> list[str]:
        return [f"wgmma_wait<{step.count}>();", *[f"pin({c_name(name)});" for name in step.names]]

    def _run(self, values: Values, step: Run, names: Names) -> list[str]:
        op = step.op
        if op.dst is not None and op.dst.name in self.lazy and op.kind == "fill":
            return [f"{op.dst.name}_live = 0;"]
        if op.kind in STORES:
            return self._store(values, op, names)
        if op.kind == "reduce_scatter":
            return cluster_reduce_lines(values, op, self.facts.layout.parts_bytes)
        lines = compute_lines(values, op, names)
        if op.dst is not None and op.dst.name in self.block.placement.staged:
            lines += stage_lines(values, op, names, self.fences)
        return lines

    def _store(self, values: Values, op: Op, names: Names) -> list[str]:
        path = self.facts.stores[op.id]
        if path.panels is not None:
            map_name = self.facts.parameters.stores[op.id]
            lines = store_lines(path.panels, map_name, values, op, names, self.helpers)
        elif path.wide:
            lines = wide_store_lines(values, op, names)
        else:
            lines = direct_store_lines(values, op, names)
        checks = [in_grid(self.program, self.plan)] if path.held_back else []
        checks += ["part == 0"] if path.first_group else []
        return [f"if ({' && '.join(checks)}) {{", *indent(lines), "}"] if checks else lines

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


def indent(lines: list[str]) -> list[str]:
    """The lines one level deeper."""
    return [f"  {line}" for line in lines]


def _short(where: str) -> str:
    return where.rsplit("/", 1)[-1]
