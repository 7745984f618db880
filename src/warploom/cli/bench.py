"""`warploom bench`: the benchmarks of the source tree, measured beside their baselines."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import warploom
from warploom.errors import CheckFailed, InputError
from warploom.evidence import Evidence, read_rows, write_rows


@dataclass(frozen=True)
class Benchmark:
    """A module of `bench`: what it measures, its steps, the evidence file it leaves in `--out`."""

    name: str
    about: str
    module: str
    evidence: str
    builds: bool = True


BENCHMARKS: dict[str, Benchmark] = {
    one.name: one
    for one in (
        Benchmark("gemm", "GEMM beside cuBLAS", "bench.gemm", "gemm.json"),
        Benchmark(
            "attention",
            "attention forward beside cuDNN and FlashAttention-4",
            "bench.attention",
            "attention-forward.json",
        ),
        Benchmark(
            "ablation",
            "named and solved schedules, model beside machine",
            "bench.ablation",
            "schedule_ablation.json",
        ),
        Benchmark(
            "sass-search",
            "what search over machine code gains",
            "bench.sass_search",
            "sass_search.json",
            builds=False,
        ),
    )
}
SUITES: dict[str, tuple[str, ...]] = {
    "kernels": ("gemm", "attention"),
    "schedules": ("ablation",),
    "all": tuple(BENCHMARKS),
}


def bench(
    name: Annotated[str, typer.Argument(help=", ".join([*BENCHMARKS, *SUITES]) + ", or list")],
    json_out: Annotated[
        Path | None, typer.Option("--json", help="write the evidence rows here")
    ] = None,
    rounds: Annotated[int, typer.Option(help="rounds of interleaved timing")] = 12,
) -> None:
    """Build and measure on the GPU here; without one: a line that says so, exit 2."""
    if name == "list":
        for one in BENCHMARKS.values():
            typer.echo(f"{one.name:12} {one.about}")
        for suite, names in SUITES.items():
            typer.echo(f"{suite:12} {', '.join(names)}")
        return
    chosen = SUITES.get(name) or ((name,) if name in BENCHMARKS else ())
    if not chosen:
        known = ", ".join([*BENCHMARKS, *SUITES])
        raise InputError(f"benchmark {name!r}: expected one of {known}")
    if rounds < 1:
        raise InputError(f"--rounds {rounds}, expected at least 1")
    _require_gpu(name)
    root = _source_root()
    rows: list[Evidence] = []
    with tempfile.TemporaryDirectory() as text:
        for one in chosen:
            rows += _run(root, BENCHMARKS[one], Path(text), rounds)
    if json_out is not None:
        write_rows(json_out, rows)
    typer.echo(json.dumps({"rows": len(rows), "json": str(json_out or "")}))


def _require_gpu(name: str) -> None:
    # Not at the top: the driver's bindings are an extra.
    from warploom.runtime.driver import gpu_here  # noqa: PLC0415

    if not gpu_here():
        raise InputError(f"bench {name}: no GPU here; benchmarks measure, they do not model")


def _source_root() -> Path:
    root = Path(warploom.__file__).resolve().parents[2]
    if not (root / "bench" / "__init__.py").is_file():
        raise InputError(
            f"bench: {root / 'bench'} is not there; benchmarks come with the source tree, not the "
            "wheel"
        )
    return root


def _run(root: Path, one: Benchmark, out: Path, rounds: int) -> list[Evidence]:
    steps = [["--out", str(out / one.evidence)]]
    if one.builds:
        steps = [["build"], ["run", "--out", str(out), "--rounds", str(rounds)]]
    for options in steps:
        step = ["-m", one.module, *options]
        done = subprocess.run([sys.executable, *step], cwd=root, check=False)
        if done.returncode:
            raise CheckFailed(f"bench {one.name}: {' '.join(step)} ended with {done.returncode}")
    return read_rows(out / one.evidence)
