"""Programs that nobody tuned by hand, as `optimize` finds them without a GPU, beside torch.compile.

    python -m bench.programs build DIR          search without a GPU, build what it found
    python -m bench.programs run DIR --out OUT  on a GPU machine: rows of claim `engine-user`
    python -m bench.programs merge FILES        into bench/results/programs.json

A row's ours is the kernel that the search predicts to be fastest, in microseconds. Its baseline is
the plain PyTorch formula on the same tensors under
torch.compile(mode="max-autotune-no-cudagraphs"), which tries cuBLAS and Triton's templates; of the
two attentions FlexAttention compiled the same way. All are checked against the formula in float64
before bursts in shuffled rounds. Of a program's further shapes only the points that were fastest at
the first one that `--only` leaves are tried.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from bench import kernel_bench as kb
from bench import sitting
from bench.evidence import Evidence, write_rows
from warploom.codegen.compile.build import Built
from warploom.engine.explored import Explored, Found
from warploom.engine.outcome import tried
from warploom.engine.points import Space
from warploom.engine.search import SECONDS, search
from warploom.engine.store import PointStore, Row
from warploom.files import cache_folder
from warploom.kernels.select import select
from warploom.kernels.user import written_names
from warploom.runtime.stats import median_interval
from warploom.tile import Program

RESULTS = Path(__file__).parent / "results" / "programs.json"
FOLDER = "examples/programs"
GPU, COMPILED, FLEX = "h200", "torch.compile", "FlexAttention"
PRODUCTS = "products alone"  # no baseline: it computes less
DEVICE, ROUNDS, TIMED, CANDIDATES = "cuda", 16, 3, 8
BOUND = {"bf16": 1e-2, "fp32": 1e-4}  # relative error in norm against float64
ROWS = 1024  # of a logits matrix in float64 at a time
CAP, WINDOW = 30.0, 128  # of the two attentions
FLEX_MODULE = "torch.nn.attention.flex_attention"
Tensors = Mapping[str, Any]
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A program at one shape; `after` is the program that finishes what it begins."""

    program: str
    sizes: Mapping[str, int]
    object: str = "kernel"
    after: str = ""

    @property
    def name(self) -> str:
        """Program and sizes."""
        return " ".join([self.program, *(f"{dim}={size}" for dim, size in self.sizes.items())])

    @property
    def folder(self) -> str:
        """Where what was built for it lies."""
        return self.name.replace(" ", "-")

    def of(self, name: str) -> str:
        """An object of its file, for the command line."""
        return f"{FOLDER}/{self.program}.py:{name}"


def _attention(rows: int, batch: int, heads: int, d: int, **more: int) -> dict[str, int]:
    return {"batch": batch, "heads": heads, **more, "rows": rows, "keys": rows, "d": d}


def _linear(m: int, n: int, k: int) -> dict[str, int]:
    return {"m": m, "n": n, "k": k}


def _batched(batch: int, m: int, n: int, k: int) -> dict[str, int]:
    return {"batch": batch, **_linear(m, n, k)}


