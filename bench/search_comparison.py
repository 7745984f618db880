"""Claim `search-comparison`: search methods on machine code at an equal number of measurements.

    python -m bench.search_comparison [--kernels attention,softmax] [--methods ppo,greedy]
        [--seeds 3] [--measurements 300] [--gpus 0,1,2,3] [--policy pretrained.pt] [--work DIR]
    python -m bench.search_comparison --report --work DIR     (rows and figures from the logs)
    python -m bench.search_comparison --take-apart BEST.cubin --kernels attention --work DIR

Each kernel of the suite runs at its best Triton configuration (as recorded by `sass_search.py`).
Every method and seed plays in a process of its own and pays for every measurement, confirmations
included; one process a GPU measures for all of them, one candidate at a time. Afterwards the best
of every run are compared with the original in one interleaved run with reloads and an A/A control:
search-time scores choose, this comparison is what is reported. Every score is a line of
`DIR/<kernel>.jsonl`; started again with the same folder, finished runs are not repeated.
`--dry-run` scores by the timing model on given cubins and measures nothing. `--take-apart` measures
the parts of one result beside the whole: which blocks, orders and control fields made it faster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.comparison.attribution import summary, take_apart
from bench.comparison.broker import Broker, GpuScorer, ModelScorer
from bench.comparison.runs import METHODS, Run
from bench.evidence import read_rows
from warploom.errors import InputError, WarploomError
from warploom.files import write_text_atomically
from warploom.runtime import LocalMeasurer, MeasureSettings, TimingSettings, Workload
from warploom.sass.decode.cubin import Cubin, load, parse
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verify import Verifier

RESULTS = Path(__file__).parent / "results"
ROUNDS = 8
COMPARING_S = 15.0
KERNELS = (
    "attention",
    "feed_forward",
    "gemm_leaky_relu",
    "batched_gemm",
    "layernorm",
    "rmsnorm",
    "skinny_gemm",
    "softmax",
)


def main(arguments: list[str]) -> int:
    """Run the claim, one kernel of it, or the report; returns the exit status."""
    given = read_arguments(arguments)
    try:
        if given.report:
            from bench.comparison.report import report  # noqa: PLC0415 - needs no GPU

            return report(given.work, RESULTS)
        given.work.mkdir(parents=True, exist_ok=True)
        if given.take_apart is not None:
            return measure_parts(given.kernels[0], given.take_apart, given.work)
        if given.worker:
            return run_kernel(given.kernels[0], given)
        return run_all(given, arguments)
    except WarploomError as error:
        print(f"search_comparison: {error}", file=sys.stderr)
        return error.exit_code


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line; argparse exits with status 2 on a bad one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--measurements", type=int, default=300, help="for each method and seed")
    parser.add_argument("--gpus", default="0", help="GPU numbers; kernels run in parallel")
    parser.add_argument("--parallel", type=int, default=12, help="runs at a time on one GPU")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop all runs after this")
    parser.add_argument(
        "--policy", default="", help="pre-trained policies: FILE, or METHOD=FILE,METHOD=FILE"
    )
    parser.add_argument("--work", type=Path, default=Path("out/search_comparison"))
    parser.add_argument("--report", action="store_true", help="only write rows and figures")
    parser.add_argument("--dry-run", type=Path, help="folder of KERNEL*.cubin; the model scores")
    parser.add_argument("--take-apart", type=Path, help="a result of the first kernel named")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.kernels, given.methods = given.kernels.split(","), given.methods.split(",")
    for name, known in [(k, KERNELS) for k in given.kernels] + [
        (m, METHODS) for m in given.methods
    ]:
        if name not in known:
            parser.error(f"unknown name {name!r}, expected some of {', '.join(known)}")
    return given


def run_all(given: argparse.Namespace, arguments: list[str]) -> int:
    """One process for each kernel, as many at a time as there are GPUs."""
    began = time.monotonic()
    free = given.gpus.split(",")
    waiting = list(given.kernels)
    running: dict[str, tuple[subprocess.Popen[bytes], str]] = {}
    status = 0
    while waiting or running:
        left = given.seconds - (time.monotonic() - began)
        while free and waiting and left > 0:
            gpu, kernel = free.pop(0), waiting.pop(0)
            share = left * len(given.gpus.split(",")) / max(len(waiting) + len(running) + 1, 1)
            command = [
                sys.executable,
                "-m",
                "bench.search_comparison",
                *arguments,
                "--worker",
                "--kernels",
                kernel,
            ]
            command += ["--seconds", f"{min(left, share):.0f}"]
            log = (given.work / f"{kernel}.log").open("w")
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            running[kernel] = (process, gpu)
            print(f"{time.monotonic() - began:6.1f} s  {kernel} on GPU {gpu}", flush=True)
        if left <= 0 and waiting:
            print(f"out of time: {', '.join(waiting)} not started", flush=True)
            waiting, status = [], 1
        for kernel, (process, gpu) in list(running.items()):
            if process.poll() is not None:
                del running[kernel]
                free.append(gpu)
                status = status or process.returncode
                tail = (given.work / f"{kernel}.log").read_text().splitlines()[-3:]
                took = time.monotonic() - began
                print(f"{took:6.1f} s  {kernel}: status {process.returncode}", flush=True)
                print("\n".join(f"    {line[:150]}" for line in tail), flush=True)
        time.sleep(0.2)
    return status


def run_kernel(name: str, given: argparse.Namespace) -> int:
    """All runs of one kernel, then the comparison of their results."""
    runs = [
        Run(name, method, seed, given.measurements, policy_of(given.policy, method))
        for seed in range(given.seeds)
        for method in given.methods
    ]
    log = given.work / f"{name}.jsonl"
    folder = given.work / "cubins"
    finished = finished_runs(log)
    waiting = [run for run in runs if run.key not in finished]
    limit = given.seconds
    began = time.monotonic()
    if given.dry_run is not None:
        path = next(iter(sorted(given.dry_run.glob(f"{name}*.cubin"))), None)
        if path is None:
            raise InputError(f"{given.dry_run} holds no {name}*.cubin")
        original = load(path)
        kernel = next(iter(original.kernels))
        broker = Broker(ModelScorer(original, kernel), log, folder, given.parallel)
        broker.play(waiting, original.data, kernel, limit)
        return 0
    captured = compile_best(name)
    original = parse(captured.cubin, name)
    (given.work / f"{name}.cubin").write_bytes(captured.cubin)
    with LocalMeasurer(settings=MeasureSettings(rounds=ROUNDS)) as measurer:
        baseline = measurer.prepare(Workload(captured.cubin, captured.launch))
        broker = Broker(GpuScorer(measurer), log, folder, given.parallel)
        setup = time.monotonic() - began
        broker.write({"kernel": name, "device": baseline.device, "config": recorded_config(name)})
        broker.play(waiting, captured.cubin, captured.name, limit - COMPARING_S - setup)
        compare(name, original, captured.name, runs, measurer, broker)
    return 0


def compare(
    name: str,
    original: Cubin,
    kernel: str,
    runs: list[Run],
    measurer: LocalMeasurer,
    broker: Broker,
) -> None:
    """The reported numbers: every run's best against the original, interleaved, with a control."""
    verifier = Verifier(original, kernel, AliasMode.TRITON)
    images: dict[str, bytes] = {"original": original.data}
    for run in runs:
        path = broker.folder / f"{run.key}.cubin"
        if path.is_file():
            verdict = verifier.check_file(load(path))
            if not verdict.legal:
                raise InputError(f"{path}: {verdict}")
            images[run.key] = path.read_bytes()
    timing = measurer.compare(images, TimingSettings(mode="warm", rounds=16, reloads=4))
    best = max((k for k in images if k != "original"), key=lambda k: timing.ratios[k].median,
               default=None)  # fmt: skip
    check = measurer.check(images[best]) if best else None
    broker.write(
        {
            "kernel": name,
            "compare": {
                key: [r.median, r.low, r.high]
                for key, r in timing.ratios.items()
                if key != "original"
            },
            "control": [timing.control.low, timing.control.high],
            "median_us": timing.median_us["original"],
            "best": best,
            "best_check": None if check is None else ("pass" if check.passed else check.detail),
        }
    )
    print(f"{name}: best {best} {timing.ratios[best] if best else ''} control {timing.control}")


