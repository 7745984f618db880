"""Numerics of the kernel families beside cuBLAS, cuDNN and FlashAttention-4, against float64.

    python -m bench.kernel_numerics build            here, no GPU: attention cubins under
                                                     out/bench/numerics (GEMM: bench/gemm.py build)
    python -m bench.kernel_numerics run --out DIR    on the GPU machine (--only attention: no GEMM)
    python -m bench.kernel_numerics merge FILE...    rows into bench/results/numerics.json
                                                     (--fresh: the only ones of their claims)

A row is one kernel on one pattern of inputs: relative error ||x - ref|| / ||ref|| over the elements
whose reference is finite, ours and each library's, and whether NaN and infinity stand where the
float64 reference (rounded to the output type) has them; for attention also the error of the worst
row by itself. `fuzz` rows take the worst ratio over random ragged sizes. Attention is every kernel
that short and long rows get, and those that they get with `exact=True`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from bench import attention as attention_bench
from bench import gemm as gemm_bench
from bench import kernel_bench as kb
from bench.attention_baselines import baselines_of
from bench.evidence import Evidence, read_rows, write_rows
from bench.gemm_cases import FUZZED, VARIANTS, expected, operands, plain_of
from warploom.codegen.compile.build import Built, build
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.attention.variants import ATTENTION, choose_attention
from warploom.kernels.tuned.variant import Variant

RESULTS = kb.ROOT / "bench" / "results" / "numerics.json"
Values = dict[str, Any]
GEMMS = {
    "bf16": ("128x256", "time"),
    "bf16 swap-ab": ("152x256-swap-ab", "time"),
    "bf16 cluster-reduce": ("cluster-reduce8-64x128", "time"),
    "fp16": ("fp16", "time"),
    "e4m3 fast": ("fp8 128x256", "fp8"),
    "e4m3 promoted": ("fp8 promoted 128x128-two-in-flight", "promoted"),
}
GEMM_SHAPE = (520, 1040, 4112)
FOLDER = kb.ROOT / "out" / "bench" / "numerics"
ATTENTION_SHAPE = (2, 3, 900, 900)


def _attentions() -> dict[str, AttentionConfig]:
    """What is asked for, by name of the kernel that it gets: short and long rows, exact or not."""
    found: dict[str, AttentionConfig] = {}
    for d, causal, exact in product((64, 96, 128, 256), (False, True), (False, True)):
        asked = AttentionConfig(head_dim=d, causal=causal, exact=exact)
        for n in (1024, 8192):
            heads = max(1, 16384 // n) * 2048 // d
            words = (f"d{d}", "causal" * causal, choose_attention(n, asked, heads=heads).name)
            found[" ".join(filter(None, (*words, "exact" * exact)))] = asked
    return found


ATTENTIONS = _attentions()


def choice_of(name: str) -> Variant:
    """The variant in a kernel's name."""
    return next(ATTENTION.variants[word] for word in name.split() if word in ATTENTION.variants)


