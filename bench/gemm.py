"""Claim `gemm`: matrix multiply beside cuBLAS, torch._scaled_mm and Triton, on random data.

    python -m bench.gemm build              here, no GPU: cubins under out/bench/gemm
    python -m bench.gemm run --out DIR      on the GPU machine: numerics, then timing, then a table
    python -m bench.gemm merge FILE...      evidence of runs into bench/results/gemm.json, which
                                            keeps the rows of variants that there are

Numerics compare with float64 (small shapes) or with float32 products of sampled rows (large ones),
on outputs poisoned with NaN inside a guarded buffer, three times bitwise.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench.evidence import Evidence, read_rows, write_rows
from bench.gemm_cases import (
    CHECKED,
    OTHERS,
    SHAPES,
    VARIANTS,
    built_of,
    default_of,
    expected,
    operands,
)
from warploom.codegen.compile.build import Built
from warploom.kernels.gemm.program import GemmConfig

FOLDER = kb.ROOT / "out" / "bench" / "gemm"
RESULTS = kb.ROOT / "bench" / "results" / "gemm.json"
# The suite's configurations that were fastest at some size.
TRITON = ("128x256x64x8_w8_s3", "128x256x64x8_w8_s4")
SAMPLE = 0.006  # seconds of calls in a sample
Values = dict[str, Any]
Call = Callable[[Values], None]


def build_all(folder: Path) -> None:
    """Compile every variant, plainly and with bounded waits."""
    for name in VARIANTS:
        for debug in (False, True):
            built = built_of(name, debug)
            built.write(folder / ("debug" if debug else "plain") / kb.slug(name))
            res = built.resources
        print(f"{name:24} {res.registers} registers, {res.spill_bytes} B spilled, {res.seconds} s")


def caller(torch: Any, name: str, flavour: str = "plain") -> Call:
    """A function that launches a variant on operands; with slices, both kernels."""
    kernel = Built.read(FOLDER / flavour / kb.slug(name)).kernel()
    config = VARIANTS[name][0]
    second = None
    if config.workspace:
        second = Built.read(FOLDER / flavour / f"combine{config.slices}").kernel()

    def call(v: Values) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        kernel({x: v[x] for x in config.arrays}, stream=stream)
        if second is not None:
            second({x: v[x] for x in ("parts", *config.epilogue, "c")}, stream=stream)

    return call


def _check(torch: Any, call: Call, config: GemmConfig, shape: tuple[int, int, int]) -> Values:
    m, n, k = shape
    v = operands(torch, config, m, n, k, seed=m + n + k)
    call(v)
    torch.cuda.synchronize()
    first = v["c"].clone()
    inside = int(torch.isnan(first).sum())
    outside = int((~torch.isnan(v["whole"])).sum()) - (first.numel() - inside)
    same = True
    for _ in range(2):
        v["c"].fill_(math.nan)
        call(v)
        torch.cuda.synchronize()
        same = same and bool(torch.equal(v["c"], first))
    want = expected(torch, config, v, None, torch.float64)
    error = float((first.double() - want).norm()) / (float(want.norm()) or 1.0)
    found: Values = {"error": error, "nan": inside, "outside": outside, "repeatable": same}
    if not (error < 0.02 and inside == 0 and outside == 0 and same):
        bad = ((first.double() - want).abs() > 0.05 * want.abs() + 0.05).nonzero()
        found["wrong"] = [[*map(int, p)] for p in bad[:12]]
    return found


def case(name: str, rounds: int) -> Values:
    """One case in a worker: `check VARIANT`, or `time|fp8|leaky|batched|gelu MxNxK`."""
    torch = kb.load_torch()
    what, which = name.split(" ", 1)
    if what != "check":
        return _time(torch, what, which, rounds)
    config = VARIANTS[which][0]
    result: Values = {}
    for flavour in ("debug", "plain"):
        call = caller(torch, which, flavour)
        for m, n, k in CHECKED:
            mm = -(-m // 16) * 16 if config.a == "km" else m
            found = _check(torch, call, config, (mm, n, k))
            result[f"{flavour} {mm}x{n}x{k}"] = found
            if "wrong" in found:
                return {"ok": False, "cases": result}
    return {"ok": True, "worst": max(c["error"] for c in result.values()), "count": len(result)}


def baselines(torch: Any, what: str) -> dict[str, Call]:
    f = torch.nn.functional

    def plain(v: Values) -> None:
        torch.mm(v["a"], v["b"], out=v["c"])

    def leaky(v: Values) -> None:
        torch.mm(v["a"], v["b"], out=v["c"])
        f.leaky_relu_(v["c"], 0.01)

    def gelu(v: Values, form: str = "none") -> None:
        torch.addmm(v["bias16"], v["a"], v["b"], out=v["c"])
        torch.ops.aten.gelu.out(v["c"], approximate=form, out=v["c"])

    def fused_gelu(v: Values) -> None:
        # cuBLASLt's epilogue: bias and the tanh form of gelu, in one kernel.
        fused = torch.ops.aten._addmm_activation.out
        fused(v["bias16"], v["a"], v["b"], use_gelu=True, out=v["c"])

    def batched(v: Values) -> None:
        torch.bmm(v["a"], v["b"], out=v["c"])

    def scaled(fast: bool) -> Call:
        def call(v: Values) -> None:
            torch._scaled_mm(
                v["a"],
                v["b"].t(),
                v["scale_a"],
                v["scale_b"],
                out_dtype=torch.bfloat16,
                use_fast_accum=fast,
                out=v["c"],
            )

        return call

    table: dict[str, dict[str, Call]] = {
        "time": {"cuBLAS": plain},
        "leaky": {"cuBLAS + activation": leaky},
        "gelu": {"cuBLASLt with gelu": fused_gelu, "cuBLAS + activation": gelu},
        "gelu_tanh": {
            "cuBLASLt with gelu": fused_gelu,
            "cuBLAS + activation": functools.partial(gelu, form="tanh"),
        },
        "batched": {"cuBLAS": batched},
        "fp8": {"cuBLAS fast": scaled(True)},
        "promoted": {"cuBLAS precise": scaled(False)},
    }
    return table[what]


def triton(torch: Any) -> dict[str, Call]:
    """The suite's own Triton kernel under its strongest configurations."""
    kernel = importlib.import_module("bench.triton_suite.gemm_leaky_relu").KERNEL
    calls: dict[str, Call] = {}
    for config in kernel.configs:
        if config.name not in TRITON:
            continue

        def call(v: Values, config: Any = config) -> None:
            m, n = v["c"].shape
            k = v["a"].shape[1]
            grid = kernel.grid({"m": m, "n": n, "k": k}, config)
            kernel.function[grid](
                v["a"],
                v["b"],
                v["c"],
                m,
                n,
                k,
                **config.constexprs,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )

        calls[f"Triton {config.name}"] = call
    return calls


