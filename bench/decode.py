"""Claim `decode`: attention of a few new tokens over cached keys, in bytes of keys and values.

    python -m bench.decode build DIR               our kernels into the cache DIR, without a GPU
    python -m bench.decode run DIR --out OUT       on the GPU machine
    python -m bench.decode merge FILES             into bench/results, latent attention by itself

A case is `KIND BATCHxKEYS HEADS/KV_HEADS dHEAD_SIZE`, with `qN` for N new tokens. `dense` caches
are `[batch, keys, kv_heads, d]`, `pageN` has pages of N tokens in random order, `ragged` lengths
from an eighth of the keys to all. Operands alternate that are larger than L2 together, so that a
call finds nothing of its keys there.
A rate counts the keys and values that the lengths say, once; `checks.floor` is its part of the rate
at which this GPU copies. Libraries that take no pages or no lengths get the same keys densely, so
that they have less to do. Of `e4m3` cases our cache has 8 bits and theirs the same values in 16,
but for a second kernel of FlashInfer's in latent attention, whose cache has 8; such rows are times.
`dense` in the checks of a paged case is the time of ours on these over its own. With `sinks` each
head has a score without a value, as FlashAttention-4 takes them. Cases of heads of 576 are latent
attention (`attention_mla`), one key head whose first 512 columns are the values; they are times as
well, and `checks.floor` is the part of the time that their bytes at the copy rate or their
operations at the tensor cores' rate (at the boost clock) take, whichever is longer. FlashMLA's
figures are published ones, of another GPU, and stand in `checks` beside them.
Calls follow one another in a stream. Ours begin while the kernel before them ends, here one of the
call before, and ask L2 for their first keys meanwhile (`LaunchPlan.fetch_early`).
Bursts in shuffled rounds, with a second copy of the first library's as A/A control.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import os
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import flashinfer, sitting
from bench import kernel_bench as kb
from bench.attention_baselines import usable
from bench.attention_cases import FA4
from bench.evidence import Evidence, read_rows, write_rows
from bench.sitting import CYCLE_FLOPS
from warploom import machine
from warploom.autosched.schedules import compiled
from warploom.codegen.compile.build import build
from warploom.errors import InputError
from warploom.kernels.attention.combine import combine, combine_schedule
from warploom.kernels.attention.decode import LATENT as LATENT_COLUMNS
from warploom.kernels.attention.decode import DecodeConfig, decode, decode_policy
from warploom.kernels.attention.decode_plan import Plan, planned
from warploom.runtime.stats import median_interval
from warploom.tile import BF16, E4M3

RESULTS = Path(__file__).parent / "results" / "decode.json"
LATENT_RESULTS = RESULTS.with_name("latent_decode.json")
MACHINE = machine.load("h200")
BEYOND_L2 = 6e8  # bytes of operands that alternate
MOST_COPIES = 48
ANY_PAGE = 64  # tokens of the pages that a dense cache is given as
ROUNDS = 9
WRONG, WRONG_NARROW = 6e-3, 0.06  # relative error of a result that fails, of 8 bits
FORM = r"(dense|ragged|page\d+) (\d+)x(\d+) (\d+)/(\d+) d(\d+)(?: q(\d+))?(?: e4m3| sinks)?"
LONG = (1024, 4096, 16384, 131072)
FIRST = (  # what decides most, where the time is short
    *(f"{kind} 16x4096 32/8 d128" for kind in ("dense", "page16")),
    *(f"{kind} 4x4096 32/8 d128" for kind in ("dense", "page64")),
    *(f"dense 1x{n} 32/8 d128" for n in LONG),
    *(f"{kind} 16x16384 32/8 d128" for kind in ("dense", "ragged")),
    *(f"dense 64x{n} 32/8 d128" for n in (4096, 1024)),
)
OTHER = (
    *(f"dense 1x{n} 64/8 d128" for n in LONG),
    *(f"dense {b}x{n} 32/8 d128" for b, n in itertools.product((4, 16, 64), (1024, 4096, 16384))),
    *(f"dense {b}x4096 64/8 d128" for b in (4, 16, 64)),
    *(f"page{page} {b}x4096 32/8 d128" for page in (16, 64, 256) for b in (1, 4, 16, 64)),
    *(f"page{page} 16x16384 32/8 d128" for page in (16, 64)),
    "dense 16x4096 32/8 d64",
    "dense 16x4096 32/8 d128 q4",
    "dense 4x16384 64/8 d128 q8",
)
NARROW = (  # caches of 8 bits
    *(f"{kind} 16x4096 32/8 d128 e4m3" for kind in ("dense", "page16")),
    *(f"dense {b}x{n} 32/8 d128 e4m3" for b, n in ((1, 16384), (16, 16384), (64, 4096))),
    "ragged 16x16384 32/8 d128 e4m3",
)
LATENT = (
    *(f"{kind} 128x4096 128/1 d576" for kind in ("dense", "page64", "ragged")),
    *(f"page64 {b}x{n} 128/1 d576" for b, n in ((1, 4096), (1, 32768), (16, 16384), (32, 4096))),
    *(f"page64 128x4096 {heads}/1 d576" for heads in (16, 64)),
    "page64 128x4096 128/1 d576 q2",
    *(f"page64 128x4096 {heads}/1 d576 e4m3" for heads in (128, 16)),
)
SINKS = tuple(f"dense {b}x4096 32/8 d128 sinks" for b in (1, 16))
CASES = tuple(dict.fromkeys(FIRST + LATENT + NARROW + SINKS + OTHER))
# By FlashMLA's README, of its dense bf16 kernel on an H800: not to be put in ratios.
PUBLISHED = "FlashMLA 660 TFLOP/s compute-bound, 3 TB/s memory-bound (H800)"
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A kind of cache and the sizes."""

    name: str

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """Batch, keys, heads, key heads, head size, new tokens."""
        found = re.fullmatch(FORM, self.name)
        if found is None:
            raise InputError(f"case {self.name!r}: expected {FORM}")
        _, *numbers = found.groups()
        batch, keys, heads, kv_heads, d, queries = (int(one or 1) for one in numbers)
        return batch, keys, heads, kv_heads, d, queries

    @property
    def page(self) -> int | None:
        """Tokens of a page."""
        kind = self.name.split()[0]
        return int(kind.removeprefix("page")) if kind.startswith("page") else None

    @property
    def narrow(self) -> bool:
        """Whether our caches and queries have 8 bits; libraries get the same values in 16."""
        return self.name.endswith(" e4m3")

    @property
    def sinks(self) -> bool:
        """Whether each head has a score without a value."""
        return self.name.endswith(" sinks")

    @property
    def columns(self) -> int:
        """Columns of values."""
        d = self.sizes[4]
        return LATENT_COLUMNS.get(d, d)

    @property
    def latent(self) -> bool:
        """Whether values are columns of the keys."""
        return self.columns < self.sizes[4]

    @property
    def caches(self) -> str:
        """The arrays of a cache."""
        return "k" if self.latent else "kv"

    @property
    def config(self) -> DecodeConfig:
        """The kernels' configuration."""
        _, _, heads, kv_heads, d, queries = self.sizes
        causal = queries > 1
        return DecodeConfig(
            dtype=E4M3 if self.narrow else BF16,
            head_dim=d,
            value_dim=self.columns if self.latent else None,
            group=heads // kv_heads,
            causal=causal,
            page=self.page,
            sinks=self.sinks,
        )