def _loss(m: int, n: int, k: int) -> Case:
    return Case("cross_entropy", {**_linear(m, n, k), "blocks": -(-n // 256)}, "blocks", "loss")


# The first shape of each program, then the others: a run that is cut short has every program.
CASES = {
    case.name: case
    for case in (
        Case("softcap_alibi", _attention(8192, 2, 16, 128)),
        Case("window_sinks", _attention(8192, 1, 64, 64, pairs=8)),
        Case("layernorm_gelu", _linear(16384, 4096, 1024)),
        Case("batched_gemm", _batched(4096, 128, 128, 64)),
        Case("rmsnorm_linear", _linear(8192, 4096, 4096)),
        _loss(8192, 128256, 4096),
        Case("swiglu", _linear(8192, 14336, 4096)),
        Case("fp8_linear", _linear(8192, 4096, 4096)),
        Case("softcap_alibi", _attention(2048, 4, 32, 128)),
        Case("window_sinks", _attention(2048, 4, 64, 64, pairs=8)),
        Case("rmsnorm_linear", _linear(8192, 2048, 2048)),
        Case("layernorm_gelu", _linear(8192, 3072, 768)),
        Case("batched_gemm", _batched(8192, 64, 64, 64)),
        Case("batched_gemm", _batched(1024, 256, 256, 128)),
        Case("swiglu", _linear(8192, 8192, 2048)),
        Case("fp8_linear", _linear(4096, 4096, 14336)),
        _loss(4096, 32000, 4096),
    )
}


# ---- without a GPU


def build(out: Path, effort: str, only: str) -> None:
    """Search every case and build the points that will be timed."""
    store = PointStore(cache_folder() / "points.sqlite")
    firsts: dict[str, list[Found]] = {}
    for name, case in CASES.items():
        if only not in name:
            continue
        space, sizes = Space(case.of(case.object), {}), dict(case.sizes)
        known = firsts.get(case.program)
        if known is None:
            explored = search(space, sizes, GPU, store, effort, print)
            found = firsts[case.program] = explored.forms(CANDIDATES)
        else:
            found = elsewhere(space, sizes, known)
        told = [
            {"point": str(one.point), "predicted": one.microseconds, **(one.row.told or {})}
            for one in found[:TIMED]
        ]
        folder = out / case.folder
        for number, one in enumerate(found[:TIMED]):
            space.selected(one.point, GPU).build().write(folder / str(number))
            told[number].pop("replay")
        if case.after:
            sizes_text = {dim: str(size) for dim, size in sizes.items() if dim in ("m", "blocks")}
            select(case.of(case.after), sizes_text, GPU).build().write(folder / case.after)
        (folder / "case.json").write_text(json.dumps(told, indent=1))
        print(name, told[0], flush=True)
    store.close()


def elsewhere(space: Space, sizes: Mapping[str, int], known: list[Found]) -> list[Found]:
    """Points that were fastest at another shape, as they are predicted at this one."""
    found: list[Found] = []
    for one in known:
        told = dict(tried(space, one.point, sizes, GPU, math.inf))
        predicted = told.pop("predicted", None)
        if isinstance(predicted, float):
            found.append(Found(one.point, Row(predicted, told=told)))
    return Explored(found).useful


# ---- the formulas in PyTorch, in the type of the tensors


def rmsnorm_linear(torch: Any, t: Tensors) -> Any:
    """y = rmsnorm(x) w."""
    return torch.nn.functional.rms_norm(t["x"], t["x"].shape[1:], eps=1e-6) @ t["w"]


def swiglu(torch: Any, t: Tensors) -> Any:
    """y = silu(x g) * (x u)."""
    return torch.nn.functional.silu(t["x"] @ t["g"]) * (t["x"] @ t["u"])


def layernorm_gelu(torch: Any, t: Tensors) -> Any:
    """y = gelu(layernorm(x) w + bias)."""
    normal = torch.nn.functional.layer_norm(t["x"], t["x"].shape[1:], eps=1e-5)
    return torch.nn.functional.gelu(normal @ t["w"] + t["bias"].to(t["x"].dtype))


def cross_entropy(torch: Any, t: Tensors) -> Any:
    """The loss a row; logits are made wide, as training code has it."""
    logits = t["x"] @ t["w"].T
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(wide, t["targets"].long(), reduction="none")


def batched_gemm(torch: Any, t: Tensors) -> Any:
    """c[b] = a[b] b[b]."""
    return torch.bmm(t["a"], t["b"])


def fp8_linear(torch: Any, t: Tensors) -> Any:
    """PyTorch's own product of 8-bit operands with a scale a row and a column."""
    if t["x"].dtype is torch.float64:
        return t["x"] @ t["w"].T * t["scale_x"][:, None] * t["scale_w"]
    scales = {"scale_a": t["scale_x"][:, None], "scale_b": t["scale_w"][None]}
    return torch._scaled_mm(
        t["x"], t["w"].T, **scales, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def products_alone(torch: Any, case: Case, t: Tensors) -> Call | None:
    """The matrix products of a case as cuBLAS makes them, without what stands around them: what any
    kernel is left with when all else is hidden. None where the formula is nothing else."""
    names = {"rmsnorm_linear": "w", "layernorm_gelu": "w", "swiglu": "gu", "cross_entropy": "w"}
    if case.program not in names:
        return None
    sides = [
        t[name].T if case.program == "cross_entropy" else t[name] for name in names[case.program]
    ]
    outs = [
        torch.empty(t["x"].shape[0], side.shape[1], device=DEVICE, dtype=side.dtype)
        for side in sides
    ]

    def call() -> Any:
        for side, out in zip(sides, outs, strict=True):
            torch.mm(t["x"], side, out=out)

    return call


FORMULAS: dict[str, Callable[[Any, Tensors], Any]] = {
    one.__name__: one
    for one in (rmsnorm_linear, swiglu, layernorm_gelu, cross_entropy, batched_gemm, fp8_linear)
}


def softcap_alibi(torch: Any, t: Tensors) -> Call:
    """FlexAttention with the scores of the program."""
    flex, slopes = importlib.import_module(FLEX_MODULE), t["slopes"]
    mask = _mask(flex, t, lambda batch, head, row, key: row >= key)

    def score(value: Any, batch: Any, head: Any, row: Any, key: Any) -> Any:
        del batch
        return CAP * torch.tanh(value / CAP) + slopes[head] * (key - row)

    return lambda: flex.flex_attention(t["q"], t["k"], t["v"], score_mod=score, block_mask=mask)


def window_sinks(torch: Any, t: Tensors) -> Call:
    """FlexAttention, then what the sink takes from every weight."""
    flex, sinks = importlib.import_module(FLEX_MODULE), t["sinks"]
    mask = _mask(flex, t, lambda batch, head, row, key: (row >= key) & (row - WINDOW < key))

    def call() -> Any:
        out, lse = flex.flex_attention(
            t["q"], t["k"], t["v"], block_mask=mask, enable_gqa=True, return_lse=True
        )
        return out * torch.sigmoid(lse - sinks[:, None])[..., None].to(out.dtype)

    return call


ATTENTIONS = {"softcap_alibi": softcap_alibi, "window_sinks": window_sinks}


def _mask(flex: Any, t: Tensors, seen: Callable[..., Any]) -> Any:
    lengths = (t[name].shape[2] for name in "qk")
    return flex.create_block_mask(seen, None, None, *lengths, device=t["q"].device)


def attention(torch: Any, t: Tensors) -> Any:
    """Both attentions as formulas, head by head."""
    q, k, v = t["q"], t["k"], t["v"]
    out, group = torch.empty_like(q), q.shape[1] // k.shape[1]
    rows, keys = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    distance = keys - rows[:, None]
    for b, head in itertools.product(range(q.shape[0]), range(q.shape[1])):
        scores = q[b, head] @ k[b, head // group].T / math.sqrt(q.shape[3])
        if "slopes" in t:
            scores = CAP * torch.tanh(scores / CAP) + t["slopes"][head] * distance
            seen = distance <= 0
        else:
            seen = (distance <= 0) & (distance > -WINDOW)
        weights = torch.exp(torch.where(seen, scores, -math.inf))
        total = weights.sum(-1, keepdim=True)
        if "sinks" in t:
            total = total + torch.exp(t["sinks"][head])
        out[b, head] = (weights / total) @ v[b, head // group]
    return out


# ---- on a GPU


def operands(torch: Any, program: Program, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Random tensors for the arrays of a program; what it writes is NaN until it has."""
    torch.manual_seed(0)
    made: dict[str, Any] = {}
    written = written_names(program)
    for one in program.arrays:
        shape, kind = [sizes[dim] for dim in one.dims], getattr(torch, one.dtype.library)
        if one.name in written:
            made[one.name] = torch.full(shape, math.nan, device=DEVICE, dtype=kind)
        elif one.name == "targets":
            made[one.name] = torch.randint(sizes["n"], shape, device=DEVICE, dtype=kind)
        elif one.name == "slopes":
            heads = torch.arange(1, shape[0] + 1, device=DEVICE)
            made[one.name] = torch.exp2(-8.0 * heads / shape[0])
        else:
            wide = torch.randn(shape, device=DEVICE)
            weights = one.name in "wgub" and "k" in one.dims and one.dtype.bits > 8
            made[one.name] = (wide * sizes["k"] ** -0.5 if weights else wide).to(kind)
    if "bias" in made:
        made["sums"] = made["w"].float().sum(0)
    return made


def right(torch: Any, case: Case, arrays: Tensors) -> Any:
    """The result in float64."""
    floats = {n: x.double() if x.is_floating_point() else x for n, x in arrays.items()}
    if case.program in ATTENTIONS:
        return attention(torch, floats)
    if case.program != "cross_entropy":
        return FORMULAS[case.program](torch, floats)
    parts = zip(floats["x"].split(ROWS), arrays["targets"].split(ROWS), strict=True)
    found = [cross_entropy(torch, {**floats, "x": x, "targets": to}) for x, to in parts]
    return torch.cat(found)


def baselines(torch: Any, case: Case, arrays: Tensors) -> dict[str, Call]:
    """What a case is beside, not compiled yet."""
    options = {"mode": "max-autotune-no-cudagraphs", "dynamic": False}
    if case.program in FORMULAS:
        made = torch.compile(FORMULAS[case.program], **options)
        return {COMPILED: lambda: made(torch, arrays)}
    found = {FLEX: torch.compile(ATTENTIONS[case.program](torch, arrays), **options)}
    if "slopes" in arrays:
        call = torch.compile(ATTENTIONS[case.program](torch, arrays), **options)
        found[f"{FLEX}, tanh.approx"] = lambda: _with_fast_tanh(torch, call)
    return found


def _with_fast_tanh(torch: Any, call: Call) -> Any:
    """Compile with the GPU's own instruction for tanh, which Inductor does not emit by itself, into
    a cache of its own: the other one has the same graph with the other tanh."""
    lowering = importlib.import_module("torch._inductor.lowering")
    ops = importlib.import_module("torch._inductor.virtualized").ops

    def fast(x: Any) -> Any:
        def inner(value: Any) -> Any:
            return ops.inline_asm_elementwise(value, asm="tanh.approx.f32 $0, $1;")

        return lowering.make_pointwise(inner)(x)

    tanh = torch.ops.aten.tanh.default
    usual = lowering.lowerings[tanh]
    lowering.lowerings[tanh] = fast
    utils = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    try:
        with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=f"{utils.cache_dir()}/fast-tanh"):
            return call()
    finally:
        lowering.lowerings[tanh] = usual


def measured(torch: Any, case: Case, folder: Path) -> Evidence:
    """One case: ours and the baselines checked, then timed."""
    told = json.loads((folder / "case.json").read_text())
    built = {str(n): Built.read(folder / str(n)) for n in range(len(told))}
    space = Space(case.of(case.object), {})
    program = space.textbook(next(iter(space.sizes())))
    arrays = operands(torch, program, case.sizes)
    expected = right(torch, case, arrays)
    result = arrays[written_names(program)[0]]
    finish: Call | None = None
    if case.after:
        last = Built.read(folder / case.after).kernel()
        result = torch.full([case.sizes["m"]], math.nan, device=DEVICE)
        ends = {name: arrays[name] for name in ("sums", "picked")} | {case.after: result}
        finish = lambda: last(ends, stream=_stream(torch))  # noqa: E731

    def ours(name: str) -> Call:
        kernel = built[name].kernel()

        def call() -> Any:
            kernel(arrays, stream=_stream(torch))
            if finish:
                finish()
            return result

        return call

    calls = {name: ours(name) for name in built}
    began = time.perf_counter()
    others = baselines(torch, case, arrays)
    calls |= others
    errors: dict[str, float] = {}
    for name, call in calls.items():
        result.fill_(math.nan)
        got = call().double()
        errors[name] = float((got - expected).norm() / expected.norm())
    seconds = time.perf_counter() - began
    del expected, got
    if (alone := products_alone(torch, case, arrays)) is not None:
        calls[PRODUCTS] = alone
    timer = sitting.Gpu(torch, calls)
    timer.again(next(iter(others)))
    bursts = sitting.measure(timer, ROUNDS, False, 0)["bursts"]
    samples = {name: [1e3 * ms for ms in one["ms"]] for name, one in bursts.items()}
    return evidence(case, told, samples, errors, list(others), seconds, built["0"])


def _stream(torch: Any) -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def evidence(
    case: Case,
    told: list[dict[str, Any]],
    samples: Mapping[str, list[float]],
    errors: Mapping[str, float],
    others: list[str],
    seconds: float,
    built: Built,
) -> Evidence:
    """The row of a case."""
    median = {name: statistics.median(one) for name, one in samples.items()}
    known = [name for name in others if name in median]
    best = min(known, key=lambda name: median[name])
    middle, *interval = median_interval(samples["0"], samples[best])
    _, *control = median_interval(samples[sitting.CONTROL], samples[known[0]])
    points = [str(n) for n in range(len(told)) if str(n) in median]
    fastest = min(points, key=lambda name: median[name])
    kind = "fp32" if case.after else "bf16"
    wrong = [name for name in points if not errors[name] <= BOUND[kind]]
    env = kb.environment()
    return Evidence(
        claim="engine-user",
        kernel=case.program,
        shape=", ".join(f"{dim} {size}" for dim, size in case.sizes.items()),
        dtype="e4m3" if case.program == "fp8_linear" else "bf16",
        device=env["device"],
        driver=env["driver"],
        compiler=built.resources.compiler,
        date=env["date"],
        command=kb.command_line(),
        unit="us",
        better="lower",
        ours=median["0"],
        baselines={name: median[name] for name in known},
        ratio_to_best=middle,
        ci95=(interval[0], interval[1]),
        control=(control[0], control[1]),
        samples=len(samples["0"]),
        checks={
            "numerics": "fail" if wrong else "pass",
            "errors": {name: f"{error:.1e}" for name, error in errors.items()},
            "limited by": told[0]["limits"],
            "predicted": round(told[0]["predicted"], 1),
            "best timed": round(median[fastest], 1),
            **({PRODUCTS: round(median[PRODUCTS], 1)} if PRODUCTS in median else {}),
            "seconds to compile the baselines": round(seconds, 1),
        },
        notes=f"torch {env['torch']}; "
        + "; ".join(
            f"{one['point']}: {one['predicted']:.1f} predicted, {median[str(n)]:.1f} measured"
            for n, one in enumerate(told)
            if str(n) in median
        ),
    )


def run(where: Path, out: Path, seconds: float, only: str) -> None:
    """Every case that begins before the seconds are over; its row is written at once."""
    import torch  # noqa: PLC0415

    rows: list[Evidence] = []
    began = time.perf_counter()
    for name, case in CASES.items():
        if only not in name:
            continue
        if not (where / case.folder).is_dir():
            print(f"{name}: not built", flush=True)
            continue
        if time.perf_counter() - began > seconds:
            print(f"{name}: no time left", flush=True)
            continue
        try:
            rows.append(measured(torch, case, where / case.folder))
        except Exception as error:  # a case that fails leaves the others theirs
            print(f"{name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            continue
        finally:
            torch.cuda.empty_cache()
        row = rows[-1]
        write_rows(out / "programs.json", rows)
        told = {key: round(value, 1) for key, value in row.baselines.items()}
        spent = time.perf_counter() - began
        print(
            f"{spent:5.0f} s  {name}: {row.ours:.1f} us, {told}, ratio {row.ratio_to_best:.3f} "
            f"{row.control} {row.checks}\n  {row.notes}",
            flush=True,
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("build", "run", "merge"))
    parser.add_argument("where", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--budget", type=float, help="seconds of a search, if not the effort's")
    parser.add_argument("--only", default="", help="cases that contain this")
    parser.add_argument("--seconds", type=float, default=95.0, help="no case begins later")
    args = parser.parse_args()
    SECONDS[args.effort] = args.budget or SECONDS[args.effort]
    if args.what == "merge":
        kb.merge(RESULTS, args.where)
    elif args.what == "build":
        build(args.where[0], args.effort, args.only)
    else:
        run(args.where[0], args.out, args.seconds, args.only)


if __name__ == "__main__":
    main()
