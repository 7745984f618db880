"""Random CUDA kernels whose machine code holds neighbours of every pipe.

A kernel is a loop of random statements over a few variables of each kind, with branches, whose
values stay normal numbers and end in a hash of all of them: a single wrong bit anywhere changes
what a thread stores. Two launches on the same input give the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Final

THREADS: Final = 512  # the most a launch may have
_HEAD: Final = """
typedef unsigned int u32; typedef unsigned long long u64;
__constant__ u32 table[256];
__device__ __forceinline__ float one(float x) {
  return __uint_as_float((__float_as_uint(x) & 0x807fffffu) | 0x3f800000u); }
__device__ __forceinline__ u32 ones(u32 x) { return (x & 0x83ff83ffu) | 0x3c003c00u; }
__device__ __forceinline__ double one(double x) {
  return __longlong_as_double((__double_as_longlong(x) & 0x800fffffffffffffll) |
                              0x3ff0000000000000ll); }
"""

Write = Callable[[random.Random], str]


def _v(kind: str, rng: random.Random) -> str:
    return f"{kind}{rng.randrange(6)}"


def _of(*texts: str) -> Write:
    """One of some statements; `%i`, `%f`, `%h`, `%d`, `%w`, `%u` become variables, `%n` a number
    below 32, `%k` one below 8."""

    def write(rng: random.Random) -> str:
        text = rng.choice(texts)
        for kind in "ifhdwu":
            while f"%{kind}" in text:
                text = text.replace(f"%{kind}", _v(kind, rng), 1)
        while "%n" in text:
            text = text.replace("%n", str(rng.randrange(1, 32)), 1)
        while "%k" in text:
            text = text.replace("%k", str(rng.randrange(8)), 1)
        return text

    return write


def _unary(name: str) -> str:
    return '{ float t; asm("' + name + ' $a, $b;" : "=f"(t) : "f"(%f)); %f = one(t); }'


def _ptx(text: str) -> str:
    return text.replace("$a", "%0").replace("$b", "%1").replace("$c", "%2").replace("$d", "%3")


STATEMENTS: Final[Mapping[str, Write]] = {
    "alu": _of(
        "%i = %i + %i + %i;",
        "%i = (%i & %i) ^ %i;",
        "%i = __funnelshift_l(%i, %i, %n);",
        "%i = __funnelshift_r(%i, %i, %i);",
        "%i = min(%i, %i);",
        "%i = max((int)%i, (int)%i) + 77u;",
        "%i = %i < %i ? %i : %i;",
        "%i = __byte_perm(%i, %i, 0x%k1%k3);",
        "%i = (%i << %k) + %i;",
        "%i = abs((int)%i) ^ 0x55u;",
        "%f = %i > %i ? %f : %f;",
        "%f = one(fminf(%f, %f) + %f);",
        "%i = (%i >> %n) | 0x10000u;",
    ),
    "imad": _of(
        "%i = %i * %i + %i;",
        "%i = __umulhi(%i, %i);",
        "%w = (u64)%i * %i + %w;",
        "%w += (u64)%i * 2654435761u;",
        "%i = (u32)(%w >> 32) * %i;",
    ),
    "wide": _of("%w += %w;", "%w ^= %w >> %n;", "%w = %w < %w ? %w : %w;", "%w -= %i;"),
    "fma": _of(
        "%f = one(%f * %f + %f);", "%f = %f * 0.5f + %f;\n  %f = one(%f);", "%f = one(%f + %f);"
    ),
    "half": _of(
        'asm("fma.rn.f16x2 $a, $b, $c, $d;" : "=r"(%h) : "r"(ones(%h)), "r"(%h), "r"(%h));',
        'asm("add.rn.f16x2 $a, $b, $c;" : "=r"(%h) : "r"(ones(%h)), "r"(ones(%h)));',
        'asm("fma.rn.bf16x2 $a, $b, $c, $d;" : "=r"(%h) : "r"(ones(%h)), "r"(%h), "r"(%h));',
        "%h = ones(%h ^ %i);",
    ),
    "xu": _of(
        *(
            _unary(f"{name}.approx.ftz.f32")
            for name in ("ex2", "rcp", "rsqrt", "sqrt", "lg2", "sin", "cos")
        ),
        _unary("tanh.approx.f32"),
        "%i ^= __popc(%i);",
        "%i += __clz(%i);",
        "%i ^= __brev(%i);",
        "%f = one((float)(%i | 1u));",
        "%i += (u32)(int)(%f * 1000.f);",
        "%i += (u32)(long long)%d;",
        "%f = one(rintf(%f * 64.f));",
    ),
    "pack": _of(
        'asm("cvt.rn.bf16x2.f32 $a, $b, $c;" : "=r"(%h) : "f"(%f), "f"(%f));',
        'asm("cvt.rn.f16x2.f32 $a, $b, $c;" : "=r"(%h) : "f"(%f), "f"(%f));',
    ),
    "fp64": _of(
        "%d = one(%d * %d + %d);",
        "%d = one(%d + %d);",
        "%d = one(%d * %d);",
        "%d = %d < %d ? %d : %d;",
    ),
    "shared": _of(
        'asm volatile("ld.shared.u32 $a, [$b+%n*2048];" : "=r"(%i) : "r"(mine) : "memory");',
        'asm volatile("st.shared.u32 [$a+%n*2048], $b;" :: "r"(mine), "r"(%i) : "memory");',
        'asm volatile("st.shared.u32 [$a+%n*2048], $b;" :: "r"(mine), "r"(%h) : "memory");',
    ),
    "global": _of(
        'asm volatile("ld.global.u32 $a, [$b+%n*4];" : "=r"(%i) : "l"(from) : "memory");',
        "%i ^= __ldg(in + ((%i >> 7) & 4095u));",
        'asm volatile("st.global.u32 [$a+%n*4], $b;" :: "l"(to), "r"(%i) : "memory");',
        'asm volatile("ld.global.u32 $a, [$b+%n*4];" : "=r"(%i) : "l"(to) : "memory");',
    ),
    "lanes": _of(
        "%i += __shfl_xor_sync(~0u, %i, %n);",
        "%i ^= __ballot_sync(~0u, %i & 4u);",
        "%i += __reduce_add_sync(~0u, %i);",
        "%f = __shfl_down_sync(~0u, %f, %k);",
    ),
    "matrix": _of(
        'asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$a, $b, $c, $d}, [%4+%k*512];"'
        ' : "=r"(%i), "=r"(h0), "=r"(h1), "=r"(h2) : "r"(rows) : "memory");\n'
        "  h0 = ones(h0); h1 = ones(h1); h2 = ones(h2);",
        'asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [$a], {$b};"'
        ' :: "r"(scratch), "r"(%h) : "memory");',
    ),
    "special": _of(
        '{ u32 t; asm volatile("mov.u32 $a, %%tid.x;" : "=r"(t)); %i += t; }',
        '{ u32 t; asm volatile("mov.u32 $a, %%laneid;" : "=r"(t)); %i ^= t; }',
        '{ u32 t; asm volatile("mov.u32 $a, %%ctaid.x;" : "=r"(t)); %i ^= t & 3u; }',
    ),
    "atomic": _of(
        '{ u32 t; asm volatile("atom.shared.add.u32 $a, [$b+%k*2048], $c;" : "=r"(t)'
        ' : "r"(mine), "r"(%i) : "memory"); %i ^= t; }'
    ),
    "constant": _of("%i ^= table[(%i >> 3) & 255u];", "%i += table[(%i & 127u) + %n];"),
    "uniform": _of(
        "%u = %u * %u + %u;",
        "%u = (%u & %u) ^ %u;",
        "%u = (%u << %k) + %u;",
        "%u = %u + %u + salt;",
        "%u = min(%u, %u) ^ 0x77u;",
        "%u = %u > %u ? %u : %u + 3u;",
        "v += v * v;",
        "v += (u64)%u << 7;",
        "v = (u64)%u * %u + v;",
        "%i += %u;",
        "%i ^= (u32)(v >> 32);",
    ),
    "mma": _of(
        'asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$a, $b, $c, $d},'
        ' {%4, %5, %6, %7}, {%8, %9}, {$a, $b, $c, $d};"'
        ' : "+f"(c%m_0), "+f"(c%m_1), "+f"(c%m_2), "+f"(c%m_3)'
        ' : "r"(%h), "r"(%h), "r"(%h), "r"(%h), "r"(%h), "r"(%h));',
        'asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$a, $b, $c, $d},'
        ' {%4, %5, %6, %7}, {%8, %9}, {$a, $b, $c, $d};"'
        ' : "+f"(c%m_0), "+f"(c%m_1), "+f"(c%m_2), "+f"(c%m_3)'
        ' : "r"(%h), "r"(%h), "r"(%h), "r"(%h), "r"(%h), "r"(%h));',
        "%i ^= __float_as_uint(c%m_0) ^ __float_as_uint(c%m_3);",
    ),
}

PROFILES: Final[Mapping[str, Mapping[str, int]]] = {
    "integer": {"alu": 8, "imad": 4, "wide": 3},
    "uniform": {"uniform": 1},
    "floats": {"fma": 6, "alu": 4, "half": 4, "pack": 2},
    "special": {"xu": 6, "alu": 4, "fma": 2, "pack": 1},
    "doubles": {"fp64": 6, "alu": 3, "imad": 2, "half": 2},
    "shared": {"shared": 8, "alu": 3, "lanes": 2, "special": 1},
    "memory": {"global": 5, "shared": 4, "lanes": 3, "special": 1, "alu": 3, "constant": 1},
    "lanes": {"lanes": 6, "special": 3, "alu": 4, "constant": 2, "atomic": 1},
    "matrix": {"mma": 5, "half": 3, "pack": 2, "alu": 3, "fma": 2, "matrix": 2},
    "all": dict.fromkeys(STATEMENTS, 1) | {"alu": 4, "imad": 2, "uniform": 3},
}


def kernel(profile: str, seed: int, statements: int = 90) -> str:
    """CUDA C++ of the kernel `spacing(in, out, space, rounds, salt)`.

    `in`: 4096 + 64 words; `out`: two words a thread; `space`: 64 words a thread.
    """
    rng = random.Random(f"{profile} {seed}")
    weights = PROFILES[profile]
    kinds, shares = list(weights), list(weights.values())

    def some(count: int) -> str:
        rows: list[str] = []
        for _ in range(count):
            text = STATEMENTS[rng.choices(kinds, shares)[0]](rng)
            text = text.replace("%m", str(rng.randrange(3)))
            rows.append("  " + (_ptx(text) if "asm" in text else text))
        return "\n".join(rows)

    def branch() -> str:
        # Lane exchanges, votes and matrices want whole warps, so most branches are uniform.
        whole = any(kind in weights for kind in ("lanes", "matrix", "mma", "uniform"))
        uniform = whole or rng.random() < 0.5
        asked = f"{_v('u', rng)} & 2u" if uniform else f"{_v('i', rng)} & {1 << rng.randrange(8)}u"
        return f"  if ({asked}) {{\n{some(7)}\n  }} else {{\n{some(4)}\n  }}"

    if profile == "uniform":
        # The compiler keeps block-wide values in uniform registers in straight-line code only.
        body = "\n".join(f"{some(14)}\n{branch()}" for _ in range(6))
        return _whole(body, loops=False)
    parts = [some(statements // 3), branch(), some(statements // 3), branch(), branch()]
    inner = f"#pragma unroll 1\n  for (u32 j = 0; j < 3u; ++j) {{ u1 += j;\n{some(8)}\n  }}"
    body = "\n".join([*parts, inner, some(statements // 3)])
    return _whole(body, loops=True)


def _whole(body: str, loops: bool) -> str:
    """The kernel around its random statements."""
    start = "\n".join(
        [
            *(f"  u32 i{n} = in[g % 4096u + {n * 7}];" for n in range(6)),
            *(f"  float f{n} = one(__uint_as_float(i{n} * {n + 3}u));" for n in range(6)),
            *(f"  u32 h{n} = ones(i{n} * {n + 11}u);" for n in range(6)),
            *(
                f"  double d{n} = one(__longlong_as_double((long long)i{n} << 20));"
                for n in range(6)
            ),
            *(f"  u64 w{n} = (u64)i{n} * 0x9e3779b97f4a7c15ull;" for n in range(6)),
            *(f"  u32 u{n} = (salt + blockIdx.x) * {n * 2 + 5}u + {n};" for n in range(6)),
            *(
                f"  float c{m}_{n} = __uint_as_float((i{n} & 0x7fffffu) | 0x3f800000u);"
                for m in range(3)
                for n in range(4)
            ),
        ]
    )
    words = [
        *(f"i{n}" for n in range(6)),
        *(f"__float_as_uint(f{n})" for n in range(6)),
        *(f"h{n}" for n in range(6)),
        *(f"(u32)(__double_as_longlong(d{n}) >> 18)" for n in range(6)),
        *(f"(u32)(w{n} ^ (w{n} >> 32))" for n in range(6)),
        *(f"u{n}" for n in range(6)),
        *(f"__float_as_uint(c{m}_{n})" for m in range(3) for n in range(4)),
        "(u32)(v ^ (v >> 32))",
    ]
    mixed = "\n".join(
        f"  a = (a ^ ({word})) * 16777619u; b = (b + a) ^ (a >> 15);" for word in words
    )
    loop = "#pragma unroll 1\n  for (u32 r = 0; r < rounds; ++r) {\n    u0 += r;\n"
    repeated = f"{loop}{body}\n  }}" if loops else body
    return f"""{_HEAD}
extern "C" __global__ void __launch_bounds__({THREADS}) spacing(
    const u32* __restrict__ in, u32* out, u32* space, u32 rounds, u32 salt) {{
  extern __shared__ u32 shared[];
  u32 g = blockIdx.x * blockDim.x + threadIdx.x;
  for (u32 at = threadIdx.x; at < 32u * 512u + 4096u; at += blockDim.x) shared[at] = in[at % 4096u];
  __syncthreads();
  u32 base; asm("{{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }}"
                : "=r"(base) : "l"(shared));
  u32 mine = base + threadIdx.x * 4u, rows = base + 65536u + (threadIdx.x & 31u) * 16u;
  u32 scratch = base + 65536u + 8192u + (threadIdx.x >> 5) * 256u + (threadIdx.x & 15u) * 16u;

  const u32* from = in + g % 4096u; u32* to = space + g * 64u;
  u64 v = salt;
{start}
{repeated}
  u32 a = 2166136261u, b = 0u;
{mixed}
  out[2u * g] = a; out[2u * g + 1u] = b;
}}
"""