def _names(what: str, shape: tuple[int, int, int]) -> tuple[str, ...]:
    if what == "time":
        return SHAPES[shape]
    if what == "promoted":
        return tuple(x for x in VARIANTS if x.startswith("fp8 promoted"))
    if what == "fp8":
        return tuple(x for x in VARIANTS if x.startswith("fp8 ") and "promoted" not in x)
    return {"gelu": ("bias-gelu",), "batched": ("batched",)}.get(
        what, tuple(x for x in VARIANTS if x.startswith(f"{what} "))
    )


def _time(torch: Any, what: str, which: str, rounds: int) -> Values:
    shape = m, n, k = tuple(map(int, which.split("x")))  # type: ignore[assignment]
    sets = 3 if m * n * k <= 2**37 else 1
    names = _names(what, shape)  # type: ignore[arg-type]
    bases = baselines(torch, what)
    config = VARIANTS[names[0]][0]
    data = [operands(torch, config, m, n, k, s) for s in range(sets)]
    for v in data:
        if "bias" in v:
            v["bias16"] = v["bias"].to(v["c"].dtype)
        timed = [VARIANTS[name][0] for name in (*names, default_of(what, (m, n, k)))]
        most = max(c.slices * c.workspace for c in timed)
        if most > 1:
            v["parts"] = torch.empty(most, m, n, device="cuda")
    turn = [0]

    def bound(call: Call) -> Callable[[], None]:
        def run() -> None:
            turn[0] = (turn[0] + 1) % sets
            call(data[turn[0]])

        return run

    calls: dict[str, Call] = dict(bases)
    calls["control"] = next(iter(bases.values()))
    if what == "leaky":
        calls |= triton(torch)
    chosen = default_of(what, (m, n, k))
    for name, variant in {"default": chosen, **{name: name for name in names}}.items():
        count = VARIANTS[variant][0].slices * VARIANTS[variant][0].workspace
        call = caller(torch, variant)
        if count > 1:

            def call(v: Values, inner: Call = call, count: int = count) -> None:
                inner({**v, "parts": v["parts"][:count]})

        calls[name] = call
    checks = verify(torch, config, data[0], calls)
    todo = {name: bound(call) for name, call in calls.items()}
    more = 2 if m * n * k > 2**40 else 1  # one call a sample: each finds a clock of its own
    samples = kb.interleave(todo, more * rounds, SAMPLE)
    kind = config.dtype.name if what not in ("fp8", "promoted") else f"{config.dtype.name} {what}"
    label = which if what in ("time", "fp8", "promoted") else f"{which} {what}"
    return {
        "shape": label,
        "dtype": kind,
        "default": chosen,
        "work": 2 * m * n * k * (3 if what == "batched" else 1),
        "samples": samples,
        "checks": checks,
        "baselines": [x for x in calls if x in bases or x.startswith("Triton")],
    }