def plan_of(config: DecodeConfig, case: Case) -> Plan:
    """What the operator runs for a case's sizes under a configuration."""
    batch, keys, _, kv_heads, _, queries = case.sizes
    return planned(config, batch * kv_heads, queries, keys, MACHINE.integer("sm.count"))


def build_all(cases: tuple[Case, ...]) -> None:
    """Compile what the cases need."""
    for case in cases:
        for own in {case.config, replace(case.config, page=None)}:
            plan = plan_of(own, case)
            compiled(decode(plan.config), decode_policy(plan.config))
            if plan.config.split:
                build(combine(plan.config, plan.room), combine_schedule(plan.config, plan.room))
            print(case.name, plan, flush=True)


def operands(torch: Any, case: Case) -> list[dict[str, Any]]:
    """Sets of operands; what lies beyond a length is large."""
    batch, keys, heads, kv_heads, d, queries = case.sizes
    size = 2 * len(case.caches) * batch * keys * kv_heads * d
    found: list[dict[str, Any]] = []
    for number in range(max(1, min(MOST_COPIES, int(BEYOND_L2 / size)))):
        torch.manual_seed(number)
        kv = [drawn(torch, case, batch, keys, kv_heads, d) for _ in case.caches]
        one = dict(zip(case.caches, kv, strict=True))
        one["q"] = drawn(torch, case, batch, queries, heads, d)
        lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
        if case.name.startswith("ragged"):
            lengths = torch.randint(keys // 8, keys + 1, (batch,), device="cuda").int()
            for b, length in enumerate(lengths.tolist()):
                for cache in kv:
                    cache[b, length:] = 400 if case.narrow else 1e4  # 8 bits have no more
        one["lengths"] = lengths
        if case.sinks:
            one["sinks"] = torch.randn(heads, device="cuda").bfloat16().float()
        if case.page:
            count = batch * keys // case.page
            table = torch.randperm(count, device="cuda").int()
            one["table"] = table.view(batch, -1)
            for name, cache in zip(case.caches, kv, strict=True):
                pages = torch.empty((count, case.page, kv_heads, d), device="cuda").bfloat16()
                pages[table.long()] = cache.view(pages.shape)
                one[f"pages of {name}"] = pages
        if case.narrow:
            ones = torch.ones((batch, kv_heads), device="cuda")
            own = [name for name in one if name not in ("lengths", "table")]
            one |= {f"{name} e4m3": one[name].to(torch.float8_e4m3fn) for name in own}
            names = ("q", *case.caches)
            one["factors"] = {f"{name}_descale": ones for name in names}
        found.append(one)
    return found


def drawn(torch: Any, case: Case, *shape: int) -> Any:
    """Random numbers of bf16, which 8 bits hold where the case has 8."""
    made = torch.randn(shape, device="cuda")
    return (made.to(torch.float8_e4m3fn) if case.narrow else made).bfloat16()


def own_calls(case: Case, sets: list[dict[str, Any]]) -> dict[str, Call]:
    """The operator on the case's caches and, where these are paged, on dense ones."""
    module, name = ("torch_mla", "mla") if case.latent else ("torch_decode", "with_kvcache")
    operator = getattr(
        importlib.import_module(f"warploom.integrations.{module}"), f"attention_{name}"
    )
    causal, kind = case.config.causal, " e4m3" if case.narrow else ""

    def made(prefix: str, table: str) -> Call:
        turn = itertools.cycle(sets)

        def call() -> Any:
            one = next(turn)
            names = ("q", *(f"{prefix}{x}" for x in case.caches))
            tensors = [one[f"{name}{kind}"] for name in names]
            rest = one.get("factors", {})
            rest |= {"sinks": one["sinks"]} if case.sinks else {}
            return operator(*tensors, one["lengths"], one.get(table), causal=causal, **rest)

        return call

    if case.page is None:
        return {"warploom": made("", "none")}
    return {"warploom": made("pages of ", "table"), "dense": made("", "none")}


def latent_calls(torch: Any, case: Case, sets: list[dict[str, Any]]) -> dict[str, Call]:
    """torch's attention, by which back end it chooses, and its products and softmax, with heads as
    rows of the one key head; FlashInfer."""
    _, keys, heads, _, d, queries = case.sizes

    def hidden(one: dict[str, Any]) -> Any:
        at = torch.arange(keys, device="cuda") - one["lengths"][:, None, None]
        row = torch.arange(queries, device="cuda").repeat_interleave(heads)[:, None]
        return (at >= 0) | ((at + queries > row) if case.config.causal else at.new_zeros(()).bool())

    masked = case.config.causal or case.name.startswith("ragged")
    masks = [hidden(one) if masked else None for one in sets]

    def made(attend: Callable[[Any, Any, Any], Any]) -> Call:
        turn = itertools.cycle(zip(sets, masks, strict=True))

        def call() -> Any:
            one, mask = next(turn)
            out = attend(one["q"].flatten(1, 2), one["k"][:, :, 0], mask)
            return out.unflatten(1, (queries, heads))

        return call

    def attention(q: Any, k: Any, mask: Any) -> Any:
        seen = None if mask is None else ~mask[:, None]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q[:, None], k[:, None], k[:, None, :, : case.columns], seen)[:, 0]

    def products(q: Any, k: Any, mask: Any) -> Any:
        scores = torch.bmm(q, k.mT) * d**-0.5
        scores = scores if mask is None else scores.masked_fill(mask, -torch.inf)
        return torch.bmm(torch.softmax(scores, -1), k[..., : case.columns])

    found = {"torch SDPA": made(attention), "torch products": made(products)}
    found |= in_pages(torch, case, sets)
    return found | (in_pages(torch, case, sets, " e4m3") if case.narrow else {})


