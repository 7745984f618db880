"""What a warp group's arithmetic loses beside another group's matmuls, and the matmuls beside it.

    python -m bench.contention build contention.cubin             no GPU
    python -m bench.contention run contention.cubin --out m.json  on a Hopper GPU

Warp group 0 keeps batches of 16 wgmma m64n128k16 going (A from shared memory or registers), each
waited for, until group 1 has done `reps` tile operations of 64 x 128
(those of bench/calibrate_kernels.py). Both read the SM's clock; each also runs without the other.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from bench.calibrate_kernels import HEADER, TILE_OPS
from bench.calibrate_schedule import SHARED_BASE, Bench, i32, u64
from warploom.errors import CheckFailed
from warploom.toolchain import find

COLUMNS = 128
BATCH = 16
REPS = 2000
BASE = SHARED_BASE + 1024  # of dynamic shared memory, behind the flag
BATCHES = 1500  # of the matmul group when it runs aleach


def kernel(name: str, body: str, registers: bool) -> str:
    """Group 0 multiplies while group 1 works; `who` bit 0: matmuls run, bit 1: arithmetic runs."""
    count = COLUMNS // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if registers:
        operands = f"{{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}, %{count + 4}"
        inputs, tail = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(db)', "1, 1, 1, 0"
    else:
        operands, inputs, tail = f"%{count}, %{count + 1}", '"l"(da), "l"(db)', "1, 1, 1, 0, 0"
    shape = f"wgmma.mma_async.sync.aligned.m64n{COLUMNS}k16.f32.bf16.bf16"
    steps = "\n".join(
        f"    {{ u64 da = first_a + {(s // 4 % 2 * 8192 + s % 4 * 32) >> 4};"
        f" u64 db = first_b + {(s // 4 % 2 * COLUMNS * 128 + s % 4 * 32) >> 4}; (void)da;\n"
        f'      asm volatile("{shape} {{{accumulators}}}, {operands}, {tail};"\n'
        f"                   : {outputs} : {inputs}); }}"
        for s in range(BATCH)
    )
    loops = body.replace("for (", "\n#pragma unroll\n      for (")
    return f"""
#define PER {COLUMNS // 2}
#define HALF {COLUMNS // 4}
extern "C" __global__ void __launch_bounds__(256) {name}(u32* out, int reps, int batches, int who,
                                                         u32 base) {{
  extern __shared__ unsigned char raw[];
  __shared__ volatile u32 finished;
  if (base != shared_base(raw)) {{ out[0] = 0xFFFFFFFFu; return; }}
  for (u32 at = threadIdx.x * 4; at < {2 * 8192 + 2 * COLUMNS * 128}; at += blockDim.x * 4)
    asm volatile("st.shared.u32 [%0], %1;" :: "r"(base + at), "r"(0) : "memory");
  if (threadIdx.x == 0) finished = 0;
  async_fence();
  __syncthreads();
  if (threadIdx.x < 128) {{
    if (!(who & 1)) return;
    const u64 layout = (1ull << 62) | (64ull << 32) | (1ull << 16);
    u64 first_a = layout | ((base & 0x3FFFF) >> 4);
    u64 first_b = layout | (((base + 16384) & 0x3FFFF) >> 4);
    u32 a[4] = {{(u32)reps >> 30, (u32)reps >> 29, (u32)reps >> 30, (u32)reps >> 29}};
    (void)a; (void)first_a;
    float d[{count}];
#pragma unroll
    for (int i = 0; i < {count}; ++i) d[i] = 0.f;
    u32 begin = now(), end = begin;
    int done = 0;
#pragma unroll 1
    for (; done < batches; ++done) {{
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
{steps}
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      int stop = (who & 2) && finished;
      // One answer for the whole group: a warp that went on alone would issue an illegal wgmma.
      asm volatile("{{ .reg .pred p, q; setp.ne.s32 q, %1, 0; bar.red.or.pred p, 1, 128, q; "
                   "selp.s32 %0, 1, 0, p; }}" : "=r"(stop) : "r"(stop) : "memory");
      if (stop) break;
      end = now();
    }}
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < {count}; ++i) sum += d[i];
    if (threadIdx.x == 0) {{ out[0] = end - begin; out[1] = (u32)done; }}
    if (sum == 12345.f) out[4] = 0;
  }} else {{
    if (!(who & 2)) return;
    float x[PER], carried[2] = {{(float)threadIdx.x, (float)threadIdx.x}};
    float scale = (float)(reps >> 30);
#pragma unroll
    for (int i = 0; i < PER; ++i) x[i] = (float)((threadIdx.x * 7 + i * 13) & 63) - 64.f;
    (void)scale;
    u32 begin = now();
#pragma unroll 1
    for (int r = 0; r < reps; ++r) {{
      {{ {loops}
      }}
      asm volatile("" :: "f"(carried[0]), "f"(carried[1]) : "memory");
    }}
    u32 end = now();
    finished = 1;
    float sum = carried[0] + carried[1];
#pragma unroll
    for (int i = 0; i < PER; ++i) sum += x[i];
    if (threadIdx.x == 128) {{ out[2] = end - begin; out[3] = (u32)reps; }}
    if (sum == 12345.25f) out[5] = 0;
  }}
}}
#undef PER
#undef HALF
"""


def build(path: Path) -> None:
    """Compile; a note that wgmma is serialised is an error."""
    parts = [HEADER]
    for name, body in TILE_OPS.items():
        parts += [kernel(f"beside_{m}_{name}", body, m == "rs") for m in ("ss", "rs")]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "contention.cu"
        text.write_text("\n".join(parts))
        done = find("nvcc").run("-cubin", "-arch=sm_90a", "-O3", "-w", "-o", str(path), str(text))
    if done.returncode or "serializ" in done.stdout + done.stderr:
        raise CheckFailed(f"nvcc: {(done.stdout + done.stderr).strip()[-400:]}")


def measure(cubin: Path) -> list[dict[str, Any]]:
    """Cycles a batch and a tile operation, alone and together."""
    bench = Bench(cubin)
    rows: list[dict[str, Any]] = []
    for mode in ("ss", "rs"):
        for name in TILE_OPS:
            row: dict[str, Any] = {"matmul": mode, "op": name}
            for title, who in (("matmul alone", 1), ("op alone", 2), ("together", 3)):
                batches = BATCHES if who == 1 else 1 << 30
                arguments = (u64(bench.out), *map(i32, (REPS, batches, who, BASE)))
                for _ in range(2):
                    got = bench.run(f"beside_{mode}_{name}", *arguments, threads=256, words=8)
                row[title] = [
                    round(got[0] / got[1], 2) if got[1] else None,
                    round(got[2] / got[3], 2) if got[3] else None,
                ]
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("build", "run"))
    parser.add_argument("cubin", type=Path)
    parser.add_argument("--out", type=Path, default=Path("contention.json"))
    args = parser.parse_args()
    if args.mode == "build":
        build(args.cubin)
    else:
        rows = measure(args.cubin)
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
