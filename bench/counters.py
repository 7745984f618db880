"""Profiler counters of generated kernels beside the model's prediction.

    python -m bench.counters build             here, no GPU: cubins under out/bench/counters
    python -m bench.counters predict           here: what the model says of every case
    python -m bench.counters run --out DIR     on the GPU machine: ncu over a worker, counters.json
    python -m bench.counters evidence FILE.json    prediction beside counters, as evidence rows

Cases are matrix products and attention as the codegen floor emits them, in several shapes and task
orders. Probes come first: kernels of known traffic that show how much of L2 a scan by all SMs, a
scan by each SM of its own part, and a write can use. ncu flushes the caches before every pass.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.evidence import Evidence, write_rows
from bench.l2_replay import Level2, Moved, TaskOrder, compulsory_bytes, dram_bytes
from warploom import machine, toolchain
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.compile.build import Built, build
from warploom.codegen.ir.plan import LaunchPlan
from warploom.derive.formula import frontend as front
from warploom.derive.formula.graph import Diagram
from warploom.derive.formula.library import formula
from warploom.derive.kernel.kernel import Kernel, Loop
from warploom.derive.kernel.legal import make_kernel
from warploom.derive.lemmas.cascade import Refusal
from warploom.errors import CheckFailed, InputError
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.runtime.device import Shape
from warploom.runtime.driver import CudaDevice, device_info
from warploom.runtime.kernel import Kernel as Launch
from warploom.runtime.launch import Params, Scalar

ROOT = Path(__file__).resolve().parent.parent

FOLDER = ROOT / "out" / "bench" / "counters"
SMS = machine.load("h200").integer("sm.count")
METRICS = (
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_bytes.sum",
    "lts__t_sectors_srcunit_tex_op_read.sum",
    "lts__t_sectors_srcunit_tex_op_write.sum",
    "lts__t_sectors_srcunit_tex_lookup_hit.sum",
    "lts__t_sectors_srcunit_tex_lookup_miss.sum",
    "lts__t_sectors_srcunit_ltcfabric.sum",
    "gpu__time_duration.sum",
)
MIB = 1 << 20
SECTOR = 32  # bytes
# Machine data: l2.size, l2.partitions, l2.dirty_max. Foreign: what kernels that only read write to
# DRAM once they fill L2 (the profiler's own lines; median of the read-only probes that do).
H200 = Level2(60 * MIB, 2, 27.0e6, 2.3e6)


@dataclass(frozen=True)
class Variant:
    """A kernel as built: what its tasks look like to the model, and how to build it."""

    config: GemmConfig | AttentionConfig
    launch: LaunchPlan

    @property
    def order(self) -> TaskOrder:
        """The launch plan as the model sees it; a block fills an SM."""
        plan = self.launch
        axis, blocks = plan.cluster
        names = {"m_tile": "a", "n_tile": "c", "rows_tile": "q", "": ""}
        return TaskOrder(
            SMS // blocks,
            plan.supergroup,
            plan.grouped,
            (names[axis], blocks),
            tuple(names[name] for name in plan.reverse),
            queue=not plan.persistent or plan.tile_scheduler == "dynamic",
            serpentine=plan.tile_scheduler == "serpentine",
        )


def _gemm(
    supergroup: int, cluster: int = 1, tile: tuple[int, int, int] = (128, 256, 64), **rest: Any
) -> Variant:
    along = ("m_tile", cluster) if cluster > 1 else ("", 1)
    plan = LaunchPlan(split="m", cluster=along, supergroup=supergroup, store_panels=2, **rest)
    return Variant(GemmConfig(tile=tile), plan)


def _attention(persistent: bool = True, **config: Any) -> Variant:
    made = AttentionConfig(tile=(128, 128), **config)
    reverse = ("rows_tile",) if made.causal else ()
    return Variant(made, LaunchPlan(split="rows", persistent=persistent, reverse=reverse))


VARIANTS: dict[str, Variant] = {
    "gemm-band8-pair": _gemm(8, 2),
    "gemm-rows": _gemm(0),
    "gemm-band16": _gemm(16),
    "gemm-band64": _gemm(64),
    "gemm-128x128-rows": _gemm(0, tile=(128, 128, 64)),
    "attention": _attention(),
    "attention-grid": _attention(persistent=False),
    "attention-causal": _attention(persistent=False, causal=True),
    "attention-group8": _attention(group=8),
}
# (m, n, k), or (batch, heads, rows, keys)
CASES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("gemm-band8-pair", (2048, 2048, 2048)),
    ("gemm-band8-pair", (4096, 4096, 4096)),
    ("gemm-band8-pair", (8192, 8192, 8192)),
    ("gemm-band8-pair", (16384, 16384, 8192)),
    ("gemm-band8-pair", (16384, 1024, 4096)),
    ("gemm-band8-pair", (2048, 2048, 16384)),
    ("gemm-band8-pair", (4000, 6008, 3000)),
    ("gemm-rows", (8192, 8192, 8192)),
    ("gemm-rows", (8192, 32768, 2048)),
    ("gemm-rows", (4096, 16384, 4096)),
    ("gemm-band16", (8192, 8192, 8192)),
    ("gemm-band16", (16384, 16384, 8192)),
    ("gemm-band64", (8192, 8192, 8192)),
    ("gemm-128x128-rows", (8192, 8192, 8192)),
    ("gemm-128x128-rows", (4096, 4096, 16384)),
    ("attention", (1, 16, 4096, 4096)),
    ("attention", (4, 16, 8192, 8192)),
    ("attention", (1, 1, 32768, 65536)),
    ("attention", (1, 1, 32768, 131072)),
    ("attention", (1, 1, 65536, 262144)),
    ("attention", (4, 32, 256, 16384)),
    ("attention-grid", (2, 16, 8192, 8192)),
    ("attention-grid", (1, 2, 33000, 100000)),
    ("attention-causal", (2, 16, 8192, 8192)),
    ("attention-causal", (1, 1, 131072, 131072)),
    ("attention-group8", (2, 64, 4096, 4096)),
)
PROBES: tuple[tuple[str, int], ...] = (
    *(("shared", n) for n in (8, 16, 24, 28, 32, 36, 40, 48, 56, 64, 80, 96, 128)),
    *(("private", n) for n in (8, 16, 24, 32, 40, 48, 52, 56, 60, 64, 72, 80, 96, 128)),
    *(("write", n) for n in (4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 256, 512)),
    *(("copy", n) for n in (16, 32, 64, 128, 256)),
)
TIMES = {"shared": 4, "private": 4, "write": 1, "copy": 1}
PROBE_SOURCE = r"""
extern "C" __global__ void probe_shared(const float4* x, long n, int times, float4* sink) {
  float4 s = {0, 0, 0, 0};
  for (int t = 0; t < times; ++t)
    for (long i = threadIdx.x; i < n; i += blockDim.x) {
      float4 v = __ldcg(x + i);
      s.x += v.x; s.y += v.y; s.z += v.z; s.w += v.w;
    }
  if (s.x == 1.2345f) sink[threadIdx.x] = s;
}
extern "C" __global__ void probe_private(const float4* x, long n, int times, float4* sink) {
  float4 s = {0, 0, 0, 0};
  for (int t = 0; t < times; ++t)
    for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < n;
         i += gridDim.x * (long)blockDim.x) {
      float4 v = __ldcg(x + i);
      s.x += v.x; s.y += v.y; s.z += v.z; s.w += v.w;
    }
  if (s.x == 1.2345f) sink[threadIdx.x] = s;
}
extern "C" __global__ void probe_write(float4* x, long n, int times, float4* sink) {
  float4 s = {1, 2, 3, (float)threadIdx.x};
  for (int t = 0; t < times; ++t)
    for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < n;
         i += gridDim.x * (long)blockDim.x)
      __stcg(x + i, s);
}
extern "C" __global__ void probe_copy(const float4* x, long n, int times, float4* sink) {
  for (int t = 0; t < times; ++t)
    for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < n;
         i += gridDim.x * (long)blockDim.x)
      __stcg(sink + i, __ldcg(x + i));
}
"""


def label(name: str, sizes: tuple[int, ...]) -> str:
    """A case's name: variant and shape."""
    return f"{name} {'x'.join(map(str, sizes))}"