def verify(torch: Any, config: GemmConfig, v: Values, calls: dict[str, Call]) -> dict[str, str]:
    """Whether each candidate agrees with float32 products of some rows of c."""
    rows = torch.randint(v["c"].shape[-2], (64,), device=v["c"].device)
    want = expected(torch, config, v, rows, torch.float32)
    checks: dict[str, str] = {}
    for name, call in calls.items():
        v["c"].fill_(math.nan)
        call(v)
        got = v["c"][..., rows, :].float()
        error = float((got - want).norm() / want.norm())
        clean = not bool(torch.isnan(v["c"]).any())
        checks[name] = "pass" if error < 0.01 and clean else f"fail {error:.3g}"
    return checks


def with_defaults(rows: Iterable[Evidence]) -> list[Evidence]:
    """The rows, each "gemm default" being that of the variant its shape gets now, if it was timed.

    A default is one of the variants that ran beside it in the same process: when the chooser has
    learned from that run, the row of what it picks now says what the default now does.
    """
    kept = list(rows)
    by_key = {(row.kernel, row.shape, row.dtype): row for row in kept}
    for place, row in enumerate(kept):
        if row.kernel != "gemm default":
            continue
        shape = tuple(int(part) for part in row.shape.split()[0].split("x"))
        what = next((w for w in OTHERS if w in f"{row.shape} {row.dtype}".split()), "time")
        name = default_of(what, shape)  # type: ignore[arg-type]
        pick = by_key.get((f"gemm {name}", row.shape, row.dtype))
        if pick is not None and not row.notes.endswith(f"; {name}"):
            kept[place] = replace(pick, kernel="gemm default")
    return kept


def main() -> None:
    """Command line."""
    args = kb.arguments(__doc__ or "")
    if args.mode == "build":
        build_all(FOLDER)
    elif args.mode == "merge":
        kb.merge(RESULTS, args.files, args.fresh)
        known = {"default", *VARIANTS}
        rows = [r for r in read_rows(RESULTS) if r.kernel.removeprefix("gemm ") in known]
        write_rows(RESULTS, with_defaults(rows))
    else:
        names = [f"check {name}" for name in VARIANTS if not name.startswith("combine")]
        names = names if args.stage != "timing" else []
        if args.stage != "numerics":
            names += [f"time {m}x{n}x{k}" for m, n, k in SHAPES]
            names += [
                f"{what} {m}x{n}x{k}" for what, (_, shapes) in OTHERS.items() for m, n, k in shapes
            ]
        names = [n for n in names if any(o in n for o in args.only.split(","))]
        results = kb.run_workers(case, args, names)
        folder = FOLDER / "plain"
        kb.report(args.out, "gemm", results, lambda n: Built.read(folder / kb.slug(n)))


if __name__ == "__main__":
    main()
