"""What is computed beside matmuls stays before the wait for them.

ptxas moves a wait for matmuls up over arithmetic that does not need them, so that it stands idle
first and then has all of it to do. A branch that is never taken, behind which the results would be
stored, keeps them before the wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from warploom.codegen.ir.block import BlockProgram
from warploom.codegen.ir.steps import Hold, Issue, Join, Run, Step
from warploom.codegen.passes.everywhere import every_sequence


def holds(block: BlockProgram) -> BlockProgram:
    """With the launch plan's `hold_waits`, tiles that are computed beside matmuls are held before
    the wait for them.

    *requires*  joins
    *before -> after*  `Issue u; Run f; Join <= 0: u` -> `Issue u; Run f; Hold f; Join <= 0: u`
    *keeps*  every other step and its order
    """
    # Sums of matmuls are not: ptxas follows these by their registers, not into every branch.
    ops = tuple(block.placement.program.ops())
    sums = {op.dst.name for op in ops if op.kind == "mma" and op.dst is not None}
    left_out = sums | block.placement.staged.keys()

    def held(steps: Sequence[Step]) -> tuple[Step, ...]:
        result: list[Step] = []
        beside: list[str] | None = None  # None: no matmul of this run is unfinished
        for step in steps:
            if isinstance(step, Issue):
                beside = []
            elif isinstance(step, Join):
                if beside:
                    result.append(Hold(tuple(dict.fromkeys(beside))))
                beside = None
            elif isinstance(step, Run) and beside is not None:
                dst = step.op.dst
                if dst is not None and len(dst.type.axes) == 2 and dst.name not in left_out:
                    beside.append(dst.name)
            result.append(step)
        return tuple(result)

    return every_sequence(block, held) if block.launch.hold_waits else block
