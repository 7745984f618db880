"""Claim `attention-backward-numerics`: errors of attention's gradients against float64.

    python -m bench.gradient_numerics run --out DIR [--only "128 causal"]   on the GPU machine
    python -m bench.gradient_numerics merge FILE...     its patterns.jsonl into bench/results
    python -m bench.gradient_numerics narrow            what 8-bit gradients would be off by; no GPU

A row is a head size and mask on one pattern of inputs (`bench.kernel_numerics`), for all that a
user calls, forward and backward: ours and FlashAttention-4's by autograd, each from its own output.
Its error is ||x - ref|| / ||ref|| over the elements whose reference is finite, of that gradient of
q, k and v which is worst beside FlashAttention-4's; `specials`: NaN and infinity stand where the
reference has them; `not finite`: how many elements are not, where those of the reference are.
Where a gradient is zero but for rounding (keys that are all alike), errors are of that rounding.
A line is written for each pattern as it comes, so that a run that is cut short has those before.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench import kernel_bench as kb
from bench.attention_cases import FA4
from bench.evidence import Evidence, write_rows
from bench.kernel_numerics import ATTENTION_SHAPE, SHAPES, attention_patterns, measure

CLAIM = "attention-backward-numerics"
RESULTS = kb.ROOT / "bench" / "results" / "attention_backward_numerics.json"
NAMES = tuple(f"{d} {mask}" for d in (64, 96, 128, 256) for mask in ("full", "causal"))
CUDNN, OURS = "cuDNN", "ours"
UNSEEN = "rows that see no key"
LINES = "patterns.jsonl"
CASE_LIMIT = 300.0  # seconds of a case: all patterns, and what the libraries compile for the first
NARROW = kb.ROOT / "bench" / "results" / "raw" / "attention-backward-8-bits.json"
Gradients = dict[str, Any]
Function = Callable[[Any, Any, Any], Any]


def reference(torch: Any, v: Gradients, causal: bool) -> Gradients:
    """The gradients in float64; what a row does not see counts for nothing, whatever it is."""
    q, k, values, do = (v[name].double() for name in ("q", "k", "v", "do"))
    scale = q.shape[-1] ** -0.5
    scores = scale * q @ k.mT
    rows, keys = scores.shape[-2:]
    seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
    seen = seen.tril(keys - rows) if causal else seen
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    weights = torch.where(seen & seen.any(-1, keepdim=True), weights, 0.0)
    out = _product(torch, weights, values, seen)
    delta = (do * out).sum(-1, keepdim=True)
    change = torch.where(seen, weights * (do @ values.mT - delta), 0.0)
    return {
        "dq": scale * _product(torch, change, k, seen),
        "dk": scale * _product(torch, change.mT, q, seen.mT),
        "dv": weights.mT @ do,
    }


def _product(torch: Any, factors: Any, x: Any, seen: Any) -> Any:
    """factors x, where a factor of 0 that is not seen makes no NaN of what is not finite."""
    product = factors @ torch.where(torch.isfinite(x), x, 0.0)
    signs = {"above": factors > 0, "below": factors < 0, "zero": seen & (factors == 0)}
    for special in (torch.inf, -torch.inf, torch.nan):
        there = (torch.isnan(x) if special is torch.nan else x == special).double()
        if not bool(there.any()):
            continue
        met = {name: which.double() @ there > 0 for name, which in signs.items()}
        product = torch.where(met["above"], product + special, product)
        product = torch.where(met["below"], product - special, product)
        product = torch.where(met["zero"], torch.nan, product)  # 0 times infinity
    return product


def functions(torch: Any, causal: bool) -> dict[str, Function]:
    """Ours and the libraries', of `[batch, heads, rows, d]`."""

    def ours(q: Any, k: Any, v: Any) -> Any:
        operators = importlib.import_module("warploom.integrations.torch_op")
        return operators.attention(q, k, v, causal=causal)

    def four(q: Any, k: Any, v: Any) -> Any:
        function = importlib.import_module("flash_attn.cute").flash_attn_func
        wide = (x.transpose(1, 2) for x in (q, k, v))
        out, _ = function(*wide, causal=causal, return_lse=True)
        return out.transpose(1, 2)

    def cudnn(q: Any, k: Any, v: Any) -> Any:
        backends = torch.nn.attention
        with backends.sdpa_kernel(backends.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return {OURS: ours, FA4: four, CUDNN: cudnn}


def gradients(torch: Any, function: Function, v: Gradients) -> Gradients:
    """What autograd makes of a function."""
    leaves = [v[name].detach().clone().requires_grad_() for name in "qkv"]
    found = torch.autograd.grad(function(*leaves), leaves, v["do"])
    torch.cuda.synchronize()
    return dict(zip(("dq", "dk", "dv"), found, strict=True))


def patterns(torch: Any) -> dict[str, Callable[[Gradients], object]]:
    """Those of the forward pass, and of the gradient of the output."""

    def one_row(v: Gradients) -> None:
        kept = v["do"][:, :, 500].clone()
        v["do"].zero_()[:, :, 500] = kept

    return {
        **attention_patterns(torch),
        "large gradients": lambda v: v["do"].mul_(1e6),
        "tiny gradients": lambda v: v["do"].mul_(1e-30),
        "the gradient of one row": one_row,
    }


def judged(torch: Any, got: Any, want: Any) -> tuple[float, bool, int]:
    """`measure`, and how many elements are not finite where those of the reference are."""
    finite = torch.isfinite(want.to(got.dtype))
    return *measure(torch, got, want), int((finite & ~torch.isfinite(got)).sum())


def case(name: str, rounds: int, out: Path, limit: float, alone: bool) -> dict[str, Any]:
    """One head size and mask on all patterns; none begins behind the time `limit`. `alone`: without
    the libraries."""
    del rounds
    torch = kb.load_torch()
    depth, mask = name.split()
    env, done = kb.environment(), 0
    for pattern, change in patterns(torch).items():
        if pattern == UNSEEN and mask != "causal":
            continue
        if time.time() > limit:
            break
        tried = functions(torch, mask == "causal")
        tried = {OURS: tried[OURS]} if alone else tried
        found = one(torch, int(depth), mask, pattern, change, tried)
        row = {"name": name, "pattern": pattern, **found}
        done += 1
        with (out / LINES).open("a") as lines:
            lines.write(json.dumps({**row, "env": env}) + "\n")
    return {"patterns": done}


def one(
    torch: Any,
    depth: int,
    mask: str,
    pattern: str,
    change: Callable[[Gradients], object],
    tried: Mapping[str, Function],
) -> dict[str, Any]:
    """What every library gives of one pattern, and which refused it."""
    causal = mask == "causal"
    torch.manual_seed(5)
    batch, heads, count, keys = SHAPES.get(pattern, ATTENTION_SHAPE)
    sizes = {"q": count, "k": keys, "v": keys, "do": count}
    v = {
        n: torch.randn(batch, heads, rows, depth, device="cuda").bfloat16()
        for n, rows in sizes.items()
    }
    change(v)
    want = reference(torch, v, causal)
    found: dict[str, dict[str, tuple[float, bool, int]]] = {}
    refused: dict[str, str] = {}
    for library, function in tried.items():
        if library == CUDNN and count != keys:
            continue  # its first row sees one key, where our last one sees all
        try:
            got = gradients(torch, function, v)
        except Exception as error:  # whatever a library raises for what it does not support
            if library == OURS:
                raise
            refused[library] = f"{type(error).__name__}: {error}"[:200]
            continue
        found[library] = {n: judged(torch, got[n], want[n]) for n in want}
    return {"found": found, "refused": refused}


def row_of(row: Mapping[str, Any]) -> Evidence:
    """The row of a pattern."""
    found: dict[str, dict[str, tuple[float, bool, int]]] = row["found"]
    ours, four, env = found[OURS], found.get(FA4, {}), row["env"]
    # A library whose gradient overflows has no error to be compared with.
    ratios = {n: ours[n][0] / four[n][0] for n in four if four[n][1] and four[n][0] > 0.0}
    worst = max(ratios, key=lambda n: ratios[n], default="dq")
    others = {library: one for library, one in found.items() if library != OURS}
    checks: dict[str, Any] = {"specials": all(right for _, right, _ in ours.values())}
    checks |= {f"specials of {n}": all(r for _, r, _ in one.values()) for n, one in others.items()}
    checks["gradient"] = worst
    checks["errors of dq, dk, dv"] = {
        n: [float(f"{error:.4g}") for error, *_ in one.values()] for n, one in found.items()
    }
    checks["not finite"] = {n: sum(lost for *_, lost in one.values()) for n, one in found.items()}
    refused = "".join(f"; {n} refused: {why}" for n, why in row["refused"].items())
    error = ours[worst][0]
    return Evidence(
        CLAIM,
        f"attention-backward {row['name']}",
        row["pattern"],
        "bf16",
        env["device"],
        env["driver"],
        f"torch {env['torch']}",
        env["date"],
        "python -m bench.gradient_numerics run",
        "relative error",
        "lower",
        error,
        {n: one[worst][0] for n, one in others.items()},
        1.0 / ratios[worst] if ratios and ratios[worst] else 1.0,
        checks=checks,
        notes=f"ratio: of FlashAttention-4's error to ours{refused}",
    )


def rows_of(files: list[Path]) -> list[Evidence]:
    """The rows of the lines of runs; what a later one has of a pattern replaces what was there. The
    inputs of a pattern are the same in every run."""
    kept: dict[tuple[str, str], dict[str, Any]] = {}
    for line in (json.loads(line) for path in files for line in path.read_text().splitlines()):
        row = kept.setdefault((line["name"], line["pattern"]), {**line, "found": {}, "refused": {}})
        row["found"] |= line["found"]
        row["refused"] |= line["refused"]
        row["env"] = line["env"]
    order = list(NAMES)
    return [row_of(row) for row in sorted(kept.values(), key=lambda row: order.index(row["name"]))]


def narrow(torch: Any) -> list[dict[str, Any]]:
    """Errors of the gradients of normal q, k, v and dO of e4m3 where P and dS are rounded too: to
    bf16, or to e4m3 with one scale or one of each block of 64 x 128; all else is float64."""
    rows, depth = 1024, 128
    found: list[dict[str, Any]] = []

    def rounded(x: Any, tile: tuple[int, int] = (rows, rows)) -> Any:
        parts = x.unflatten(-1, (-1, min(tile[1], x.shape[-1]))).unflatten(-3, (-1, tile[0]))
        scale = 448.0 / parts.abs().amax((-3, -1), keepdim=True).clamp_min(1e-30)
        return ((parts * scale).float().to(torch.float8_e4m3fn).double() / scale).reshape(x.shape)

    kinds: dict[str, Callable[[Any], Any]] = {
        "bf16": lambda x: x.bfloat16().double(),
        "e4m3, one scale": rounded,
        "e4m3, a scale a block": lambda x: rounded(x, (64, 128)),
    }
    torch.manual_seed(0)
    q, k, v, do = (rounded(torch.randn(2, rows, depth).double()) for _ in range(4))
    for mask in ("full", "causal"):
        seen = torch.ones(rows, rows, dtype=torch.bool)
        seen = seen.tril() if mask == "causal" else seen
        scores = (q @ k.mT * depth**-0.5).masked_fill(~seen, -torch.inf)
        weights = torch.softmax(scores, -1)
        change = weights * (do @ v.mT - (do * (weights @ v)).sum(-1, keepdim=True))
        want = (change @ k, change.mT @ q, weights.mT @ do)
        for kind, to in kinds.items():
            own, ds = to(weights), to(change)
            pairs = zip((ds @ k, ds.mT @ q, own.mT @ do), want, strict=True)
            errors = [round(float((a - b).norm() / b.norm()), 5) for a, b in pairs]
            found.append({"mask": mask, "P and dS": kind, "errors of dq, dk, dv": errors})
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("run", "merge", "narrow"))
    parser.add_argument("files", nargs="*", type=Path, help=f"merge: {LINES} of runs")
    parser.add_argument("--out", type=Path, default=Path("out/results"))
    parser.add_argument("--only", default="", help="run cases that contain one of these")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of all of a run")
    parser.add_argument("--alone", action="store_true", help="without the libraries")
    parser.set_defaults(rounds=0)
    args = parser.parse_args()
    if args.mode == "merge":
        files: list[Path] = args.files
        write_rows(RESULTS, rows_of(files))
        return
    if args.mode == "narrow":
        found = narrow(kb.load_torch())
        NARROW.write_text(json.dumps(found, indent=1) + "\n")
        print(*found, sep="\n")
        return
    wished = args.only.split(",")
    args.out.mkdir(parents=True, exist_ok=True)
    limit = time.time() + args.limit
    ran = functools.partial(case, out=args.out, limit=limit, alone=args.alone)
    names = [n for n in NAMES if any(o in n for o in wished)]
    kb.run_workers(ran, args, names, limit_s=CASE_LIMIT)
    rows = rows_of([args.out / LINES]) if (args.out / LINES).is_file() else []
    print(kb.table([["kernel", "pattern", "ours", FA4, "ratio", "specials"], *map(_line, rows)]))


def _line(row: Evidence) -> list[object]:
    numbers = (row.ours, row.baselines.get(FA4, 0.0))
    errors = [f"{number:.2e}" for number in numbers]
    pattern = f"{row.shape}, {row.checks['gradient']}"
    return [row.kernel, pattern, *errors, f"{row.ratio_to_best:.2f}", row.checks["specials"]]


if __name__ == "__main__":
    main()
