"""Vectors along the columns of tiles are loaded once a group, not once a quad of lanes."""

from __future__ import annotations

from collections.abc import Sequence

from warploom.codegen.ir.block import BlockProgram
from warploom.codegen.ir.steps import Run, Share, Step
from warploom.codegen.passes.everywhere import every_sequence


def shares(block: BlockProgram) -> BlockProgram:
    """Each thread loads an element of a vector, and the group puts the vector into its shared
    memory before the first op that reads it.

    *requires*  pipelines without joins
    *before -> after*  `Run load x; Issue u; Run f(u, x)` ->
                       `Run load x; Issue u; Share x; Run f(u, x)`; vectors loaded by then go along
    *keeps*  every other step and its order
    """
    spread = block.placement.spread
    fusion = block.placement.fusion

    def read_by(step: Run) -> set[str]:
        return {var.name for var in fusion.sources(step.op)} & spread

    def shared(steps: Sequence[Step]) -> tuple[Step, ...]:
        result: list[Step] = []
        done: set[str] = set()
        for place, step in enumerate(steps):
            if not isinstance(step, Run):
                result.append(step)
                continue
            if new := read_by(step) - done:
                # Those that are read later and loaded before go along.
                for later in steps[place:]:
                    if isinstance(later, Run) and later.stage == step.stage:
                        written = set[str]() if later.op.dst is None else {later.op.dst.name}
                        if written & spread:
                            break
                        new |= read_by(later) - done
                result.append(Share(tuple(sorted(new)), step.stage))
                done |= new
            result.append(step)
            if step.op.dst is not None:
                done.discard(step.op.dst.name)
        return tuple(result)

    return every_sequence(block, shared) if spread else block
