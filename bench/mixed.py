"""Claim `mixed`: chunks of prompts and single new tokens in one launch, in microseconds.

    python -m bench.mixed build DIR               our kernels into the cache DIR, without a GPU
    python -m bench.mixed run DIR --out OUT       on the GPU machine
    python -m bench.mixed merge FILES             into bench/results/mixed.json

A case `TOKENSxKEYS+CHUNKxKEYS HEADS/KV_HEADS` has so many sequences of one new token over so many
keys each, and one of a chunk of new tokens, the last of its keys, in pages of 16 tokens. Beside
`attention_mixed` stand `attention_with_kvcache` in two calls, one for the tokens and one for the
chunk (which somebody must have sorted), FlashInfer on the same pages, and torch's packed
attention over the same keys without pages. The list of tasks is made before, as all layers of a
step share it, and so is FlashInfer's plan; `checks.listed` is the time of a call that makes its
list itself.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from bench import flashinfer, sitting
from bench import kernel_bench as kb
from bench.attention_baselines import usable
from bench.evidence import Evidence, read_rows, write_rows
from warploom.autosched.schedules import compiled
from warploom.integrations.torch_program import RUNS, collecting
from warploom.kernels.attention.decode import DecodeConfig, decode, decode_policy
from warploom.kernels.attention.decode_plan import mixed_tile
from warploom.runtime.stats import median_interval

RESULTS = Path(__file__).parent / "results" / "mixed.json"
CASES = (
    "32x4096+512x4096 32/8",
    "64x4096+512x512 32/8",
    "8x16384+2048x8192 32/8",
    "64x1024+0x0 32/8",
)
PAGE, D = 16, 128
ROUNDS, WRONG = 9, 6e-3
LISTED = "warploom with its list"
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """The sizes of a batch."""

    name: str

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sequences of one token and their keys; tokens of the chunk and its keys; heads."""
        return tuple(map(int, re.findall(r"\d+", self.name)))

    @property
    def counts(self) -> list[int]:
        """New tokens of each sequence."""
        return [1] * self.sizes[0] + [self.sizes[2]] * (self.sizes[2] > 0)

    @property
    def lengths(self) -> list[int]:
        """Keys of each sequence."""
        return [self.sizes[1]] * self.sizes[0] + [self.sizes[3]] * (self.sizes[2] > 0)


