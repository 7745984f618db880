"""The commands as functions, for scripts and notebooks: `warploom.optimize`, `build`, `run`,
`tune`.

A kernel is what the command line takes, "gemm", "attention" or "FILE.py:OBJECT", or an object of
the running Python: a `tile.Program`, a function that gives one, a `UserKernel`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from warploom.codegen.compile.build import Built
from warploom.errors import InputError
from warploom.flows.built import write_build_note
from warploom.flows.optimize import optimize as run_optimize
from warploom.flows.optimized import Optimized, OptimizeSettings, Say
from warploom.flows.targets import read_target
from warploom.flows.tune import tune as run_tune
from warploom.flows.tuned import TuneReport, TuneSettings
from warploom.kernels.check import CheckResult, checked
from warploom.kernels.library import configure
from warploom.kernels.select import DEFAULT, select
from warploom.kernels.user import UserKernel
from warploom.objects import hold
from warploom.tile import Program

PLACES = ("cpu", "emulated", "gpu")
Kernel = str | Program | UserKernel | Callable[..., Program]


def optimize(
    kernel: Kernel,
    settings: Mapping[str, Any] | None = None,
    gpu: str = "h200",
    out: Path | str = "",
    say: Say = print,
    **options: Any,
) -> Optimized:
    """Search for the fastest kernel and build it into the folder `out` (default: out/NAME).

    settings   array sizes and the program's own settings: {"m": 8192, "tile_n": 256}
    say        is told the progress, a line at a time
    options    fields of `OptimizeSettings`: effort="quick" | "normal" | "thorough", measure="auto"
               | "gpu" | "none", schedule, seconds, compare

    Raises what `flows.optimize` raises; where a GPU is, an object of this Python needs
    measure="none", as it is measured in a process of its own, which can load a file only.
    """
    name = named(kernel)
    folder = Path(out) if out else Path("out") / name.rpartition(":")[2]
    return run_optimize(OptimizeSettings(name, gpu, texts(settings), **options), folder, say)


def build(
    kernel: Kernel,
    settings: Mapping[str, Any] | None = None,
    gpu: str = "h200",
    schedule: str = DEFAULT,
    out: Path | str = "",
) -> Built:
    """Emit and compile a kernel under a schedule by name; written into `out` where one is given.

    Raises what `kernels.select.select` and `codegen.compile.build.build` raise.
    """
    name, given = named(kernel), texts(settings)
    made = select(name, given, gpu, schedule).build()
    if out:
        made.write(Path(out))
        write_build_note(Path(out), name, given, gpu, made)
    return made


def run(
    kernel: Kernel,
    settings: Mapping[str, Any] | None = None,
    on: str = "cpu",
    seed: int = 0,
) -> CheckResult:
    """Run a kernel on random data and compare every output; `require()` of the result raises where
    something is wrong.

    on    "cpu": the interpreter; "emulated": its CUDA C++ on a CPU; "gpu": launched
    """
    if on not in PLACES:
        raise InputError(f"--on {on!r}: expected {', '.join(PLACES[:-1])} or {PLACES[-1]}")
    if seed < 0:
        raise InputError(f"--seed {seed}, expected at least 0")
    name, given = named(kernel), texts(settings)
    sizes, chosen = configure(name, given)[1], select(name, given)
    code = None if on == "cpu" else chosen.build() if on == "gpu" else chosen.emitted()
    return checked(name, chosen.config, sizes, code, seed)


def tune(
    target: Path | str | Optimized,
    out: Path | str,
    settings: Mapping[str, Any] | None = None,
    say: Say = print,
    **options: Any,
) -> TuneReport:
    """Search for faster machine code and write it into the folder `out`.

    target     a cubin, a folder of `build` or `optimize`, what `optimize` gave, or "FILE.py:OBJECT"
               for a Triton kernel
    settings   sizes to measure the kernel of a folder at
    options    fields of `TuneSettings`: seconds=60.0, measure="model" | "gpu", player, moves, ...

    Raises what `read_target` and `flows.tune.tune` raise.
    """
    text = str(target.folder if isinstance(target, Optimized) else target)
    found = read_target(text, None, None, None, texts(settings))
    return run_tune(found, TuneSettings(**options), Path(out), say=say)


def named(kernel: Kernel) -> str:
    """A name of a kernel for the rest of the package."""
    if isinstance(kernel, str):
        return kernel
    program = kernel.program if isinstance(kernel, UserKernel) else kernel
    label = program.name if isinstance(program, Program) else getattr(program, "__name__", "")
    return hold(kernel, label or "kernel")


def texts(settings: Mapping[str, Any] | None) -> dict[str, str]:
    """Settings as the command line has them."""
    return {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in (settings or {}).items()
    }
