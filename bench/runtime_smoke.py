"""Everything the runtime does, on a real GPU, in under a minute.

    PYTHONPATH=src python -m bench.runtime_smoke --out DIR

Prints a short table last and writes DIR/runtime_smoke.json. Each section stands alone: one that
fails is reported with its error and the rest still run. Exit 1 when a section failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import runtime_kernels as kernels
from warploom.files import write_text_atomically
from warploom.runtime import Buffer, CheckSettings, LocalMeasurer, TimingSettings, Workload
from warploom.runtime.device import CudaError
from warploom.runtime.driver import CudaDevice
from warploom.runtime.helpers import Helpers
from warploom.runtime.nvrtc import compile_source
from warploom.runtime.patterns import PATTERNS, generate
from warploom.runtime.timing import Stopwatch
from warploom.runtime.workbench import Workbench
from warploom.tile.dtypes import MEMORY

Rows = dict[str, Any]
QUADS = 1 << 20  # 16 MiB read, 16 MiB written: fits the L2 cache, about 10-15 us


class Smoke:
    """The sections, sharing one device of this process and one worker."""

    def __init__(self) -> None:
        self.device = CudaDevice()
        self.helpers = Helpers(self.device)
        info = self.device.info
        self.arch = info.arch + ("a" if info.compute_capability >= (9, 0) else "")
        self.blocks = 4 * info.sm_count
        self.spec = kernels.flip_spec(QUADS, self.blocks)
        self.right = kernels.flip_cubin(self.arch)
        self.gpu = LocalMeasurer(limit_s=2.0)

    def clock(self) -> Rows:
        """The SM clock from a spin."""
        return {"clock_mhz": [round(self.helpers.clock_mhz()) for _ in range(5)]}

    def fills(self) -> Rows:
        """Every pattern in every type, against numpy, bit for bit."""
        wrong: list[str] = []
        address = self.device.allocate(1 << 20)
        for pattern in PATTERNS:
            for dtype in MEMORY.values():
                self.helpers.reset(3)
                buffer = Buffer("b", (997, 61), dtype.name, "in")
                self.helpers.fill(address, buffer, 9, 2, (pattern,))
                got = self.device.download(address, buffer.nbytes)
                made = generate(dtype, buffer.count, pattern, 12, 2, 61)
                if got != made.tobytes():
                    wrong.append(f"{pattern}/{dtype.name}")
        self.device.free(address)
        expect(not wrong, f"patterns differ from numpy: {wrong}")
        return {"fills_checked": len(PATTERNS) * len(MEMORY)}

    def launches(self) -> Rows:
        """TMA descriptors, clusters (portable and not), and the arenas."""
        bench = Workbench(self.device, self.helpers, kernels.tma_spec())
        bench.expect(bench.load(compile_source(kernels.TMA_COPY, self.arch)), 1, ("randn",))
        space = bench.workspace
        expect(
            space.read(space.expected, "x") == space.read(space.expected, "y"), "TMA copy differs"
        )
        expect(not space.broken_guard(space.expected), "TMA copy broke a guard band")
        bench.close()
        for size in (2, 8, 16):
            bench = Workbench(self.device, self.helpers, kernels.cluster_spec(size))
            bench.expect(bench.load(compile_source(kernels.CLUSTER_RANK, self.arch)), 1, ("randn",))
            raw = bench.workspace.read(bench.workspace.expected, "y")
            got = np.frombuffer(raw, np.int32)
            expect(
                list(got) == [at % size + 100 * size for at in range(64)], f"cluster {size}: {got}"
            )
            bench.close()
        return {"tma": "ok", "clusters": [2, 8, 16]}

    def bandwidth(self) -> Rows:
        """Device copy and L2 read bandwidth, for a machine overlay."""
        nbytes = 1 << 30
        first, second = self.device.allocate(nbytes), self.device.allocate(nbytes)
        start, stop = self.device.event(), self.device.event()
        copies: list[float] = []
        for _ in range(6):
            self.device.record(start)
            self.device.copy(second, first, nbytes)
            self.device.record(stop)
            self.device.synchronize()
            copies.append(2 * nbytes / self.device.elapsed_us(start, stop) * 1e6)
        self.device.free(first)
        self.device.free(second)
        found: dict[str, Any] = {"copy_tb_per_s": round(float(np.median(copies[1:])) / 1e12, 3)}
        for mib in (8, 16, 24):
            quads, times = mib * 65536, 20
            spec = kernels.l2_spec(quads, 2 * self.device.info.sm_count, times)
            bench = Workbench(self.device, self.helpers, spec)
            loaded = bench.load(compile_source(kernels.L2_READ, self.arch))
            bench.expect(loaded, 1, ("randn",))
            bench.workspace.restore()
            micros = Stopwatch(self.device, self.helpers).rough_us(bench.launcher(loaded))
            found[f"l2_read_{mib}mib_tb_per_s"] = round(quads * 16 * times / micros / 1e6, 3)
            bench.close()
        return found

    def search_path(self) -> Rows:
        """Candidates per second, and every outcome costing its own candidate only."""
        baseline = self.gpu.prepare(Workload(self.right, self.spec))
        self.gpu.measure([self.right] * 10)
        began = time.perf_counter()
        results = self.gpu.measure([self.right] * 300)
        rate = 300 / (time.perf_counter() - began)
        expect(all(result.outcome == "ok" for result in results), "a right candidate was refused")
        spread = np.percentile([result.speedup for result in results], [5, 50, 95])
        return {
            "kernel_us": round(baseline.rough_us, 2),
            "candidates_per_s": round(rate, 1),
            "aa_speedup_p5_p50_p95": [round(float(point), 4) for point in spread],
        }

    def outcomes(self) -> Rows:
        """Wrong, wild, unwritten, faulting and hanging candidates between right ones."""
        planted = {
            "wrong": kernels.WRONG,
            "wrong (wild)": kernels.WILD,
            "wrong (unwritten)": kernels.UNWRITTEN,
            "fault": kernels.FAULT,
            "hang": kernels.HANG,
        }
        found: dict[str, Any] = {}
        for name, behave in planted.items():
            began = time.perf_counter()
            bad, good = self.gpu.measure([kernels.flip_cubin(self.arch, behave), self.right])
            found[name] = f"{time.perf_counter() - began:.2f} s, {bad.detail[:90]}"
            expect(
                bad.outcome == name.split(" ")[0], f"{name} came out as {bad.outcome}: {bad.detail}"
            )
            expect(good.outcome == "ok", f"after {name} a right candidate is {good.outcome}")
        refused = self.gpu.measure([b"junk"])[0]
        expect(refused.outcome == "rejected", f"junk came out as {refused.outcome}")
        found["restarts"] = self.gpu.restarts
        return found

    def timing(self) -> Rows:
        """ABBA warm and cold against slower variants, with the A/A control."""
        images = {"base": self.right, "copy": self.right}
        images |= {f"rounds{n}": kernels.flip_cubin(self.arch, rounds=n) for n in (8, 32)}
        found: dict[str, Any] = {}
        for mode in ("warm", "cold"):
            began = time.perf_counter()
            timing = self.gpu.compare(images, TimingSettings(mode=mode))
            found[mode] = {
                "us": {name: round(micros, 2) for name, micros in timing.median_us.items()},
                "control": str(timing.control),
                "ratios": {name: str(ratio) for name, ratio in timing.ratios.items()},
                "reloads": timing.reload_medians["control"],
                "launches": timing.launches_per_window,
                "clock_mhz": timing.clock_mhz,
                "seconds": round(time.perf_counter() - began, 2),
            }
            expect(
                timing.ratios["rounds32"].verdict == "loss", f"{mode}: a slower kernel is no loss"
            )
        return found

    def checking(self) -> Rows:
        """All patterns, cold and warm, then samples at speed, on a small and on a large launch."""
        found: dict[str, Any] = {}
        faster = kernels.flip_cubin(self.arch, rounds=2)
        for name, quads, samples in (("64 KiB", 4096, 50_000), ("16 MiB", QUADS, 4_000)):
            self.gpu.prepare(Workload(self.right, kernels.flip_spec(quads, self.blocks)))
            began = time.perf_counter()
            report = self.gpu.check(faster)
            patterns_s = time.perf_counter() - began
            expect(report.passed, report.detail)
            report = self.gpu.check(faster, CheckSettings(patterns=("randn",), samples=samples))
            expect(report.passed, str(report))
            expect(report.samples == samples, f"{report.samples} samples, expected {samples}")
            found[name] = {
                "patterns_s": round(patterns_s, 2),
                "samples_per_s": round(report.samples_per_second),
            }
            bad = self.gpu.check(kernels.flip_cubin(self.arch, kernels.WRONG))
            expect("output y" in bad.detail, f"a wrong bit came out as: {bad}")
        return found

    def errors(self) -> Rows:
        """What the driver says to bad requests, in one line each."""
        attempts: dict[str, Callable[[], Any]] = {
            "image": lambda: self.device.load(b"\x7fELF not a cubin"),
            "arch": lambda: self.device.load(kernels.flip_cubin("sm_100a")),
            "name": lambda: self.device.function(self.device.load(self.right), "nothing"),
            "memory": lambda: self.device.allocate(1 << 50),
        }
        found: dict[str, Any] = {}
        for name, attempt in attempts.items():
            try:
                attempt()
                found[name] = "nothing failed"
            except CudaError as error:
                found[name] = str(error)
        expect("nothing failed" not in found.values(), str(found))
        return found


def expect(holds: bool, message: str) -> None:
    """Fail the section with `message` unless `holds`."""
    if not holds:
        raise AssertionError(message)


def main() -> int:
    """Run every section; print the table; write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for runtime_smoke.json")
    out: Path = parser.parse_args().out
    smoke = Smoke()
    report: dict[str, Any] = {"device": smoke.device.info.to_json(), "sections": {}}
    names = [
        "clock", "fills", "launches", "errors", "bandwidth", "search_path", "timing", "checking",
        "outcomes",
    ]  # fmt: skip
    for name in names:
        began = time.perf_counter()
        try:
            found = getattr(smoke, name)()
            if name == "search_path":  # a rate of a machine that does nothing else
                expect(found["candidates_per_s"] >= 100, f"{found}: expected 100 candidates/s")
            entry = {"ok": True, "found": found}
        except Exception as error:
            traceback.print_exc()
            entry = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        entry["seconds"] = round(time.perf_counter() - began, 2)
        report["sections"][name] = entry
        write_text_atomically(out / "runtime_smoke.json", json.dumps(report, indent=1) + "\n")
    smoke.gpu.close()
    print(f"{report['device']['name']}, driver {report['device']['driver_version']}")
    for name, entry in report["sections"].items():
        state = "ok  " if entry["ok"] else "FAIL"
        text = json.dumps(entry.get("found", entry.get("error")))
        print(f"{state} {name:<12} {entry['seconds']:6.2f} s  {text[:600]}")
    return 0 if all(entry["ok"] for entry in report["sections"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
