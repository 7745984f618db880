"""Hedgehog's attention with a window beside a copy of its bytes.

    python -m bench.hedgehog build DIR          build the kernel
    python -m bench.hedgehog run DIR --out OUT  on a GPU machine: rows of `linear-attention`
    python -m bench.hedgehog merge FILES        into bench/results/linear_attention.json

16 sequences with 16 heads of 128 channels. No library that runs has this function;
ThunderKittens' times are those of an earlier run on the same kind of GPU. Calls are captured into
graphs and interleaved, with a second copy of ours as A/A control; results are judged in float64,
chunk after chunk, over 16384 rows too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from bench import kernel_bench as kb
from bench.evidence import Evidence, write_rows
from bench.kernel_bench import CONTROL, COPY, OURS
from bench.linear_attention import BATCH, HEADS, LONG, RESULTS, WRONG
from warploom.autosched.schedules import compiled
from warploom.codegen.compile.build import Built
from warploom.kernels.recurrent.hedgehog import FEATURES, HedgehogConfig, default_policy, hedgehog
from warploom.kernels.recurrent.task import CHUNK

D = 128
KITTENS = {1024: 0.228, 4096: 0.894}  # milliseconds
CASES = ("hedgehog d128",)


def inputs(torch: Any, batch: int, heads: int, rows: int) -> dict[str, Any]:
    """Random tensors."""
    made = {
        name: torch.randn(batch, rows, heads, D, device="cuda").bfloat16()
        for name in ("q", "k", "v")
    }
    made["o"] = torch.full_like(made["v"], math.nan)
    for name in ("q_map", "k_map"):
        made[name] = (torch.randn(heads, D, FEATURES, device="cuda") / D**0.5).bfloat16()
    return made | {x: torch.rand(heads, device="cuda") for x in ("window", "linear")}


def features(torch: Any, x: Any, into: Any) -> Any:
    """[..., heads, 2 f] of x: [..., heads, d]."""
    mapped = torch.einsum("...hd,hdf->...hf", x, into)
    return torch.cat([mapped.softmax(-1), (-mapped).softmax(-1)], -1)


def exact(torch: Any, given: dict[str, Any], scale: float) -> Any:
    """The result in float64, a chunk at a time."""
    wide = {name: one.double() for name, one in given.items()}
    q, k, v = (wide[name] for name in "qkv")
    batch, rows, heads, _ = q.shape
    ours, theirs = features(torch, q, wide["q_map"]), features(torch, k, wide["k_map"])
    state = torch.zeros(batch, heads, 2 * FEATURES, D, device="cuda", dtype=torch.float64)
    total = torch.zeros(batch, heads, 2 * FEATURES, device="cuda", dtype=torch.float64)
    out = torch.empty_like(q)
    for first in range(0, rows, CHUNK):
        now, seen = slice(first, first + CHUNK), slice(max(0, first - CHUNK), first + CHUNK)
        m = torch.arange(rows, device="cuda")[now, None]
        n = torch.arange(rows, device="cuda")[None, seen]
        s = torch.einsum("bmhd,bnhd->bhmn", q[:, now], k[:, seen]) * scale
        s = s.masked_fill(n > m, -torch.inf)
        near = wide["window"][:, None, None] * torch.exp(s - s.amax(-1, keepdim=True))
        phi = wide["linear"][:, None] * ours[:, now]
        top = torch.einsum("bhmn,bnhe->bmhe", near, v[:, seen])
        top += torch.einsum("bmhf,bhfe->bmhe", phi, state)
        whole = near.sum(-1).transpose(1, 2) + torch.einsum("bmhf,bhf->bmh", phi, total)
        out[:, now] = top / whole[..., None]
        if first:
            old = slice(first - CHUNK, first)
            state += torch.einsum("bnhf,bnhe->bhfe", theirs[:, old], v[:, old])
            total += theirs[:, old].sum(1)
    return out


def measured(torch: Any, kernel: Any, compiler: str, rounds: int) -> Iterator[Evidence]:
    """The rows, by length."""
    scale, wrong = D**-0.5, dict[str, float]()

    def launch(given: dict[str, Any]) -> None:
        kernel(given, {"scale": scale}, int(torch.cuda.current_stream().cuda_stream))

    for rows in (987, LONG):
        given = inputs(torch, 1, 2, rows)
        launch(given)
        right = exact(torch, given, scale)
        far = float((given["o"].double() - right).norm() / right.norm())
        wrong[f"error {rows} rows"] = round(far, 6)
    for rows, kittens in KITTENS.items():
        given = inputs(torch, BATCH, HEADS, rows)
        moved = sum(one.numel() * one.element_size() for one in given.values())
        half = torch.ones(moved // 4, dtype=torch.bfloat16, device="cuda")
        other = torch.empty_like(half)
        ours = partial(launch, given)
        calls = {OURS: ours, CONTROL: ours, COPY: partial(torch.neg, half, out=other)}
        yield kb.row_of_times(
            kb.interleave(calls, rounds),
            COPY,
            {
                "numerics": "pass" if all(x < WRONG for x in wrong.values()) else "fail",
                **wrong,
                "ThunderKittens ms, earlier run": kittens,
            },
            claim="linear-attention",
            kernel=CASES[0],
            shape=f"{BATCH}x{HEADS}x{rows}, q and k of {HEADS}",
            compiler=compiler,
        )


def main() -> None:
    """Command line."""
    args = kb.modes(__doc__, CASES)
    if args.what == "merge":
        kb.merge(RESULTS, args.where)
        return
    (folder,) = args.where
    if args.what == "build":
        built = compiled(hedgehog(HedgehogConfig(D)), default_policy())
        built.write(folder / kb.slug(CASES[0]))
        return
    torch = kb.load_torch()
    torch.manual_seed(0)
    built = Built.read(folder / kb.slug(CASES[0]))
    found: list[Evidence] = []
    for row in measured(torch, built.kernel(), built.resources.compiler, args.rounds):
        found.append(row)
        write_rows(args.out / "hedgehog.json", found)
        print(row.kernel, row.shape, round(row.ours, 4), row.checks, flush=True)


if __name__ == "__main__":
    main()
