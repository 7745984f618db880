"""Cycle counters in an emitted kernel: what one iteration of a steady state really takes.

*requires*  an emitted file whose steady loops are `#pragma unroll 1` / `for (... < INDEX_stop ...)`
*before -> after*  a steady loop of a compute group -> the same between two readings of the SM clock
*keeps*  every other line: parameters, order and results are those of the kernel itself

One thread of a group adds to `probe_log[3 l]` cycles, `[3 l + 1]` iterations and `[3 l + 2]`
nanoseconds of loop l, once a task, outside of the loop. Cycles are of the SM clock, so power
throttling does not enter; cycles / nanoseconds is the clock that the kernel ran at, in GHz.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from warploom.codegen.ir.source import CudaSource
from warploom.errors import InputError

LOG = "probe_log"
WORDS = 3  # of the log a loop
STEADY = re.compile(r"^(\s*)for \(int (\w+) = (.+); \2 < (\w+)_stop; \+\+\2\) \{$")
LOADER = "one thread starts every copy"
COMPUTE = "matmuls and everything in registers"
_HELPER = f"""\
__device__ unsigned long long {LOG}[{{words}}];
DEVICE long long probe_clock() {{{{
  long long t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t) :: "memory");
  return t;
}}}}
DEVICE long long probe_nanoseconds() {{{{
  long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t) :: "memory");
  return t;
}}}}
"""


@dataclass(frozen=True)
class Reading:
    """The log of one loop after some launches."""

    loop: str
    cycles: int
    iterations: int
    nanoseconds: int

    @property
    def cycles_an_iteration(self) -> float:
        """SM cycles from the start of one iteration to the start of the next, averaged."""
        return self.cycles / max(1, self.iterations)

    @property
    def gigahertz(self) -> float:
        """The SM clock while the loop ran."""
        return self.cycles / max(1, self.nanoseconds)


def probe(source: CudaSource) -> tuple[CudaSource, tuple[str, ...]]:
    """The kernel with counters, and the loops in the order of the log."""
    lines = source.text.split("\n")
    loops: list[str] = []
    result: list[str] = []
    closing: list[tuple[str, list[str]]] = []
    computing = False
    for number, line in enumerate(lines):
        computing = (computing or COMPUTE in line) and LOADER not in line
        found = STEADY.match(line)
        if found and computing and lines[number - 1].strip() == "#pragma unroll 1":
            margin, loop = found.group(1), found.groups()[-1]
            loops += [loop] * (loop not in loops)
            at = WORDS * loops.index(loop)
            pragma = result.pop()
            result += [
                f"{margin}const long long probe_{loop} = probe_clock();",
                f"{margin}const long long probe_{loop}_ns = probe_nanoseconds();",
                pragma,
                line,
            ]
            ran = f"{loop}_stop - ({found.group(3)})"
            closing.append((margin, _closing(loop, ran, at)))
            continue
        result.append(line)
        if closing and line == closing[-1][0] + "}":
            margin, tail = closing.pop()
            result += [margin + text for text in tail]
    if not loops:
        raise InputError(f"kernel {source.name} has no steady loop to count cycles in")
    place = next(i for i, line in enumerate(result) if line.startswith('extern "C" __global__'))
    result.insert(place, _HELPER.format(words=WORDS * len(loops)))
    return replace(source, text="\n".join(result)), tuple(loops)


def _closing(loop: str, ran: str, at: int) -> list[str]:
    add = "static_cast<unsigned long long>"
    return [
        f"if (threadIdx.x % 128 == 0 && {ran} > 0) {{",
        f"  atomicAdd(&{LOG}[{at}], {add}(probe_clock() - probe_{loop}));",
        f"  atomicAdd(&{LOG}[{at + 1}], {add}({ran}));",
        f"  atomicAdd(&{LOG}[{at + 2}], {add}(probe_nanoseconds() - probe_{loop}_ns));",
        "}",
    ]


def readings(loops: tuple[str, ...], words: list[int]) -> tuple[Reading, ...]:
    """The log's words by loop."""
    return tuple(
        Reading(loop, *words[WORDS * i : WORDS * i + WORDS]) for i, loop in enumerate(loops)
    )
