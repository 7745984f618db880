"""Measure what a whole launch needs beyond its loops: the clock that power leaves, and L2's rate.

    python -m bench.calibrate_launch --build cal.cubin                compile (no GPU; nvcc >= 13.3)
    python -m bench.calibrate_launch --cubin cal.cubin --out m.json   measure (H100 / H200)
    python -m bench.calibrate_launch --fit m.json                     constants, with residuals

`power` runs small kernels that do one thing (matmuls, arithmetic, copies) twice: in bursts of 4 ms
after 12 ms of rest, and alone for half a second. Each reads its own cycles and nanoseconds, so the
clock is the one it ran at; NVML tells the watts of the second kind. `copies` fills a ring of every
SM from L2, with groups of neighbouring blocks that read the same bytes. `launches` times kernels
that do nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.calibrate_fit import Fit
from bench.calibrate_kernels import HEADER
from warploom.errors import CheckFailed, InputError
from warploom.files import write_text_atomically
from warploom.runtime.device import Shape
from warploom.runtime.driver import CudaDevice
from warploom.runtime.launch import Params, TensorMap
from warploom.toolchain import find

SHARED = 200 * 1024
BURST, REST, BURSTS = 4e-3, 12e-3, 6
LENGTHS = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3)  # seconds of a launch
SETTLE, ALONE = 0.25, 0.35
DATA, NOISE = 1 << 30, 1 << 21  # bytes that copies read, of which so many are different
KIB = 1024
LAUNCHES = 200  # in a graph

BODY = """
DEV u64 nanoseconds() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }
DEV u64 cycles() { u64 c; asm volatile("mov.u64 %0, %%clock64;" : "=l"(c) :: "memory"); return c; }
struct Span {
  u64 c, t;
  DEV void begin() { __syncthreads(); c = cycles(); t = nanoseconds(); }
  DEV void end(u64* out) {
    __syncthreads();
    if (threadIdx.x == 0) {
      out[2 * blockIdx.x] = cycles() - c;
      out[2 * blockIdx.x + 1] = nanoseconds() - t;
    }
  }
};
// Operands as matmuls have them: numbers of a normal distribution, `data` holds half a MiB of them.
DEV void fill(u32 base, u32 bytes, const u32* data) {
  for (u32 at = threadIdx.x * 4; at < bytes; at += blockDim.x * 4)
    asm volatile("st.shared.u32 [%0], %1;" :: "r"(base + at), "r"(data[at / 4]) : "memory");
  async_fence();
  __syncthreads();
}
DEV void meet() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
// Blocks of a cluster that meet as they begin and as they end.
extern "C" __global__ void meeting(u64* out, int reps) {
  meet();
  Span span; span.begin();
  span.end(out);
  meet();
}
// Sleeping warps: what the GPU takes while nothing happens.
extern "C" __global__ void asleep(u64* out, int reps) {
  Span span; span.begin();
  for (int r = 0; r < reps; ++r) __nanosleep(1000);
  span.end(out);
}
"""

COPIES = """
// A ring of slots kept full. Block b reads the bytes of group b / share, from the group's own place
// on, over and over `wrap` slots.
extern "C" __global__ void stream(u64* out, int reps, const char* data, u32 bytes, int wrap,
                                  int share, int slots) {
  extern __shared__ unsigned char raw[];
  __shared__ alignas(8) u64 full[8];
  u32 to = shared_base(raw), first_bar = address(&full[0]);
  if (threadIdx.x == 0) for (int s = 0; s < 8; ++s) barrier_init(first_bar + 8 * s, 1);
  async_fence();
  Span span; span.begin();
  const char* from = data + (u64)(blockIdx.x / share) * wrap * bytes;
  int slot = 0, phase = 1, place = 0;
  for (int r = 0; r < reps + slots; ++r) {
    u32 bar = first_bar + 8 * slot;
    if (r >= slots && !wait(bar, phase)) break;
    if (r < reps) {
      expect(bar, bytes);
      bulk_load(to + slot * bytes, from + (u64)place * bytes, bytes, bar);
    }
    if (++place == wrap) place = 0;
    if (++slot == slots) { slot = 0; phase ^= 1; }
  }
  span.end(out);
}
// The same of tiles of 64 columns of a matrix: slot r of block b has columns 64 r + `first` on, and
// the 128 rows of the block's group in each of `boxes` matrices stacked on one another.
extern "C" __global__ void tiles(u64* out, int reps, const __grid_constant__ Map map, int rows,
                                 int boxes, int columns, int share, int slots, int first) {
  extern __shared__ unsigned char raw[];
  __shared__ alignas(8) u64 full[8];
  u32 to = shared_base(raw), first_bar = address(&full[0]), bytes = rows * 128;
  if (threadIdx.x == 0) for (int s = 0; s < 8; ++s) barrier_init(first_bar + 8 * s, 1);
  async_fence();
  Span span; span.begin();
  int slot = 0, phase = 1, x = first, y = blockIdx.x / share * rows * boxes;
  for (int r = 0; r < reps + slots; ++r) {
    u32 bar = first_bar + 8 * slot;
    if (r >= slots && !wait(bar, phase)) break;
    if (r < reps) {
      expect(bar, bytes * boxes);
      for (int b = 0; b < boxes; ++b)
        tensor_load(to + (slot * boxes + b) * bytes, &map, x, y + b * rows, bar);
    }
    x += 64;
    if (x + 64 > columns) x = first;
    if (++slot == slots) { slot = 0; phase ^= 1; }
  }
  span.end(out);
}
// Bulk stores of a slot, as many in flight as groups allow.
extern "C" __global__ void bulk_stores(u64* out, int reps, char* data, u32 bytes, int wrap) {
  extern __shared__ unsigned char raw[];
  u32 from = shared_base(raw);
  fill(from, bytes, (const u32*)data);
  Span span; span.begin();
  if (threadIdx.x == 0) {
    u64 first = (u64)blockIdx.x * wrap;
    for (int r = 0; r < reps; ++r) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                   :: "l"(data + (first + r % wrap) * bytes), "r"(from), "r"(bytes) : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group.read 3;" ::: "memory");
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  span.end(out);
}
"""

# What the loop of a matrix product loads, and no product: a ring of slots with 64 columns of rows
# of two matrices, for tasks in bands of rows. Each slot is read for `pace` cycles and given back
# `held` steps later, as by matmuls in flight.
PACED_RING = """
extern "C" __global__ void paced(
    u64* out, int reps, const __grid_constant__ Map a, const __grid_constant__ Map b, int rows_a,
    int rows_b, int steps, int high, int wide, int band, int slots, int held, int pace) {
  extern __shared__ unsigned char raw[];
  __shared__ alignas(8) u64 full[8], empty[8];
  u32 to = shared_base(raw), filled = address(&full[0]), freed = address(&empty[0]);
  if (threadIdx.x == 0) for (int s = 0; s < 8; ++s) {
    barrier_init(filled + 8 * s, 1);
    barrier_init(freed + 8 * s, 1);
  }
  async_fence();
  Span span; span.begin();
  u32 size_a = rows_a * 128, size_b = rows_b * 128, bytes = size_a + size_b;
  if (threadIdx.x == 0) {
    int slot = 0, phase = 0, step = 0, task = blockIdx.x, row = 0, column = 0;
    for (int r = 0; r < reps; ++r) {
      if (step == 0) {
        int t = task % (high * wide), first = t / (band * wide) * band;
        int here = min(band, high - first), inside = t % (band * wide);
        row = first + inside % here, column = inside / here;
        task += gridDim.x;
      }
      if (r >= slots && !wait(freed + 8 * slot, phase)) break;
      u32 at = to + slot * bytes, bar = filled + 8 * slot;
      expect(bar, bytes);
      tensor_load(at, &a, step * 64, row * rows_a, bar);
      tensor_load(at + size_a, &b, step * 64, column * rows_b, bar);
      if (++step == steps) step = 0;
      if (++slot == slots) { slot = 0; if (r >= slots) phase ^= 1; }
    }
  } else if (threadIdx.x == 32) {
    int slot = 0, phase = 0, late = 0;
    u64 ready = cycles();
    for (int r = 0; r < reps; ++r) {
      if (!wait(filled + 8 * slot, phase)) break;
      u64 seen = cycles();
      ready = (seen > ready ? seen : ready) + pace;
      while (cycles() < ready) {}
      if (r >= held) {
        arrive(freed + 8 * late);
        if (++late == slots) late = 0;
      }
      if (++slot == slots) { slot = 0; phase ^= 1; }
    }
  }
  span.end(out);
}
"""

# What a thread of 256 does over and over, with eight values of its own.
LANES = {
    "ffma": 'asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[i]) : "f"(c), "f"(d));',
    "ex2": 'asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));',
    "fmax": 'asm volatile("max.f32 %0, %0, %1;" : "+f"(x[i]) : "f"(x[(i + 1) % 8]));',
    "lds": 'asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]),'
    ' "=f"(x[2]), "=f"(x[3]) : "r"(at + (i + (u & 3)) * 4096) : "memory");'
    " x[4 + i % 4] += x[i % 4];",
    "sts": 'asm volatile("st.shared.v4.f32 [%4], {%0, %1, %2, %3};" :: "f"(x[0]), "f"(x[1]),'
    ' "f"(x[2]), "f"(x[3]), "r"(at + (i + (u & 3)) * 4096) : "memory");',
}
LANE_STEPS = 64  # operations of a thread in one repetition


def lanes(name: str, text: str) -> str:
    """A kernel in which every thread does `LANE_STEPS` of one operation a repetition."""
    return f"""
extern "C" __global__ void __launch_bounds__(256) lanes_{name}(u64* out, int reps,
                                                                 const u32* data) {{
  extern __shared__ unsigned char raw[];
  u32 at = shared_base(raw) + threadIdx.x * 16;
  fill(shared_base(raw), 64 * 1024, data);
  float x[8], c = 0.999f - 1e-6f * threadIdx.x, d = 1e-3f * (threadIdx.x % 7);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = __uint_as_float(data[threadIdx.x * 8 + i]);
  (void)at; (void)c; (void)d;
  Span span; span.begin();
#pragma unroll 1
  for (int r = 0; r < reps; ++r) {{
#pragma unroll
    for (int u = 0; u < {LANE_STEPS // 8}; ++u) {{
#pragma unroll
      for (int i = 0; i < 8; ++i) {{ {text} }}
    }}
  }}
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += x[i];
  span.end(out);
  if (sum == 12345.f) out[0] = 0;
}}
"""


BATCH = 8  # matmul instructions of a group in one repetition


def products(columns: int, registers: bool, kind: str) -> str:
    """A kernel whose two groups multiply without end: `BATCH` m64n{columns} a repetition each."""
    narrow = kind == "e4m3"
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    shape = f"m64n{columns}k{32 if narrow else 16}.f32.{PTX.get(kind, kind)}.{PTX.get(kind, kind)}"
    shape = f"wgmma.mma_async.sync.aligned.{shape}"
    tail = "1, 1, 1" if narrow else ("1, 1, 1, 0" if registers else "1, 1, 1, 0, 0")
    if registers:
        operands = f"{{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}, %{count + 4}"
        inputs = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(db)'
    else:
        operands, inputs = f"%{count}, %{count + 1}", '"l"(da), "l"(db)'
    steps = "\n".join(
        f"    {{ u64 da = first_a + {(s // 4 * 8192 + s % 4 * 32) >> 4};"
        f" u64 db = first_b + {(s // 4 * columns * 128 + s % 4 * 32) >> 4}; (void)da;\n"
        f'      asm volatile("{shape} {{{sums}}}, {operands}, {tail};"\n'
        f"                   : {outputs} : {inputs}); }}"
        for s in range(BATCH)
    )
    name = products_name(columns, registers, kind)
    return f"""
extern "C" __global__ void __launch_bounds__(256) {name}(u64* out, int reps, u32 base,
                                                               const u32* data) {{
  // The base of shared memory comes in as a parameter, so that descriptors stay out of the loop.
  extern __shared__ unsigned char raw[];
  if (base != shared_base(raw)) {{ out[0] = 0; return; }}
  fill(base, {4 * 8192 + 2 * columns * 128}, data + {OPERANDS[kind] // 4});
  const u64 layout = (1ull << 62) | (64ull << 32) | (1ull << 16);
  u64 first_a = layout | (((base + threadIdx.x / 128 * 16384) & 0x3FFFF) >> 4);
  u64 first_b = layout | (((base + 32768) & 0x3FFFF) >> 4);
  u32 a[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = data[threadIdx.x * 4 + i];
  float d[{count}];
#pragma unroll
  for (int i = 0; i < {count}; ++i) d[i] = 0.f;
  (void)a;
  Span span; span.begin();
#pragma unroll 1
  for (int r = 0; r < reps; ++r) {{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
{steps}
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }}
  span.end(out);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < {count}; ++i) sum += d[i];
  if (sum == 12345.f) out[0] = 0;
}}
"""


def products_name(columns: int, registers: bool, kind: str) -> str:
    """The name of that kernel."""
    return f"products_{columns}" + "_registers" * registers + f"_{kind}" * (kind != "bf16")


MATMULS = (
    (256, False, "bf16"),
    (128, False, "bf16"),
    (64, False, "bf16"),
    (256, True, "bf16"),
    (256, False, "e4m3"),
    (256, False, "fp16"),
)
PTX = {"fp16": "f16"}
# Where numbers of a type begin in what is read, in bytes.
OPERANDS = {"bf16": 0, "e4m3": 1 << 19, "fp16": 1 << 20}


def source() -> str:
    """The whole file."""
    made = [PACED_RING, *(products(*one) for one in MATMULS)]
    return "\n".join([HEADER, BODY, COPIES, *(lanes(*one) for one in LANES.items()), *made])


def build(path: Path, kernels: str) -> None:
    """Compile kernels to a cubin; a note that wgmma is serialised is an error."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "launch.cu"
        text.write_text(kernels)
        done = find("nvcc").run("-cubin", "-arch=sm_90a", "-O3", "-w", "-o", str(path), str(text))
    if done.returncode or "serializ" in done.stdout + done.stderr:
        raise CheckFailed(f"nvcc: {(done.stdout + done.stderr).strip()[-400:]}")


@dataclass(frozen=True)
class Probe:
    """A kernel to run: `events` are what one repetition of one block does, by name."""

    name: str
    kernel: str
    events: dict[str, float]
    threads: int = 256
    blocks: int = 0  # 0: every SM
    arguments: tuple[bytes, ...] = ()


def i32(value: int) -> bytes:
    """A 32-bit kernel argument."""
    return struct.pack("<i", value)


def u64(value: int) -> bytes:
    """A 64-bit kernel argument."""
    return struct.pack("<Q", value)


def power_probes(sms: int, data: int, encode: Any) -> list[Probe]:
    """Kernels that do one thing each."""
    base = (i32(1024), u64(data))
    found = [Probe("asleep", "asleep", {}, 32)]
    for columns, registers, kind in MATMULS:
        events = {
            "matmul": 2 * BATCH * columns / 2,  # cycles
            "operands": 2
            * BATCH
            * (columns + (0 if registers else 64)),  # of 32 bytes, read by wgmma
        }
        if kind != "bf16":
            events[kind] = events.pop("matmul")
        name = products_name(columns, registers, kind)
        found.append(Probe(name, name, events, arguments=base))
    wide = found[1]
    found += [
        Probe(f"{wide.name} on {count}", wide.kernel, wide.events, 256, count, base)
        for count in (sms // 4, sms // 2, sms * 3 // 4)
    ]
    for name in LANES:
        warps = LANE_STEPS * 256 / 32
        events = {name: warps} | ({"ffma": warps} if name == "lds" else {})
        found.append(Probe(name, f"lanes_{name}", events, arguments=(u64(data),)))
    for name, kib, wrap, share in (
        ("from L2", 32, 4, 1),
        ("from L2, shared by 12", 32, 32, 12),
        ("from DRAM", 32, 240, 1),
    ):
        events = {"copied": float(kib)} | ({"dram": float(kib)} if "DRAM" in name else {})
        events |= {} if "shared" in name else {"distinct": float(kib)}
        arguments = (u64(data), i32(kib * KIB), i32(wrap), i32(share), i32(6))
        found.append(Probe(name, "stream", events, 1, arguments=arguments))
    arguments = (u64(data), i32(32 * KIB), i32(4))
    found.append(Probe("stores", "bulk_stores", {"stored": 32.0}, 32, 0, arguments))
    for share in (1, 12):  # rows that begin at a line, at a sector, 16 B beside a line, inside
        found += [_tiles(encode, data, 8192, 3, 4, share, at) for at in (0, 16, 8, 24)]
    for product in (*NEAR, *FAR):
        slots = int((SHARED / KIB - 1) / product.kib)
        found.append(product.probe(encode, data, slots, 0, math.prod(product.rows) // 32))
    return found


def _tiles(
    encode: Any, data: int, pitch: int, boxes: int, slots: int, share: int, first: int = 0
) -> Probe:
    """A ring of tiles of 128 x 64 elements of two bytes; `pitch` is of their matrices, in bytes,
    and tiles begin so many elements into a row."""
    rows = 128
    high = -(-132 // share) * rows * boxes
    plan = TensorMap("data", (pitch // 2, high), (pitch,), (64, rows), swizzle=128)
    encoded = encode(plan, "bf16", data)
    columns = pitch // 2 // 64 * 64
    given = (encoded, i32(rows), i32(boxes), i32(columns), i32(share), i32(slots), i32(first))
    name = f"{slots} x {16 * boxes} KiB of tiles, rows of {pitch} B, shared by {share}"
    name += f", from element {first}" * bool(first)
    return Probe(name, "tiles", {"copied": 16.0 * boxes}, 1, 0, given)


@dataclass(frozen=True)
class Product:
    """Whose loads a ring makes: rows of a task's two operands, of so many tasks high and wide in
    bands of `band` rows of tasks, over `columns` elements of two bytes."""

    rows: tuple[int, int]
    tasks: tuple[int, int]
    columns: int
    band: int

    @property
    def kib(self) -> float:
        """Of a step."""
        return sum(self.rows) / 8

    @property
    def distinct(self) -> float:
        """Share of the bytes that all SMs ask for at a time that is different."""
        high = min(self.band, self.tasks[0])
        wide = min(self.tasks[1], -(-132 // high))
        return (high * self.rows[0] + wide * self.rows[1]) / (132 * sum(self.rows))

    def probe(self, encode: Any, data: int, slots: int, held: int, pace: int) -> Probe:
        """A ring of it."""
        pitch, high = 2 * self.columns, self.tasks[0] * self.rows[0]
        maps: list[bytes] = []
        for number, at in enumerate((data, data + high * pitch)):
            rows, box = self.rows[number] * self.tasks[number], self.rows[number]
            plan = TensorMap("data", (self.columns, rows), (pitch,), (64, box), swizzle=128)
            maps.append(encode(plan, "bf16", at))
        given = (*self.rows, self.columns // 64, *self.tasks, self.band, slots, held, pace)
        name = (
            f"{slots} slots of {self.rows[0]}+{self.rows[1]} rows, {held} held, {pace} cycles each,"
            f" {self.tasks[0]}x{self.tasks[1]} tasks of {self.columns} in bands of {self.band}"
        )
        events = {"copied": self.kib, "distinct": self.kib * self.distinct}
        arguments = (*maps, *map(i32, given))
        return Probe(name, "paced", events, 64, 0, arguments)


NEAR = (  # operands of which L2 holds a copy in both of its parts
    Product((128, 256), (16, 8), 2048, 16),
    Product((128, 256), (8, 16), 2048, 8),
    Product((256, 200), (8, 12), 2048, 12),
    Product((64, 128), (66, 2), 1024, 66),
    Product((64, 128), (33, 4), 1024, 33),
    Product((128, 128), (11, 12), 2048, 11),
)
FAR = (  # operands that L2 does not hold
    Product((128, 256), (64, 32), 8192, 8),
    Product((128, 256), (64, 32), 8192, 16),
    Product((256, 200), (32, 40), 8192, 12),
)
SLOTS = ((2, 0), (2, 1), (3, 0), (3, 1), (4, 1))


def paced_probes(data: int, encode: Any) -> list[Probe]:
    """Rings of products at the pace of their matmuls, and slower and faster ones."""
    found: list[Probe] = []
    for product in (*NEAR, *FAR):
        matmuls = math.prod(product.rows) // 32  # cycles of a step of 64 columns
        for slots, held in SLOTS:
            if slots * product.kib < SHARED / KIB:
                for share in (0.6, 0.8, 1.0, 1.3, 1.8):
                    pace = round(share * matmuls)
                    found.append(product.probe(encode, data, slots, held, pace))
    return found


def copy_probes(data: int, encode: Any) -> list[Probe]:
    """Rings filled from L2 in several ways; 16 MiB in all where that is enough for six slots."""
    found: list[Probe] = []
    for kib, slots in ((1, 6), (16, 6), (32, 6)):
        for share in (1, 2, 3, 4, 6, 11, 12, 33, 132):
            wrap = max(4, 16 * KIB // kib * share // 132)
            arguments = (u64(data), i32(kib * KIB), i32(wrap), i32(share), i32(slots))
            name = f"{slots} x {kib} KiB, shared by {share}"
            found.append(Probe(name, "stream", {"copied": float(kib)}, 1, 0, arguments))
    for pitch in (8192, 8208, 6000, 6016, 8224, 8256, 2112, 5472):
        for boxes, slots in ((1, 1), (2, 1), (3, 1), (3, 2), (3, 3), (3, 4)):
            found += [
                _tiles(encode, data, pitch, boxes, slots, share)
                for share in ((1, 11, 132) if slots in (1, 4) else (11,))
            ]
    for first in (8, 16, 24, 32, 40, 48, 56):  # every row begins so far into a line
        for slots in (2, 3, 4):
            found += [_tiles(encode, data, 8192, 3, slots, share, first) for share in (11, 132)]
    for kib in (16, 32):
        arguments = (u64(data), i32(kib * KIB), i32(4))
        found.append(Probe(_stores(kib), "bulk_stores", {"stored": float(kib)}, 32, 0, arguments))
    return found


def noise_of_products() -> bytes:
    """`NOISE` bytes: half a MiB each of numbers of a normal distribution in bf16, random e4m3, and
    a MiB of such numbers in fp16."""
    made = np.random.default_rng(0)
    wide = made.standard_normal(1 << 18, dtype=np.float32).view(np.uint32) >> 16
    narrow = made.integers(0, 256, 1 << 19, dtype=np.uint8) & 0xBF  # no NaN, at most 2
    half = made.standard_normal(1 << 19, dtype=np.float32).astype(np.float16)
    return wide.astype(np.uint16).tobytes() + narrow.tobytes() + half.tobytes()


class Bench:
    """Runs probes of the cubin."""

    def __init__(self, cubin: Path) -> None:
        self.device = CudaDevice()
        self.module = self.device.load(cubin.read_bytes())
        self.out = self.device.allocate(4096)
        self.sms = self.device.info.sm_count
        self.data = self.device.allocate(DATA)
        noise = noise_of_products()
        self.device.upload(self.data, noise)
        for at in range(NOISE, DATA, NOISE):
            self.device.copy(self.data + at, self.data, NOISE)

    def prepared(self, probe: Probe, reps: int) -> tuple[Any, Shape, Params]:
        """What a launch takes."""
        function = self.device.function(self.module, probe.kernel, SHARED)
        blocks = probe.blocks or self.sms
        shape = Shape((blocks, 1, 1), (probe.threads, 1, 1), SHARED)
        return function, shape, Params((u64(self.out), i32(reps), *probe.arguments))

    def spans(self, probe: Probe) -> list[tuple[int, int]]:
        """(cycles, nanoseconds) of each block of the last launch."""
        blocks = probe.blocks or self.sms
        words = struct.unpack(f"<{2 * blocks}Q", self.device.download(self.out, 16 * blocks))
        return list(zip(words[::2], words[1::2], strict=True))

    def once(self, probe: Probe, reps: int) -> tuple[float, float]:
        """(cycles a repetition, MHz) of one launch: the medians of its blocks."""
        self.device.memset(self.out, 0, 4096)
        self.device.launch(*self.prepared(probe, reps))
        self.device.synchronize()
        spans = self.spans(probe)
        if not all(c and t for c, t in spans):
            raise CheckFailed(f"{probe.name}: a wait gave up")
        cycles = statistics.median(c for c, _ in spans)
        return cycles / reps, statistics.median(1e3 * c / t for c, t in spans)

    def reps(self, probe: Probe, seconds: float) -> int:
        """Repetitions that take about so long."""
        self.once(probe, 64)
        cycles, mhz = self.once(probe, 512)
        return max(64, round(seconds * mhz * 1e6 / cycles))


def power(bench: Bench, meter: Any) -> list[dict[str, Any]]:
    """Every kernel in bursts, then alone with the watts it takes."""
    rows: list[dict[str, Any]] = []
    for probe in power_probes(bench.sms, bench.data, bench.device.tensor_map):
        reps = bench.reps(probe, BURST)
        bursts: list[tuple[float, float]] = []
        for _ in range(BURSTS):
            time.sleep(REST)
            bursts.append(bench.once(probe, reps))
        prepared = bench.prepared(probe, reps)
        began, first = time.perf_counter(), 0.0
        spans: list[tuple[int, int]] = []
        while (now := time.perf_counter() - began) < SETTLE + ALONE:
            for _ in range(5):
                bench.device.launch(*prepared)
            bench.device.synchronize()
            if now > SETTLE:
                first = first or time.perf_counter()
                spans += bench.spans(probe)
        watts = [w for t, w, _ in list(meter.samples) if t > first]
        rows.append(
            {
                "name": probe.name,
                "blocks": probe.blocks or bench.sms,
                "events": probe.events,
                "cycles": statistics.median(c for c, _ in spans) / reps,
                "mhz": statistics.median(1e3 * c / t for c, t in spans),
                "watts": statistics.median(watts),
                "burst cycles": statistics.median(c for c, _ in bursts),
                "burst mhz": statistics.median(mhz for _, mhz in bursts),
                "bursts": [round(mhz) for _, mhz in bursts],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def launches(bench: Bench) -> list[dict[str, Any]]:
    """Microseconds from one launch to the next in a graph, of kernels that do nothing; of those in
    clusters the blocks of each wait for one another, at first and at last."""
    rows: list[dict[str, Any]] = []
    shapes = [(bench.sms, 384, 1), (bench.sms, 128, 1), (1, 32, 1), (64, 384, 1)]
    shapes += [(blocks, 384, cluster) for cluster in (2, 4, 8) for blocks in (128, 64)]
    for blocks, threads, cluster in shapes:
        name = "meeting" if cluster > 1 else "asleep"
        function, shape, given = bench.prepared(Probe("nothing", name, {}, threads, blocks), 0)
        shape = replace(shape, cluster=(cluster, 1, 1))

        def work(function: Any = function, shape: Shape = shape, given: Params = given) -> None:
            for _ in range(LAUNCHES):
                bench.device.launch(function, shape, given)

        graph = bench.device.capture(work)
        found: list[float] = []
        for _ in range(6):
            marks = bench.device.event(), bench.device.event()
            bench.device.record(marks[0])
            bench.device.replay(graph)
            bench.device.record(marks[1])
            bench.device.synchronize()
            found.append(bench.device.elapsed_us(*marks) / LAUNCHES)
        told = {"blocks": blocks, "threads": threads, "cluster": cluster}
        rows.append(told | {"us": statistics.median(found)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def long_bursts(bench: Bench) -> list[dict[str, Any]]:
    """The mean clock of matmuls in launches of several lengths, each after a rest."""
    probe = next(p for p in power_probes(bench.sms, bench.data, bench.device.tensor_map)[1:2])
    rows: list[dict[str, Any]] = []
    for seconds in LENGTHS:
        reps, mhz = bench.reps(probe, seconds), list[float]()
        for _ in range(3):
            time.sleep(REST)
            mhz.append(bench.once(probe, reps)[1])
        rows.append({"name": probe.name, "seconds": seconds, "mhz": statistics.median(mhz)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def cycles_of(bench: Bench, probes: Sequence[Probe], reps: int, skipped: int) -> list[Any]:
    """Each probe that computes what it should, with its median cycles after the first runs."""
    found: list[Any] = []
    for probe in probes:
        try:
            runs = [bench.once(probe, reps)[0] for _ in range(skipped + skipped + 1)][skipped:]
        except CheckFailed as error:
            print(error)
            continue
        found.append((probe, statistics.median(runs)))
        print(json.dumps({"name": probe.name, "cycles": found[-1][1]}), flush=True)
    return found


def measure(cubin: Path, out: Path) -> None:
    """Both sections."""
    import torch  # noqa: PLC0415

    from bench.sitting import Meter  # noqa: PLC0415

    meter = Meter(torch)
    bench = Bench(cubin)
    found: dict[str, Any] = {"device": bench.device.info.to_json(), "limit": meter.limit()}
    found["launches"] = launches(bench)
    encode = bench.device.tensor_map
    found["copies"] = [
        {"name": probe.name, "per_kib": cycles / sum(probe.events.values())}
        for probe, cycles in cycles_of(bench, copy_probes(bench.data, encode), 400, 2)
    ]
    found["paces"] = [
        {"name": probe.name, "cycles": cycles}
        for probe, cycles in cycles_of(bench, paced_probes(bench.data, encode), 800, 1)
    ]
    found["long bursts"] = long_bursts(bench)
    write_text_atomically(out, json.dumps(found, indent=1) + "\n")
    found["power"] = power(bench, meter)
    write_text_atomically(out, json.dumps(found, indent=1) + "\n")


NAMES = (
    "matmul", "operands", "e4m3", "ffma", "ex2", "fmax", "sts", "copied", "distinct", "dram",
    "stored",
)  # fmt: skip
UNITS = {"operands": 32.0, "sts": 512.0, "copied": 1024.0, "distinct": 1024.0, "dram": 1024.0}
UNITS |= {"stored": 1024.0}  # bytes of an event, where the energy is of a byte
SECTOR = 32  # bytes
# Rings of three slots and more, of tiles of a matrix whose rows begin at lines: how many neighbours
# share them, and where their rows begin.
RING_OF_TILES = re.compile(
    r"[3-9] x 48 KiB of tiles, rows of 8192 B, shared by (\d+)(?:, from element (\d+))?$"
)
PLACES = {
    "sector": "at a sector that begins no line of 128 B",
    "beside": "16 B beside a line",
    "inside": "inside of another sector",
}
# Rings at the pace of matmuls: rows of a slot, columns of the operands.
PACED = re.compile(r"\d slots of (\S+) rows, .* tasks of (\d+) in bands")
CAPPED = 1780.0  # MHz: matmuls run at less only under the limit


def fit(raw: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """(constants, residuals by kernel) of watts = static + energies * (clock / boost) ^ exponent.

    Under the limit NVML's watts scatter by 3 %, so that the limit itself is taken. Energies are in
    pJ, of a byte where the machine's data have them so. `burst` is the median power of the matmul
    kernels with operands in shared memory at their clocks in bursts.
    """
    from scipy.optimize import least_squares  # noqa: PLC0415

    rows, limit = raw["power"], raw["limit"]
    boost = max(row["mhz"] for row in rows)

    def watts(at: Sequence[float], row: Mapping[str, Any], mhz: float) -> float:
        energy = dict(zip(NAMES, at[2:], strict=True))
        each = sum(count * energy[name] for name, count in row["events"].items() if name in energy)
        rate = row["blocks"] / row["cycles"] * mhz * 1e6
        return at[0] + 1e-12 * each * rate * (mhz / boost) ** at[1]

    # Loads of one address are merged; rings of tiles are beside one another (`placed`).
    known = [row for row in rows if row["name"] != "lds" and " of tiles" not in row["name"]]

    def residuals(at: Sequence[float]) -> list[float]:
        return [
            math.log(watts(at, row, row["mhz"]) / (limit if _capped(row) else row["watts"]))
            for row in known
        ]

    start = [120.0, 1.8, *(100.0 for _ in NAMES)]
    least = [50.0, 0.5, *(0.0 for _ in NAMES)]
    found = least_squares(residuals, start, bounds=(least, [200.0, 4.0, *(1e7 for _ in NAMES)]))
    at = list(found.x)
    constants = {"static": at[0], "exponent": at[1]}
    constants |= {n: one / UNITS.get(n, 1.0) for n, one in zip(NAMES, at[2:], strict=True)}
    shared = [
        row for row in known if row["name"] in ("products_256", "products_128", "products_64")
    ]
    constants["burst"] = statistics.median(watts(at, row, row["burst mhz"]) for row in shared)
    names = [row["name"] for row in known]
    return constants, dict(zip(names, residuals(at), strict=True))


def beside(raw: Mapping[str, Any], known: Mapping[str, float]) -> dict[str, float]:
    """Energies of matmuls of other types and of DRAM's bytes that SMs ask for in common, and the
    share of common bytes that L2 reads for each of them, from a run of the kernels on any card:
    beside its own matmuls in bf16, and its own rings that share all or nothing. `known` is of
    `fit`; cards differ by a few per cent."""
    rows = {row["name"]: row for row in raw["power"]}
    static = rows["asleep"]["watts"]
    boost = max(row["mhz"] for row in raw["power"])

    def each(row: Mapping[str, Any]) -> float:
        """pJ of a repetition of a block at the highest clock."""
        watts = (raw["limit"] if _capped(row) else row["watts"]) - static
        rate = row["blocks"] / row["cycles"] * row["mhz"] * 1e6
        return watts / rate / (row["mhz"] / boost) ** known["exponent"] * 1e12

    wide = rows["products_256"]
    operands = wide["events"]["operands"] * known["operands"] * UNITS["operands"]
    whole = wide["events"]["matmul"] * known["matmul"] + operands
    found: dict[str, float] = {}
    for kind in ("fp16", "e4m3"):
        row = rows[f"products_256_{kind}"]
        found[kind] = (whole * each(row) / each(wide) - operands) / row["events"][kind]
    of_a_kib = {name: each(row) / row["events"].get("copied", 1.0) for name, row in rows.items()}
    shared, apart = of_a_kib["from L2, shared by 12"], of_a_kib["from L2"]
    again, far = list[float](), list[float]()
    near: dict[str, float] = {}  # pJ of a KiB, by the rows of a slot
    for name, row in rows.items():
        if not (of := PACED.match(name)):
            continue
        different = row["events"]["distinct"] / row["events"]["copied"]
        if int(of[2]) < FAR[0].columns:
            read = (of_a_kib[name] - shared) / (apart - shared)
            again.append((read - different) / (1.0 - different))
            near[of[1]] = of_a_kib[name]
        elif of[1] in near:
            far.append((of_a_kib[name] - near[of[1]]) / different / KIB)
    found["read_again"] = statistics.median(again)
    return found | ({"dram_shared": statistics.median(far)} if far else {})


def place_of(byte: int) -> str:
    """What the place of a byte in a line that is none of its first is called."""
    if byte % SECTOR == 0:
        return "sector"
    return "beside" if byte in (16, 112) else "inside"


def placed(raw: Mapping[str, Any], exponent: float) -> dict[str, float]:
    """pJ a byte more of tiles whose rows do not begin at lines, by place: beside the same ring of
    those that do, the mean of rings that share their bytes and of rings that do not."""
    rows = {row["name"]: row for row in raw["power"]}
    static, boost = rows["asleep"]["watts"], max(row["mhz"] for row in raw["power"])

    def each(row: Mapping[str, Any]) -> float:
        rate = row["blocks"] / row["cycles"] * row["mhz"] * 1e6 * row["events"]["copied"] * KIB
        return 1e12 * (row["watts"] - static) / rate / (row["mhz"] / boost) ** exponent

    lines: dict[str, float] = {}
    more: dict[str, list[float]] = {}
    for name, row in rows.items():
        if (found := RING_OF_TILES.match(name)) and not found[2]:
            lines[found[1]] = each(row)
        elif found:
            more.setdefault(place_of(2 * int(found[2])), []).append(each(row) - lines[found[1]])
    return {place: statistics.mean(one) for place, one in more.items()}


def costs(raw: Mapping[str, Any]) -> dict[str, Fit]:
    """Costs of the scheduling table that only show while every SM copies, those that a run has."""
    cycles = {row["name"]: row["per_kib"] for row in raw["copies"]}
    places: dict[str, list[float]] = {}
    for name, value in cycles.items():
        if (found := RING_OF_TILES.match(name)) and found[2]:
            places.setdefault(place_of(2 * int(found[2])), []).append(value)
    fits = {
        f"load.per_kib_{place}": Fit(
            round(statistics.median(one), 1), round(min(one), 1), round(max(one), 1),
            "clk/KiB", f"tiles whose rows begin {PLACES[place]}, by every SM at once",
        )
        for place, one in places.items()
    }  # fmt: skip
    stores = [round(cycles[name], 1) for kib in (32, 16) if (name := _stores(kib)) in cycles]
    if stores:
        text = "bulk stores of 32 and 16 KiB by every SM at once, to L2"
        fits["store.per_kib_all"] = Fit(stores[0], min(stores), max(stores), "clk/KiB", text)
    return fits


def _stores(kib: int) -> str:
    return f"stores of {kib} KiB"


def _capped(row: Mapping[str, Any]) -> bool:
    return "products" in row["name"] and row["mhz"] < CAPPED


def main() -> int:
    """Build, measure or fit."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--build", type=Path, help="compile the kernels to this cubin")
    parser.add_argument("--cubin", type=Path, help="measure with this cubin")
    parser.add_argument("--out", type=Path, help="where the raw figures go")
    parser.add_argument("--fit", type=Path, help="raw figures to turn into constants")
    parser.add_argument("--beside", type=Path, help="figures of another card, for --fit")
    given = parser.parse_args()
    if given.fit:
        constants, residuals = fit(json.loads(given.fit.read_text()))
        for name, value in constants.items():
            print(f"{name:10} {value:10.4g}")
        if given.beside:
            for name, value in beside(json.loads(given.beside.read_text()), constants).items():
                print(f"{name:10} {value:10.4g}")
        for name, cost in costs(json.loads(given.fit.read_text())).items():
            print(f"{name:20} {cost}")
        print(f"largest residual {max(map(abs, residuals.values())):.1%}")
    elif given.build:
        build(given.build, source())
    elif given.cubin and given.out:
        measure(given.cubin, given.out)
    else:
        raise InputError("give --build FILE, --cubin FILE --out FILE, or --fit FILE")
    return 0


if __name__ == "__main__":
    sys.exit(main())