def measure_parts(name: str, path: Path, work: Path) -> int:
    """Measure the parts of a result against the original, all interleaved, with a control."""
    captured = compile_best(name)
    winner = load(path)
    parts = take_apart(parse(captured.cubin, name), winner, captured.name)
    images = {"original": captured.cubin, "whole": winner.data, **parts.images}
    with LocalMeasurer() as measurer:
        measurer.prepare(Workload(captured.cubin, captured.launch))
        timing = measurer.compare(images, TimingSettings(mode="warm", rounds=16, reloads=4))
    ratios = {k: [r.median, r.low, r.high] for k, r in timing.ratios.items() if k != "original"}
    control = [timing.control.low, timing.control.high]
    line = {"kernel": name, "control": control, **summary(parts, ratios)}
    write_text_atomically(work / f"{name}-parts.json", json.dumps(line, indent=1) + "\n")
    for key, (middle, low, high) in ratios.items():
        print(f"{key}: {middle:.4f} [{low:.4f}, {high:.4f}]")
    print(f"control {control}; refused: {', '.join(parts.refused) or 'none'}")
    return 0


def policy_of(given: str, method: str) -> str | None:
    """The pre-trained policy of a method, from what the command line says."""
    named = dict(item.split("=", 1) for item in given.split(",") if "=" in item)
    return named.get(method) or (given if given and "=" not in given else None)


def finished_runs(log: Path) -> set[str]:
    """Runs whose `done` line says that they spent their measurements."""
    if not log.is_file():
        return set()
    lines: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    return {
        line["run"]
        for line in lines
        if line.get("done") and "error" not in line and "cut_short" not in line
    }


def recorded_config(name: str) -> str:
    """The fastest Triton configuration that `sass_search.py` recorded for a kernel."""
    rows = read_rows(RESULTS / "sass_search.json")
    for row in rows:
        if row.kernel.split(" / ")[0] == name:
            return next(iter(row.baselines)).removeprefix("triton ")
    raise InputError(f"bench/results/sass_search.json has no row of {name}")


def compile_best(name: str) -> Any:
    """The captured kernel at its recorded best configuration (needs Triton)."""
    from bench.triton_suite import SUITE  # noqa: PLC0415 - a dry run needs no Triton
    from bench.triton_suite.offline import compile_offline  # noqa: PLC0415

    kernel, wanted = SUITE[name], recorded_config(name)
    config = next((item for item in kernel.configs if item.name == wanted), None)
    if config is None:
        raise InputError(f"{name}: the suite has no configuration {wanted!r}")
    return compile_offline(kernel, config, 90)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
