"""How warps of several groups share a scheduler partition: what `timing.partition` is made of.

    python -m bench.partition build partition.cubin                 no GPU
    python -m bench.partition run partition.cubin --out RAW         on a Hopper GPU
    python -m bench.partition compare partition.cubin RAW           no GPU: model beside measurement

`same_*`: each of one or two groups issues a batch of eight wgmma (m64n128k16 from shared memory, or
m64n64k16 with A in registers) and does one tile operation of 64 x 128 before it waits; also each
alone. `three_*`: two groups repeat tile operations while a third keeps batches of 16 wgmma going;
`who` says which of the three run. Figures are cycles a pass. `trace_*`: when each of eight wgmma
was issued and the batch was done, the second group beginning `delay` cycles late.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.calibrate_kernels import HEADER, TILE_OPS
from bench.calibrate_schedule import SHARED_BASE, Bench, i32, u64
from warploom.errors import CheckFailed
from warploom.sass.decode.cubin import load
from warploom.sass.decode.kernel import decode_all
from warploom.sass.flow.steady import loop_passes
from warploom.sass.timing.partition import Partition
from warploom.sass.timing.slots import Line, slots_of
from warploom.toolchain import find

REPS = 1000
SEQUENCES = {
    "soft": ("row_max", "scale_shift", "exp2", "row_sum", "convert"),
    "exp": ("exp2",),
    "fma": ("scale_shift",),
    "max": ("row_max",),
    "expfma": ("scale_shift", "exp2", "row_sum_local"),
}
MODES = {"ss": 128, "rs": 64}  # where A is, and columns
TRACES = (("ss", 128), ("rs", 64), ("rs", 128))
DELAYS = (0, 40, 100, 200, 400, 700)
WHO = (1, 3, 4, 5, 7)
FENCE = 'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");'
COMMIT = 'asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");'
# One answer for the whole group: a warp that went on alone would issue an illegal wgmma.
TOGETHER = (
    'asm volatile("{ .reg .pred p, q; setp.ne.s32 q, %1, 0; bar.red.or.pred p, 2, 128, q; '
    'selp.s32 %0, 1, 0, p; }" : "=r"(stop) : "r"(stop) : "memory");'
)
WAIT = 'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");'


def wgmmas(columns: int, mode: str, count: int) -> list[str]:
    """Lines that issue so many wgmma onto one accumulator."""
    own = columns // 2
    registers = ", ".join(f"%{i}" for i in range(own))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(own))
    if mode == "rs":
        operands = f"{{%{own}, %{own + 1}, %{own + 2}, %{own + 3}}}, %{own + 4}, 1, 1, 1, 0"
        inputs = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(db)'
    else:
        operands, inputs = f"%{own}, %{own + 1}, 1, 1, 1, 0, 0", '"l"(da), "l"(db)'
    shape = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16"
    return [
        f"{{ u64 da = first_a + {(s // 4 % 2 * 8192 + s % 4 * 32) >> 4}; "
        f"u64 db = first_b + {(s // 4 % 2 * columns * 128 + s % 4 * 32) >> 4}; (void)da; "
        f'asm volatile("{shape} {{{registers}}}, {operands};" : {outputs} : {inputs}); }}'
        for s in range(count)
    ]


def _opening(columns: int) -> str:
    return f"""
  extern __shared__ unsigned char raw[];
  if (base != shared_base(raw)) {{ out[0] = 0xFFFFFFFFu; return; }}
  for (u32 at = threadIdx.x * 4; at < {2 * 8192 + 2 * columns * 128}; at += blockDim.x * 4)
    asm volatile("st.shared.u32 [%0], %1;" :: "r"(base + at), "r"(0) : "memory");
  async_fence();
  __syncthreads();
  const u64 layout = (1ull << 62) | (64ull << 32) | (1ull << 16);
  u64 first_a = layout | ((base & 0x3FFFF) >> 4);
  u64 first_b = layout | (((base + 16384) & 0x3FFFF) >> 4);
  u32 a[4] = {{(u32)reps >> 30, (u32)reps >> 29, (u32)reps >> 30, (u32)reps >> 29}};
  (void)a; (void)first_a;
  float d[{columns // 2}];
  for (int i = 0; i < {columns // 2}; ++i) d[i] = 0.f;
  const int g = threadIdx.x / 128;
"""


VALUES = """
  float x[64], carried[2] = {(float)threadIdx.x, (float)threadIdx.x};
  float scale = (float)(reps >> 30);
  (void)scale;
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i] = (float)((threadIdx.x * 7 + i * 13) & 63) - 64.f;
"""
USED = """
  float sum = carried[0] + carried[1];
#pragma unroll
  for (int i = 0; i < 64; ++i) sum += x[i];
"""


def _operation(name: str) -> str:
    body = TILE_OPS[name].replace("for (", "\n#pragma unroll\n      for (")
    return f'{{ {body}\n asm volatile("" :: "f"(carried[0]), "f"(carried[1]) : "memory"); }}'


def _head(name: str, threads: int, last: str) -> str:
    return (
        f'extern "C" __global__ void __launch_bounds__({threads}) {name}'
        f"(u32* out, int reps, int {last}, u32 base) {{"
    )


def same(mode: str, op: str) -> str:
    """`what`: 1 matmuls, 2 the operation, 3 both."""
    batch = " ".join([FENCE, *wgmmas(MODES[mode], mode, 8), COMMIT])
    loop = "#pragma unroll 1\n  for (int r = 0; r < reps; ++r)"
    return f"""
{_head(f"same_{mode}_{op}", 256, "what")} {_opening(MODES[mode])} {VALUES}
  u32 begin = now();
  if (what == 3) {{
{loop} {{ {batch} {_operation(op)} {WAIT} }}
  }} else if (what == 1) {{
{loop} {{ {batch} {WAIT} }}
  }} else {{
{loop} {{ {_operation(op)} }}
  }}
  u32 end = now();
  {USED}
  for (int i = 0; i < {MODES[mode] // 2}; ++i) sum += d[i];
  if (threadIdx.x % 128 == 0) out[g] = end - begin;
  if (sum == 12345.25f) out[5] = 0;
}}"""


def three(name: str) -> str:
    """Bits of `who`: groups 0 and 1 do the operations, 2 the matmuls until both are done."""
    return f"""
{_head(f"three_{name}", 384, "who")} {_opening(128)}
  __shared__ volatile u32 finished[2];
  if (threadIdx.x < 2) finished[threadIdx.x] = !((who >> threadIdx.x) & 1);
  __syncthreads();
  if (!((who >> g) & 1)) return;
  if (g == 2) {{
    u32 begin = now(), end = begin;
    int done = 0;
#pragma unroll 1
    for (; done < (1 << 30); ++done) {{
      {FENCE} {" ".join(wgmmas(128, "ss", 16))} {COMMIT} {WAIT}
      int stop = (who & 3) ? (finished[0] && finished[1]) : done >= 1500;
      {TOGETHER}
      if (stop) break;
      end = now();
    }}
    float total = 0;
    for (int i = 0; i < 64; ++i) total += d[i];
    if (threadIdx.x == 256) {{ out[4] = end - begin; out[5] = done; }}
    if (total == 12345.f) out[9] = 0;
    return;
  }}
  {VALUES}
  u32 begin = now();
#pragma unroll 1
  for (int r = 0; r < reps; ++r) {{ {" ".join(map(_operation, SEQUENCES[name]))} }}
  u32 end = now();
  finished[g] = 1;
  {USED}
  if (threadIdx.x % 128 == 0) {{ out[g * 2] = end - begin; out[g * 2 + 1] = reps; }}
  if (sum == 12345.25f) out[9] = 0;
}}"""


def trace(mode: str, columns: int) -> str:
    """When each of eight wgmma was issued."""
    lines = wgmmas(columns, mode, 8)
    stamped = " ".join(f"t[{number}] = now(); {line}" for number, line in enumerate(lines))
    return f"""
{_head(f"trace_{mode}_{columns}", 256, "delay")} {_opening(columns)}
  u32 t[10];
  for (int r = 0; r < reps; ++r) {{
    asm volatile("bar.sync 1, %0;" :: "r"((int)blockDim.x) : "memory");
    u32 zero = now();
    if (g == 1) while (now() - zero < (u32)delay) ;
    {FENCE} {stamped} {COMMIT} t[8] = now(); {WAIT} t[9] = now();
    if (threadIdx.x % 128 == 0) for (int i = 0; i < 10; ++i) out[g * 16 + i] = t[i] - zero;
  }}
  float sum = 0;
  for (int i = 0; i < {columns // 2}; ++i) sum += d[i];
  if (sum == 12345.f) out[60] = 0;
}}"""


def build(path: Path, names: Sequence[str] = ()) -> None:
    """Compile the kernels of those names, or all; a note that wgmma is serialised is an error."""
    texts = {f"same_{mode}_{op}": same(mode, op) for mode in MODES for op in TILE_OPS}
    texts |= {f"three_{name}": three(name) for name in SEQUENCES}
    texts |= {f"trace_{mode}_{columns}": trace(mode, columns) for mode, columns in TRACES}
    chosen = [texts[name] for name in names or texts]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "partition.cu"
        text.write_text("\n".join([HEADER, "#define PER 64\n#define HALF 32", *chosen]))
        done = find("nvcc").run("-cubin", "-arch=sm_90a", "-O3", "-w", "-o", str(path), str(text))
    if done.returncode or "serializ" in done.stdout + done.stderr:
        raise CheckFailed(f"nvcc: {(done.stdout + done.stderr).strip()[-400:]}")


def measure(bench: Bench) -> dict[str, Any]:
    """Cycles a pass by kernel and setting, the second of two launches."""
    found: dict[str, Any] = {}

    def twice(name: str, reps: int, last: int, base: int, threads: int, words: int) -> list[int]:
        for _ in range(2):
            got = bench.run(
                name, u64(bench.out), i32(reps), i32(last), i32(base), threads=threads, words=words
            )
        return got

    for mode, columns in TRACES:
        for delay in DELAYS:
            got = twice(f"trace_{mode}_{columns}", 4, delay, SHARED_BASE, 256, 32)
            found[f"trace {mode} {columns} delay {delay}"] = [got[:10], got[16:26]]
    for mode in MODES:
        for op in TILE_OPS:
            for groups in (1, 2):
                for what in (1, 2, 3):
                    got = twice(f"same_{mode}_{op}", REPS, what, SHARED_BASE, 128 * groups, 8)
                    found[f"same {mode} {op}: {groups} groups, {what}"] = max(got[:groups]) / REPS
    for name in SEQUENCES:
        for who in WHO:
            got = twice(f"three_{name}", REPS, who, SHARED_BASE + 1024, 384, 8)
            if who & 3:
                found[f"three {name}: {who} operations"] = max(got[0], got[2]) / REPS
            if who & 4:
                found[f"three {name}: {who} matmuls"] = got[4] / max(1, got[5])
    return found


def predict(cubin: Path, key: str) -> float:
    """What the model says of one figure of `measure`."""
    kind, rest = key.split(" ", 1)
    name, setting = rest.split(": ")
    kernel = decode_all(load(cubin))[f"{kind}_{name.replace(' ', '_')}"]
    loops = [slots_of(loop) for loop in loop_passes(kernel)]
    arithmetic = max((one for one in loops if not _matmuls(one)), key=len)
    batches = sorted((one for one in loops if _matmuls(one)), key=len)
    if kind == "same":
        groups, what = int(setting[0]), int(setting[-1])
        loop = {1: batches[0], 2: arithmetic, 3: batches[-1]}[what]
        return max(_paces([loop] * groups))
    who = int(setting[0])
    own = bin(who & 3).count("1")
    paces = _paces([arithmetic] * own + [batches[0]] * (who >> 2))
    return paces[-1] if setting.endswith("matmuls") else max(paces[:own])


def _matmuls(loop: Sequence[Line]) -> int:
    return sum(bool(slot.matmul) for slot, _ in loop)


def _paces(loops: Sequence[Sequence[Line]]) -> list[float]:
    """Cycles a pass of each, while all of them run."""
    ends = Partition(loops, [37.0 * number for number in range(len(loops))]).run(40)
    over = min(own[39] for own in ends)
    found: list[float] = []
    for own in ends:
        within = [end for end in own if end <= over]
        third = len(within) // 3
        found.append((within[-1] - within[third]) / max(1, len(within) - 1 - third))
    return found


def compare(cubin: Path, raw: dict[str, Any]) -> None:
    """A table of model and measurement."""
    errors: list[float] = []
    for key, measured in raw["cycles"].items():
        if key.startswith("trace"):
            continue
        model = predict(cubin, key)
        errors.append(model / measured - 1)
        print(f"{key:40} measured {measured:7.0f}  model {model:7.0f}  {errors[-1]:+.1%}")
    print(
        f"{len(errors)} figures, mean {statistics.mean(errors):+.1%}, "
        f"standard deviation {statistics.pstdev(errors):.1%}"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("build", "run", "compare"))
    parser.add_argument("cubin", type=Path)
    parser.add_argument("raw", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path("partition.json"))
    args = parser.parse_args()
    if args.mode == "build":
        build(args.cubin)
    elif args.mode == "run":
        bench = Bench(args.cubin)
        info = bench.device.info
        found = {"device": info.name, "driver": info.driver_version, "cycles": measure(bench)}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    else:
        compare(args.cubin, json.loads(args.raw.read_text()))


if __name__ == "__main__":
    main()
