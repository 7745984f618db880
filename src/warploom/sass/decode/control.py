"""The control field of a 128-bit instruction: when a warp may issue, and what it waits for.

From Volta to Blackwell bits 105-125 of every instruction word carry the schedule the compiler
chose. The hardware has no interlock for fixed-latency results, so these bits are part of the
program's meaning. Layout and legality rules L1-L5 were read off ptxas output and nvdisasm's
refusals (CUDA 12.8 to 13.5):

=========  ==========  =====================================================================
bits       field       meaning
=========  ==========  =====================================================================
105-108    stall       cycles before this warp may issue its next instruction
109        stay        1: stay on this warp; 0: end of group, the scheduler may switch (yield)
110-112    write_sb    scoreboard released when the result is written; 7 = none
113-115    read_sb     scoreboard released when the sources were read; 7 = none
116-121    wait        mask of scoreboards that must be zero before issue
122-125    reuse       operand-cache hint per source slot a, b, c; only with stay = 1
=========  ==========  =====================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

NO_SCOREBOARD: Final = 7
SCOREBOARDS: Final = 6
MAX_STALL: Final = 15
MAX_STALL_STAYING: Final = 11

# Position of the field inside the high 64-bit word (bit 64 of the instruction is bit 0 here).
CONTROL_SHIFT: Final = 105 - 64
CONTROL_BITS: Final = 21
CONTROL_MASK: Final = ((1 << CONTROL_BITS) - 1) << CONTROL_SHIFT


@dataclass(frozen=True, slots=True)
class Control:
    """One decoded control field; `encode` and `decode` are exact inverses."""

    stall: int
    stay: bool
    write_sb: int
    read_sb: int
    wait: int
    reuse: int

    @staticmethod
    def decode(high: int) -> Control:
        """The control field of an instruction whose high 64-bit word is `high`."""
        return _decoded((high & CONTROL_MASK) >> CONTROL_SHIFT)

    def encode(self, high: int) -> int:
        """`high` with its control field replaced by this one."""
        field = (
            self.stall
            | int(self.stay) << 4
            | self.write_sb << 5
            | self.read_sb << 8
            | self.wait << 11
            | self.reuse << 17
        )
        return high & ~CONTROL_MASK | field << CONTROL_SHIFT

    def waits(self) -> tuple[int, ...]:
        """The scoreboards this instruction waits for, lowest first."""
        return tuple(k for k in range(SCOREBOARDS) if self.wait >> k & 1)

    def fault(self) -> str | None:
        """The first legality rule this field breaks, in words; None when it breaks none."""
        if self.stay and not 1 <= self.stall <= MAX_STALL_STAYING:
            return f"L1: stay needs a stall of 1 to {MAX_STALL_STAYING}, it is {self.stall}"
        if self.reuse and not self.stay:
            return "L2: reuse bits mean something else when the warp may be switched"
        if self.reuse > 7:
            return "L2: reuse bit 3 is never set by the compiler"
        for name, number in (("write", self.write_sb), ("read", self.read_sb)):
            if number == SCOREBOARDS:
                return f"there is no scoreboard {number} ({name})"
        return None

    def __str__(self) -> str:
        """Compact form, one column a field: `-:-:w2:r0:S05:Y`."""
        wait = "".join(str(k) if self.wait >> k & 1 else "-" for k in range(SCOREBOARDS))
        write = "-" if self.write_sb == NO_SCOREBOARD else str(self.write_sb)
        read = "-" if self.read_sb == NO_SCOREBOARD else str(self.read_sb)
        return f"B{wait} W{write} R{read} {' ' if self.stay else 'Y'} S{self.stall:02d}"


@lru_cache(1 << 14)  # a kernel of thousands of instructions has a few hundred different ones
def _decoded(field: int) -> Control:
    return Control(
        stall=field & 0xF,
        stay=bool(field >> 4 & 1),
        write_sb=field >> 5 & 7,
        read_sb=field >> 8 & 7,
        wait=field >> 11 & 0x3F,
        reuse=field >> 17 & 0xF,
    )