# --- here: build and predict ----------------------------------------------------------------------


def build_all() -> None:
    """Compile the variants and the probes."""
    for name, variant in VARIANTS.items():
        if isinstance(variant.config, GemmConfig):
            program = gemm(variant.config)
            schedule = schedule_for(program, Policy("inflight", variant.launch, groups=2, depth=4))
        else:
            program = attention(variant.config)
            schedule = schedule_for(program, Policy("pingpong", variant.launch, groups=2, depth=2))
        built = build(program, schedule)
        built.write(FOLDER / name)
        print(f"{name:20} {built.resources.registers} registers, {built.resources.seconds:.0f} s")
    source, image = FOLDER / "probes.cu", FOLDER / "probes.cubin"
    source.write_text(PROBE_SOURCE)
    done = toolchain.find("nvcc").run(
        "-cubin", "-arch=sm_90a", "-O3", "-o", str(image), str(source)
    )
    if done.returncode:
        raise CheckFailed(f"nvcc refused the probes: {done.stderr}")
    print(f"{'probes':20} {image.stat().st_size} B")


def derived(name: str, sizes: tuple[int, ...]) -> Kernel:
    """The case as a kernel of `derive`, with the tile sizes of the generated code."""
    config = VARIANTS[name].config
    if isinstance(config, GemmConfig):
        m, n, k = sizes
        body = formula("matmul").resized({"a": m, "b": k, "c": n})
        loops = [Loop("a", "group"), Loop("c", "group"), Loop("b", "stream")]
        tiles = {"g_a": config.tile[0], "g_c": config.tile[1], "s_b": config.tile[2]}
        return _made(body, loops, tiles)
    batch, heads, rows, keys = sizes
    given = {"q": rows, "x": keys, "d": config.head_dim, "e": config.head_dim}
    inner = [Loop("q", "group"), Loop("x", "stream")]
    tiles = {"g_q": config.tile[0], "s_x": config.tile[1]}
    if config.causal:
        body = _causal_heads().resized({**given, "h": batch * heads})
        return _made(body, [Loop("h", "group"), *inner], {**tiles, "g_h": 1})
    if config.group > 1:
        given |= {"n": batch * heads // config.group, "h": config.group}
        body = formula("gqa").resized(given)
        outer = [Loop("n", "group"), Loop("h", "group")]
        return _made(body, [*outer, *inner], {**tiles, "g_n": 1, "g_h": 1})
    body = formula("mha").resized({**given, "h": batch * heads})
    return _made(body, [Loop("h", "group"), *inner], {**tiles, "g_h": 1})


def _causal_heads() -> Diagram:
    """Causal attention with a head axis."""
    q, k, v = front.tensor("Q", "h q d"), front.tensor("K", "h x d"), front.tensor("V", "h x e")
    scaled = front.contract(q, k, out=("h", "q", "x")) * front.power_of_size("d", -0.5)
    scores = front.causal(scaled, "q", "x")
    out = front.contract(front.softmax(scores, "x"), v, out=("h", "q", "e"))
    return front.build("causal_heads", out, {"h": 1, "q": 1, "x": 1, "d": 128, "e": 128})


def _made(body: Diagram, loops: list[Loop], tiles: dict[str, int]) -> Kernel:
    made = make_kernel(body, loops)
    if isinstance(made, Refusal):
        raise CheckFailed(str(made))
    return made.tiled(tiles)


def predict(name: str, sizes: tuple[int, ...], level: Level2) -> tuple[Moved, float]:
    """(bytes the model says, compulsory bytes)."""
    kernel = derived(name, sizes)
    moved = dram_bytes(kernel, VARIANTS[name].order, level, 2.0)
    return moved, compulsory_bytes(kernel, 2.0)


# --- on the GPU -----------------------------------------------------------------------------------


def jobs() -> list[tuple[str, tuple[int, ...]]]:
    """Everything launched, in order: probes, then cases."""
    return [*((f"probe {kind}", (n,)) for kind, n in PROBES), *CASES]


def worker(labels: Path) -> None:
    """Launch every job once, in order; the profiler watches. Writes what was launched."""
    torch = importlib.import_module("torch")
    driver = _Probes()
    launched: list[str] = []
    kernels: dict[str, Launch] = {}
    for name, sizes in jobs():
        if name.startswith("probe "):
            driver.launch(torch, name.split()[1], sizes[0] * MIB)
        else:
            if name not in kernels:
                kernels[name] = Built.read(FOLDER / name).kernel()
            kernels[name](_arrays(torch, name, sizes))
        torch.cuda.synchronize()
        launched.append(label(name, sizes))
        labels.write_text(json.dumps(launched))


def _arrays(torch: Any, name: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    config = VARIANTS[name].config

    def made(*shape: int) -> Any:
        return torch.ones(shape, device="cuda", dtype=torch.bfloat16)

    if isinstance(config, GemmConfig):
        m, n, k = sizes
        return {"a": made(m, k), "b": made(k, n), "c": made(m, n)}
    batch, heads, rows, keys = sizes
    kv, d = heads // config.group, config.head_dim
    return {
        "q": made(batch, heads, rows, d),
        "k": made(batch, kv, keys, d),
        "v": made(batch, kv, keys, d),
        "o": made(batch, heads, rows, d),
    }


class _Probes:
    """The probe module on the current device."""

    def __init__(self) -> None:
        self.device = CudaDevice()
        self.module = self.device.load((FOLDER / "probes.cubin").read_bytes())

    def launch(self, torch: Any, kind: str, size: int) -> None:
        """One probe over `size` bytes: one block of 1024 threads on every SM."""
        data = torch.zeros(size // 4, device="cuda")
        sink = torch.zeros(size // 4 if kind == "copy" else 4096, device="cuda")
        torch.cuda.synchronize()
        values = Scalar("u64", data.data_ptr()), Scalar("i64", size // 16)
        values += Scalar("i32", TIMES[kind]), Scalar("u64", sink.data_ptr())
        function = self.device.function(self.module, f"probe_{kind}")
        params = Params([value.pack() for value in values])
        self.device.launch(function, Shape((SMS, 1, 1), (1024, 1, 1)), params)
        self.device.synchronize()


def run(out: Path) -> None:
    """Profile the worker and write counters.json: {label: {metric: value}}."""
    tool = shutil.which("ncu")
    if tool is None:
        raise CheckFailed("ncu is not on the PATH: install Nsight Compute")
    out.mkdir(parents=True, exist_ok=True)
    log, labels = out / "ncu.csv", out / "labels.json"
    known = subprocess.run(
        [tool, "--query-metrics", "--chip", "gh100"], capture_output=True, text=True, check=False
    ).stdout
    metrics = [m for m in METRICS if m.split(".")[0] in known] or list(METRICS[:3])
    # An unknown counter would stop the profiler: try all of ours, then the three that matter most.
    for chosen in (metrics, list(METRICS[:3])):
        _profile(tool, chosen, log, labels)
        names = json.loads(labels.read_text()) if labels.is_file() else []
        found = parse(log.read_text(), names) if log.is_file() else {}
        if found:
            break
    else:
        raise CheckFailed(f"no counters: {log.read_text()[-800:] if log.is_file() else 'no log'}")
    text = {
        "device": _device(),
        "date": time.strftime("%Y-%m-%d"),
        "metrics": chosen,
        "counters": found,
    }
    (out / "counters.json").write_text(json.dumps(text, indent=0))
    for name, values in found.items():
        print(f"{name:40} " + " ".join(f"{v / 1e6:.1f}" for v in values.values()))
    print(f"{len(found)} kernels of {len(jobs())} profiled")


def _profile(tool: str, metrics: list[str], log: Path, labels: Path) -> None:
    options = ["--clock-control", "none", "--cache-control", "all", "--csv", "--page", "raw"]
    options += ["--print-units", "base", "--log-file", str(log), "--force-overwrite"]
    options += ["--kernel-name", "regex:^(gemm|attention|probe_.*)$", "--metrics"]
    command = [tool, *options, ",".join(metrics)]
    command += [sys.executable, "-m", "bench.counters", "worker"]
    done = subprocess.run([*command, str(labels)], check=False, capture_output=True, text=True)
    print(done.stdout[-1500:], done.stderr[-1500:])


def parse(text: str, names: list[str]) -> dict[str, dict[str, float]]:
    """ncu's raw page as {label: {metric: value}}, of our metrics; raises for a foreign kernel."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.reader(lines))
    if len(rows) < 3:
        return {}
    head, units, body = rows[0], rows[1], rows[2:]
    if len(body) < len(names):
        names = names[: len(body)]
    found: dict[str, dict[str, float]] = {}
    for name, row in zip(names, body, strict=True):
        kernel = row[head.index("Kernel Name")]
        wanted = f"probe_{name.split()[1]}" if name.startswith("probe") else name.split("-")[0]
        if kernel.split("(")[0] != wanted.split()[0]:
            raise CheckFailed(f"counter row {row[0]} is of {kernel}, expected {name}")
        values: dict[str, float] = {}
        for title, unit, cell in zip(head, units, row, strict=True):
            if title in METRICS and cell not in ("", "n/a"):
                if unit not in ("", "byte", "sector", "ns", "nsecond", "%"):
                    raise CheckFailed(f"counter {title} is in {unit!r}, expected a base unit")
                values[title] = float(cell.replace(",", ""))
        found[name] = values
    return found


def _device() -> str:
    info = device_info()
    return f"{info.name}, {info.driver_version}"


# --- here again: prediction beside counters -------------------------------------------------------


def compare(path: Path, level: Level2) -> list[Evidence]:
    """An evidence row a case: predicted DRAM bytes beside the counters."""
    try:
        data = json.loads(path.read_text())
        found, device = data["counters"], data["device"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a counter file ({error})") from None
    rows: list[Evidence] = []
    for name, sizes in CASES:
        counters = found.get(label(name, sizes))
        if counters is None:
            continue
        moved, least = predict(name, sizes, level)
        read, written = counters["dram__bytes_read.sum"], counters["dram__bytes_write.sum"]
        seen = read + written
        rows.append(
            Evidence(
                "derive-dram",
                name,
                "x".join(map(str, sizes)),
                "bf16",
                device,
                "",
                "",
                data["date"],
                "python -m bench.counters evidence bench/results/raw/counters-h200.json",
                "B",
                "lower",
                moved.dram,
                {"ncu dram__bytes": seen},
                seen / moved.dram,
                samples=1,
                checks={
                    "within_5_percent": "pass" if abs(moved.dram / seen - 1) <= 0.05 else "fail",
                    "read": read,
                    "read_predicted": moved.read,
                    "written": written,
                    "written_predicted": moved.written,
                    "compulsory": least,
                    **_entering(counters, moved),
                },
                notes="cold L2; a prediction, not a contest: the ratio is counters over prediction",
            )
        )
    return rows


def _entering(counters: dict[str, float], moved: Moved) -> dict[str, float]:
    """What SMs ask L2 for and store to it, beside the formula. Requests of neighbouring SMs for the
    same line are joined before L2, so the counter of loads may be the smaller; stores are exact."""
    found = {"l2_stores_predicted": moved.stored, "l2_loads_predicted": moved.requested}
    for kind, key in (("write", "l2_stores"), ("read", "l2_loads")):
        if (sectors := counters.get(f"lts__t_sectors_srcunit_tex_op_{kind}.sum")) is not None:
            found[key] = SECTOR * sectors
    return found


def show(rows: list[Evidence]) -> None:
    """The rows as a table, megabytes."""
    print(f"{'case':42} {'read':>9} {'model':>9} {'written':>9} {'model':>9} {'ratio':>7}")
    for row in rows:
        c = row.checks
        numbers = [c["read"], c["read_predicted"], c["written"], c["written_predicted"]]
        text = " ".join(f"{n / 1e6:9.1f}" for n in numbers)
        print(f"{row.kernel + ' ' + row.shape:42} {text} {row.ratio_to_best:7.3f}")
    good = sum(row.checks["within_5_percent"] == "pass" for row in rows)
    print(f"{good} of {len(rows)} within 5 %")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("build", "predict", "run", "worker", "table", "evidence"))
    parser.add_argument("path", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out/results")))
    options = parser.parse_args()
    level = H200
    if options.mode == "build":
        build_all()
    elif options.mode == "run":
        run(options.out)
    elif options.mode == "worker":
        worker(options.path)
    elif options.mode in ("table", "evidence"):
        rows = compare(options.path, level)
        show(rows)
        if options.mode == "evidence":
            write_rows(ROOT / "bench" / "results" / "derive-dram.json", rows)
    else:
        for name, sizes in CASES:
            moved, least = predict(name, sizes, level)
            print(
                f"{label(name, sizes):40} read {moved.read / 1e6:9.1f} MB, written "
                f"{moved.written / 1e6:8.1f}, asked {moved.requested / 1e6:9.1f}, "
                f"compulsory {least / 1e6:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
