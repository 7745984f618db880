"""Claim `attention-forward`: beside cuDNN (through torch) and FlashAttention-4, on random data.

    python bench/attention.py build              here, no GPU: cubins under out/bench/attention
    python bench/attention.py run --out DIR      on the GPU machine: numerics, timing, a table
    python bench/attention.py merge FILE...      evidence of runs into bench/results

FlashAttention-4 is a baseline where `flash_attn.cute` can be imported; a row's ratio is to the best
baseline of that row, and its notes say which there were.
Operations: 4 * batch * heads * rows * keys * head_dim, halved when causal.
"""

from __future__ import annotations

import importlib
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
from warploom.errors import WarploomError  # noqa: E402
from warploom.kernels.attention import AttentionConfig, attention  # noqa: E402
from warploom.kernels.choices import ATTENTION_CHOICES, choose_attention  # noqa: E402
from warploom.tile import FP16  # noqa: E402

# name -> (config, its schedule, what the compiler may do)
Variant = tuple[AttentionConfig, Callable[[AttentionConfig], KernelSchedule], tuple[str, ...]]


def _choice(name: str, **config: Any) -> Variant:
    choice = ATTENTION_CHOICES[name]
    return choice.config(AttentionConfig(**config)), choice.schedule, choice.allow


def _plain(config: AttentionConfig) -> KernelSchedule:
    return multistage(attention(config), {"k": 2, "v": 2}, LaunchPlan(split="rows"), 2, in_flight=0)


TIMED: dict[str, tuple[str, ...]] = {
    "d128": (
        "128x128-ahead",
        "128x128-ahead-together",
        "128x128-ahead-together-eager",
        "128x176-together",
    ),
    "d128 causal": (
        "128x128-draw4-together",
        "128x128-draw16",
        "128x128-draw16-together",
        "128x128-draw16-together-eager",
        "128x176-draw4-together",
    ),
    "d64": (
        "192x128-ahead",
        "192x128-ahead-together",
        "192x128-ahead-eager",
        "128x192-ahead",
        "256x64-ahead",
    ),
    "d64 causal": (
        "128x128-draw16",
        "128x192-draw16",
        "192x128-snake",
        "192x128-draw4",
        "192x128-draw16",
        "192x128-draw16-eager",
        "192x64-draw16",
        "256x64-draw16",
    ),
}


def _timed(kind: str) -> dict[str, Variant]:
    dim, causal = int(kind.split(maxsplit=1)[0][1:]), kind.endswith("causal")
    return {f"{kind} {n}": _choice(n, head_dim=dim, causal=causal) for n in TIMED[kind]}


VARIANTS: dict[str, Variant] = {
    **{name: variant for kind in TIMED for name, variant in _timed(kind).items()},
    "d128 plain": (AttentionConfig(), _plain, ()),
    "d96": _choice("128x128-ahead-together", head_dim=96),
    "d96-causal": _choice("128x128-draw16-together", head_dim=96, causal=True),
    "d256": _choice("128x64", head_dim=256),
    "d256-causal": _choice("128x64", head_dim=256, causal=True),
    "d128-fp16": _choice("128x128-ahead", dtype=FP16),
    "d64-fp16-causal": _choice("192x128-draw16", head_dim=64, causal=True, dtype=FP16),
    "d128-lse": _choice("128x128", lse=True),
    "d128-causal-window-gqa-lse": _choice("128x128", causal=True, window=300, group=4, lse=True),
    "d128-window-draw": _choice("128x128-draw16", causal=True, window=1000),
}
# Numerics alone; the others are timed too.
UNTIMED = tuple(name for name in VARIANTS if " " not in name)
CHECKED = (
    (1, 2, 128, 128),
    (2, 4, 256, 256),
    (1, 4, 1000, 1000),
    (1, 2, 1, 5),
    (1, 2, 130, 700),
    (1, 1, 64, 2048),
    (3, 8, 515, 515),
    (5, 16, 515, 515),  # more tasks than SMs
)
FA4 = "FlashAttention-4"
LENGTHS = (1024, 1536, 3072, 6144, 12288, 16384)


def schedule_of(name: str) -> KernelSchedule:
    """The schedule of a variant."""
    config, make, _ = VARIANTS[name]
    return make(config)


def build_all(folder: Path) -> None:
    """Compile every variant, plainly and with bounded waits; says which the compiler refuses."""
    for name in VARIANTS:
        try:
            for debug in (False, True):
                allow = ("spills", "stack") if debug else VARIANTS[name][2]
                program, schedule = attention(VARIANTS[name][0]), schedule_of(name)
                built = build(program, schedule, allow=allow, debug=debug)
                built.write(folder / ("debug" if debug else "plain") / kb.slug(name))
        except WarploomError as error:
            print(f"{name:28} REFUSED {error}")
            continue
        res = built.resources
        print(f"{name:28} {res.registers} registers, {res.spill_bytes} B spilled, {res.seconds} s")


