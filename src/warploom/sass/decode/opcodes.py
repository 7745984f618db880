"""Opcodes as data: which pipe an opcode uses, how its result becomes ready, what it may not cross.

Keys are opcode names without modifiers, or with the modifiers that matter (`IMAD.WIDE`,
`HFMA2.MMA`); the longest key that prefixes the text wins. An opcode that is not here is treated
as `UNKNOWN`: it is pinned and every register it names counts as read and written.
Pipes and timing behaviour: NVIDIA's CUDA Binary Utilities instruction tables, Huerta et al.
(arXiv 2503.20481) for fixed against variable latency, and ptxas 12.8-13.5 output.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Final


class Pipe(Enum):
    """The unit an instruction goes to. Variable-latency results of one pipe complete in order."""

    FMA = "fma"
    IMAD = "imad"
    ALU = "alu"
    HALF = "half"
    MMA = "mma"
    FP64 = "fp64"
    UNIFORM = "uniform"
    XU = "xu"  # special functions and conversions
    LSU = "lsu"  # global, local and shared memory, shuffles
    CONSTANT = "constant"
    ASYNC = "async"  # warp-group matrix and bulk copies
    CONTROL = "control"
    UNKNOWN = "unknown"

    __hash__ = object.__hash__  # members are one each; Enum's own is slow where walks look them up


class Order(Enum):
    """What an instruction may not cross inside its block, beyond register dependences."""

    FREE = "free"
    MEMORY = "memory"  # alias rules decide
    SYNC = "sync"  # keeps its order with memory and with every other sync
    FIXED = "fixed"  # keeps its offset


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What is known of an opcode.

    `variable`: the result arrives at an unknown time, so a scoreboard (its own, or that of a
    later operation of the same pipe) must cover it. `dests` says how many leading operands are
    results: `r` a register with optional predicates around it, `p` predicates only, `-` none.
    """

    name: str
    pipe: Pipe
    variable: bool
    dests: str
    order: Order


def _table(pipe: Pipe, variable: bool, dests: str, order: Order, names: str) -> dict[str, OpInfo]:
    return {name: OpInfo(name, pipe, variable, dests, order) for name in names.split()}


_F: Final = Order.FREE
_M: Final = Order.MEMORY
_S: Final = Order.SYNC
_X: Final = Order.FIXED

