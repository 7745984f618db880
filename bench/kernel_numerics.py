"""Numerics of the kernel families beside cuBLAS and cuDNN, against float64.

    python bench/kernel_numerics.py run --out DIR    on the GPU machine; cubins of bench/gemm.py
                                                     and bench/attention.py `build` must be there
    python bench/kernel_numerics.py merge FILE...    rows into bench/results/numerics.json

A row is one kernel on one pattern of inputs: relative error ||x - ref|| / ||ref|| over the elements
whose reference is finite, ours and the library's, and whether NaN and infinity stand where the
float64 reference (rounded to the output type) has them. `fuzz` rows take the worst ratio over
random ragged sizes.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

import attention as attention_bench  # noqa: E402
import gemm as gemm_bench  # noqa: E402
import kernel_bench as kb  # noqa: E402
from gemm_cases import FUZZED, VARIANTS, expected, operands, plain_of  # noqa: E402
from warploom.codegen.build import Built  # noqa: E402
from warploom.codegen.launch import Kernel  # noqa: E402
from warploom.evidence import Evidence, write_rows  # noqa: E402

RESULTS = kb.ROOT / "bench" / "results" / "numerics.json"
Values = dict[str, Any]
GEMMS = {
    "bf16": ("128x256", "time"),
    "bf16 across": ("152x256-across", "time"),
    "bf16 meeting": ("meet8-64x128", "time"),
    "fp16": ("fp16", "time"),
    "e4m3 fast": ("fp8 128x256", "fp8"),
    "e4m3 promoted": ("fp8 promoted 128x128-ahead", "promoted"),
}
GEMM_SHAPE = (520, 1040, 4112)
# The variants that short and long rows get.
ATTENTIONS = tuple(
    dict.fromkeys(
        attention_bench.chosen_for("time", f"{d} {mask} {n}")
        for d in (64, 96, 128, 256)
        for mask in ("full", "causal")
        for n in (1024, 8192)
    )
)
ATTENTION_SHAPE = (2, 3, 900, 900)


def gemm_patterns(torch: Any, kind: str) -> dict[str, Callable[[Any, Any], tuple[Any, Any]]]:
    """Patterns of (a, b) in float64, from two normal matrices; sizes suit the element type."""
    big, small = {"bf16": (1e12, 1e-12), "fp16": (30.0, 1e-3)}.get(kind, (30.0, 0.03))

    def one_hot(a: Any, b: Any) -> tuple[Any, Any]:
        picked = torch.zeros_like(a)
        rows = torch.arange(a.shape[0], device="cuda")
        picked[rows, rows * 7 % a.shape[1]] = 1
        return picked, b

    def cancel(a: Any, b: Any) -> tuple[Any, Any]:
        half = a.shape[1] // 2
        a[:, half : 2 * half] = -a[:, :half]
        b[half : 2 * half] = b[:half]
        b[half : 2 * half] += torch.randn_like(b[:half]) / 16
        return a, b

    def place(value: float) -> Callable[[Any, Any], tuple[Any, Any]]:
        def put(a: Any, b: Any) -> tuple[Any, Any]:
            a[5, 3] = value
            b[9, 17] = value
            b[3, 40] = 0.0
            return a, b

        return put

    table = {
        "normal": lambda a, b: (a, b),
        "positive": lambda a, b: (a.abs(), b.abs()),
        "large": lambda a, b: (a * big, b * big),
        "small": lambda a, b: (a * small, b * small),
        "constant": lambda a, b: (torch.full_like(a, 0.1), torch.full_like(b, 0.3)),
        "one-hot": one_hot,
        "cancelling": cancel,
        "heavy-tailed": lambda a, b: (a * (1.5 * a).exp(), b * (1.5 * b).exp()),
        "integers": lambda a, b: ((2 * a).round(), (2 * b).round()),
        "wide-range": lambda a, b: (a * torch.logspace(-2, 1, a.shape[1], device="cuda"), b),
        "nan": place(math.nan),
    }
    return {**table, "infinity": place(math.inf)} if kind in ("bf16", "fp16") else table


def attention_patterns(torch: Any) -> dict[str, Callable[[Values], object]]:
    """Patterns as changes of normal q, k and v."""

    def along(v: Values, sign: float) -> None:
        keys = v["k"].shape[2]
        ramp = sign * torch.linspace(0, 1, keys, device="cuda")[:, None]
        v["q"][:] = 1.0 + v["q"] / 16
        v["k"][:] = ramp * 4.0 + v["k"] / 16

    def put(name: str, value: float) -> Callable[[Values], object]:
        def change(v: Values) -> None:
            v[name][0, 1, 700, 3] = value

        return change

    return {
        "normal": lambda v: None,
        "large scores": lambda v: v["q"].mul_(50),
        "constant": lambda v: [v[n].fill_(0.3) for n in "qkv"],
        "equal keys": lambda v: v["k"].copy_(v["k"][:, :, :1].expand_as(v["k"])),
        "rising scores": lambda v: along(v, 1.0),
        "falling scores": lambda v: along(v, -1.0),
        "heavy-tailed": lambda v: [v[n].mul_((0.8 * v[n]).exp()) for n in "qkv"],
        "large values": lambda v: v["v"].mul_(1e6),
        "offset values": lambda v: v["v"].add_(100.0),
        "one-hot values": lambda v: v["v"].copy_((v["v"] > 2.5).to(v["v"].dtype)),
        "nan in q": put("q", math.nan),
        "nan in k": put("k", math.nan),
        "nan in v": put("v", math.nan),
        "infinity in v": put("v", math.inf),
        "infinity in k": put("k", math.inf),
    }


def measure(torch: Any, got: Any, want: Any) -> tuple[float, bool]:
    """(relative error over finite elements, whether NaN and infinity are where they should be)."""
    rounded = want.to(got.dtype).double()
    placed = bool(torch.equal(torch.isnan(got), torch.isnan(rounded)))
    placed = placed and bool(torch.equal(torch.isinf(got), torch.isinf(rounded)))
    both = torch.isfinite(rounded) & torch.isfinite(got)
    wide = got.double()
    gap = torch.where(both, wide - want, 0.0).norm()
    return float(gap) / (float(torch.where(both, want, 0.0).norm()) or 1.0), placed


def _gemm(torch: Any, label: str) -> list[Values]:
    name, what = GEMMS[label]
    ours, (theirs,) = gemm_bench.caller(torch, name), gemm_bench.baselines(torch, what).values()
    config, rows = VARIANTS[name][0], []
    for pattern, change in gemm_patterns(torch, label.split(maxsplit=1)[0]).items():
        v = operands(torch, config, *GEMM_SHAPE, seed=7)
        a, b = torch.randn(*GEMM_SHAPE[::2], device="cuda"), None
        b = torch.randn(GEMM_SHAPE[2], GEMM_SHAPE[1], device="cuda")
        a, b = change(a, b)
        if label.startswith("e4m3"):
            a, b = a.clamp(-448, 448), b.clamp(-448, 448)
        v["a"].copy_(a.to(v["a"].dtype))
        v["b"].copy_((b if config.b == "kn" else b.T.contiguous()).to(v["b"].dtype))
        rows.append(_compare(torch, pattern, v, "c", config, ours, theirs))
    if label == "bf16":
        rows.append(_fuzz_gemm(torch))
    return rows


def _compare(
    torch: Any, pattern: str, v: Values, out: str, config: Any, ours: Any, theirs: Any
) -> Values:
    want = expected(torch, config, v, None, torch.float64)
    found = []
    for call in (ours, theirs):
        v[out].fill_(math.nan)
        call(v)
        found.append(measure(torch, v[out], want))
    return {"pattern": pattern, "ours": found[0], "theirs": found[1]}


def _fuzz_gemm(torch: Any) -> Values:
    worst: Values = {"ratio": 0.0}
    (library,) = gemm_bench.baselines(torch, "time").values()
    calls: dict[str, Any] = {}
    for m, n, k in FUZZED:
        name = plain_of((m, n, k))
        calls.setdefault(name, gemm_bench.caller(torch, name))
        config = VARIANTS[name][0]
        v = operands(torch, config, m, n, k, seed=m)
        row = _compare(torch, f"fuzz {m}x{n}x{k}", v, "c", config, calls[name], library)
        ratio = row["ours"][0] / (row["theirs"][0] or 1.0)
        if not row["ours"][1] or ratio > worst["ratio"]:
            worst = {**row, "ratio": ratio}
    return {**worst, "pattern": f"worst of {len(FUZZED)} ragged sizes ({worst['pattern'][5:]})"}


def _attention(torch: Any, name: str) -> list[Values]:
    folder = attention_bench.FOLDER / "plain" / kb.slug(name)
    kernel, config = Kernel(Built.read(folder)), attention_bench.VARIANTS[name][0]

    def one(pattern: str, change: Callable[[Values], object], shape: tuple[int, ...]) -> Values:
        v = attention_bench.operands(torch, config, *shape, seed=5)
        change(v)
        want, _ = attention_bench.expected(torch, config, v)
        kernel({x: v[x] for x in "qkvo"}, stream=torch.cuda.current_stream().cuda_stream)
        ours = measure(torch, v["o"], want)
        backends = torch.nn.attention
        with backends.sdpa_kernel(backends.SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                v["q"], v["k"], v["v"], is_causal=config.causal
            )
        return {"pattern": pattern, "ours": ours, "theirs": measure(torch, out, want)}

    rows = [one(p, c, ATTENTION_SHAPE) for p, c in attention_patterns(torch).items()]
    draw, worst = random.Random(3), {"ratio": 0.0}
    for _ in range(20):
        n = draw.randint(1, 1500)
        row = one(f"N={n}", lambda v: None, (draw.randint(1, 3), draw.randint(1, 4), n, n))
        ratio = row["ours"][0] / (row["theirs"][0] or 1.0)
        if not row["ours"][1] or ratio > worst["ratio"]:
            worst = {**row, "ratio": ratio}
    rows.append({**worst, "pattern": f"worst of 20 ragged lengths ({worst['pattern']})"})
    return rows


def case(name: str, rounds: int) -> Values:
    """One kernel on all its patterns."""
    torch = kb.load_torch()
    torch.manual_seed(1)
    what, which = name.split(" ", 1)
    rows = _gemm(torch, which) if what == "gemm" else _attention(torch, which)
    return {"rows": rows}


def _rows(results: list[Values]) -> list[Evidence]:
    env, evidence = kb.environment(), []
    for result in results:
        what, which = result["name"].split(" ", 1)
        library = "cuBLAS" if what == "gemm" else "cuDNN"
        for row in result.get("rows", []):
            (error, placed), (other, other_placed) = row["ours"], row["theirs"]
            folder = gemm_bench.FOLDER if what == "gemm" else attention_bench.FOLDER
            variant = GEMMS[which][0] if what == "gemm" else which
            built = Built.read(folder / "plain" / kb.slug(variant))
            evidence.append(
                Evidence(
                    f"{what}-numerics",
                    f"{what} {which}",
                    row["pattern"],
                    which.split(maxsplit=1)[0] if what == "gemm" else "bf16",
                    env["device"],
                    env["driver"],
                    built.resources.compiler,
                    env["date"],
                    "python bench/kernel_numerics.py run",
                    "relative error",
                    "lower",
                    error,
                    {library: other},
                    other / error if error else 1.0,
                    checks={"specials": placed, f"specials of {library}": other_placed},
                    notes=f"torch {env['torch']}; {variant}",
                )
            )
    return evidence


def main() -> None:
    """Command line."""
    args = kb.arguments(__doc__ or "")
    if args.mode == "worker":
        kb.work(case, args)
    elif args.mode == "merge":
        kb.merge(RESULTS, args.files, args.fresh, args.only)
    else:
        wished = args.only.split(",")
        every = dict.fromkeys([*ATTENTIONS, *attention_bench.VARIANTS])
        names = [*(f"gemm {n}" for n in GEMMS), *(f"attention {n}" for n in every)]
        # A variant that is no default is there by its whole name only.
        kept = {f"attention {n}" for n in every if n not in ATTENTIONS}
        names = [n for n in names if n in wished or any(o in n for o in wished if n not in kept)]
        results = kb.run_workers(str(Path(__file__)), args, names)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "numerics_raw.json").write_text(json.dumps(results, indent=1))
        rows = _rows(results)
        write_rows(args.out / "numerics.json", rows)
        print(
            kb.table([["kernel", "pattern", "ours", "library", "placed", "theirs"], *_lines(rows)])
        )


def _lines(rows: list[Evidence]) -> list[list[object]]:
    return [
        [
            row.kernel,
            row.shape,
            f"{row.ours:.2e}",
            f"{next(iter(row.baselines.values())):.2e}",
            *row.checks.values(),
        ]
        for row in rows
    ]


if __name__ == "__main__":
    main()
