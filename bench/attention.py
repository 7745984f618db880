"""Variants of attention: numerics, and times that `bench/tuned.py` puts into the tuned table.

    python -m bench.attention build              here, no GPU: cubins under out/bench/attention
    python -m bench.attention run --out DIR      on the GPU machine: numerics, timing, a table
    python -m bench.attention merge FILE...      evidence of runs into bench/results

What a user gets is measured by `bench/attention_sitting.py`. Here every variant of a shape runs in
one process; a row's ratio is to the best baseline of that row.
Operations: 4 * batch * heads * head_dim * pairs of a query and a key it sees (half when causal).
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench.attention_baselines import baselines_of, usable
from bench.attention_cases import (
    CHECKED,
    LENGTHS,
    PACKED,
    SHORT,
    VARIANTS,
    expected,
    operands,
    pack,
    reshape_scores,
)
from warploom.codegen.compile.build import Built, build
from warploom.codegen.ir.plan import KernelSchedule
from warploom.errors import WarploomError
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.attention.variants import choose_attention


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
    own = {x: v[x] for x in c.arrays}
    kernel(own, stream=stream)
    torch.cuda.synchronize()
    first, same = v["o"].clone(), True
    for _ in range(2):
        v["o"].fill_(math.nan)
        kernel(own, stream=stream)
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
    """One case: `check VARIANT`, `time|sharp|rising|fp8|window|gqa DIM MASK N`, or
    `packed DIM causal [short]`."""
    torch = kb.load_torch()

    what, which = name.split(" ", 1)
    if what != "check":
        return _time(torch, what, which, rounds)
    result: dict[str, Any] = {}
    for flavour in ("debug", "plain"):
        kernel = Built.read(FOLDER / flavour / kb.slug(which)).kernel()
        for shape in CHECKED if flavour == "plain" else CHECKED[2:]:
            found = _check(torch, kernel, VARIANTS[which][0], shape)
            result[f"{flavour} {shape}"] = found
            if "diagnosis" in found:
                return {"ok": False, "cases": result}
    return {"ok": True, "worst": max(c["error"] for c in result.values()), "count": len(result)}


DENSE = ("time", "sharp", "rising")  # the same kernels on other values
EXACT = 2**28  # pairs of positions that outputs are checked on, against float64
WITHOUT = "WARPLOOM_WITHOUT"  # in the environment: variants that failed a check before


def _time(torch: Any, what: str, which: str, rounds: int) -> dict[str, Any]:
    dim, mask, *rest = which.split()
    d, causal = int(dim), mask == "causal"
    lead = ("" if what in DENSE else f"{what} ") + (f"d{d} causal " if causal else f"d{d} ")
    names = [name for name in VARIANTS if name.startswith(lead)]
    names = [n for n in names if causal or ("causal" not in n and "plain" not in n)]
    config = VARIANTS[names[0]][0]
    without = json.loads(os.environ.get(WITHOUT, "[]"))
    names = [n for n in names if n not in without and (FOLDER / "plain" / kb.slug(n)).is_dir()]
    h = 2048 // d
    if what == "packed":
        lengths = packed_lengths(rest)
        data = [pack(torch, config, h, [(n, n) for n in lengths]) for _ in range(2)]
        pairs = h * sum(n * n for n in lengths)
    else:
        n = int(rest[0])
        data = [operands(torch, config, max(1, 16384 // n), h, n, n, s) for s in range(2)]
        for v in data:
            reshape_scores(torch, what, v)
        pairs = max(1, 16384 // n) * h * n * n
    chosen = chosen_for(what, which)
    turn = [0]

    def pick() -> dict[str, Any]:
        turn[0] ^= 1
        return data[turn[0]]

    libraries = baselines_of(torch, what, data, pick, config)
    if what == "fp8":  # those of 16 bits stand beside the defaults, in sittings
        libraries = {name: call for name, call in libraries.items() if "fp8" in name}
    baselines, refused = usable(torch, libraries)
    candidates: dict[str, Any] = {**baselines, "control": next(iter(baselines.values()))}
    checks: dict[str, str] = {}
    part = data[0] if what == "packed" else first_heads(config, data[0])
    want, _ = expected(torch, config, part)
    for name in names:
        kernel, rows = Built.read(FOLDER / "plain" / kb.slug(name)).kernel(), _rows(name)

        def ours(kernel: Any = kernel, rows: int = rows) -> None:
            v = pick()
            stream = torch.cuda.current_stream().cuda_stream
            tables = {"tiles": v[f"tiles {rows}"]} if config.packed else {}
            kernel({x: v[x] for x in config.arrays} | tables, stream=stream)

        candidates[name] = ours
        turn[0] = 1
        data[0]["o"].fill_(math.nan)
        ours()
        whole = not bool(torch.isnan(data[0]["o"]).any())
        found = data[0]["o"][:1, : want.shape[1]] if part is not data[0] else data[0]["o"]
        error = float((found.double() - want).norm() / want.norm())
        right = error < (0.06 if config.narrow else 0.01) and whole
        checks[name] = "pass" if right else f"fail {error:.3g}"
    del want, part
    samples = kb.interleave(candidates, rounds)
    return {
        "shape": which if what == "time" else f"{what} {which}",
        "dtype": config.dtype.name,
        "default": chosen,
        "work": 4 * visible(pairs, config, data[0]) * d,
        "samples": samples,
        "checks": checks,
        "baselines": list(baselines),
        "refused": refused,
    }


def _rows(name: str) -> int:
    return VARIANTS[name][0].tile[0]


def first_heads(config: AttentionConfig, v: dict[str, Any]) -> dict[str, Any]:
    """The operands of as many heads of the first sequence as `EXACT` allows, at least a group."""
    rows, keys = v["q"].shape[2], v["k"].shape[2]
    kv = max(1, min(v["k"].shape[1], EXACT // (rows * keys) // config.group))
    part = {"q": v["q"][:1, : kv * config.group], "k": v["k"][:1, :kv], "v": v["v"][:1, :kv]}
    return part | {x: v[x] for x in v if x.startswith("scale_")}


def packed_lengths(rest: list[str]) -> list[int]:
    """The sequences of a packed case, by the last word of its name."""
    return PACKED[rest[0] if rest else "mixed"]


def chosen_for(what: str, which: str) -> str:
    """The variant that the chooser takes for a timed case."""
    dim, mask, *rest = which.split()
    d, causal = int(dim), mask == "causal"
    lead = ("" if what in DENSE else f"{what} ") + (f"d{d} causal " if causal else f"d{d} ")
    config = next(VARIANTS[name][0] for name in VARIANTS if name.startswith(lead))
    h = 2048 // d
    if what == "packed":
        return lead + choose_attention(packed_lengths(rest), config, heads=h).name
    n = int(rest[0])
    return lead + choose_attention(n, config, heads=max(1, 16384 // n) * h).name


def visible(pairs: float, config: AttentionConfig, v: dict[str, Any]) -> float:
    """Pairs of a query and a key that it sees, of all `pairs`."""
    if config.window is not None:
        rows = v["q"].shape[2]
        seen = min(config.window, rows)
        return pairs / rows * (seen - seen * (seen - 1) / 2 / rows)
    return pairs * (0.5 if config.causal else 1.0)


FOLDER = kb.ROOT / "out" / "bench" / "attention"
RESULTS = kb.ROOT / "bench" / "results" / "attention_variants.json"


def main() -> None:
    """Command line."""
    args = kb.arguments(__doc__ or "")
    if args.mode == "build":
        build_all(FOLDER)
    elif args.mode == "merge":
        kb.merge(RESULTS, args.files, args.fresh)
    else:
        built = [name for name in VARIANTS if (FOLDER / "plain" / kb.slug(name)).is_dir()]
        names = [f"check {name}" for name in built] if args.stage != "timing" else []
        if args.stage != "numerics":
            masks = ("causal", "full")
            names += [f"time {d} {m} {n}" for d in (64, 128) for m in masks for n in LENGTHS]
            names += [f"time {d} {m} {n}" for d in (64, 128) for m, n in SHORT]
            names += [f"packed {d} {m}" for d in (64, 128) for m in ("causal", "causal short")]
            names += ["window 128 causal 8192"]
            names += [f"fp8 {d} {m} {n}" for d in (64, 128) for m in masks for n in LENGTHS]
            names += [f"fp8 256 {m} {n}" for m in masks for n in LENGTHS[:4]]
            names += ["gqa 128 causal 8192"]
            names += [
                f"{w} {d} 8192" for w in ("sharp", "rising") for d in ("64 full", "128 causal")
            ]
            names += [f"time {d} {m} {n}" for d in (96, 256) for m in masks for n in LENGTHS[:4]]
        names = [n for n in names if any(o in n for o in args.only.split(","))]
        checks = [name for name in names if name.startswith("check")]
        results = kb.run_workers(case, args, checks)
        failed = json.loads(os.environ.get(WITHOUT, "[]"))
        failed += [r["name"].removeprefix("check ") for r in results if not r.get("ok")]
        os.environ[WITHOUT] = json.dumps(failed)
        timed = [name for name in names if not name.startswith("check")]
        results += kb.run_workers(case, args, timed)
        folder = FOLDER / "plain"
        kb.report(args.out, "attention-forward", results, lambda n: Built.read(folder / kb.slug(n)))


if __name__ == "__main__":
    main()
