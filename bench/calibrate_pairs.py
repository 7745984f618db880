"""Measure how fast tiles come to pairs of blocks of which each loads one half for both.

    python -m bench.calibrate_pairs --build pairs.cubin                  compile (no GPU)
    python -m bench.calibrate_pairs --cubin pairs.cubin --out m.json     measure (H100 / H200)
    python -m bench.calibrate_pairs --into m.json                        into the raw file of
                                                                         `bench.calibrate_launch`

The ring of `tiles` of `bench.calibrate_launch`, in clusters of two: a box of 128 rows comes as two
boxes of 64, each multicast to both blocks, and a slot is filled again when both have seen it full.
Figures are cycles in which an SM gets a KiB, whoever asked for it, while all SMs load: rows of
matrices begin at sectors of L2 (pitches of 8192 and 6016 bytes) or do not (8208, 6000).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from bench.calibrate_kernels import HEADER
from bench.calibrate_launch import BODY, KIB, Bench, Probe, build, i32
from warploom.errors import CheckFailed
from warploom.files import write_text_atomically
from warploom.runtime.launch import TensorMap

RAW = Path(__file__).parent / "results" / "raw" / "launch-h200.json"
ROWS, COLUMNS, BLOCKS = 128, 64, 132
PITCHES, SHARES, RINGS = (8192, 8208, 6000, 6016), (2, 12, 132), ((3, 2), (3, 4))
REPS, LAUNCHES, WARM = 400, 5, 2

PAIRS = """
DEV void load_for_both(u32 to, const Map* map, int x, int y, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
               :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(bar), "h"((unsigned short)3) : "memory");
}
DEV void arrive_at(u32 bar, u32 block) {
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
               " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }"
               :: "r"(bar), "r"(block) : "memory");
}
DEV void meet() {
  asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// Slots of `boxes` tiles: this block loads its half of the rows of each, for both.
extern "C" __global__ void __cluster_dims__(2, 1, 1)
pairs(u64* out, int reps, const __grid_constant__ Map map, int rows, int boxes, int columns,
      int share, int slots) {
  extern __shared__ unsigned char raw[];
  __shared__ alignas(8) u64 full[8], seen[8];
  u32 to = shared_base(raw), bytes = rows * 128, rank = blockIdx.x % 2;
  for (int s = 0; s < 8; ++s) {
    barrier_init(address(&full[s]), 1);
    barrier_init(address(&seen[s]), 1);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  meet();
  Span span; span.begin();
  int slot = 0, phase = 1, x = 0, y = blockIdx.x / share * rows * boxes + rank * rows / 2;
  for (int r = 0; r < reps + slots; ++r) {
    u32 bar = address(&full[slot]), free = address(&seen[slot]);
    if (r >= slots) {
      if (!wait(bar, phase)) break;
      arrive_at(free, rank ^ 1);
    }
    if (r < reps) {
      if (r >= slots && !wait(free, phase)) break;
      expect(bar, bytes * boxes);
      for (int b = 0; b < boxes; ++b)
        load_for_both(to + (slot * boxes + b) * bytes + rank * bytes / 2, &map, x, y + b * rows,
                      bar);
    }
    x += 64;
    if (x >= columns) x = 0;
    if (++slot == slots) { slot = 0; phase ^= 1; }
  }
  span.end(out);
  meet();
}
"""


def source() -> str:
    """The CUDA file."""
    return HEADER + BODY + PAIRS


def probe(bench: Bench, pitch: int, boxes: int, slots: int, share: int) -> Probe:
    """A ring of slots of tiles of bf16; `pitch` is of their matrices, in bytes."""
    high = -(-BLOCKS // share) * ROWS * boxes
    plan = TensorMap("data", (pitch // 2, high), (pitch,), (COLUMNS, ROWS // 2), swizzle=128)
    encoded = bench.device.tensor_map(plan, "bf16", bench.data)
    columns = pitch // 2 // COLUMNS * COLUMNS
    given = (encoded, i32(ROWS), i32(boxes), i32(columns), i32(share), i32(slots))
    kib = ROWS * COLUMNS * 2 * boxes / KIB
    name = f"{slots} x {kib:.0f} KiB of tiles by pairs, rows of {pitch} B, shared by {share}"
    return Probe(name, "pairs", {"copied": kib}, 1, 0, given)


def measure(cubin: Path) -> list[dict[str, Any]]:
    """Cycles a KiB of an SM."""
    bench = Bench(cubin)
    rows: list[dict[str, Any]] = []
    for pitch in PITCHES:
        for boxes, slots in RINGS:
            for share in SHARES:
                one = probe(bench, pitch, boxes, slots, share)
                try:
                    found = [bench.once(one, REPS)[0] for _ in range(LAUNCHES)][WARM:]
                except CheckFailed as error:
                    print(error, flush=True)
                    continue
                kib = one.events["copied"]
                rows.append({"name": one.name, "per_kib": statistics.median(found) / kib})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Build, measure, or put a measurement beside the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, help="compile the kernel to this cubin")
    parser.add_argument("--cubin", type=Path, help="measure with this cubin")
    parser.add_argument("--out", type=Path, default=Path("out/bench/pairs.json"))
    parser.add_argument("--into", type=Path, help="rows of a measurement, to be kept")
    given = parser.parse_args()
    if given.build:
        build(given.build, source())
    elif given.cubin:
        write_text_atomically(given.out, json.dumps(measure(given.cubin), indent=1))
    else:
        raw = json.loads(RAW.read_text())
        raw["pairs"] = json.loads(given.into.read_text())
        write_text_atomically(RAW, json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