def operands(
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


def expected(torch: Any, c: AttentionConfig, v: dict[str, Any]) -> tuple[Any, Any]:
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
    v = operands(torch, c, *shape, seed=sum(shape))
    stream = torch.cuda.current_stream().cuda_stream
    kernel(v, stream=stream)
    torch.cuda.synchronize()
    first, same = v["o"].clone(), True
    for _ in range(2):
        v["o"].fill_(math.nan)
        kernel(v, stream=stream)
        torch.cuda.synchronize()
        same = same and bool(torch.equal(v["o"], first))
    want, lse = expected(torch, c, v)
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
        kernel = Kernel(Built.read(FOLDER / flavour / kb.slug(which)))
        for shape in CHECKED if flavour == "plain" else CHECKED[2:]:
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
    lead = f"d{d} causal " if causal else f"d{d} "
    names = [
        name
        for name in VARIANTS
        if name not in UNTIMED
        and name.startswith(lead)
        and VARIANTS[name][0].causal == causal
        and (FOLDER / "plain" / kb.slug(name)).is_dir()
    ]
    chosen = lead + choose_attention(n, VARIANTS[names[0]][0]).name
    config = VARIANTS[names[0]][0]
    data = [operands(torch, config, b, h, n, n, s) for s in range(2)]
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
    candidates: dict[str, Any] = {"cuDNN": cudnn, "control": cudnn}
    turn[0] = 1
    want = cudnn().float()
    four = _flash_attention(data, pick, causal)
    if four is not None:
        candidates[FA4] = four
    for name in ("default", *names):
        kernel = Kernel(
            Built.read(FOLDER / "plain" / kb.slug(chosen if name == "default" else name))
        )

        def ours(kernel: Any = kernel) -> None:
            v = pick()
            kernel(
                {x: v[x] for x in ("q", "k", "v", "o")},
                stream=torch.cuda.current_stream().cuda_stream,
            )

        candidates[name] = ours
    checks: dict[str, str] = {}
    if four is not None:
        turn[0] = 1
        error = float((four().transpose(1, 2).float() - want).norm() / want.norm())
        checks[FA4] = "pass" if error < 0.01 else f"fail {error:.3g}"
    for name in ("default", *names):
        turn[0] = 1
        data[0]["o"].fill_(math.nan)
        candidates[name]()
        error = float((data[0]["o"].float() - want).norm() / want.norm())
        checks[name] = "pass" if error < 0.01 else f"fail {error:.3g}"
    samples = kb.interleave(candidates, rounds)
    work = 4 * b * h * n * n * d * (0.5 if causal else 1.0)
    return {
        "shape": which,
        "dtype": "bf16",
        "default": chosen,
        "work": work,
        "samples": samples,
        "checks": checks,
        "baselines": [name for name in ("cuDNN", FA4) if name in samples],
    }


def _flash_attention(data: list[dict[str, Any]], pick: Any, causal: bool) -> Any:
    """A call of FlashAttention-4 on the same values in its own layout, or None without it."""
    try:
        function = importlib.import_module("flash_attn.cute").flash_attn_func
    except ImportError:
        return None
    for v in data:
        v["theirs"] = [v[name].transpose(1, 2).contiguous() for name in ("q", "k", "v")]

    def call() -> Any:
        out = function(*pick()["theirs"], causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return call


FOLDER = kb.ROOT / "out" / "bench" / "attention"
RESULTS = kb.ROOT / "bench" / "results" / "attention_forward.json"


def main() -> None:
    """Command line."""
    args = kb.arguments(__doc__ or "")
    if args.mode == "build":
        build_all(FOLDER)
    elif args.mode == "worker":
        kb.work(case, args)
    elif args.mode == "merge":
        kb.merge(RESULTS, args.files, args.fresh)
    else:
        built = [name for name in VARIANTS if (FOLDER / "plain" / kb.slug(name)).is_dir()]
        names = [f"check {name}" for name in built] if args.stage != "timing" else []
        if args.stage != "numerics":
            names += [
                f"time {d} {m} {n}" for d in (128, 64) for m in ("full", "causal") for n in LENGTHS
            ]
        names = [n for n in names if any(o in n for o in args.only.split(","))]
        results = kb.run_workers(str(Path(__file__)), args, names)
        folder = FOLDER / "plain"
        kb.report(args.out, "attention-forward", results, lambda n: Built.read(folder / kb.slug(n)))


if __name__ == "__main__":
    main()