def operands(torch: Any, case: Case, device: str) -> dict[str, Any]:
    """Tensors of a case: paged caches, and the same keys behind one another."""
    *_, heads, kv_heads = case.sizes
    counts, lengths = case.counts, case.lengths
    columns = max(lengths) // PAGE
    torch.manual_seed(0)
    pages = len(counts) * columns
    table = torch.randperm(pages, device=device).view(len(counts), columns).int()
    one: dict[str, Any] = {"table": table}
    for name in "kv":
        cache = torch.randn(pages, PAGE, kv_heads, D, device=device).bfloat16()
        one[name] = cache
        own = [cache[row.long()].flatten(0, 1)[:n] for row, n in zip(table, lengths, strict=True)]
        one[f"packed {name}"] = torch.cat(own)
    one["q"] = torch.randn(sum(counts), heads, D, device=device).bfloat16()
    for name, numbers in (("bounds", counts), ("key bounds", lengths)):
        ends = torch.tensor([0, *numbers], dtype=torch.int32, device=device)
        one[name] = ends.cumsum(0).int()
    one["lengths"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    return one


def calls(torch: Any, case: Case, one: dict[str, Any]) -> dict[str, Call]:
    """Ours in one call and in two, and libraries: FlashInfer on the pages, the others without."""
    mixed = RUNS["warploom::attention_mixed"]
    cached = importlib.import_module("warploom.integrations.torch_decode").attention_with_kvcache
    few, _, chunk, *_, heads, kv_heads = case.sizes
    counts = case.counts
    q, k, v, table, lengths = (one[name] for name in ("q", "k", "v", "table", "lengths"))

    batch = q, k, v, lengths, table, one["bounds"]
    module = importlib.import_module("warploom.integrations.torch_mixed")
    tasks = module.get_scheduler_metadata(one["bounds"], lengths, sum(counts), heads, kv_heads)

    def together() -> Any:
        return mixed(*batch, None, None, 0.0, tasks)

    def listed() -> Any:
        return mixed(*batch)

    def apart() -> Any:
        tokens = cached(q[:few, None], k, v, lengths[:few], table[:few])
        if not chunk:
            return tokens[:, 0]
        rest = cached(q[None, few:], k, v, lengths[few:], table[few:], causal=True)
        return torch.cat([tokens[:, 0], rest[0]])

    most = max(counts), max(case.lengths)
    bounds = one["bounds"], one["key bounds"]

    def torchs() -> Any:
        varlen: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        grouped = {"enable_gqa": True} if "enable_gqa" in signature(varlen).parameters else {}
        packed = q, one["packed k"], one["packed v"]
        return varlen(*packed, *bounds, *most, window_size=(-1, 0), **grouped)

    made: list[Call] = []

    def inferred() -> Any:
        if not made:
            planned = (table, counts, case.lengths, True)
            made.append(flashinfer.paged(torch, q, k, v, *planned))
        return made[0]()

    libraries = {"torch varlen": torchs, flashinfer.NAME: inferred}
    return {"warploom": together, LISTED: listed, "two calls": apart, **libraries}


def expected(torch: Any, case: Case, one: dict[str, Any]) -> Any:
    """The last sequence's result, of the first key head, in float64."""
    *_, heads, kv_heads = case.sizes
    count, length = case.counts[-1], case.lengths[-1]
    q = one["q"][-count:, : heads // kv_heads].double()
    k, v = (one[f"packed {x}"][-length:, 0].double() for x in "kv")
    scores = torch.einsum("qgd,kd->gqk", q, k) * D**-0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
    scores = scores.masked_fill(hidden.triu(length - count + 1), -torch.inf)
    return torch.einsum("gqk,kd->qgd", torch.softmax(scores, -1), v)


def config_of(case: Case) -> DecodeConfig:
    """The kernel that `attention_mixed` takes."""
    *_, heads, kv_heads = case.sizes
    rows = sum(case.counts) * heads // kv_heads / len(case.counts)
    return DecodeConfig(
        group=heads // kv_heads, causal=True, page=PAGE, split=False, mixed=True,
        tile=mixed_tile(rows),
    )  # fmt: skip


def measured(torch: Any, case: Case) -> Evidence:
    """One case, checked and timed."""
    one = operands(torch, case, "cuda")
    want = expected(torch, case, one)
    every, refused = usable(torch, calls(torch, case, one))
    group = case.sizes[4] // case.sizes[5]

    def error(call: Call) -> float:
        part = call()[-case.counts[-1] :, :group].double()
        return float((part - want).norm() / want.norm())

    errors = {name: error(call) for name, call in every.items()}
    right = {name: call for name, call in every.items() if errors[name] < WRONG}
    gpu = sitting.Gpu(torch, right)
    bases = [name for name in gpu.names if name not in ("warploom", LISTED)]
    gpu.again(bases[0])
    bursts = sitting.measure(gpu, ROUNDS, False, 0)["bursts"]
    samples: dict[str, list[float]] = {name: found["ms"] for name, found in bursts.items()}
    times = {name: 1e3 * statistics.median(ms) for name, ms in samples.items()}
    best = min(bases, key=lambda name: times[name])
    middle, *interval = median_interval(samples["warploom"], samples[best])
    _, *same = median_interval(samples[bases[0]], samples[sitting.CONTROL])
    config = config_of(case)
    return Evidence(
        claim="mixed",
        kernel="mixed batch",
        shape=case.name,
        dtype="bf16",
        **kb.provenance(),
        compiler=compiled(decode(config), decode_policy(config)).resources.compiler,
        unit="us",
        better="lower",
        ours=times["warploom"],
        baselines={name: times[name] for name in bases},
        ratio_to_best=middle,
        ci95=(interval[0], interval[1]),
        control=(same[0], same[1]),
        samples=ROUNDS,
        checks={
            "numerics": "pass" if errors["warploom"] < WRONG else "fail",
            "errors": {name: float(f"{found:.2g}") for name, found in errors.items()},
            "listed": round(times[LISTED], 2),
            "refused": refused | gpu.refused,
        },
    )


def build_all(cases: tuple[Case, ...]) -> None:
    """Compile what the cases need."""
    torch = importlib.import_module("torch")
    for module in ("torch_mixed", "torch_decode"):
        importlib.import_module(f"warploom.integrations.{module}")
    for case in cases:
        few = case.sizes[0]
        one = operands(torch, case, "meta")
        with collecting() as found:
            calls(torch, case, one)["warploom"]()
            run = RUNS["warploom::attention_with_kvcache"]
            caches = one["k"], one["v"]
            run(one["q"][:few, None], *caches, one["lengths"][:few], one["table"][:few])
            if case.sizes[2]:
                rest = one["lengths"][few:], one["table"][few:]
                run(one["q"][None, few:], *caches, *rest, None, True)
        print(case.name, len(found), "kernels", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("build", "run", "merge"))
    parser.add_argument("paths", nargs="*", type=Path, help="the cache, or files of rows to merge")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after them")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    args = parser.parse_args()
    cases = tuple(map(Case, CASES))
    if args.what == "merge":
        old = read_rows(RESULTS) if RESULTS.exists() else []
        known = {r.shape: r for r in (*old, *(r for file in args.paths for r in read_rows(file)))}
        write_rows(RESULTS, sorted(known.values(), key=lambda row: CASES.index(row.shape)))
        return
    if args.paths:
        os.environ["WARPLOOM_CACHE"] = str(args.paths[0].resolve())
    if args.what == "build":
        build_all(cases)
        return
    importlib.import_module("warploom.integrations.torch_mixed")
    kb.measure(cases, measured, args.seconds, args.out / "mixed.json")


if __name__ == "__main__":
    main()
