"""Row operations beside torch.compile and QuACK, in bytes a second.

    python -m bench.row_ops build                  our kernels into the cache, without a GPU
    python -m bench.row_ops compile [--part 0 --of 4]    torch's and QuACK's into theirs, on a GPU
    python -m bench.row_ops run softmax:4096,rotary --out OUT
    python -m bench.row_ops merge FILES            into bench/results/row_ops.json

A rate counts the bytes that an operation must read and write, each array once: `checks.floor` is
its part of the rate at which this GPU copies. Every candidate gets the same tensors of 2^27
elements, far beyond L2; torch.compile gets the formula of the operation, forward or backward, with
static shapes, and QuACK is beside where it has the operation. Bursts in shuffled rounds, with a
second copy of torch.compile's as A/A control.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench import sitting
from bench.evidence import Evidence, read_rows, write_rows
from warploom import machine
from warploom.codegen.compile.build import build
from warploom.integrations.row_signatures import SIGNATURES
from warploom.kernels.rows.choose import built_rows, sums_kernel
from warploom.kernels.rows.program import RowConfig
from warploom.runtime.stats import median_interval
from warploom.tile import BF16

RESULTS = Path(__file__).parent / "results" / "row_ops.json"
BOTH = "cross_entropy with its gradient"  # over the logits
DROPPED = "dropout"
LINE = 8  # elements of an access: QuACK is not asked for other lengths
ELEMENTS = 1 << 27
COMPARED = 64  # rows against float64
ROUNDS = 15
HEAD = 128  # columns of a head that is rotated, of HEADS
HEADS = 32
LONG = (1024, 4096, 8192, 16384, 32768, 65536, 131072)
CASES: dict[str, tuple[int, ...]] = {
    "rmsnorm": (*LONG, 1000, 5003),
    "rmsnorm_backward": (*LONG, 1000, 5003),
    "softmax": (*LONG, 5003),
    "softmax_backward": (1024, 4096, 16384, 65536),
    "cross_entropy": (*LONG, 5003, 32000, 128256),
    "cross_entropy_backward": (4096, 32768, 131072),
    "layernorm": (1024, 4096, 16384, 65536),
    "layernorm_backward": (1024, 4096, 16384, 65536),
    "rmsnorm residual": (4096, 16384),
    "rmsnorm residual dropout": (4096,),
    "rmsnorm fp8": (4096, 16384),
    "cross_entropy with its gradient": (4096, 32768, 131072, 128256),
    "gated": (4096, 14336),
    "gated_backward": (4096, 14336),
    "quantised": (4096, 16384),
    "rotary": (HEAD,),
    "rotary pairs": (HEAD,),
}
# Arrays of the size of rows that an operation reads and writes, in bytes an element.
BYTES = {
    "rmsnorm": 4, "rmsnorm_backward": 6, "softmax": 4, "softmax_backward": 6, "cross_entropy": 2,
    "cross_entropy_backward": 4, "layernorm": 4, "layernorm_backward": 6, "gated": 6,
    "gated_backward": 10, "quantised": 3, "rotary": 4, "rotary pairs": 4, "rmsnorm residual": 8,
    "rmsnorm residual dropout": 8, "rmsnorm fp8": 3, "cross_entropy with its gradient": 4,
}  # fmt: skip


def config(case: str, columns: int) -> RowConfig:
    """The configuration of a case."""
    if case == BOTH:
        return RowConfig("cross_entropy_both", columns)
    op, *options = case.split()
    return RowConfig(op, columns, options=frozenset(options))


def chosen(text: str) -> list[tuple[str, int]]:
    """The cases that a text names, `operation` or `operation:columns` with commas; all of none."""
    found: list[tuple[str, int]] = []
    for word in text.split(",") if text else CASES:
        case, _, columns = word.partition(":")
        found += [(case, int(columns))] if columns else [(case, n) for n in CASES[case]]
    return found


def build_all(cases: list[tuple[str, int]]) -> None:
    """Compile every kernel that the cases launch."""
    for case, columns in cases:
        print(case, columns, built_rows(config(case, columns)).resources, flush=True)
    build(*sums_kernel(BF16))


def tensors(torch: Any, case: str, columns: int) -> dict[str, Any]:
    """Random operands of a case, with the statistics that backward passes are given."""
    if case.startswith("rotary"):
        positions = ELEMENTS // (HEADS * HEAD)
        angles = torch.rand(positions, HEAD // 2, device="cuda") * 6.28
        x = drawn(torch, positions, HEADS, HEAD)[None]
        return {"x": x, "cos": angles.cos().bfloat16(), "sin": angles.sin().bfloat16()}
    rows = ELEMENTS // columns
    x, dy, w = of_columns(torch, columns)
    found = {"x": x, "dy": dy, "w": w, "eps": 1e-6}
    if case.startswith("gated"):
        found |= {"gate": x, "up": w.expand(1, -1) + dy}
    found["target"] = torch.randint(0, columns, (rows,), device="cuda")
    found["dloss"] = torch.rand(rows, device="cuda")
    found["residual"], found["seed"] = dy, torch.randint(0, 99, (2,), device="cuda").int()
    pieces = x.split(max(1, rows // 16))
    found["mean"] = torch.cat([one.float().mean(1) for one in pieces])
    squares = torch.cat([one.float().square().mean(1) for one in pieces])
    centred = squares - found["mean"] ** 2 if case.startswith("layernorm") else squares
    found["rstd"] = torch.rsqrt(centred + 1e-6)
    if case == "softmax_backward":
        found["y"] = torch.cat([one.float().softmax(1).bfloat16() for one in pieces])
    if case == "cross_entropy_backward":
        found["lse"] = torch.cat([one.float().logsumexp(1) for one in pieces])
    torch.cuda.empty_cache()
    return found


@functools.lru_cache(maxsize=1)
def of_columns(torch: Any, columns: int) -> tuple[Any, Any, Any]:
    """Rows of so many columns twice, and a number a column."""
    torch.manual_seed(1)
    rows = ELEMENTS // columns
    return (
        drawn(torch, rows, columns), drawn(torch, rows, columns), drawn(torch, columns)
    )  # fmt: skip


def drawn(torch: Any, *shape: int) -> Any:
    """Normal numbers in bf16."""
    pieces = [torch.randn(p, *shape[1:], device="cuda").bfloat16() for p in _parts(shape[0])]
    return torch.cat(pieces)


def _parts(rows: int) -> list[int]:
    step = max(1, -(-rows // 16))
    return [min(step, rows - at) for at in range(0, rows, step)]


def formulas() -> dict[str, Callable[..., Any]]:
    """The operations as torch formulas."""
    return importlib.import_module("bench.row_formulas").FORMULAS


def ours(rows: Any, case: str, given: dict[str, Any]) -> Callable[[], Any]:
    """Our operator on the operands of a case."""
    if case.startswith("rotary"):
        return lambda: rows.rotary(given["x"], given["cos"], given["sin"], "pairs" in case)
    if case == BOTH:
        x, loss = given["x"].clone(), given["dloss"].clone()
        call = functools.partial(rows.logits_to_gradients, x, given["target"], given["dloss"], loss)
        return lambda: (call(), x, loss)[1:]
    op, *options = case.split()
    known = SIGNATURES[op]
    with_it = {name for name in known.names if known.optional.get(name, "") in ("", *options)}
    values = {**given, "p": importlib.import_module("bench.row_formulas").P} | {
        flag: flag in options for flag in known.flags
    }
    args = [values.get(name) if name in with_it else None for name in known.names]
    return lambda: rows.OPERATORS[op](*args)


def quack(case: str, given: dict[str, Any]) -> Callable[[], Any] | None:
    """QuACK's kernel for a case, where it is installed and has one."""
    try:
        # The package has functions of the names of these modules.
        norms, weights, losses = (
            importlib.import_module(f"quack.{name}")
            for name in ("rmsnorm", "softmax", "cross_entropy")
        )
    except ImportError:
        return None
    x, w, dy = (given.get(name) for name in ("x", "w", "dy"))
    known: dict[str, Callable[[], Any]] = {
        "rmsnorm": lambda: norms.rmsnorm_fwd(x, w, eps=1e-6, store_rstd=True),
        "rmsnorm_backward": lambda: norms.rmsnorm_bwd(x, w, dy, given["rstd"])[:2],
        "layernorm": lambda: norms.layernorm_fwd(
            x, w.float(), eps=1e-6, return_rstd=True, return_mean=True
        ),
        "softmax": lambda: weights.softmax_fwd(x),
        "softmax_backward": lambda: weights.softmax_bwd(dy, given["y"]),
        "cross_entropy": lambda: losses.cross_entropy_fwd(x, given["target"], return_lse=True),
        "cross_entropy_backward": lambda: losses.cross_entropy_bwd(
            x, given["target"], given["dloss"], given["lse"]
        ),
        "rmsnorm residual": lambda: norms.rmsnorm_fwd(x, w, residual=dy, eps=1e-6, store_rstd=True),
        BOTH: lambda: losses.cross_entropy_fwd(x, given["target"], return_dx=True),
    }
    return known.get(case) if x is None or x.shape[-1] % LINE == 0 else None


