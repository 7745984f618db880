"""The micro-benchmarks as a table, and the CUDA source each row becomes.

A probe is one instruction (or a pair) repeated in a loop, between two reads of the SM's clock. With
one chain every instruction needs the one before it: cycles per instruction are its *latency*. With
eight independent chains and more warps they are the *interval* at which a scheduler partition
accepts it. The row names the machine instruction it expects, and a compiled probe whose loop does
not hold that instruction often enough is refused: what the compiler folded away is not measured.

Method: arXiv 1804.06826 (chains between clock reads), arXiv 2501.08071 (lower a stall until the
result goes wrong).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CHAINS: Final = 8
UNROLL: Final = 64
PREFIX: Final = "probe_"
SHARED: Final = 40960  # bytes of the tile the memory probes touch


@dataclass(frozen=True)
class Probe:
    """One micro-benchmark.

    `body` is PTX on the chain's register `{x}` (32 bits; `{w}` 64 bits), the loop's constants
    `{a} {b} {c}`, and `{near}` and `{far}`, byte offsets that differ from step to step; several
    statements make one step. `opcode` is the machine instruction expected, `per_step` how many of
    it a step holds. `chains` independent chains take turns.
    """

    name: str
    opcode: str
    body: str
    chains: int = 1
    per_step: int = 1
    setup: str = ""
    shared: int = SHARED
    unroll: int = UNROLL
    wide: bool = False


# A step on the chain register: (name, opcode, PTX). Values stay finite and never settle, so that a
# stale operand always shows: multiplying by -1.125 (a) and adding 0.37 (b), mixing low bits (c).
ARITHMETIC: Final[tuple[tuple[str, str, str], ...]] = (
    ("ffma", "FFMA", "fma.rn.f32 {x}, {x}, {a}, {b};"),
    ("fadd", "FADD", "add.rn.f32 {x}, {x}, {b};"),
    ("fmul", "FMUL", "mul.rn.f32 {x}, {x}, {a};"),
    ("imad", "IMAD", "mad.lo.u32 {x}, {x}, {one}, {c};"),
    ("lop3", "LOP3", "lop3.b32 {x}, {x}, {c}, {d}, 0x6a;"),
    ("prmt", "PRMT", "prmt.b32 {x}, {x}, {c}, {sel};"),
    ("shf", "SHF", "shf.l.wrap.b32 {x}, {x}, {c}, {one};"),
    ("fmnmx", "FMNMX", "max.f32 {x}, {x}, {a}; min.f32 {x}, {x}, {b};"),
    ("hfma2", "HFMA2", "fma.rn.f16x2 {x}, {x}, {ha}, {hb};"),
    ("f2fp", "F2FP", "cvt.rn.f16x2.f32 {x}, {x}, {b};"),
    ("mufu_ex2", "MUFU", "ex2.approx.ftz.f32 {x}, {x};"),
    ("mufu_tanh", "MUFU", "tanh.approx.f32 {x}, {x};"),
    ("mufu_rsq", "MUFU", "rsqrt.approx.ftz.f32 {x}, {x};"),
    ("popc", "POPC", "popc.b32 {x}, {x};"),
    ("i2f", "I2FP", "cvt.rn.f32.s32 {x}, {x};"),
    ("f2i", "F2I", "cvt.rni.s32.f32 {x}, {x};"),
    ("flo", "FLO", "bfind.u32 {x}, {x};"),
    ("shfl", "SHFL", "shfl.sync.bfly.b32 {x}, {x}, 1, 31, 0xffffffff;"),
    (
        "isetp_sel",
        "ISETP",
        "setp.lt.s32 p, {x}, {sel}; selp.b32 t, {a}, {b}, p; mad.lo.u32 {x}, {x}, {d}, t;",
    ),
    (
        "isetp_guard",
        "ISETP",
        "setp.lt.s32 p, {x}, {sel}; @p mad.lo.u32 {x}, {x}, {d}, {a}; "
        "@!p lop3.b32 {x}, {x}, {b}, {d}, 0x96;",
    ),
    ("dfma", "DFMA", "fma.rn.f64 {w}, {w}, {da}, {db};"),
    ("lds32", "LDS", "ld.shared.u32 {x}, [{x}];"),
    ("lds64", "LDS", "ld.shared.v2.u32 {{{x}, {y}}}, [{x}];"),
    ("lds128", "LDS", "ld.shared.v4.u32 {{{x}, {y}, {z}, {u}}}, [{x}];"),
    ("sts32", "STS", "st.shared.u32 [{addr}+{near}], {x};"),
    ("sts128", "STS", "st.shared.v4.u32 [{addr}+{near}], {{{x}, {x}, {x}, {x}}};"),
    ("ldsm4", "LDSM", "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{x}, {y}, {z}, {u}}}, [{x}];"),
    ("ldsm1", "LDSM", "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{{x}}}, [{x}];"),
    (
        "stsm4",
        "STSM",
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{addr}+{near}], {{{x}, {x}, {x}, {x}}};",
    ),
    ("bar", "BAR", "bar.sync 0;"),
    ("ldg64_l1", "LDG", "ld.global.ca.u64 {w}, [{w}];"),
    ("ldg64_l2", "LDG", "ld.global.cg.u64 {w}, [{w}];"),
    ("ldg128_l2", "LDG", "ld.global.cg.v2.u64 {{{w}, {v}}}, [{w}];"),
    ("stg32", "STG", "st.global.u32 [{gaddr}+{far}], {x};"),
    ("stg128", "STG", "st.global.v4.u32 [{gaddr}+{far}], {{{x}, {x}, {x}, {x}}};"),
    ("ldgsts16", "LDGSTS", "cp.async.cg.shared.global [{addr}+{near}], [{gaddr}+{far}], 16;"),
    (
        "hmma16816",
        "HMMA",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{x}, {y}, {z}, {u}}}, "
        "{{{a}, {b}, {c}, {d}}}, {{{a}, {b}}}, {{{x}, {y}, {z}, {u}}};",
    ),
)

# Loads that hand the next address on: latency by pointer chasing.
CHASES: Final[tuple[tuple[str, str, str], ...]] = (
    ("chase_lds", "LDS", "ld.shared.u32 {x}, [{x}];"),
    ("chase_l1", "LDG", "ld.global.ca.u64 {w}, [{w}];"),
    ("chase_l2", "LDG", "ld.global.cg.u64 {w}, [{w}];"),
    ("chase_dram", "LDG", "ld.global.cg.u64 {w}, [{w}];"),
)

# Instructions whose latency chain means something (the result feeds the next step).
CHAINED: Final = frozenset(
    "ffma fadd fmul imad lop3 prmt shf hfma2 f2fp mufu_ex2 mufu_tanh mufu_rsq popc i2f f2i "
    "flo shfl isetp_sel isetp_guard dfma hmma16816 bar".split()
)
# Pairs for the stall probes: producer and consumer, both on the same 32-bit value.
PAIRED: Final = ("ffma", "imad", "lop3", "prmt")
_BY_NAME: Final = {row[0]: row for row in ARITHMETIC}


def probes() -> list[Probe]:
    """Every micro-benchmark but the warp-group matrix ones."""
    found: list[Probe] = []
    for name, opcode, body in ARITHMETIC:
        count = body.count(";") if name == "fmnmx" else 1
        wide = "{w}" in body
        if name in CHAINED:
            found.append(Probe(f"{name}_chain", opcode, body, 1, count, wide=wide))
        if name not in ("bar",):
            chains = CHAINS if "{y}" not in body and "{v}" not in body else 4
            found.append(Probe(f"{name}_rate", opcode, body, chains, count, wide=wide))
    for name, opcode, body in CHASES:
        found.append(Probe(name, opcode, body, 1, 1, wide="{w}" in body, unroll=16))
    for first in PAIRED:
        for second in PAIRED:
            if first == second:
                continue
            body = f"{_BY_NAME[first][2]} {_BY_NAME[second][2]}"
            found.append(Probe(f"pair_{first}_{second}", _BY_NAME[first][1], body))
    return found


_NAMES: Final = "xyzu"


def source(probe: Probe) -> str:
    """The CUDA C++ of one probe: `probe_NAME(out, mem, rounds, constants...)`.

    `out` [threads, 2] takes the clock cycles of the loop (64 bits) and a digest of the chains.
    """
    kind = "unsigned long long" if probe.wide else "unsigned"
    letter = "w" if probe.wide else "x"
    extra = [name for name in "yzuv" if f"{{{name}}}" in probe.body]
    lines = [
        f'extern "C" __global__ void {PREFIX}{probe.name}(unsigned long long* out, '
        "unsigned long long mem, int rounds, unsigned a, unsigned b, unsigned c, unsigned d, "
        "unsigned one, unsigned sel, unsigned ha, unsigned hb, unsigned long long start) {",
        f"  __shared__ alignas(16) unsigned tile[{probe.shared // 4}];",
        "  unsigned base = (unsigned)__cvta_generic_to_shared(tile);",
        f"  for (int i = threadIdx.x; i < {probe.shared // 4}; i += blockDim.x)",
        "    tile[i] = base + i % 128 / 4 * 16;",
        "  __syncthreads();",
        "  unsigned addr = base + (threadIdx.x % 32) * 16;",
        "  unsigned long long gaddr = mem + (unsigned long long)(threadIdx.x * 16);",
        "  unsigned long long da = __double_as_longlong(-1.125), db = __double_as_longlong(0.37);",
    ]
    for chain in range(probe.chains):
        if probe.name.startswith("chase"):
            value = "start" if probe.wide else "base"
        elif probe.opcode in ("LDS", "LDSM"):
            value = "addr"
        elif probe.wide and probe.opcode == "LDG":
            value = f"gaddr + {chain} * 16384"
        elif probe.wide:
            value = f"__double_as_longlong(1.0 + {chain} + threadIdx.x)"
        else:
            value = f"__float_as_uint(1.0f + {chain}.0f + (float)threadIdx.x * 0.125f)"
        lines.append(f"  {kind} {letter}{chain} = {value};")
        lines += [f"  {kind} {name}{chain} = {letter}{chain};" for name in extra]
    lines += [
        "  long long began = clock64();",
        "#pragma unroll 1",
        "  for (int round = 0; round < rounds; ++round) {",
    ]
    lines += [f"    {_step(probe, step)}" for step in range(probe.unroll)]
    if "cp.async" in probe.body:
        lines.append('    asm volatile("cp.async.commit_group; cp.async.wait_group 0;");')
    lines += ["  }", "  long long ended = clock64();", f"  {kind} digest = 0;"]
    for chain in range(probe.chains):
        lines.append(f"  digest = digest * 31 + {letter}{chain};")
        lines += [f"  digest = digest * 31 + {name}{chain};" for name in extra]
    lines += [
        "  out[2 * threadIdx.x] = (unsigned long long)(ended - began);",
        "  out[2 * threadIdx.x + 1] = digest + tile[threadIdx.x];",
        "}",
    ]
    return "\n".join(lines)


def _step(probe: Probe, step: int) -> str:
    """One inline assembly statement: a step of one chain."""
    chain = step % probe.chains
    outputs: list[str] = []
    names: dict[str, str] = {}

    def bind(placeholder: str, constraint: str, variable: str) -> None:
        if f"{{{placeholder}}}" in probe.body:
            names[placeholder] = f"%{len(names)}"
            outputs.append(f'"{constraint}"({variable})')

    for name in _NAMES:
        bind(name, "+r", f"{name}{chain}")
    bind("w", "+l", f"w{chain}")
    bind("v", "+l", f"v{chain}")
    written = len(outputs)
    for name in ("a", "b", "c", "d", "one", "sel", "ha", "hb", "addr"):
        bind(name, "r", name)
    bind("gaddr", "l", "gaddr")
    bind("da", "l", "da")
    bind("db", "l", "db")
    text = probe.body.format(**names, near=step % 64 * 512, far=step * 4096)
    if " p," in text or "@p" in text:
        text = f"{{ .reg .pred p; .reg .b32 t; {text} }}"
    target = f"{', '.join(outputs[:written])}"
    origin = ", ".join(outputs[written:])
    return f'asm volatile("{text}" : {target} : {origin} : "memory");'
