"""Measure what the scheduling cost table needs, on a Hopper GPU, in cycles of the SM's own clock.

    python -m bench.calibrate_schedule --build cal.cubin           compile (no GPU; nvcc >= 13.3)
    python -m bench.calibrate_schedule --cubin cal.cubin --out m.json      measure (H100 / H200)
    python -m bench.calibrate_schedule --fit m.json                costs as TOML, with provenance

Each section runs in a process of its own with a time limit, so one that fails costs only itself.
The kernels are in bench/calibrate_kernels.py. Raw figures go to --out; the fit of the published
run is in bench/results/schedule_costs.json and src/warploom/schedule/data/costs.toml, [h200].
"""

from __future__ import annotations

import argparse
import datetime
import json
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.calibrate_kernels import BATCHES, COLUMNS, LANE_OPS, STUCK, TILE_OPS, source
from warploom.errors import CheckFailed, InputError
from warploom.files import write_text_atomically
from warploom.runtime.device import Shape
from warploom.runtime.driver import CudaDevice
from warploom.runtime.launch import Params, TensorMap
from warploom.toolchain import find

WORDS = 1 << 16
SECTION_SECONDS = 40
SHARED = 200 * 1024
SHARED_BASE = 1024  # where dynamic shared memory begins on sm_90: the first KiB is the system's
KIB = 1024
Rows = list[dict[str, Any]]