OPCODES: Final[dict[str, OpInfo]] = {
    # fixed latency, covered by stall counts
    **_table(Pipe.FMA, False, "r", _F, "FFMA FADD FMUL VIADD"),
    **_table(Pipe.IMAD, False, "r", _F, "IMAD IMAD.WIDE IMAD.HI IMUL IDP IDP4A"),
    **_table(
        Pipe.ALU,
        False,
        "r",
        _F,
        "IADD3 IADD LOP3 LOP SHF SHL SHR SEL MOV PRMT LEA FSEL FMNMX FMNMX3 IMNMX VIMNMX VIMNMX3 "
        "IABS SGXT F2FP BMSK FSET ISCADD VABSDIFF VABSDIFF4 I2FP F2IP I2IP LEPC CS2R P2R CSEL "
        "VIADDMNMX VIMNMX.U32 VHMNMX FSEL.FTZ MOV64IUR VOTE UMOV32 IADD.64",
    ),
    **_table(Pipe.ALU, False, "p", _F, "ISETP FSETP PLOP3 PSETP"),
    **_table(Pipe.ALU, False, "R2P", _F, "R2P"),
    **_table(Pipe.HALF, False, "r", _F, "HADD2 HFMA2 HFMA2.MMA HMUL2 HMNMX2 HSET2"),
    **_table(Pipe.HALF, False, "p", _F, "HSETP2"),
    **_table(Pipe.MMA, False, "r", _F, "HMMA IMMA BMMA QMMA OMMA MOVM"),
    # double precision: fixed distances on datacentre parts; a scoreboard where the code sets one
    **_table(Pipe.FP64, False, "r", _F, "DADD DMUL DFMA DMMA"),
    **_table(Pipe.FP64, False, "p", _F, "DSETP"),
    # uniform datapath
    **_table(
        Pipe.UNIFORM,
        False,
        "r",
        _F,
        "UIADD3 ULOP3 ULOP USHF ULEA USEL UMOV ULDC UIMAD UIMAD.WIDE USGXT UP2UR UPRMT UBMSK "
        "UFLO UPOPC UBREV UIABS UMOV32I UF2FP VOTEU UIMNMX UVIMNMX UVIADD UFSEL UFADD UFMUL UFFMA "
        "UIADD3.64 UI2FP UFMNMX UCLEA",
    ),
    **_table(Pipe.UNIFORM, False, "p", _F, "UISETP UPLOP3 UPSETP UFSETP"),
    **_table(Pipe.UNIFORM, False, "UR2P", _F, "UR2UP"),
    **_table(Pipe.UNIFORM, False, "r", _F, "R2UR"),
    # variable latency, covered by scoreboards
    **_table(Pipe.XU, True, "r", _F, "MUFU I2F F2I F2F FRND POPC FLO BREV I2I UF2I"),
    **_table(Pipe.XU, True, "p", _F, "FCHK"),
    **_table(Pipe.LSU, True, "r", _F, "S2R SHFL MATCH REDUX S2UR CREDUX"),
    **_table(Pipe.CONSTANT, True, "r", _F, "LDC LDCU"),
    # memory
    **_table(Pipe.LSU, True, "r", _M, "LDG LDS LDSM LD LDL"),
    **_table(Pipe.LSU, True, "-", _M, "STG STS STSM ST STL LDGSTS"),
    **_table(Pipe.LSU, True, "r", _S, "ATOM ATOMG ATOMS"),
    **_table(Pipe.LSU, True, "-", _S, "RED REDG REDS REDAS STAS"),
    # synchronisation and asynchronous engines
    **_table(
        Pipe.CONTROL,
        True,
        "-",
        _S,
        "BAR MEMBAR FENCE CCTL CCTLL CCTLT ERRBAR LDGDEPBAR DEPBAR ARRIVES NANOSLEEP "
        "UCGABAR_ARV UCGABAR_WAIT UCGABAR_SET UCGABAR_GET CGAERRBAR ACQBULK PREEXIT "
        "WARPGROUPSET UTMALDG UTMASTG UTMAREDG UTMAPF UTMACMDFLUSH UTMACCTL UBLKCP UBLKRED UBLKPF "
        "QSPC BPT PMTRIG TEXDEPBAR VIRTCOUNT",
    ),
    **_table(Pipe.ASYNC, True, "r", _S, "HGMMA QGMMA IGMMA BGMMA"),
    **_table(Pipe.CONTROL, True, "r", _S, "SYNCS B2R USETMAXREG BMOV ENDCOLLECTIVE"),
    **_table(Pipe.CONTROL, False, "r", _S, "ELECT"),
    **_table(Pipe.CONTROL, False, "-", _S, "WARPGROUP"),
    # control flow
    **_table(
        Pipe.CONTROL,
        True,
        "-",
        _X,
        "BRA BRX BRXU JMP JMX JMXU CALL RET EXIT KILL BSSY BSYNC BREAK WARPSYNC YIELD RTT NOP "
        "R2B RPCMOV COLLECTIVE WARPSYNC.COLLECTIVE WARPSYNC.ALL UBSSY",
    ),
}

UNKNOWN: Final = OpInfo("UNKNOWN", Pipe.UNKNOWN, True, "?", Order.FIXED)

# Instructions after which control may go elsewhere: they end a basic block.
TERMINATORS: Final = frozenset(
    "BRA BRX BRXU JMP JMX JMXU CALL RET EXIT KILL BSYNC BREAK WARPSYNC RTT".split()
)


@cache
def lookup(opcode: str) -> OpInfo:
    """What is known of `opcode` (as printed, with modifiers); `UNKNOWN` when it is not listed."""
    parts = opcode.split(".")
    for count in range(len(parts), 0, -1):
        if found := OPCODES.get(".".join(parts[:count])):
            return found
    # modifiers that do not stand first, as in IMAD.MOV.U32 or HFMA2.MMA.BF16
    return UNKNOWN
