"""Claim `attention-forward`: beside cuDNN through torch, in one process, on random data.

    python bench/attention.py build              here, no GPU: cubins under out/bench/attention
    python bench/attention.py run --out DIR      on the GPU machine: numerics, timing, a table

Operations: 4 * batch * heads * rows * keys * head_dim, halved when causal.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

import kernel_bench as kb  # noqa: E402
from warploom.codegen.build import Built, build  # noqa: E402
from warploom.codegen.launch import Kernel  # noqa: E402
from warploom.codegen.named import multistage, overlapped  # noqa: E402
from warploom.codegen.plan import KernelSchedule, LaunchPlan  # noqa: E402
from warploom.errors import WarploomError  # noqa: E402
from warploom.evidence import Evidence, write_rows  # noqa: E402
from warploom.kernels.attention import AttentionConfig, attention  # noqa: E402
from warploom.tile import FP16  # noqa: E402

# name -> (config, schedule, turns, ring depths, launch options, compute groups)
Variant = tuple[AttentionConfig, str, bool, dict[str, int], dict[str, Any], int]


def _variant(
    schedule: str = "overlapped",
    turns: bool = True,
    depth: int = 2,
    groups: int = 2,
    launch: dict[str, Any] | None = None,
    **config: Any,
) -> Variant:
    return (
        AttentionConfig(**config),
        schedule,
        turns,
        {"k": depth, "v": depth},
        launch or {},
        groups,
    )


LONGEST_FIRST = {"reverse": ("rows_tile",)}
GRID = {"persistent": False}
VARIANTS: dict[str, Variant] = {
    "d128": _variant(),
    "d128-together": _variant(turns=False),
    "d128-plain": _variant(schedule="multistage"),
    "d128-176": _variant(tile=(128, 176), launch={"store_panels": 1}),
    "d128-grid": _variant(launch=GRID),
    "d128-176-grid": _variant(tile=(128, 176), launch={"store_panels": 1, **GRID}),
    "d128-causal": _variant(causal=True, launch=LONGEST_FIRST),
    "d128-causal-together": _variant(causal=True, turns=False, launch=LONGEST_FIRST),
    "d128-causal-grid": _variant(causal=True, launch={**LONGEST_FIRST, **GRID}),
    "d64": _variant(head_dim=64, tile=(128, 128), depth=3),
    "d64-3groups": _variant(head_dim=64, tile=(192, 128), depth=3, groups=3),
    "d64-causal": _variant(
        head_dim=64, tile=(128, 128), depth=3, causal=True, launch=LONGEST_FIRST
    ),
    "d64-causal-3groups": _variant(
        head_dim=64, tile=(192, 128), depth=3, groups=3, causal=True, launch=LONGEST_FIRST
    ),
    "d96": _variant(head_dim=96),
    "d256": _variant(head_dim=256, tile=(128, 64), launch={"store_panels": 1}),
    "d128-fp16": _variant(dtype=FP16),
    "d128-lse": _variant(lse=True),
    "d128-causal-window-gqa-lse": _variant(causal=True, window=300, group=4, lse=True),
}
CHECKED = (
    (1, 2, 128, 128),
    (2, 4, 256, 256),
    (1, 4, 1000, 1000),
    (1, 2, 1, 5),
    (1, 2, 130, 700),
    (1, 1, 64, 2048),
    (3, 8, 515, 515),
)
LENGTHS = (1024, 1536, 3072, 6144, 12288, 16384)


def schedule_of(name: str) -> KernelSchedule:
    """The schedule of a variant."""
    config, kind, turns, depth, options, groups = VARIANTS[name]
    launch = LaunchPlan(split="rows", **options)
    program = attention(config)
    if kind == "multistage":
        return multistage(program, depth, launch, groups, in_flight=0)
    return overlapped(program, depth, launch, groups, turns)


def build_all(folder: Path) -> None:
    """Compile every variant, plainly and with bounded waits; says which the compiler refuses."""
    for name in VARIANTS:
        try:
            for debug in (False, True):
                allow = ("spills", "stack") if debug else ()
                program, schedule = attention(VARIANTS[name][0]), schedule_of(name)
                built = build(program, schedule, allow=allow, debug=debug)
                built.write(folder / ("debug" if debug else "plain") / name)
        except WarploomError as error:
            print(f"{name:28} REFUSED {error}")
            continue
        res = built.resources
        print(f"{name:28} {res.registers} registers, {res.spill_bytes} B spilled, {res.seconds} s")


def _operands(
    torch: Any, c: AttentionConfig, b: int, h: int, rows: int, keys: int, seed: int
) -> dict[str, Any]:
    kind = torch.float16 if c.dtype is FP16 else torch.bfloat16
    torch.manual_seed(seed)
    kv = max(1, h // c.group)

    def rand(heads: int, n: int) -> Any:
        return torch.randn(b, heads, n, c.head_dim, device="cuda").to(kind)

    heads = kv * c.group
    v = {"q": rand(heads, rows), "k": rand(kv, keys), "v": rand(kv, keys)}
    v["o"] = torch.full_like(v["q"], math.nan)
    if c.lse:
        v["lse"] = torch.full((b, heads, rows), math.nan, device="cuda")
    return v


def _expected(torch: Any, c: AttentionConfig, v: dict[str, Any]) -> tuple[Any, Any]:
    q = v["q"].double()
    k, x = (v[n].double().repeat_interleave(c.group, 1) for n in ("k", "v"))
    s = q @ k.transpose(-1, -2) * c.factor
    rows, keys = s.shape[-2:]
    row = torch.arange(rows, device="cuda")[:, None] + keys - rows
    key = torch.arange(keys, device="cuda")[None]
    seen = torch.ones(rows, keys, dtype=torch.bool, device="cuda")
    if c.causal:
        seen &= key <= row
    if c.window is not None:
        seen &= key > row - c.window
    s = s.masked_fill(~seen, -math.inf)
    return torch.nan_to_num(torch.softmax(s, -1), nan=0.0) @ x, torch.logsumexp(s, -1)


def _check(
    torch: Any, kernel: Any, c: AttentionConfig, shape: tuple[int, int, int, int]
) -> dict[str, Any]:
    v = _operands(torch, c, *shape, seed=sum(shape))
    stream = torch.cuda.current_stream().cuda_stream
    kernel(v, stream=stream)
    torch.cuda.synchronize()
    first, same = v["o"].clone(), True
    for _ in range(2):
        v["o"].fill_(math.nan)
        kernel(v, stream=stream)
        torch.cuda.synchronize()
        same = same and bool(torch.equal(v["o"], first))
    want, lse = _expected(torch, c, v)
    result: dict[str, Any] = {
        "error": float((first.double() - want).norm() / want.norm()),
        "nan": int(torch.isnan(first).sum()),
        "repeatable": same,
    }
    if c.lse:
        gap = (v["lse"].double() - lse).nan_to_num(nan=0.0, posinf=9.0, neginf=9.0)
        result["lse"] = float(gap.abs().max())
    ok = result["error"] < 0.01 and result["nan"] == 0 and same and result.get("lse", 0) < 0.01
    if not ok:
        bad = ((first.double() - want).abs() > 0.05).nonzero()
        result["diagnosis"] = {
            "wrong": len(bad),
            "of": first.numel(),
            "first": [
                [*map(int, p), float(first[tuple(p)]), float(want[tuple(p)])] for p in bad[:12]
            ],
            "rows": sorted({int(p[2]) for p in bad[:4000]})[:24],
            "cols": sorted({int(p[3]) for p in bad[:4000]})[:24],
        }
    return result


def case(name: str, rounds: int) -> dict[str, Any]:
    """One case in a worker: `check VARIANT` or `time DIM full|causal N`."""
    torch = kb.load_torch()

    what, which = name.split(" ", 1)
    if what == "time":
        return _time(torch, which, rounds)
    result: dict[str, Any] = {}
    for flavour in ("debug", "plain"):
        kernel = Kernel(Built.read(FOLDER / flavour / which))
        for shape in CHECKED:
            found = _check(torch, kernel, VARIANTS[which][0], shape)
            result[f"{flavour} {shape}"] = found
            if "diagnosis" in found:
                return {"ok": False, "cases": result}
    return {"ok": True, "worst": max(c["error"] for c in result.values()), "count": len(result)}


def _time(torch: Any, which: str, rounds: int) -> dict[str, Any]:
    backends, sdpa_kernel = torch.nn.attention.SDPBackend, torch.nn.attention.sdpa_kernel

    dim, mask, length = which.split()
    d, n, causal = int(dim), int(length), mask == "causal"
    b, h = max(1, 16384 // n), 2048 // d
    names = [
        name
        for name, v in VARIANTS.items()
        if v[0].head_dim == d
        and v[0].causal == causal
        and not v[0].lse
        and v[0].group == 1
        and v[0].dtype is not FP16
        and (FOLDER / "plain" / name).is_dir()
    ]
    config = VARIANTS[names[0]][0]
    data = [_operands(torch, config, b, h, n, n, s) for s in range(2)]
    turn = [0]

    def pick() -> dict[str, Any]:
        turn[0] ^= 1
        return data[turn[0]]

    def sdpa(backend: Any) -> Any:
        def call() -> Any:
            v = pick()
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    v["q"], v["k"], v["v"], is_causal=causal
                )

        return call

    cudnn = sdpa(backends.CUDNN_ATTENTION)
    candidates: dict[str, Any] = {"cudnn": cudnn, "cudnn again": cudnn}
    for name in names:
        kernel = Kernel(Built.read(FOLDER / "plain" / name))

        def ours(kernel: Any = kernel) -> None:
            kernel(pick(), stream=torch.cuda.current_stream().cuda_stream)

        candidates[name] = ours
    checks: dict[str, str] = {}
    turn[0] = 1
    want = cudnn().float()
    for name in names:
        turn[0] = 1
        data[0]["o"].fill_(math.nan)
        candidates[name]()
        error = float((data[0]["o"].float() - want).norm() / want.norm())
        checks[name] = "pass" if error < 0.01 else f"fail {error:.3g}"
    samples = kb.interleave(candidates, rounds)
    work = 4 * b * h * n * n * d * (0.5 if causal else 1.0)
    return {"shape": which, "work": work, "samples": samples, "checks": checks}


FOLDER = kb.ROOT / "out" / "bench" / "attention"


def main() -> None:
    """Command line."""
    args = kb.arguments(__doc__ or "")
    if args.mode == "build":
        build_all(FOLDER)
        return
    if args.mode == "worker":
        kb.work(case, args)
        return
    built = [name for name in VARIANTS if (FOLDER / "plain" / name).is_dir()]
    names = [f"check {name}" for name in built] if args.stage != "timing" else []
    if args.stage != "numerics":
        names += [
            f"time {d} {m} {n}" for d in (128, 64) for m in ("full", "causal") for n in LENGTHS
        ]
    results = kb.run_workers(str(Path(__file__)), args, [n for n in names if args.only in n])
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "attention_raw.json").write_text(json.dumps(results, indent=1))
    _report(args.out, results)


def _report(out: Path, results: list[dict[str, Any]]) -> None:
    env = kb.environment()
    rows: list[list[object]] = [["shape", "kernel", "TFLOP/s", "vs cuDNN", "95 %", "check"]]
    evidence: list[Evidence] = []
    for result in results:
        if "samples" not in result:
            continue
        samples, work = result["samples"], result["work"] * 1e-9
        _, low, high = kb.ratio_interval(samples["cudnn again"], samples["cudnn"])
        for name, ms in samples.items():
            ratio, lo, hi = kb.ratio_interval(ms, samples["cudnn"])
            rate, check = work / sorted(ms)[len(ms) // 2], result["checks"].get(name, "")
            rows.append([result["shape"], name, rate, ratio, f"{lo:.3f}..{hi:.3f}", check])
            if name.startswith("cudnn"):
                continue
            base = work / sorted(samples["cudnn"])[len(ms) // 2]
            evidence.append(
                Evidence(
                    "attention-forward",
                    f"attention {name}",
                    result["shape"],
                    "bf16",
                    env["device"],
                    env["driver"],
                    Built.read(FOLDER / "plain" / name).resources.compiler,
                    env["date"],
                    "python bench/attention.py run",
                    "TFLOP/s",
                    "higher",
                    rate,
                    {"cuDNN": base},
                    ratio,
                    (lo, hi),
                    (low, high),
                    len(ms),
                    {"numerics": check},
                    f"torch {env['torch']}",
                )
            )
    write_rows(out / "attention-forward.json", evidence)
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
