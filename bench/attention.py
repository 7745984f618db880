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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

import kernel_bench as kb  # noqa: E402
from attention_cases import (  # noqa: E402
    CHECKED,
    FA4,
    LENGTHS,
    VARIANTS,
    expected,
    operands,
    pack,
)
from warploom.codegen.build import Built, build  # noqa: E402
from warploom.codegen.launch import Kernel  # noqa: E402
from warploom.codegen.plan import KernelSchedule  # noqa: E402
from warploom.errors import WarploomError  # noqa: E402
from warploom.kernels.attention import AttentionConfig, attention  # noqa: E402
from warploom.kernels.choices import choose_attention  # noqa: E402


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
    limit = 0.05 if c.narrow else 0.01
    ok = result["error"] < limit and result["nan"] == 0 and same and result.get("lse", 0) < 0.01
    if not ok:
        bad = ((first.double() - want).abs() > 0.05).nonzero()
        result["diagnosis"] = {
            "wrong": len(bad),
            "of": first.numel(),
            "first": [
                [*map(int, p), float(first[tuple(p)]), float(want[tuple(p)])] for p in bad[:12]
            ],
            "rows": sorted({int(p[-2]) for p in bad[:4000]})[:24],
            "cols": sorted({int(p[-1]) for p in bad[:4000]})[:24],
        }
    return result


def case(name: str, rounds: int) -> dict[str, Any]:
    """One case in a worker: `check VARIANT`, `time|fp8 DIM MASK N`, `packed DIM causal`."""
    torch = kb.load_torch()

    what, which = name.split(" ", 1)
    if what != "check":
        return _time(torch, what, which, rounds)
    result: dict[str, Any] = {}
    for flavour in ("debug", "plain"):
        kernel = Kernel(Built.read(FOLDER / flavour / kb.slug(which)))
        for shape in CHECKED if flavour == "plain" else CHECKED[2:]:
            found = _check(torch, kernel, VARIANTS[which][0], shape)
            result[f"{flavour} {shape}"] = found
            if "diagnosis" in found:
                return {"ok": False, "cases": result}
    return {"ok": True, "worst": max(c["error"] for c in result.values()), "count": len(result)}


PACKED = [512 * (1 + 5 * s % 13) + 37 * s for s in range(13)]  # lengths, 45 thousand tokens


def _time(torch: Any, what: str, which: str, rounds: int) -> dict[str, Any]:
    dim, mask, *rest = which.split()
    d, causal = int(dim), mask == "causal"
    lead = ("" if what == "time" else f"{what} ") + (f"d{d} causal " if causal else f"d{d} ")
    names = [name for name in VARIANTS if name.startswith(lead)]
    names = [n for n in names if causal or ("causal" not in n and "plain" not in n)]
    config = VARIANTS[names[0]][0]
    h = 2048 // d
    if what == "packed":
        data = [pack(torch, config, h, [(n, n) for n in PACKED]) for _ in range(2)]
        pairs, chosen = h * sum(n * n for n in PACKED), names[0]
    else:
        n = int(rest[0])
        data = [operands(torch, config, max(1, 16384 // n), h, n, n, s) for s in range(2)]
        pairs, chosen = max(1, 16384 // n) * h * n * n, lead + choose_attention(n, config).name
    turn = [0]

    def pick() -> dict[str, Any]:
        turn[0] ^= 1
        return data[turn[0]]

    baselines = _baselines(torch, what, data, pick, causal)
    candidates: dict[str, Any] = {**baselines, "control": next(iter(baselines.values()))}
    if chosen in VARIANTS:
        names = ["default", *names]
    checks: dict[str, str] = {}
    want, _ = expected(torch, config, data[0]) if pairs < 2**31 else (None, None)
    for name in names:
        folder = FOLDER / "plain" / kb.slug(chosen if name == "default" else name)
        kernel = Kernel(Built.read(folder))

        def ours(kernel: Any = kernel) -> None:
            v = pick()
            stream = torch.cuda.current_stream().cuda_stream
            kernel({x: v[x] for x in config.arrays}, stream=stream)

        candidates[name] = ours
        turn[0] = 1
        data[0]["o"].fill_(math.nan)
        ours()
        if want is None:  # the first is checked against cuDNN, the others against the first
            turn[0] = 1
            want = candidates["control"]().double()
        error = float((data[0]["o"].double() - want).norm() / want.norm())
        checks[name] = "pass" if error < (0.06 if config.narrow else 0.01) else f"fail {error:.3g}"
    samples = kb.interleave(candidates, rounds)
    return {
        "shape": which if what == "time" else f"{what} {which}",
        "dtype": config.dtype.name,
        "default": chosen,
        "work": 4 * pairs * d * (0.5 if causal else 1.0),
        "samples": samples,
        "checks": checks,
        "baselines": list(baselines),
    }


def _baselines(
    torch: Any, what: str, data: list[dict[str, Any]], pick: Any, causal: bool
) -> dict[str, Any]:
    """The libraries that can do this; for 8-bit elements, the 16-bit ones on the same values."""
    if what == "packed":
        return _packed_baselines(torch, data, pick)
    for v in data:
        if what == "fp8":
            wide = [v[x].to(torch.bfloat16) for x in "qkv"]
            v["wide"] = [wide[0], wide[1], wide[2].transpose(-1, -2).contiguous()]
        else:
            v["wide"] = [v[x] for x in "qkv"]
    backends = torch.nn.attention

    def cudnn() -> Any:
        with backends.sdpa_kernel(backends.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                *pick()["wide"], is_causal=causal
            )

    found: dict[str, Any] = {"cuDNN": cudnn}
    try:
        function = importlib.import_module("flash_attn.cute").flash_attn_func
    except ImportError:
        return found
    for v in data:
        v["theirs"] = [x.transpose(1, 2).contiguous() for x in v["wide"]]

    def four() -> Any:
        out = function(*pick()["theirs"], causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return {**found, FA4: four}


def _packed_baselines(torch: Any, data: list[dict[str, Any]], pick: Any) -> dict[str, Any]:
    longest = max(PACKED)
    varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn

    def two() -> Any:
        v = pick()
        bounds = v["row_bounds"], v["key_bounds"]
        return varlen(v["q"], v["k"], v["v"], *bounds, longest, longest, window_size=(-1, 0))

    found: dict[str, Any] = {"torch varlen (FlashAttention-2)": two}
    try:
        function = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    except ImportError:
        return found

    def four() -> Any:
        v = pick()
        out = function(
            v["q"],
            v["k"],
            v["v"],
            cu_seqlens_q=v["row_bounds"],
            cu_seqlens_k=v["key_bounds"],
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=True,
        )
        return out[0] if isinstance(out, tuple) else out

    return {**found, FA4: four}


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
            masks = ("full", "causal")
            names += [f"time {d} {m} {n}" for d in (128, 64) for m in masks for n in LENGTHS]
            names += [f"time {d} {m} {n}" for d in (96, 256) for m in masks for n in (1024, 8192)]
            names += [f"fp8 128 {m} {n}" for m in masks for n in (1024, 8192)]
            names += ["packed 128 causal", "packed 64 causal"]
        names = [n for n in names if any(o in n for o in args.only.split(","))]
        results = kb.run_workers(str(Path(__file__)), args, names)
        folder = FOLDER / "plain"
        kb.report(args.out, "attention-forward", results, lambda n: Built.read(folder / kb.slug(n)))


if __name__ == "__main__":
    main()