def rivals(torch: Any, case: str, given: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """What a case is timed beside."""
    formula = formulas()[case]
    operands = [given[name] for name in names_of(formula)]
    torch._dynamo.reset()
    compiled = torch.compile(formula, dynamic=False)
    calls: dict[str, Callable[[], Any]] = {
        "torch.compile": lambda: compiled(*operands, torch.float32)
    }
    known = quack(case, given)
    return calls if known is None else calls | {"QuACK": known}


def names_of(formula: Callable[..., Any]) -> list[str]:
    """The operands of a formula."""
    code = formula.__code__
    return [name for name in code.co_varnames[: code.co_argcount] if name != "wide"]


def compile_rivals(torch: Any, cases: list[tuple[str, int]]) -> None:
    """Call what the cases are timed beside once, so that their caches on disk have it."""
    for case, columns in cases:
        for name, call in rivals(torch, case, tensors(torch, case, columns)).items():
            began = time.monotonic()
            try:
                call()
                torch.cuda.synchronize()
            except Exception as error:
                print(case, columns, name, f"{type(error).__name__}: {error}"[:200], flush=True)
            print(case, columns, name, f"{time.monotonic() - began:.1f} s", flush=True)


def measured(torch: Any, rows: Any, case: str, columns: int) -> Evidence:
    """One case, checked and timed."""
    given = tensors(torch, case, columns)
    formula = formulas()[case]
    calls = {"warploom": ours(rows, case, given), **rivals(torch, case, given)}
    error = _error(torch, case, formula, names_of(formula), given, calls["warploom"]())
    gpu = sitting.Gpu(torch, calls)
    gpu.again("torch.compile")
    bursts = sitting.measure(gpu, ROUNDS, False, 0)["bursts"]
    samples = {name: one["ms"] for name, one in bursts.items()}
    bytes_ = ELEMENTS // columns * columns * BYTES[case]
    rates = {n: bytes_ / statistics.median(one) * 1e-9 for n, one in samples.items()}
    others = {n: rate for n, rate in rates.items() if n not in ("warploom", sitting.CONTROL)}
    best = max(others, key=lambda name: others[name])
    middle, *interval = median_interval(samples["warploom"], samples[best])
    _, *control = median_interval(samples["torch.compile"], samples[sitting.CONTROL])
    floor = rates["warploom"] * 1e12 / machine.load("h200").value("dram.copy_bandwidth")
    return Evidence(
        claim="row-ops",
        kernel=case,
        shape=f"{ELEMENTS // columns} x {columns}",
        dtype="bf16",
        **{**kb.provenance(), "command": f"python -m bench.row_ops run '{case}:{columns}'"},
        compiler=built_rows(config(case, columns)).resources.compiler,
        unit="TB/s",
        better="higher",
        ours=rates["warploom"],
        baselines=others,
        ratio_to_best=middle,
        ci95=(interval[0], interval[1]),
        control=(control[0], control[1]),
        samples=ROUNDS,
        checks={
            "numerics": "pass" if error < BOUND.get(case, 4e-3) else "fail",
            "error": float(f"{error:.2g}"),
            "floor": round(floor, 3),
            "refused": gpu.refused,
        },
    )


BOUND = {"quantised": 0.04, "rmsnorm fp8": 0.04, "cross_entropy": 1e-5}


def _error(
    torch: Any, case: str, formula: Callable[..., Any], names: list[str], given: dict[str, Any],
    found: Any,
) -> float:  # fmt: skip
    """The largest relative error of a result against float64: of some rows, and sums of all."""
    whole = 1 if case.startswith("rotary") else 0
    rows = given["x"].shape[whole]

    def part(name: str, first: int, count: int) -> Any:
        one = given[name]
        if not hasattr(one, "dim") or name == "w":
            return one
        if one.dim() > whole and one.shape[0] == 1 and whole:
            return one[:, first : first + count]
        return one[first : first + count]

    results = found if isinstance(found, tuple) else (found,)
    if DROPPED in case:  # of what the sum is; tests hold what was left out
        formula, given = formulas()["rmsnorm"], given | {"x": results[2]}
        names, results = names_of(formula), results[:2]
    results = [one for one in results if one.numel()]
    want = formula(*[part(name, 0, COMPARED) for name in names], torch.float64)
    want = list(want) if isinstance(want, tuple) else [want]
    sums = case.endswith("norm_backward")
    if sums:
        want[1] = torch.zeros_like(want[1])
        for first in range(0, rows, step := max(1, (1 << 22) // given["x"].shape[-1])):
            pieces = [part(name, first, min(step, rows - first)) for name in names]
            want[1] += formula(*pieces, torch.float64)[1]
    worst = 0.0
    by_name = zip(sorted(want, key=lambda t: -t.dim()), sorted(results, key=lambda t: -t.dim()),
                  strict=False)  # fmt: skip
    for right, ours_ in by_name:
        got = ours_ if sums and right.dim() == 1 else _first(ours_, whole, right.shape[whole])
        off = (got.double() - right).norm() / right.norm()
        worst = max(worst, float(off) if math.isfinite(float(off)) else math.inf)
    return worst


def _first(tensor: Any, dim: int, count: int) -> Any:
    return tensor.narrow(dim, 0, count)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("build", "compile", "run", "merge"))
    parser.add_argument("--part", type=int, default=0, help="of the cases to compile for")
    parser.add_argument("--of", type=int, default=1, help="parts, each for a process")
    parser.add_argument("which", nargs="*", help="cases, or files of rows to merge")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after them")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    args = parser.parse_args()
    if args.what == "merge":
        old = read_rows(RESULTS) if RESULTS.exists() else []
        fresh = [row for file in args.which for row in read_rows(Path(file))]
        known = {(row.kernel, row.shape): row for row in (*old, *fresh)}
        order = list(CASES)
        write_rows(RESULTS, sorted(known.values(), key=lambda row: order.index(row.kernel)))
        return
    cases = chosen(",".join(args.which))
    if args.what == "build":
        build_all(cases)
        return
    began = time.monotonic()
    import torch  # noqa: PLC0415

    from warploom.integrations import torch_rows  # noqa: PLC0415

    if args.what == "compile":
        compile_rivals(torch, cases[args.part :: args.of])
        return
    rows: list[Evidence] = []
    for case, columns in cases:
        if time.monotonic() - began > args.seconds:
            print(f"{case} {columns}: the time is over")
            continue
        try:
            rows.append(measured(torch, torch_rows, case, columns))
        except Exception as error:
            print(case, columns, f"{type(error).__name__}: {error}"[:300], flush=True)
            continue
        one, rates = rows[-1], {n: round(r, 2) for n, r in rows[-1].baselines.items()}
        told = f"{case} {columns}: {one.ours:.2f} TB/s {rates} ratio {one.ratio_to_best:.3f}"
        print(told, one.control, one.checks, f"{time.monotonic() - began:.0f} s", flush=True)
        write_rows(args.out / "row_ops.json", rows)


if __name__ == "__main__":
    main()
