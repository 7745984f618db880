"""Warp-group matrix probes: cycles of one `wgmma` when eight of a group run back to back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bench.calibration.probes import PREFIX

GROUP: Final = 8
COLUMNS: Final = (64, 128, 256)


@dataclass(frozen=True)
class MatrixProbe:
    """m64nNk16, fp16 in, fp32 out; A from shared memory, or from registers (`rs`).

    `wait`: the group is waited for before the next begins, so that the loop shows the latency of
    a group as a whole; otherwise one group stays in flight and the loop shows the rate.
    """

    columns: int
    rs: bool
    wait: bool

    @property
    def name(self) -> str:
        """Such as `wgmma128_ss_rate`."""
        operand = "rs" if self.rs else "ss"
        return f"wgmma{self.columns}_{operand}_{'chain' if self.wait else 'rate'}"

    opcode = "HGMMA"


def matrix_probes() -> list[MatrixProbe]:
    """Every warp-group matrix probe."""
    flags = (False, True)
    return [MatrixProbe(n, rs, wait) for n in COLUMNS for rs in flags for wait in flags]


def matrix_source(probe: MatrixProbe) -> str:
    """The CUDA C++ of one probe; dynamic shared memory holds 16 KiB of A and 32 KiB of B."""
    count = probe.columns // 2
    registers = ", ".join(f"%{n}" for n in range(count))
    inputs = ['"r"(a0)', '"r"(a1)', '"r"(a2)', '"r"(a3)'] if probe.rs else ['"l"(da)']
    first = ", ".join(f"%{count + n}" for n in range(len(inputs)))
    first = f"{{{first}}}" if probe.rs else first
    second = f"%{count + len(inputs)}"
    tail = "p, 1, 1, 0" if probe.rs else "p, 1, 1, 0, 0"
    outputs = ", ".join(f'"+f"(d[{n}])' for n in range(count))
    step = (
        'asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{probe.columns}k16.f32.f16.f16 "
        f'{{{registers}}}, {first}, {second}, {tail}; }}" '
        f': {outputs} : {", ".join(inputs)}, "l"(db));'
    )
    left = 0 if probe.wait else 1
    return f"""
extern "C" __global__ void __launch_bounds__(256) {PREFIX}{probe.name}(
    unsigned long long* out, unsigned long long mem, int rounds, unsigned a, unsigned b, unsigned c,
    unsigned e, unsigned one, unsigned sel, unsigned ha, unsigned hb, unsigned long long start) {{
  extern __shared__ __align__(1024) unsigned char tile[];
  for (int i = threadIdx.x; i < 12288; i += blockDim.x) ((unsigned*)tile)[i] = ha;
  unsigned base = (unsigned)__cvta_generic_to_shared(tile);
  // 128-byte swizzle, 8-row groups 1024 bytes apart (PTX ISA, matrix descriptor).
  unsigned long long form = (1ull << 62) | (64ull << 32) | (1ull << 16);
  unsigned long long da = form | ((base & 0x3FFFF) >> 4);
  unsigned long long db = form | (((base + 16384) & 0x3FFFF) >> 4);
  unsigned a0 = ha, a1 = hb, a2 = ha + threadIdx.x % 4, a3 = hb;
  float d[{count}];
  for (int i = 0; i < {count}; ++i) d[i] = 0.0f;
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  long long began = clock64();
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    {(chr(10) + "    ").join([step] * GROUP)}
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned {left};" ::: "memory");
  }}
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  long long ended = clock64();
  float digest = 0;
  for (int i = 0; i < {count}; ++i) digest += d[i];
  out[2 * threadIdx.x] = (unsigned long long)(ended - began);
  out[2 * threadIdx.x + 1] = __float_as_uint(digest);
}}
"""
