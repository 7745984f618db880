"""Sums over the parts of gradients that tasks leave side by side: of dq and dk those of heads and
columns that share a q and k, of dv those of tiles of channels.

torch's addition of two such halves moves 2.3 TB/s on an H200, its reduction over more less.
"""

from __future__ import annotations

from dataclasses import replace

from warploom import tile as t
from warploom.codegen.simt.choose import simt
from warploom.codegen.simt.schedule import SimtSchedule

ELEMENTS = 2048  # of a task's tile: 16 of a thread
AT_ONCE = 16  # parts that are loaded one beside the other


def slot_sums(parts: int, d: int) -> t.Program:
    """`sums: [tokens, d]` of `parts: [tokens, slots, d]`, in fp32, in the order of the slots."""
    rows = max(1, ELEMENTS // d)

    def body(**given: t.Array) -> None:
        (token,) = t.grid(tokens=t.cdiv(t.size("tokens"), rows))
        place = t.span(token * rows, rows, "tokens"), t.span(0, d, "d")
        total = t.load(given["parts"], place[0], 0, place[1]).cast(t.FP32)
        for slot in range(1, parts) if parts <= AT_ONCE else t.loop(1, t.size("slots")):
            total += t.load(given["parts"], place[0], slot, place[1]).cast(t.FP32)
        t.store(given["sums"], *place, tile=total.cast(t.BF16))

    arrays = {"parts": t.array(t.BF16, "tokens slots d"), "sums": t.array(t.BF16, "tokens d")}
    return t.trace(body, arrays, name="recurrent_slot_sums")


def slot_schedule(program: t.Program) -> SimtSchedule:
    """Its schedule: d is a multiple of 8, so a thread moves 16 bytes at a time."""
    return replace(simt(program), aligned=True)
