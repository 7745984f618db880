"""The code of overlapped tasks (`passes.overlap`): what a group does ahead of the next one.

The next task's number and position are variables, as are the slots of rings taken once a task and
the result of the matmul that is started ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.codegen.cuda.lines import indent
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.tasks import count_lines, next_lines, position_lines
from warploom.codegen.cuda.values import Values
from warploom.codegen.ir.block import BlockProgram, Pipeline, Role
from warploom.codegen.ir.steps import Issue, Wait
from warploom.tile import Loop, Var


@dataclass(frozen=True)
class Overlap:
    """What a role does ahead of a task: waits for rings filled once a task and for those of its
    loop, and the loop's first matmul."""

    block: BlockProgram
    loop: Loop
    outer: tuple[str, ...]
    inner: tuple[str, ...]
    first: Issue

    @classmethod
    def of(cls, block: BlockProgram, role: Role) -> Overlap:
        """What a role does ahead of its tasks."""
        (loop,) = (section for section in role.sections if isinstance(section, Pipeline))
        inside = {step.ring for step in loop.steady if isinstance(step, Wait)}
        waits = [step.ring for step in role.ahead if isinstance(step, Wait)]
        outer = tuple(ring for ring in waits if ring not in inside)
        inner = tuple(ring for ring in waits if ring in inside)
        first = next(step for step in role.ahead if isinstance(step, Issue))
        return cls(block, loop.loop, outer, inner, first)

    @property
    def result(self) -> Var:
        """The tile of the matmul that is started ahead."""
        assert self.first.op.dst is not None
        return self.first.op.dst

    @property
    def symbols(self) -> list[str]:
        """What tells one task from another, as C++ names."""
        program = self.block.placement.program
        names = [name for name, _ in program.grid] + [read.name for read in program.reads]
        return [c_name(name) for name in names]


def overlapped_lines(
    overlap: Overlap, values: Values, ahead: list[str], body: list[str]
) -> list[str]:
    """The loop over tasks around the code of one (`body`); `ahead` is `ahead_lines`."""
    program, plan = overlap.block.placement.program, overlap.block.launch
    setup, _ = next_lines(plan)
    return [
        *count_lines(program, plan),
        *setup,
        *[f"int next_{name} = 0;" for name in overlap.symbols],
        *[f"unsigned {ring}_at = in_block({ring}_base);" for ring in overlap.outer],
        values.declare(overlap.result),
        "// Ahead of the first task",
        *ahead,
        "wgmma_wait<0>();",
        f"pin({c_name(overlap.result.name)});",
        "#pragma unroll 1",
        "while (next_task < tasks) {",
        *[f"  const int {name} = next_{name};" for name in overlap.symbols],
        *indent(body),
        "}",
    ]


def ahead_lines(overlap: Overlap, ranges: list[str], first: list[str]) -> list[str]:
    """Take the next task and start its first matmul (`first`); `ranges` are its loop's bounds.

    Without a next task, or without iterations of its loop, the matmul reads what lies in some slot
    and nobody reads its result: ptxas follows matmuls only where every path has them.
    """
    block, loop = overlap.block, overlap.loop.index
    program, plan = block.placement.program, block.launch
    _, take = next_lines(plan)
    inner = [line for ring in overlap.inner for line in _wait(block, ring)]
    found = [
        "const int task = next_task;",
        *position_lines(program, plan, loads=False),
        *[f"next_{name} = {name};" for name in overlap.symbols],
        *[line for ring in overlap.outer for line in _wait(block, ring)],
        *ranges,
        f"if ({loop}_stop > {loop}_start) {{",
        *indent(inner),
        "}",
    ]
    lines = [
        *take,
        *[f"unsigned {ring}_at = in_block({ring}_base);" for ring in overlap.inner],
        "if (next_task < tasks) {",
        *indent(found),
        "}",
        *first,
    ]
    return ["{", *indent(lines), "}"]


def _wait(block: BlockProgram, name: str) -> list[str]:
    ring = block.ring(name)
    return [
        f"barrier_wait({name}_full + {name}_cursor.slot * 8, {name}_cursor.parity);",
        f"{name}_at = in_block({name}_base) + {name}_cursor.slot * {ring.slot_bytes};",
        f"advance<{ring.depth}>({name}_cursor);",
    ]
