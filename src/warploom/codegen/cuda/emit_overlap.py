"""The code of overlapped tasks (`passes.overlap`): what a group does ahead of the next one."""

from __future__ import annotations

from warploom.codegen.cuda.emit_steps import StepCode, indent
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.tasks import count_lines, next_lines, position_lines
from warploom.codegen.cuda.values import Values
from warploom.codegen.ir.block import BlockProgram, Pipeline, Role
from warploom.codegen.ir.steps import Issue, Wait


class OverlapCode:
    """Writes the loop over tasks of one compute role.

    The next task's number and position are variables, as are the slots of rings taken once a task
    and the result of the matmul that is started ahead.
    """

    def __init__(self, block: BlockProgram, role: Role, values: Values, steps: StepCode) -> None:
        self.block, self.role, self.values, self.steps = block, role, values, steps
        self.program, self.plan = block.placement.program, block.schedule.launch
        self.loop = next(s.loop for s in role.sections if isinstance(s, Pipeline))
        self.inside = {
            step.ring
            for section in role.sections
            if isinstance(section, Pipeline)
            for step in section.steady
            if isinstance(step, Wait)
        }
        waits = [step.ring for step in role.ahead if isinstance(step, Wait)]
        self.outer = [ring for ring in waits if ring not in self.inside]
        self.inner = [ring for ring in waits if ring in self.inside]
        self.first = next(step for step in role.ahead if isinstance(step, Issue))
        assert self.first.op.dst is not None
        self.result = self.first.op.dst
        self.symbols = [c_name(name) for name, _ in self.program.grid]
        self.symbols += [c_name(read.name) for read in self.program.reads]

    def lines(self, body: list[str]) -> list[str]:
        """The loop over tasks around the code of one."""
        setup, _ = next_lines(self.plan)
        result = c_name(self.result.name)
        return [
            *count_lines(self.program, self.plan),
            *setup,
            *[f"int next_{name} = 0;" for name in self.symbols],
            *[f"unsigned {ring}_at = in_block({ring}_base);" for ring in self.outer],
            self.values.declare(self.result),
            "// Ahead of the first task",
            *self.ahead(),
            "wgmma_wait<0>();",
            f"pin({result});",
            "#pragma unroll 1",
            "while (next_task < tasks) {",
            *indent([f"const int {name} = next_{name};" for name in self.symbols]),
            *indent(body),
            "}",
        ]

    def ahead(self) -> list[str]:
        """Take the next task and start its first matmul.

        Without a next task, or without iterations of its loop, the matmul reads what lies in some
        slot and nobody reads its result: ptxas follows matmuls only where every path has them.
        """
        _, take = next_lines(self.plan)
        loop = self.loop.index
        lines = [*take, *[f"unsigned {r}_at = in_block({r}_base);" for r in self.inner]]
        inner = [line for ring in self.inner for line in self._wait(ring)]
        found = [
            "const int task = next_task;",
            *position_lines(self.program, self.plan, loads=False),
            *[f"next_{name} = {name};" for name in self.symbols],
            *[line for ring in self.outer for line in self._wait(ring)],
            *self.steps.range_lines(self.role, self.loop),
            f"if ({loop}_stop > {loop}_start) {{",
            *indent(inner),
            "}",
        ]
        lines += ["if (next_task < tasks) {", *indent(found), "}"]
        lines += self.steps.lines_of(self.values, self.first, {})
        return ["{", *indent(lines), "}"]

    def _wait(self, ring: str) -> list[str]:
        return [
            f"barrier_wait({ring}_full + {ring}_cursor.slot * 8, {ring}_cursor.parity);",
            f"{ring}_at = in_block({ring}_base) + {ring}_cursor.slot * "
            f"{self.block.ring(ring).slot_bytes};",
            f"advance<{self.block.ring(ring).depth}>({ring}_cursor);",
        ]
