"""Claim `gemm`: bf16 matrix multiply beside cuBLAS, in one process, on random data.

    python bench/gemm.py build              here, no GPU: cubins under out/bench/gemm
    python bench/gemm.py run --out DIR      on the GPU machine: numerics, then timing, then a table

Numerics compare with float64 (small shapes) or with float32 products of sampled rows (large ones),
on outputs poisoned with NaN inside a guarded buffer, three times bitwise.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

import kernel_bench as kb  # noqa: E402
from warploom.codegen.build import Built, build  # noqa: E402
from warploom.codegen.launch import Kernel  # noqa: E402
from warploom.codegen.named import multistage  # noqa: E402
from warploom.codegen.plan import KernelSchedule, LaunchPlan  # noqa: E402
from warploom.evidence import Evidence, write_rows  # noqa: E402
from warploom.kernels.choices import GEMM_CHOICES, GemmChoice, choose_gemm  # noqa: E402
from warploom.kernels.gemm import GemmConfig, gemm  # noqa: E402
from warploom.tile import E4M3, FP16, FP32  # noqa: E402


def _plan(cluster: int = 2, supergroup: int = 8, panels: int = 2, **rest: Any) -> LaunchPlan:
    along = ("m_tile", cluster) if cluster > 1 else ("", 1)
    return LaunchPlan(split="m", cluster=along, supergroup=supergroup, store_panels=panels, **rest)


Variant = tuple[GemmConfig, Callable[[GemmConfig], KernelSchedule]]


def _hand(config: GemmConfig, depth: int, plan: LaunchPlan, flying: int = 1) -> Variant:
    return config, lambda c: multistage(gemm(c), depth, plan, in_flight=flying)


def _choice(choice: GemmChoice, base: GemmConfig | None = None) -> Variant:
    return choice.config(base or GemmConfig()), choice.schedule


VARIANTS: dict[str, Variant] = {
    "nn": _hand(GemmConfig(), 4, _plan()),
    "nt": _hand(GemmConfig(b="nk"), 4, _plan()),
    "tn": _hand(GemmConfig(a="km"), 4, _plan()),
    "tt": _hand(GemmConfig(a="km", b="nk"), 4, _plan()),
    "nn-single": _hand(GemmConfig(), 4, _plan(cluster=1)),
    "nn-drain": _hand(GemmConfig(), 4, _plan(), 0),
    "nn-group16": _hand(GemmConfig(), 4, _plan(supergroup=16)),
    "nn-3stage": _hand(GemmConfig(), 3, _plan(panels=4)),
    "nn-grid": _hand(GemmConfig(), 4, _plan(persistent=False)),
    "nn-snake": _hand(GemmConfig(), 4, _plan(walk="snake")),
    **{f"choice {choice.name}": _choice(choice) for choice in GEMM_CHOICES},
    "fp16": _hand(GemmConfig(dtype=FP16, out=FP16), 4, _plan()),
    "fp32-out": _hand(GemmConfig(out=FP32), 4, _plan()),
    "batched": _hand(GemmConfig(batched=True), 4, _plan()),
    "bias-gelu": _hand(GemmConfig(bias=True, activation="gelu"), 4, _plan()),
    "leaky": _hand(GemmConfig(activation="leaky_relu"), 4, _plan()),
    "residual-scale": _hand(GemmConfig(residual=True, scale=0.5), 4, _plan()),
    "fp8": _hand(GemmConfig(dtype=E4M3, b="nk", tile=(128, 256, 128)), 4, _plan()),
}
SMALL = (
    (256, 256, 128),
    (128, 256, 64),
    (1, 8, 8),
    (200, 264, 72),
    (520, 1032, 328),
    (384, 512, 0),
    (129, 512, 4096),
    (1000, 1000, 1000),
    (2100, 4200, 200),  # more tasks than SMs
)
LARGE = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16384, 16384, 16384),
    (4000, 6008, 3000),
    (8200, 1032, 8192),
    (2048, 2048, 16384),
    (16384, 1024, 4096),
    (1024, 1024, 1024),
)
CHOICES = tuple(f"choice {choice.name}" for choice in GEMM_CHOICES)
SQUARE = ("nn-single", "nn-drain", "nn-group16", "nn-snake")  # beside the choices


def _slug(name: str) -> str:
    return name.replace(" ", "-")


def schedule_of(name: str) -> KernelSchedule:
    """The schedule of a variant."""
    config, make = VARIANTS[name]
    return make(config)


def build_all(folder: Path) -> None:
    """Compile every variant, plainly and with bounded waits."""
    for name in VARIANTS:
        for debug in (False, True):
            allow = ("spills", "stack") if debug else ()
            built = build(gemm(VARIANTS[name][0]), schedule_of(name), allow=allow, debug=debug)
            built.write(folder / ("debug" if debug else "plain") / _slug(name))
            res = built.resources
        print(f"{name:16} {res.registers} registers, {res.spill_bytes} B spilled, {res.seconds} s")


def _operands(torch: Any, config: GemmConfig, m: int, n: int, k: int, seed: int) -> dict[str, Any]:
    kinds = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "e4m3": torch.float8_e4m3fn,
    }
    torch.manual_seed(seed)
    lead = (3,) if config.batched else ()
    a_shape = (m, k) if config.a == "mk" else (k, m)
    b_shape = (k, n) if config.b == "kn" else (n, k)

    def rand(*shape: int, kind: str) -> Any:
        return torch.randn(*shape, device="cuda").to(kinds[kind])

    values = {
        "a": rand(*lead, *a_shape, kind=config.dtype.name),
        "b": rand(*lead, *b_shape, kind=config.dtype.name),
    }
    if config.bias:
        values["bias"] = rand(n, kind="fp32")
    if config.residual:
        values["residual"] = rand(*lead, m, n, kind=config.out.name)
    guard = 4096
    count = math.prod(lead) * m * n
    whole = torch.full((count + 2 * guard,), math.nan, device="cuda", dtype=kinds[config.out.name])
    values["c"] = whole[guard : guard + count].view(*lead, m, n)
    values["whole"] = whole
    return values


def _expected(torch: Any, config: GemmConfig, v: dict[str, Any], rows: Any, wide: Any) -> Any:
    a = v["a"] if config.a == "mk" else v["a"].transpose(-1, -2)
    b = v["b"] if config.b == "kn" else v["b"].transpose(-1, -2)
    if rows is not None:
        a = a[..., rows, :]
    x = (a.to(wide) @ b.to(wide)) * config.scale
    if config.bias:
        x = x + v["bias"].to(wide)
    f = torch.nn.functional
    x = {
        "none": lambda y: y,
        "relu": f.relu,
        "leaky_relu": f.leaky_relu,
        "gelu": f.gelu,
        "silu": f.silu,
    }[config.activation](x)
    if config.residual:
        x = x + (v["residual"] if rows is None else v["residual"][..., rows, :]).to(wide)
    return x


def _check(
    torch: Any, kernel: Any, config: GemmConfig, shape: tuple[int, int, int]
) -> dict[str, Any]:
    m, n, k = shape
    v = _operands(torch, config, m, n, k, seed=m + n + k)
    arrays = {name: t for name, t in v.items() if name != "whole"}
    stream = torch.cuda.current_stream().cuda_stream
    kernel(arrays, stream=stream)
    torch.cuda.synchronize()
    first = v["c"].clone()
    inside = int(torch.isnan(first).sum())
    count = first.numel()
    outside = int((~torch.isnan(v["whole"])).sum()) - (count - inside)
    same = True
    for _ in range(2):
        v["c"].fill_(math.nan)
        kernel(arrays, stream=stream)
        torch.cuda.synchronize()
        same = same and bool(torch.equal(v["c"], first))
    big = m * n * k > 2**32
    rows = torch.randint(m, (64,), device="cuda") if big else None
    want = _expected(torch, config, v, rows, torch.float32 if big else torch.float64)
    got = first if rows is None else first[..., rows, :]
    norm = float(want.norm()) or 1.0
    error = float((got.to(want.dtype) - want).norm()) / norm
    result = {"error": error, "nan": inside, "outside": outside, "repeatable": same}
    if not (error < 0.02 and inside == 0 and outside == 0 and same):
        result["diagnosis"] = _diagnose(torch, kernel, config)
    return result


def _diagnose(torch: Any, kernel: Any, config: GemmConfig) -> dict[str, Any]:
    """Where elements go: a picks k = row % 64, b holds coded positions; prints what came out."""
    m, n, k = 128, 256, 64
    v = _operands(torch, config, m, n, k, 0)
    for name in ("bias", "residual"):
        if name in v:
            v[name].zero_()
    kind = v["a"].dtype
    pick = torch.zeros(m, k, device="cuda")
    pick[torch.arange(m), torch.arange(m) % k] = 1
    found: dict[str, Any] = {}
    for what in ("row", "col"):
        code = torch.arange(k)[:, None] if what == "row" else torch.arange(n)[None, :] % 64
        b = code.expand(k, n).float().cuda()
        a_in = pick if config.a == "mk" else pick.T
        b_in = b if config.b == "kn" else b.T
        v["a"].copy_(a_in.contiguous().to(kind).expand_as(v["a"]))
        v["b"].copy_(b_in.contiguous().to(kind).expand_as(v["b"]))
        kernel(
            {x: y for x, y in v.items() if x != "whole"},
            stream=torch.cuda.current_stream().cuda_stream,
        )
        torch.cuda.synchronize()
        c = v["c"].float().reshape(-1, m, n)[0]
        want = pick @ b
        bad = (c != want).nonzero()
        found[what] = {
            "wrong": len(bad),
            "first": [[*map(int, p), float(c[tuple(p)]), float(want[tuple(p)])] for p in bad[:12]],
        }
    return found


def case(name: str, rounds: int) -> dict[str, Any]:
    """One case in a worker: `check VARIANT` or `time MxNxK`."""
    torch = kb.load_torch()

    what, which = name.split(" ", 1)
    if what == "check":
        config = VARIANTS[which][0]
        step = 16 if config.dtype is E4M3 else 8
        shapes = [tuple(-(-x // step) * step if i else x for i, x in enumerate(s)) for s in SMALL]
        result: dict[str, Any] = {}
        for flavour in ("debug", "plain"):
            kernel = Kernel(Built.read(FOLDER / flavour / _slug(which)))
            for m, n, k in shapes:
                mm = -(-m // 8) * 8 if config.a == "km" else m
                if k == 0:
                    continue
                found = _check(torch, kernel, config, (mm, n, k))
                result[f"{flavour} {mm}x{n}x{k}"] = found
                if "diagnosis" in found:
                    return {"ok": False, "cases": result}
        return {"ok": True, "worst": max(c["error"] for c in result.values()), "count": len(result)}
    return _time(torch, which, rounds)


def _time(torch: Any, which: str, rounds: int) -> dict[str, Any]:
    m, n, k = map(int, which.split("x"))
    sets = 3 if m * n * k <= 2**37 else 1
    config = GemmConfig()
    data = [_operands(torch, config, m, n, k, s) for s in range(sets)]
    turn = [0]

    def pick() -> dict[str, Any]:
        turn[0] = (turn[0] + 1) % sets
        return data[turn[0]]

    def library() -> None:
        v = pick()
        torch.mm(v["a"], v["b"], out=v["c"])

    candidates = {"cublas": library, "cublas again": library}
    names = (*CHOICES, *SQUARE) if m == n == k and m >= 4096 else (*CHOICES, "nn-single")
    chosen = f"choice {choose_gemm(m, n, k).name}"
    for name in ("default", *names):
        kernel = Kernel(Built.read(FOLDER / "plain" / _slug(chosen if name == "default" else name)))

        def ours(kernel: Any = kernel) -> None:
            v = pick()
            stream = torch.cuda.current_stream().cuda_stream
            kernel({"a": v["a"], "b": v["b"], "c": v["c"]}, stream=stream)

        candidates[name] = ours
    checks: dict[str, str] = {}
    v = data[0]
    rows = torch.randint(m, (64,), device="cuda")
    want = v["a"][rows].float() @ v["b"].float()
    for name, call in candidates.items():
        v["c"].fill_(math.nan)
        turn[0] = sets - 1
        call()
        error = float((v["c"][rows].float() - want).norm() / want.norm())
        checks[name] = (
            "pass" if error < 0.01 and not bool(torch.isnan(v["c"]).any()) else f"fail {error:.3g}"
        )
    samples = kb.interleave(candidates, rounds)
    return {"shape": which, "default": chosen, "samples": samples, "checks": checks}


FOLDER = kb.ROOT / "out" / "bench" / "gemm"


def main() -> None:
    """Command line."""
    args = kb.arguments(__doc__ or "")
    if args.mode == "build":
        build_all(FOLDER)
        return
    if args.mode == "worker":
        kb.work(case, args)
        return
    names = [f"check {name}" for name in VARIANTS] if args.stage != "timing" else []
    if args.stage != "numerics":
        names += [f"time {m}x{n}x{k}" for m, n, k in LARGE]
    results = kb.run_workers(str(Path(__file__)), args, [n for n in names if args.only in n])
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gemm_raw.json").write_text(json.dumps(results, indent=1))
    _report(args.out, results)


def _report(out: Path, results: list[dict[str, Any]]) -> None:
    env = kb.environment()
    rows: list[list[object]] = [["shape", "kernel", "TFLOP/s", "vs cuBLAS", "95 %", "check"]]
    evidence: list[Evidence] = []
    for result in results:
        if "samples" not in result:
            continue
        m, n, k = map(int, result["shape"].split("x"))
        samples = result["samples"]
        _, low, high = kb.ratio_interval(samples["cublas again"], samples["cublas"])
        for name, ms in samples.items():
            ratio, lo, hi = kb.ratio_interval(ms, samples["cublas"])
            rate = 2e-9 * m * n * k / sorted(ms)[len(ms) // 2]
            rows.append(
                [result["shape"], name, rate, ratio, f"{lo:.3f}..{hi:.3f}", result["checks"][name]]
            )
            if name.startswith("cublas"):
                continue
            base = 2e-9 * m * n * k / sorted(samples["cublas"])[len(ms) // 2]
            which = result["default"] if name == "default" else name
            evidence.append(
                Evidence(
                    "gemm",
                    f"gemm {name}",
                    result["shape"],
                    "bf16",
                    env["device"],
                    env["driver"],
                    Built.read(FOLDER / "plain" / _slug(which)).resources.compiler,
                    env["date"],
                    "python bench/gemm.py run",
                    "TFLOP/s",
                    "higher",
                    rate,
                    {"cuBLAS": base},
                    ratio,
                    (lo, hi),
                    (low, high),
                    len(ms),
                    {"numerics": result["checks"][name]},
                    f"torch {env['torch']}; {which}",
                )
            )
    write_rows(out / "gemm.json", evidence)
    checks = [r for r in results if r["name"].startswith("check")]
    print(json.dumps(env))
    print(
        kb.table(
            [
                ["numerics", "ok", "worst error"],
                *[
                    [r["name"], r.get("ok", "FAIL"), r.get("worst", r.get("error", "see raw"))]
                    for r in checks
                ],
            ]
        )
    )
    print(kb.table(rows))


if __name__ == "__main__":
    main()
