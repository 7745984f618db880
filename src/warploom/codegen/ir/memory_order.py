"""What a task stores and loads again: refused where the emitted code would not see it.

Loads run ahead of the program by rings, and by the read-only path of the caches, so a task must not
load what it has stored. Reading a range before it is written (in-place updates) is fine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from warploom.errors import InputError
from warploom.tile import Loop, Op, Program


def check_memory(program: Program) -> None:
    """Raise `InputError` at a load that may read what the same task has stored before."""
    memory = [op for op in program.ops() if op.array is not None]
    stores = [op for op in memory if op.kind in ("store", "store_add")]
    for load in (op for op in memory if op.kind == "load"):
        for store in stores:
            if store.array == load.array and _may_follow(program, load, store):
                assert load.array is not None
                raise InputError(
                    f"{load.where}: load of {load.array.name}, which the same task stores to at "
                    f"{store.where}: beside matmuls loads run ahead of stores; go on with the tile "
                    "that was stored, or use two kernels"
                )


def memory_chains(ops: Sequence[Op]) -> list[list[Op]]:
    """Ops of a loop that must keep their order because one of them stores to an array of all."""
    stored = {op.array.name for op in ops if op.array and op.kind.startswith("store")}
    chains = [[op for op in ops if op.array and op.array.name == name] for name in sorted(stored)]
    return [chain for chain in chains if len(chain) > 1]


def _may_follow(program: Program, load: Op, store: Op) -> bool:
    if load.id > store.id:
        return True
    return any(
        {load.id, store.id} <= {op.id for op in _ops(loop)} and not _in_place(load, store, loop)
        for loop in program.loops()
    )


def _in_place(load: Op, store: Op, loop: Loop) -> bool:
    """Whether every iteration reads and then writes a range of its own."""
    own = any(loop.index in span.start.symbols() for span in load.spans)
    same = [(span.starts, span.size) for span in load.spans]
    return own and same == [(span.starts, span.size) for span in store.spans]


def _ops(loop: Loop) -> Iterator[Op]:
    for item in loop.body:
        if isinstance(item, Op):
            yield item
        else:
            yield from _ops(item)
