"""The commands as functions, for scripts and notebooks: `warploom.derive`, `run`, `schedule`,
`build`, `emulate`, `optimize`, `tune`, `judge`.

A kernel is what the command line takes, "gemm", "attention" or "FILE.py:OBJECT", or an object of
the running Python: a `tile.Program`, a function that gives one, a `UserKernel`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warploom.codegen.compile.build import Built
from warploom.derive.derive import Derivation, derive_on
from warploom.derive.derive import derive as run_derive
from warploom.derive.formula.frontend import Expr
from warploom.derive.formula.graph import Diagram
from warploom.errors import InputError
from warploom.flows.built import write_build_note
from warploom.flows.derived import diagram_of, verified
from warploom.flows.emulated import SEEDS, Emulated, emulated, orders
from warploom.flows.optimize import optimize as run_optimize
from warploom.flows.optimized import Optimized, OptimizeSettings, Say
from warploom.flows.schedule import problem_of
from warploom.flows.targets import read_target
from warploom.flows.tune import tune as run_tune
from warploom.flows.tuned import TuneReport, TuneSettings
from warploom.kernels.check import CheckResult, checked
from warploom.kernels.library import configure
from warploom.kernels.select import DEFAULT, select
from warploom.kernels.user import UserKernel
from warploom.objects import hold
from warploom.schedule import service
from warploom.tile import Program

if TYPE_CHECKING:
    from warploom.judge import Verdict

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

        >>> import warploom
        >>> made = warploom.build("gemm")  # needs the compiler, and no GPU
        >>> made.resources.spill_bytes, "wgmma" in made.source.text
        (0, True)

    Raises what `kernels.select.select` and `codegen.compile.build.build` raise.
    """
    name, given = named(kernel), texts(settings)
    made = select(name, given, gpu, schedule).build()
    if out:
        made.write(Path(out))
        write_build_note(Path(out), name, given, gpu, made)
    return made


def run(
    kernel: Kernel, settings: Mapping[str, Any] | None = None, on: str = "cpu", seed: int = 0
) -> CheckResult:
    """Run a kernel on random data and compare every output; `require()` of the result raises where
    something is wrong.

    on    "cpu": the interpreter; "emulated": its CUDA C++ on a CPU; "gpu": launched

        >>> import warploom
        >>> warploom.run("gemm", {"m": 40, "n": 72, "k": 136}).passed
        True
    """
    if on not in PLACES:
        raise InputError(f"--on {on!r}: expected {', '.join(PLACES[:-1])} or {PLACES[-1]}")
    if seed < 0:
        raise InputError(f"--seed {seed}, expected at least 0")
    name, given = named(kernel), texts(settings)
    sizes, chosen = configure(name, given)[1], select(name, given)
    code = None if on == "cpu" else chosen.build() if on == "gpu" else chosen.emitted()
    return checked(name, chosen.config, sizes, code, seed)


def derive(
    formula: str | Diagram | Expr,
    sizes: Mapping[str, int] | None = None,
    gpu: str = "h200",
    dtype: str = "fp16",
    memory: float | None = None,
) -> Derivation:
    """What a formula becomes: what to fuse, tiles, traffic, a proven bound, a tile program.

    formula   a name (`warploom derive list`), "FILE.py:OBJECT", or a formula of
              `warploom.derive`'s `tensor`, `softmax`, ...
    sizes     of its axes: {"q": 4096}
    memory    derive for so many values of fast memory, and for no GPU

        >>> import warploom
        >>> found = warploom.derive("attention", {"q": 4096, "x": 4096})
        >>> len(found.kernels), 0 < found.percent_of_bound <= 100
        (1, True)

    The derivation was run on random input and agrees with the formula; `CheckFailed` else. Raises
    what `warploom.derive.derive_on` raises.
    """
    name = formula if isinstance(formula, str) else hold(formula, "formula")
    diagram = diagram_of(name).resized(dict(sizes or {}))
    found = derive_on(diagram, gpu, dtype) if memory is None else run_derive(diagram, memory)
    verified(found)
    return found


def schedule(
    kernel: Kernel,
    settings: Mapping[str, Any] | None = None,
    gpu: str = "",
    loop: str = "",
    seconds: float = 60.0,
) -> service.Result:
    """Solve a kernel's loop for a software pipeline; the answer holds a proof and was checked.

    kernel    as for the others, or a graph's file, "GRAPH.json"
    loop      which loop of the kernel; the first with a matmul
    seconds   for the whole solve

        >>> import warploom
        >>> found = warploom.schedule("gemm", seconds=30)
        >>> found.schedule.initiation_interval > 0, found.report.passed
        (True, True)

    Raises what `schedule.service.answer` raises, such as `ToolMissing` without OR-Tools.
    """
    request = service.Request(gpu, time_limit=seconds)
    return service.answer(problem_of(named(kernel), texts(settings), loop, request))


def emulate(
    what: Kernel | Path,
    settings: Mapping[str, Any] | None = None,
    seeds: int = SEEDS,
    seed: int | None = None,
) -> Emulated:
    """Run a kernel's CUDA C++ on an emulated Hopper: races, missing waits, deadlocks.

    what    a kernel, or a file FILE.cu with a `main`
    seeds   so many orders of events; `seed` replays one

        >>> import warploom
        >>> warploom.emulate("gemm", {"m": 130, "n": 64, "k": 72}, seeds=1).passed
        True

    `require()` of the result raises where there is a fault. Raises what `flows.emulated.emulated`
    raises.
    """
    name = str(what) if isinstance(what, Path) else named(what)
    return emulated(name, texts(settings), orders(seed, seeds))


def judge(
    candidate: Path | str, against: Path | str, on: str = "cpu", gpu: str = "h200", seed: int = 0
) -> Verdict:
    """Is a kernel that somebody else wrote right, is it faster, does it cheat?

    candidate   "FILE.py:FUNCTION", a launch FILE.toml, or a folder of a build
    against     the problem, "FILE.py" or "FILE.py:OBJECT" (`warploom.judge.Problem`)
    on          "cpu", where CUDA is emulated, or "gpu", where it is timed, too

        >>> import tempfile, warploom
        >>> from pathlib import Path
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "softmax.py").write_text('''
        ... import torch
        ... from warploom import tile as t
        ... from warploom.judge import Problem
        ... problem = Problem(lambda x: torch.softmax(x, -1), inputs={"x": t.array(t.FP32, "m n")},
        ...     outputs={"y": t.array(t.FP32, "m n")}, sizes=[{"m": 5, "n": 37}])
        ... ''')
        >>> _ = (folder / "mine.py").write_text('''
        ... def columns(x):
        ...     return x.softmax(0)
        ... ''')
        >>> verdict = warploom.judge(folder / "mine.py:columns", folder / "softmax.py")
        >>> verdict.checks
        ('values',)

    Raises what `warploom.judge.judge` raises; a candidate that is wrong is a verdict.
    """
    from warploom.judge import judge as run_judge  # noqa: PLC0415 - it needs torch, no other does

    return run_judge(str(candidate), str(against), on, gpu, seed)


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