def build(path: Path) -> None:
    """Compile the kernels to a cubin; a note that wgmma is serialised is an error."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "calibrate.cu"
        text.write_text(source())
        done = find("nvcc").run("-cubin", "-arch=sm_90a", "-O3", "-w", "-o", str(path), str(text))
    if done.returncode or "serializ" in done.stdout + done.stderr:
        raise CheckFailed(f"nvcc: {(done.stdout + done.stderr).strip()[-400:]}")


class Bench:
    """Launches kernels of the cubin by name and returns the words they wrote."""

    def __init__(self, cubin: Path) -> None:
        self.device = CudaDevice()
        self.module = self.device.load(cubin.read_bytes())
        self.out = self.device.allocate(4 * WORDS)

    def run(
        self, name: str, *arguments: bytes, threads: int = 128, blocks: int = 1, words: int = 64
    ) -> list[int]:
        """The words after one launch; raises when a wait gave up."""
        function = self.device.function(self.module, name, SHARED)
        self.device.memset(self.out, 0, 4 * WORDS)
        shape = Shape((blocks, 1, 1), (threads, 1, 1), SHARED)
        self.device.launch(function, shape, Params(arguments))
        raw = self.device.download(self.out, 4 * words)
        found = list(struct.unpack(f"<{words}I", raw))
        if STUCK in found:
            raise CheckFailed(f"{name}: a wait gave up")
        return found

    def span(self, name: str, reps: int, threads: int) -> int:
        """Cycles from the first warp's begin to the last warp's end; the second of two runs."""
        words: list[int] = []
        for _ in range(2):
            words = self.run(name, u64(self.out), i32(reps), threads=threads)
        warps = max(1, threads // 32)
        begins, ends = words[0 : 2 * warps : 2], words[1 : 2 * warps : 2]
        base = begins[0]  # the 32-bit clock wraps: differences only
        first = min(signed(b - base) for b in begins)
        return max(signed(e - base) for e in ends) - first


def signed(word: int) -> int:
    """A 32-bit difference as a signed number."""
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)


def u64(value: int) -> bytes:
    """A 64-bit kernel argument."""
    return struct.pack("<Q", value)


def i32(value: int) -> bytes:
    """A 32-bit kernel argument."""
    return struct.pack("<i", value)


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return sorted(values)[len(values) // 2]


def wgmma(bench: Bench) -> Rows:
    """Cycles of a batch of wgmma, waited for, and cycles to issue it; each of 1 and 2 groups."""
    rows: Rows = []
    reps = 200
    for mode in ("ss", "rs"):
        for columns in COLUMNS:
            for batch in BATCHES:
                for groups in (1, 2):
                    name = f"wgmma_{mode}_{columns}_{batch}"
                    arguments = (u64(bench.out), i32(reps), i32(SHARED_BASE))
                    for _ in range(2):
                        got = bench.run(name, *arguments, threads=128 * groups, words=4)
                    row = {"mode": mode, "columns": columns, "batch": batch, "groups": groups}
                    row["cycles"] = max(got[0], got[2]) / reps
                    row["issue"] = max(got[1], got[3]) / reps
                    rows.append(row)
    return rows


def lanes(bench: Bench) -> Rows:
    """Results a cycle an SM for 1 to 16 warps, and the latency of a dependent chain."""
    rows: Rows = []
    for name in LANE_OPS:
        chain = bench.span(f"lane_{name}_1", 100, 32) / 6400
        rate = {
            warps: warps * 32 * 64 * 100 / bench.span(f"lane_{name}_8", 100, 32 * warps)
            for warps in (1, 4, 8, 16)
        }
        rows.append({"op": name, "latency": chain, "per_cycle": rate})
    return rows


def tiles(bench: Bench) -> Rows:
    """Cycles of one tile operation on 64 rows by columns, by 1 and by 2 groups at once."""
    reps = 200
    return [
        {
            "op": op,
            "columns": columns,
            "groups": groups,
            "cycles": bench.span(f"tile_{op}_{columns}", reps, 128 * groups) / reps,
        }
        for op in TILE_OPS
        for columns in COLUMNS
        for groups in (1, 2)
    ]


def shared(bench: Bench) -> Rows:
    """Cycles for each 128 bytes read or written, and the latency of a dependent load."""
    rows: Rows = [
        {
            "op": op,
            "warps": warps,
            "cycles_per_128": bench.span(f"smem_{op}", 200, 32 * warps) / (200 * 4 * 4 * warps),
        }
        for op in ("read", "write")
        for warps in (1, 4, 8, 16)
    ]
    words = bench.run("smem_latency", u64(bench.out), i32(1000), threads=1)
    rows.append({"op": "latency", "cycles": signed(words[1] - words[0]) / 1000})
    return rows


def loads(bench: Bench) -> Rows:
    """Bulk and tensor-map loads: latency from L2 and DRAM, and the rate of a full ring."""
    rows: Rows = []
    device, size, reps = bench.device, 1 << 30, 64
    data = device.allocate(size)
    for rows_in_box in (8, 32, 64, 128, 256):
        count = 128 * rows_in_box
        plan = TensorMap("data", (64, size // 128), (128,), (64, rows_in_box), swizzle=128)
        encoded = device.tensor_map(plan, "bf16", data)
        for source_of in ("l2", "dram"):
            far = source_of == "dram"
            device.memset(data, 0, size)  # the last 60 MB stay in L2, the first do not
            stride = 128 * KIB if far else 0
            plain = (u64(bench.out), u64(data), u64(stride), i32(count), i32(reps))
            got = bench.run("bulk_latency", *plain, threads=1, words=2 * reps)
            rows.append({"kind": "bulk", "bytes": count, "from": source_of, **spread(got, 2)})
            device.memset(data, 0, size)
            mapped = (encoded, u64(bench.out), i32(count), i32(1024 if far else 0), i32(reps))
            got = bench.run("tensor_latency", *mapped, threads=1, words=2 * reps)
            rows.append({"kind": "tensor", "bytes": count, "from": source_of, **spread(got, 2)})
    sms = device.info.sm_count
    for rows_in_box in (64, 128, 256):
        count = 128 * rows_in_box
        plan = TensorMap("data", (64, size // 128), (128,), (64, rows_in_box), swizzle=128)
        encoded = device.tensor_map(plan, "bf16", data)
        for blocks in (1, sms):
            # 8 MiB that every block walks from a place of its own: what L2 holds.
            wrap = 8 * KIB * KIB // count
            given = (
                encoded, u64(bench.out), i32(count), i32(rows_in_box), i32(wrap), i32(256),
            )  # fmt: skip
            for _ in range(2):
                got = bench.run("tensor_stream", *given, threads=1, blocks=blocks, words=blocks)
            cycles = median(got) / (256 * count / KIB)
            rows.append({"kind": "stream", "bytes": count, "blocks": blocks, "per_kib": cycles})
    device.free(data)
    return rows


def spread(words: list[int], columns: int) -> dict[str, float]:
    """Median issue time and 10, 50, 90 per cent points of the last column; the first left out."""
    issue = words[columns::columns]
    total = sorted(words[2 * columns - 1 :: columns])
    at = {f"p{q}": total[min(len(total) - 1, len(total) * q // 100)] for q in (10, 50, 90)}
    return {"issue": median(issue), **at}


def stores(bench: Bench) -> Rows:
    """Bulk stores: issue, source readable again, written."""
    rows: Rows = []
    data = bench.device.allocate(64 << 20)
    for count in (1024, 4096, 8192, 16384, 32768):
        got = bench.run(
            "bulk_store", u64(bench.out), u64(data), u64(count), i32(count), i32(64),
            threads=1, words=192,
        )  # fmt: skip
        read = median(got[4::3])
        rows.append({"bytes": count, "read": read, **spread(got, 3)})
    bench.device.free(data)
    return rows


def sync(bench: Bench) -> Rows:
    """One way between two warp groups: mbarriers, named barriers, a tile through shared memory."""
    reps, rows = 1000, Rows()
    out = u64(bench.out)
    for label, everyone in (("elected", 0), ("all", 1)):
        got = bench.run("mbarrier_pingpong", out, i32(reps), i32(everyone), threads=256, words=1)
        rows.append({"kind": f"mbarrier, {label} arrive", "one_way": got[0] / reps / 2})
    got = bench.run("mbarrier_alone", out, i32(reps), words=1)
    rows.append({"kind": "mbarrier, own group", "one_way": got[0] / reps})
    got = bench.run("named_pingpong", out, i32(reps), threads=256, words=1)
    rows.append({"kind": "named barrier", "one_way": got[0] / reps / 2})
    for vectors in (1, 4, 8, 16):
        got = bench.run(f"handoff_{vectors}", out, i32(reps), threads=256, words=1)
        rows.append(
            {"kind": "hand-off", "bytes": vectors * 2048, "one_way": got[0] / reps / 2}
        )  # fmt: skip
    return rows


def registers(bench: Bench) -> Rows:
    """setmaxnreg: giving and taking uncontended, and from giving to another group's taking."""
    got = bench.run("setmaxnreg_pair", u64(bench.out), i32(32), threads=384, words=64)
    rows: Rows = [{"kind": "dec", "cycles": median(got[2::2])}]
    rows.append({"kind": "inc", "cycles": median(got[3::2])})
    got = bench.run("setmaxnreg_wait", u64(bench.out), threads=384, words=3)
    rows.append({"kind": "hand-over", "cycles": signed(got[2] - got[0])})
    return rows


