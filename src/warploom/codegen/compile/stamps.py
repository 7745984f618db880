"""Time stamps in an emitted kernel: when each warp group is through each step of a steady loop.

*requires*  an emitted file whose steady loops are `#pragma unroll 1` / `for (... < INDEX_stop ...)`
            and whose steps begin with a comment
*before -> after*  behind a wait, a matmul's issue, a slot or a turn given away in the steady loop
                   of a compute group -> a reading of the SM clock by one thread of the group
*keeps*  every other line: parameters, order and results are those of the kernel itself

The first block writes `stamp_log[loop][group][1 + n]`, the low half of the clock at stamp n of a
task's way through the loop, and at [0] how many there were; the last task of the block has the say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from warploom.codegen.compile.probe import COMPUTE, LOADER, STEADY
from warploom.codegen.ir.source import CudaSource
from warploom.errors import InputError

LOG = "stamp_log"
MOST = 255  # stamps of a group in a loop that are kept
GROUPS = 5  # warp groups of a block, at most
_STEP = re.compile(r"^\s*// ((?:Wait|TurnWait|Issue|Release|TurnPass)\b.*?)(?:  .*)?$")
_HELPER = f"""\
__device__ unsigned {LOG}[{{loops}}][{GROUPS}][{MOST + 1}];
DEVICE void stamp(int loop, int& count) {{{{
  unsigned t;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(t) :: "memory");
  if (blockIdx.x == 0 && threadIdx.x % 128 == 0 && count < {MOST})
    {LOG}[loop][threadIdx.x / 128][1 + count] = t;
  ++count;
}}}}
DEVICE void stamped(int loop, int count) {{{{
  if (blockIdx.x == 0 && threadIdx.x % 128 == 0 && count > 0)
    {LOG}[loop][threadIdx.x / 128][0] = count;
}}}}
"""


@dataclass(frozen=True)
class Stamps:
    """The steps of a loop's body, in the order of its stamps."""

    loop: str
    steps: tuple[str, ...]


def with_stamps(source: CudaSource) -> tuple[CudaSource, tuple[Stamps, ...]]:
    """The kernel with stamps, and what they are, a loop each in the order of the log.

    Raises `InputError` for a kernel without a steady loop of compute groups.
    """
    lines, result = source.text.split("\n"), list[str]()
    steps: dict[str, list[str]] = {}
    margin, loop, pending, computing = "", "", False, False
    for number, line in enumerate(lines):
        computing = (computing or COMPUTE in line) and LOADER not in line
        found = STEADY.match(line)
        ends = bool(loop) and line == margin + "}"
        step = _STEP.match(line) if loop else None
        if pending and (ends or line.strip().startswith("// ")):
            result.append(f"{margin}  stamp({list(steps).index(loop)}, stamps_{loop});")
            pending = False
        if found and computing and lines[number - 1].strip() == "#pragma unroll 1":
            margin, loop = found.group(1), found.groups()[-1]
            steps[loop] = []
            result.insert(len(result) - 1, f"{margin}int stamps_{loop} = 0;")
        elif step:
            steps[loop].append(step.group(1))
            pending = True
        result.append(line)
        if ends:
            result.append(f"{margin}stamped({list(steps).index(loop)}, stamps_{loop});")
            loop = ""
    if not steps:
        raise InputError(f"kernel {source.name} has no steady loop to stamp")
    place = next(i for i, line in enumerate(result) if line.startswith('extern "C" __global__'))
    result.insert(place, _HELPER.format(loops=len(steps)))
    made = tuple(Stamps(name, tuple(own)) for name, own in steps.items())
    return replace(source, text="\n".join(result)), made


def stamped_cycles(
    stamps: Sequence[Stamps], words: Sequence[int]
) -> list[tuple[str, int, int, str, int]]:
    """(loop, group, iteration, step, cycle) of the log's words; groups count from 0, cycles from
    the first stamp of their loop."""
    found: list[tuple[str, int, int, str, int]] = []
    for number, one in enumerate(stamps):
        rows = [
            words[(number * GROUPS + group) * (MOST + 1) :][: MOST + 1] for group in range(GROUPS)
        ]
        taken = [row for row in rows if row[0]]
        zero = min((row[1] for row in taken), default=0)
        for group, row in enumerate(taken):
            for n, clock in enumerate(row[1 : 1 + min(row[0], MOST)]):
                iteration, place = divmod(n, len(one.steps))
                cycle = (clock - zero) % 2**32
                found.append((one.loop, group, iteration, one.steps[place], cycle))
    return found