def build_attentions() -> None:
    """Compile every attention kernel."""
    for name, asked in ATTENTIONS.items():
        choice = choice_of(name)
        config = choice.config(asked)
        build(attention(config), choice.schedule(config), allow=choice.allow).write(
            FOLDER / kb.slug(name)
        )
        print(f"{name}", flush=True)


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

    def ramp(v: Values, sign: float) -> None:
        keys = v["k"].shape[2]
        grows = sign * torch.linspace(0, 1, keys, device="cuda")[:, None]
        v["q"][:] = 1.0 + v["q"] / 16
        v["k"][:] = grows * 4.0 + v["k"] / 16

    def put(name: str, value: float) -> Callable[[Values], object]:
        def change(v: Values) -> None:
            v[name][0, 1, 700, 3] = value

        return change

    def along(v: Values, scores: Any) -> None:
        # So many more for every key, whatever the row; noise of deviation 1 beside it.
        v["q"][..., 0] = v["q"].shape[3] ** 0.5
        v["k"][..., 0] = scores

    def blocks(each: float, width: int = 64) -> Callable[[Values], object]:
        def change(v: Values) -> None:
            along(v, torch.arange(v["k"].shape[2], device="cuda") // width * each)

        return change

    def peak(height: float) -> Callable[[Values], object]:
        # Keys at one and at two thirds, the later one higher: each outweighs all before it.
        def change(v: Values) -> None:
            keys = v["k"].shape[2]
            scores = torch.zeros(keys, device="cuda")
            scores[keys // 3], scores[2 * keys // 3] = height / 2, height
            along(v, scores)

        return change

    def huge_equal(v: Values) -> None:
        v["q"].fill_(4096.0), v["k"].fill_(4096.0)
        half = v["v"].shape[2] // 2
        v["v"][:, :, :half], v["v"][:, :, half:] = 1.5, -0.5

    def find(v: Values) -> None:
        # Every row looks for one key, which outweighs the others by far.
        order = torch.randperm(v["k"].shape[2], device="cuda")
        v["q"].copy_(8.0 * v["k"][:, :, order])

    def huge(v: Values) -> None:
        v["v"].copy_(3e38 * v["v"].sign())

    return {
        "normal": lambda v: None,
        "sharp scores": lambda v: v["q"].mul_(4),
        "large scores": lambda v: v["q"].mul_(50),
        "constant": lambda v: [v[n].fill_(0.3) for n in "qkv"],
        "equal keys": lambda v: v["k"].copy_(v["k"][:, :, :1].expand_as(v["k"])),
        "equal huge keys, 8192 of them": huge_equal,
        "rising scores": lambda v: ramp(v, 1.0),
        "falling scores": lambda v: ramp(v, -1.0),
        "blocks that rise by 6": blocks(6.0, 128),
        "blocks that rise by 12": blocks(12.0),
        "blocks that rise by 20": blocks(20.0),
        "blocks that fall by 12": blocks(-12.0),
        "peaks of 5 and 10": peak(10.0),
        "peaks of 10 and 20": peak(20.0),
        "peaks of 30 and 60": peak(60.0),
        "every row finds a key": find,
        "heavy-tailed": lambda v: [v[n].mul_((0.8 * v[n]).exp()) for n in "qkv"],
        "large values": lambda v: v["v"].mul_(1e6),
        "huge values": huge,
        "huge values, peaks of 30 and 60": lambda v: [peak(60.0)(v), huge(v)],
        "huge values, blocks that rise by 12": lambda v: [blocks(12.0)(v), huge(v)],
        "tiny values": lambda v: v["v"].mul_(1e-30),
        "tiniest values": lambda v: v["v"].mul_(1e-37),
        "offset values": lambda v: v["v"].add_(100.0),
        "one-hot values": lambda v: v["v"].copy_((v["v"] > 2.5).to(v["v"].dtype)),
        "rows that see no key": lambda v: None,
        "nan in q": put("q", math.nan),
        "nan in k": put("k", math.nan),
        "nan in v": put("v", math.nan),
        "infinity in v": put("v", math.inf),
        "infinity in k": put("k", math.inf),
    }


SHAPES = {
    "equal huge keys, 8192 of them": (1, 1, 8192, 8192),
    "rows that see no key": (2, 3, 900, 300),  # under a causal mask
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


def worst_row(torch: Any, got: Any, want: Any) -> float:
    """The largest relative error of a row, of those that are finite as they should be."""
    gap, size = (got.double() - want).norm(dim=-1), want.norm(dim=-1)
    there = torch.isfinite(gap) & torch.isfinite(size) & (size > 0)
    return float(torch.where(there, gap / size.clamp_min(5e-324), 0.0).max())


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
    return {"pattern": pattern, "found": dict(zip(("ours", "cuBLAS"), found, strict=True))}


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
        (error, placed), (other, _) = row["found"].values()
        ratio = error / (other or 1.0)
        if not placed or ratio > worst["ratio"]:
            worst = {**row, "ratio": ratio}
    return {**worst, "pattern": f"worst of {len(FUZZED)} ragged sizes ({worst['pattern'][5:]})"}


def _attention(torch: Any, name: str) -> list[Values]:
    kernel = Built.read(FOLDER / kb.slug(name)).kernel()
    config = choice_of(name).config(ATTENTIONS[name])

    def one(pattern: str, change: Callable[[Values], object], shape: tuple[int, ...]) -> Values:
        v = attention_bench.operands(torch, config, *shape, seed=5)
        change(v)
        want, _ = attention_bench.expected(torch, config, v)
        kernel({x: v[x] for x in "qkvo"}, stream=torch.cuda.current_stream().cuda_stream)
        found, worst = {"ours": measure(torch, v["o"], want)}, [worst_row(torch, v["o"], want)]
        calls = baselines_of(torch, "time", [v], lambda: v, config)
        if config.causal and shape[2] != shape[3]:
            del calls["cuDNN"]  # its first row sees one key, where ours and FlashAttention's last
        refused: dict[str, str] = {}
        for library, call in calls.items():
            out, why = _tried(torch, call)
            if out is None:
                refused[library] = why
                continue
            found[library] = measure(torch, out, want)
            worst.append(worst_row(torch, out, want))
        rows = dict(zip(found, worst, strict=True))
        return {"pattern": pattern, "found": found, "worst rows": rows, "refused": refused}

    rows = [
        one(pattern, change, SHAPES.get(pattern, ATTENTION_SHAPE))
        for pattern, change in attention_patterns(torch).items()
        if config.causal or pattern != "rows that see no key"
    ]
    draw, worst, most = random.Random(3), rows[0], 0.0
    for _ in range(20):
        n = draw.randint(1, 1500)
        row = one(f"N={n}", lambda v: None, (draw.randint(1, 3), draw.randint(1, 4), n, n))
        (error, placed), *others = row["found"].values()
        ratio = error / (min((other for other, _ in others), default=0.0) or 1.0)
        if not placed or ratio > most:
            worst, most = row, ratio if placed else math.inf
    rows.append({**worst, "pattern": f"worst of 20 ragged lengths ({worst['pattern']})"})
    return rows


def _tried(torch: Any, call: Callable[[], Any]) -> tuple[Any, str]:
    """What a library gives, or None and why it does not support this."""
    try:
        out = call()
        torch.cuda.synchronize()
    except Exception as error:  # whatever a library raises for what it does not support
        return None, f"{type(error).__name__}: {error}"[:200]
    return out, ""


def case(name: str, rounds: int) -> Values:
    """One kernel on all its patterns."""
    torch = kb.load_torch()
    torch.manual_seed(1)
    what, which = name.split(" ", 1)
    rows = _gemm(torch, which) if what == "gemm" else _attention(torch, which)
    return {"rows": rows}


def _rows(results: list[Values]) -> list[Evidence]:
    env = kb.environment()
    return [
        _evidence(env, *result["name"].split(" ", 1), row)
        for result in results
        for row in result.get("rows", [])
    ]


def _evidence(env: dict[str, str], what: str, which: str, row: Values) -> Evidence:
    folder = FOLDER / kb.slug(which)
    if what == "gemm":
        folder = gemm_bench.FOLDER / "plain" / kb.slug(GEMMS[which][0])
    found: dict[str, tuple[float, bool]] = row["found"]
    (error, placed), *_ = found.values()
    others = {name: pair for name, pair in found.items() if name != "ours"}
    # A library whose result overflows has no error to be compared with.
    best = min((other for other, right in others.values() if right), default=error)
    specials = {f"specials of {name}": right for name, (_, right) in others.items()}
    worst = {f"worst row, {name}": value for name, value in row.get("worst rows", {}).items()}
    refused = "".join(f"; {name} refused: {why}" for name, why in row.get("refused", {}).items())
    return Evidence(
        f"{what}-numerics",
        f"{what} {which}",
        row["pattern"],
        which.split(maxsplit=1)[0] if what == "gemm" else "bf16",
        env["device"],
        env["driver"],
        Built.read(folder).resources.compiler,
        env["date"],
        "python -m bench.kernel_numerics run",
        "relative error",
        "lower",
        error,
        {name: other for name, (other, _) in others.items()},
        best / error if error else 1.0,
        checks={"specials": placed, **specials, **worst},
        notes=f"torch {env['torch']}; {GEMMS[which][0] if what == 'gemm' else which}{refused}",
    )


def merge(files: list[Path], fresh: bool) -> None:
    """Rows of runs into the results; `fresh`: without the old rows of the same claims."""
    claims = {row.claim for path in files for row in read_rows(path)}
    if fresh:
        write_rows(RESULTS, [row for row in read_rows(RESULTS) if row.claim not in claims])
    kb.merge(RESULTS, files)


def main() -> None:
    """Command line."""
    args = kb.arguments(__doc__ or "")
    if args.mode == "build":
        build_attentions()
    elif args.mode == "merge":
        merge(args.files, args.fresh)
    else:
        wished = args.only.split(",")
        names = [*(f"gemm {n}" for n in GEMMS), *(f"attention {n}" for n in ATTENTIONS)]
        results = kb.run_workers(case, args, [n for n in names if any(o in n for o in wished)])
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "numerics_raw.json").write_text(json.dumps(results, indent=1))
        rows = _rows(results)
        write_rows(args.out / "numerics.json", rows)
        head = ["kernel", "pattern", "ours", "libraries", "ratio", "checks"]
        print(kb.table([head, *(_line(row) for row in rows)]))


def _line(row: Evidence) -> list[object]:
    others = ", ".join(f"{name} {error:.2e}" for name, error in row.baselines.items())
    checks = [
        f"{name} {value:.2e}" if isinstance(value, float) else f"no {name}"
        for name, value in row.checks.items()
        if value is not True
    ]
    ratio = f"{row.ratio_to_best:.2f}"
    return [row.kernel, row.shape, f"{row.ours:.2e}", others, ratio, ", ".join(checks)]


if __name__ == "__main__":
    main()