SECTIONS: dict[str, Callable[[Bench], Rows]] = {
    "wgmma": wgmma,
    "lanes": lanes,
    "tiles": tiles,
    "shared": shared,
    "loads": loads,
    "stores": stores,
    "sync": sync,
    "registers": registers,
}


def measure(cubin: Path, out: Path) -> bool:
    """Every section in its own process; whether all succeeded."""
    found: dict[str, Any] = {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    failed: dict[str, str] = {}
    for name in SECTIONS:
        command = [
            sys.executable,
            "-m",
            "bench.calibrate_schedule",
            "--cubin",
            str(cubin),
            "--section",
            name,
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECTION_SECONDS, check=False
            )
            found |= json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
            if done.returncode:
                failed[name] = done.stderr.strip()[-300:]
        except (subprocess.TimeoutExpired, IndexError, json.JSONDecodeError) as error:
            failed[name] = repr(error)[:300]
        print(f"{name:10} {failed.get(name, 'ok')}", flush=True)
    found["failed"] = failed
    write_text_atomically(out, json.dumps(found, indent=1) + "\n")
    return not failed


def main() -> int:
    """Build, measure, one section, or fit."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--build", type=Path, help="compile the kernels to this cubin")
    parser.add_argument("--cubin", type=Path, help="measure with this cubin")
    parser.add_argument("--section", choices=SECTIONS, help="one section, as JSON on stdout")
    parser.add_argument("--out", type=Path, help="where the raw figures go")
    parser.add_argument("--fit", type=Path, help="raw figures to turn into costs")
    given = parser.parse_args()
    if given.build:
        build(given.build)
        return 0
    if given.fit:
        from bench.calibrate_fit import report  # noqa: PLC0415

        print(report(json.loads(given.fit.read_text())))
        return 0
    if not given.cubin or not (given.section or given.out):
        raise InputError("give --build FILE, --cubin FILE --out FILE, or --fit FILE")
    if given.section:
        bench = Bench(given.cubin)
        info = bench.device.info.to_json()
        print(json.dumps({given.section: SECTIONS[given.section](bench), "device": info}))
        return 0
    return 0 if measure(given.cubin, given.out) else 1


if __name__ == "__main__":
    sys.exit(main())