def in_pages(torch: Any, case: Case, sets: list[dict[str, Any]], kind: str = "") -> dict[str, Call]:
    """FlashInfer on the case's pages, or on the dense caches as pages in order; those of a `kind`
    of elements."""
    batch, keys, _, _, _, queries = case.sizes
    made: dict[int, Call] = {}
    turn = itertools.cycle(range(len(sets)))

    def planned_for(one: dict[str, Any]) -> Call:
        names = [x if case.page is None else f"pages of {x}" for x in case.caches]
        caches, table = [one[f"{name}{kind}"] for name in names], one.get("table")
        if table is None:
            caches = [c.flatten(0, 1).unflatten(0, (-1, ANY_PAGE)) for c in caches]
            table = torch.arange(batch * keys // ANY_PAGE, device="cuda").view(batch, -1)
        rest = (table, [queries] * batch, one["lengths"].tolist(), case.config.causal)
        q = one["q"].flatten(0, 1)
        if case.latent:
            return flashinfer.latent(torch, q, caches[0][:, :, 0], *rest)
        return flashinfer.paged(torch, q, caches[0], caches[1], *rest)

    def call() -> Any:
        number = next(turn)
        if number not in made:
            made[number] = planned_for(sets[number])
        return made[number]().unflatten(0, (batch, queries))

    return {f"{flashinfer.NAME}{kind}": call}


def library_calls(torch: Any, case: Case, sets: list[dict[str, Any]]) -> dict[str, Call]:
    """torch's attention by cuDNN and FlashAttention-2, FlashAttention-4 and FlashInfer."""
    if case.latent:
        return latent_calls(torch, case, sets)
    nn, causal = torch.nn.attention, case.config.causal
    diagonal = importlib.import_module("torch.nn.attention.bias")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    ragged = case.name.startswith("ragged")
    keys = case.sizes[1]

    def masked(one: dict[str, Any]) -> Any:
        at = torch.arange(keys, device="cuda")
        return (at < one["lengths"][:, None])[:, None, None]

    masks = [masked(one) if ragged else None for one in sets]

    def attention(backend: Any) -> Call:
        turn = itertools.cycle(zip(sets, masks, strict=True))

        def call() -> Any:
            one, mask = next(turn)
            q, k, v = (one[name].transpose(1, 2) for name in "qkv")
            bias = diagonal.causal_lower_right(q.shape[2], keys) if causal else mask
            with nn.sdpa_kernel(backend):
                return sdpa(q, k, v, bias, enable_gqa=True).transpose(1, 2)

        return call

    def four() -> Call:
        turn = itertools.cycle(sets)

        def call() -> Any:
            module: Any = importlib.import_module("flash_attn.cute")
            one = next(turn)
            qkv = [one[name] for name in "qkv"]
            rest = {"seqused_k": one["lengths"]} if ragged else {}
            rest |= {"learnable_sink": one["sinks"].bfloat16()} if case.sinks else {}
            function = module.flash_attn_varlen_func if ragged else module.flash_attn_func
            out = function(*qkv, causal=causal, **rest)
            return out if torch.is_tensor(out) else out[0]

        return call

    if case.sinks:
        return {FA4: four()}
    backends = nn.SDPBackend
    return {
        "cuDNN": attention(backends.CUDNN_ATTENTION),
        "FlashAttention-2": attention(backends.FLASH_ATTENTION),
        FA4: four(),
        **in_pages(torch, case, sets),
    }


def expected(torch: Any, case: Case, one: Mapping[str, Any]) -> Any:
    """The result of the last sequence's first key head in float64."""
    config, length = case.config, int(one["lengths"][-1])
    q = one["q"][-1, :, : config.group].double()
    k, v = (one[name][-1, :length, 0].double() for name in (case.caches[0], case.caches[-1]))
    v = v[:, : case.columns]
    scores = torch.einsum("qgd,kd->gqk", q, k) * config.factor
    if config.causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(hidden.triu(length - len(q) + 1), -torch.inf)
    if case.sinks:
        sinks = one["sinks"][: config.group].double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, sinks], -1)
    return torch.einsum("gqk,kd->qgd", torch.softmax(scores, -1)[..., : len(k)], v)


