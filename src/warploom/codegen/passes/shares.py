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

    def shared(steps: Sequence[Step]) -> tuple[Step, ...]:
        result: list[Step] = []
        loaded: list[tuple[str, int]] = []
        done: set[str] = set()
        for step in steps:
            if not isinstance(step, Run):
                result.append(step)
                continue
            read = {var.name for var in fusion.sources(step.op)} & (spread - done)
            if read:
                along = {name for name, stage in loaded if stage == step.stage} - done
                result.append(Share(tuple(sorted(read | along)), step.stage))
                done |= read | along
            result.append(step)
            if step.op.dst is not None and step.op.dst.name in spread:
                loaded.append((step.op.dst.name, step.stage))
                done.discard(step.op.dst.name)
        return tuple(result)

    return every_sequence(block, shared) if spread else block