def error_of(case: Case, got: Any, want: Any) -> float:
    """Relative error of what `expected` gives."""
    part = got[-1, :, : case.config.group].double()
    return float((part - want).norm() / want.norm())


def latent_checks(case: Case, entries: int, size: int, ms: float) -> dict[str, Any]:
    """What binds a case of latent attention, and how far from it we are."""
    _, _, heads, _, d, queries = case.sizes
    flops = 2 * entries * heads * queries * (d + case.columns)
    rate = CYCLE_FLOPS[case.config.dtype.name] * MACHINE.integer("sm.count")
    peak = rate * 1e6 * MACHINE.value("clock.boost")
    least = {
        "memory-bound": size / MACHINE.value("dram.copy_bandwidth"),
        "compute-bound": flops / peak,
    }
    binds = max(least, key=lambda name: least[name])
    return {
        "floor": round(least[binds] * 1e3 / ms, 3),
        "binds": binds,
        "TFLOP/s": round(flops / ms * 1e-9),
        "TB/s": round(size / ms * 1e-9, 2),
        "published": PUBLISHED,
    }


def measured(torch: Any, case: Case) -> Evidence:
    """One case, checked and timed."""
    gc.collect()
    torch.cuda.empty_cache()
    sets = operands(torch, case)
    want = expected(torch, case, sets[0])
    ours = own_calls(case, sets)
    libraries, refused = usable(torch, library_calls(torch, case, sets))
    # The first call of all took the first operands; so does the one after a whole turn.
    errors = {name: error_of(case, call(), want) for name, call in ours.items()}
    for call in libraries.values():
        for _ in sets[1:]:
            call()
    errors |= {name: error_of(case, call(), want) for name, call in libraries.items()}
    right = {name: call for name, call in libraries.items() if errors[name] < WRONG}
    gpu = sitting.Gpu(torch, {**ours, **right})
    control = next(name for name in right if name in gpu.names)
    gpu.again(control)
    bursts = sitting.measure(gpu, ROUNDS, False, 0)["bursts"]
    samples: dict[str, list[float]] = {name: one["ms"] for name, one in bursts.items()}
    entries = int(sets[0]["lengths"].sum()) * case.sizes[3]
    size = len(case.caches) * entries * case.sizes[4] * case.config.dtype.bytes
    timed = case.narrow or case.latent
    times = {name: statistics.median(ms) for name, ms in samples.items()}
    best = min((name for name in right if name in times), key=lambda name: times[name])
    rate = size / times["warploom"] * 1e-9
    # Libraries read twice as many bytes of the same keys where ours have 8 bits.
    shown = {n: 1e3 * ms if timed else size / ms * 1e-9 for n, ms in times.items()}
    middle, *interval = median_interval(samples["warploom"], samples[best])
    _, *same = median_interval(samples[control], samples[sitting.CONTROL])
    plan = plan_of(case.config, case).config
    limit = WRONG_NARROW if case.narrow else WRONG
    checks = {
        "numerics": "pass" if errors["warploom"] < limit else "fail",
        "errors": {name: float(f"{error:.2g}") for name, error in errors.items()},
        "floor": round(rate * 1e12 / MACHINE.value("dram.copy_bandwidth"), 3),
        "us": round(1e3 * statistics.median(samples["warploom"]), 2),
        "refused": refused | gpu.refused,
    }
    if case.latent:
        checks |= latent_checks(case, entries, size, times["warploom"])
    if "dense" in samples:
        checks["dense"] = round(median_interval(samples["warploom"], samples["dense"])[0], 3)
    return Evidence(
        claim="decode",
        kernel="latent decode" if case.latent else "decode",
        shape=case.name,
        dtype=case.config.dtype.name,
        **kb.provenance(),
        compiler=compiled(decode(plan), decode_policy(plan)).resources.compiler,
        unit="us" if timed else "TB/s",
        better="lower" if timed else "higher",
        ours=shown["warploom"],
        baselines={name: shown[name] for name in right if name in shown},
        ratio_to_best=middle,
        ci95=(interval[0], interval[1]),
        control=(same[0], same[1]),
        samples=ROUNDS,
        checks=checks,
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("build", "run", "merge"))
    parser.add_argument("paths", nargs="*", type=Path, help="the cache, or files of rows to merge")
    parser.add_argument("--only", default="", help="cases of these names, or that contain one")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after them")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    args = parser.parse_args()
    if args.what == "merge":
        fresh = [row for file in args.paths for row in read_rows(file)]
        for target in (RESULTS, LATENT_RESULTS):
            old = read_rows(target) if target.exists() else []
            own = [r for r in fresh if Case(r.shape).latent == (target == LATENT_RESULTS)]
            known = {row.shape: row for row in (*old, *own)}
            if not known:
                continue
            write_rows(target, sorted(known.values(), key=lambda row: CASES.index(row.shape)))
        return
    if args.paths:
        os.environ["WARPLOOM_CACHE"] = str(args.paths[0].resolve())
    asked = args.only.split(",")  # whole names, or parts of them
    chosen = tuple(
        Case(n) for n in CASES if n in asked or any(one in n for one in asked if one not in CASES)
    )
    if args.what == "build":
        build_all(chosen)
    else:
        kb.measure(chosen, measured, args.seconds, args.out / "decode.json")


if __name__ == "__main__":
    main()
