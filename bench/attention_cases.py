"""What `bench/attention.py` builds, checks and times: variants, operands, float64 references."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.attention.reference import task_table
from warploom.kernels.attention.variants import ATTENTION
from warploom.tile import E4M3, FP16
from warploom.tile.typing import QUAD_PLACES, quad_places

# name -> (config, its schedule, what the compiler may do)
Variant = tuple[AttentionConfig, Callable[[AttentionConfig], KernelSchedule], tuple[str, ...]]


# What a variant is without a decision that it was measured for: how much the decision is worth.
CHANGES = {  # orders
    "-rescaled-early": "overlapped-early",  # sums rescaled before the values come on top
    "-no-pingpong": "overlapped",
}


def _choice(name: str, **config: Any) -> Variant:
    found = next((end for end in CHANGES if name.endswith(end)), "")
    choice = ATTENTION.variants[name.removesuffix(found)]
    if found:
        choice = choice.having(name, order=CHANGES[found])
    return choice.config(AttentionConfig(**config)), choice.schedule, choice.allow


def _plain(config: AttentionConfig) -> KernelSchedule:
    return schedule_for(attention(config), Policy("multistage", LaunchPlan(split="rows"), groups=2))


TIMED: dict[str, tuple[str, ...]] = {
    "d128": (
        "128x128-prefetch-cooperative-split",
        "128x176-cooperative-split",
        "128x128-prefetch-cooperative-split-rescaled-early",
        "192x80-early-optimistic-split",
        "128x128-overlap-early-optimistic",
        "192x80-prefetch-early-optimistic-split",
        "128x128-pingpong-overlap-early-optimistic",
        "128x112-pingpong-overlap-early-optimistic",
        "128x128-pingpong-overlap-early-optimistic-panels2",
        "128x112-pingpong-overlap-early-optimistic-panels2",
    ),
    "d128 causal": (
        "128x128-dynamic16-cooperative",
        "192x128-serpentine1-serial",
        "192x128-serpentine1-serial-split",
        "192x80-serpentine1-early-optimistic-split",
        "128x128-dynamic16-overlap-early-optimistic",
        "192x80-dynamic16-overlap-early-optimistic",
        "128x128-dynamic16-overlap",
        "128x128-dynamic16-pingpong-overlap-early-optimistic",
        "128x128-raster4-pingpong-overlap-early-optimistic",
        "128x128-dynamic16-overlap-early-optimistic-panels2",
        "128x128-raster4-pingpong-overlap-early-optimistic-panels2",
        "128x128-raster4-pingpong-prefetch-early-optimistic",
    ),
    "d64": (
        "192x128-prefetch",
        "192x128-prefetch-rescaled-early",
        "192x128-prefetch-no-pingpong",
        "192x128-prefetch-optimistic-split",
        "192x128-prefetch-early-optimistic",
        "192x128-overlap-early-optimistic",
        "128x128-overlap-early-optimistic",
        "128x128-prefetch-early-optimistic",
        "128x64-two-per-sm-serial",
        "128x128-pingpong-overlap-early-optimistic",
        "128x112-pingpong-overlap-early-optimistic",
        "128x128-pingpong-overlap-early-optimistic-depth3",
    ),
    "d64 causal": (
        "128x64-two-per-sm-serial",
        "128x64-two-per-sm-prefetch-serial-depth3",
        "192x128-serpentine",
        "192x128-serpentine-early-optimistic",
        "128x128-dynamic16-overlap-early-optimistic",
        "128x128-dynamic16-pingpong-overlap-early-optimistic",
    ),
    "d96": (
        "128x128-prefetch-cooperative-split",
        "192x128-serial-split",
        "192x112-early-optimistic-split",
        "192x112-overlap-early-optimistic",
        "192x112-overlap-early-optimistic-panels2",
    ),
    "d96 causal": (
        "128x128-dynamic16-cooperative",
        "192x128-serpentine1-serial",
        "192x112-serpentine1-early-optimistic",
        "128x128-dynamic16-overlap-early-optimistic",
        "128x128-dynamic16-overlap-early-optimistic-panels2",
    ),
    "d256": (
        "128x64",
        "128x80-cooperative-split",
        "128x80-cooperative-split-lazy",
        "128x80-early-split-lazy",
        "128x80-direct-early-split-lazy",
    ),
    "d256 causal": ("128x64-dynamic16-cooperative", "128x80-dynamic16-split-lazy"),
    "fp8 d128": (
        "128x224-prefetch-cooperative",
        "128x128-overlap-early-optimistic",
        "128x128-prefetch-early-optimistic",
        "128x160-overlap-early-optimistic",
        "128x160-prefetch-early-optimistic",
    ),
    "fp8 d128 causal": (
        "128x128-dynamic16-overlap",
        "128x128-dynamic16-overlap-early-optimistic",
        "128x128-dynamic16-pingpong-overlap-early-optimistic",
        "128x160-dynamic16-overlap-early-optimistic",
    ),
    "fp8 d64": ("192x128-prefetch", "192x96-overlap-early-optimistic"),
    "fp8 d64 causal": (
        "128x128-dynamic16-overlap-early-optimistic",
        "128x192-dynamic16-overlap-early-optimistic",
    ),
    "fp8 d256": ("128x96-prefetch-early-optimistic",),
    "fp8 d256 causal": ("128x64-dynamic16-cooperative", "128x96-dynamic16-early-optimistic"),
    "packed d128 causal": (
        "128x128-dynamic16-cooperative",
        "128x128-dynamic16",
        "192x128-serpentine1-serial-split",
        "192x80-serpentine1-early-optimistic-split",
        "128x128-dynamic16-overlap",
        "128x128-dynamic16-overlap-early-optimistic",
        "192x80-dynamic16-overlap-early-optimistic",
    ),
    "packed d64 causal": (
        "128x128-dynamic16",
        "192x128-serpentine",
        "192x128-serpentine-early-optimistic",
    ),
    "window d128 causal": (
        "128x128-dynamic16-cooperative",
        "128x128-dynamic16",
        "192x80-serpentine1-early-optimistic-split",
        "128x128-dynamic16-overlap",
        "128x128-dynamic16-overlap-early-optimistic",
    ),
    "gqa d128 causal": (
        "128x128-dynamic16-cooperative",
        "192x128-serpentine1-serial-split",
        "192x80-serpentine1-early-optimistic-split",
        "192x80-dynamic16-overlap-early-optimistic",
    ),
}
WINDOW, GROUP = 1024, 4  # of the timed cases "window" and "gqa"


def _timed(kind: str) -> dict[str, Variant]:
    words = kind.split()
    config: dict[str, Any] = {
        "head_dim": int(next(w for w in words if w[0] == "d" and w[1:].isdigit())[1:]),
        "causal": "causal" in words,
        "packed": "packed" in words,
    }
    if "fp8" in words:
        config["dtype"] = E4M3
    if "window" in words:
        config["window"] = WINDOW
    if "gqa" in words:
        config["group"] = GROUP
    return {f"{kind} {n}": _choice(n, **config) for n in TIMED[kind]}


VARIANTS: dict[str, Variant] = {
    **{name: variant for kind in TIMED for name, variant in _timed(kind).items()},
    "d128 plain": (AttentionConfig(), _plain, ()),
    "fp8-d64-lse": _choice("192x128-prefetch", head_dim=64, dtype=E4M3, lse=True),
    "packed-window-gqa-lse": _choice(
        "128x128-dynamic16", packed=True, window=200, group=2, lse=True
    ),
    "d128-fp16": _choice("128x128-dynamic16-overlap", dtype=FP16),
    "d64-fp16-causal": _choice("192x128-serpentine", head_dim=64, causal=True, dtype=FP16),
    "d64-fp16-optimistic-lse": _choice(
        "192x128-prefetch-early-optimistic", head_dim=64, dtype=FP16, lse=True
    ),
    "d256-causal-over-lse": _choice(
        "128x80-dynamic16-split-lazy", head_dim=256, causal=True, lse=True
    ),
    "d96-window-optimistic-gqa": _choice(
        "192x112-serpentine1-early-optimistic", head_dim=96, causal=True, window=300, group=2
    ),
    "d128-lse": _choice("128x64", lse=True),
    "d128-causal-window-gqa-lse": _choice("128x64", causal=True, window=300, group=4, lse=True),
    "d128-window-dynamic": _choice("128x128-dynamic16", causal=True, window=1000),
}
# Numerics alone; the others are timed too.
UNTIMED = tuple(name for name in VARIANTS if " " not in name)
CHECKED = (
    (1, 2, 128, 128),
    (2, 4, 256, 256),
    (1, 4, 1000, 1000),
    (1, 2, 3, 5),
    (1, 2, 130, 700),
    (1, 1, 64, 2048),
    (3, 8, 515, 515),
    (5, 16, 515, 515),  # more tasks than SMs
)
DEVICE = "cuda"  # of operands; a dry run has them on the CPU
FA4 = "FlashAttention-4"
PACKED = {  # tokens of the sequences: 49 and 30 thousand together
    "mixed": [512 * (1 + 5 * s % 13) + 37 * s for s in range(13)],
    "short": [100 + 211 * s % 1000 for s in range(52)],
}
JUMP = 17
LENGTHS = (1024, 2048, 4096, 8192, 16384)
IMAGES = (197, 577)  # rows of an image of 224 and of 336 pixels in squares of 16 and 14, and one
PROMPTS = (256, 512)
SHORT = (  # (mask, rows)
    *(("full", n) for n in sorted(IMAGES + PROMPTS)),
    *(("causal", n) for n in PROMPTS),
)


def lengths_of(b: int, rows: int, keys: int) -> list[tuple[int, int]]:
    """The (query, key) lengths of a packed case: b + 2 sequences, one of them empty."""
    return [(rows * (s + 1) // (b + 2), keys * (s + 1) // (b + 2)) for s in range(b + 1)] + [(0, 3)]


def operands(
    torch: Any, c: AttentionConfig, b: int, h: int, rows: int, keys: int, seed: int
) -> dict[str, Any]:
    """Random operands; for a packed configuration, sequences up to those lengths."""
    kind = torch.float16 if c.dtype is FP16 else torch.bfloat16
    torch.manual_seed(seed)
    kv = max(1, h // c.group)
    heads = kv * c.group
    if c.packed:
        return pack(torch, c, heads, lengths_of(b, rows, keys))

    def rand(heads: int, n: int, d: int = c.head_dim) -> Any:
        return torch.randn(b, heads, n, d, device=DEVICE).to(kind)

    wide = c.value_dim or c.head_dim
    v = {"q": rand(heads, rows), "k": rand(kv, keys), "v": rand(kv, keys, wide)}
    v["o"] = torch.full_like(v["q"][..., :wide], math.nan).contiguous()
    if c.lse:
        v["lse"] = torch.full((b, heads, rows), math.nan, device=DEVICE)
    if c.narrow:
        for x, factor in (("q", 0.5), ("k", 1.25), ("v", 2.0)):
            v[x] = v[x].to(torch.float8_e4m3fn)
            v[f"scale_{x}"] = torch.full((1,), factor, device=DEVICE)
        if keys % QUAD_PLACES == 0:
            v["ordered"] = ordered_values(torch, v["v"])
    return v


def ordered_values(torch: Any, v: Any) -> Any:
    """`v: [..., keys, d]` in the order of quads, `[..., d, places]`."""
    places = quad_places(v.shape[-2])
    return v.view(torch.uint8)[..., places, :].transpose(-1, -2).contiguous().view(v.dtype)


def reshape_scores(torch: Any, what: str, v: dict[str, Any], block: int = 128) -> None:
    """Scores for which a guess of the maximum is worse than for normal ones (deviation 1).

    sharp: of deviation 4, as in layers that look at few keys; rising: 6 more in every block of 128
    keys, so that every guess is wrong; jump: 17 more in every block of `block` keys, which is more
    than 2^24: each block is weighed twice.
    """
    if what == "sharp":
        v["q"] *= 4
    if what == "rising":
        d, keys = v["k"].shape[3], v["k"].shape[2]
        v["q"][..., 0] = d**0.5
        v["k"][..., 0] = torch.arange(keys, device=DEVICE) // 128 * 6.0
    if what == "jump":
        d, keys = v["k"].shape[3], v["k"].shape[2]
        height = torch.arange(keys, device=DEVICE) // block * JUMP
        # In two parts that bf16 holds exactly: beyond 256 it has even numbers alone.
        v["q"][..., :2] = d**0.5
        v["k"][..., 0] = (height // 256 * 256).to(v["k"].dtype)
        v["k"][..., 1] = (height % 256).to(v["k"].dtype)


def pack(
    torch: Any, c: AttentionConfig, heads: int, lengths: list[tuple[int, int]]
) -> dict[str, Any]:
    """Random operands of packed sequences with those (query, key) lengths."""
    rows, keys = ([sum(p[n] for p in lengths[:s]) for s in range(len(lengths) + 1)] for n in (0, 1))
    kind = torch.float16 if c.dtype is FP16 else torch.bfloat16

    def rand(tokens: int, count: int) -> Any:
        return torch.randn(tokens, count, c.head_dim, device=DEVICE).to(kind)

    def whole(numbers: Any) -> Any:
        return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)

    kv = heads // c.group
    v = {"q": rand(rows[-1], heads), "k": rand(keys[-1], kv), "v": rand(keys[-1], kv)}
    v["o"] = torch.full_like(v["q"], math.nan)
    v |= {"row_bounds": whole(rows), "key_bounds": whole(keys)}
    for tile in (64, 128, 192, 256):
        table = task_table(*zip(*lengths, strict=True), tile)
        v[f"tiles {tile}"] = whole(table.tolist()).view(-1, 2)
    v["tiles"] = v[f"tiles {c.tile[0]}"]
    v["longest"] = max(max(pair) for pair in lengths)
    if c.lse:
        v["lse"] = torch.full((heads, rows[-1]), math.nan, device=DEVICE)
    return v


def expected(torch: Any, c: AttentionConfig, v: dict[str, Any]) -> tuple[Any, Any]:
    """(o, lse) in float64."""
    if not c.packed:
        wide = {x: v[x].double() for x in "qkv"}
        if c.narrow:
            wide = {x: wide[x] * v[f"scale_{x}"].double() for x in "qkv"}
        return _one(torch, c, **wide)
    out, lse = v["q"].double(), torch.zeros(*v["q"].shape[1::-1], device=DEVICE).double()
    rows, keys = v["row_bounds"].tolist(), v["key_bounds"].tolist()
    for s in range(len(rows) - 1):
        r, k = slice(rows[s], rows[s + 1]), slice(keys[s], keys[s + 1])
        if rows[s] == rows[s + 1]:
            continue
        wide = {
            x: v[x][at].double().transpose(0, 1)[None]
            for x, at in zip("qkv", (r, k, k), strict=True)
        }
        o, natural = _one(torch, c, **wide)
        out[r], lse[:, r] = o[0].transpose(0, 1), natural[0]
    return out, lse


def _one(torch: Any, c: AttentionConfig, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    k, v = (x.repeat_interleave(c.group, 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * c.factor
    rows, keys = s.shape[-2:]
    row = torch.arange(rows, device=DEVICE)[:, None] + keys - rows
    key = torch.arange(keys, device=DEVICE)[None]
    seen = torch.ones(rows, keys, dtype=torch.bool, device=DEVICE)
    if c.causal:
        seen &= key <= row
    if c.window is not None:
        seen &= key > row - c.window
    s = s.masked_fill(~seen, -math.inf)
    # Masked keys do not count, whatever stands there: 0 * NaN must not come in.
    weights = torch.where(seen.any(-1, keepdim=True), torch.softmax(s, -1), 0.0)
    out = weights @ torch.where(torch.isfinite(v), v, 0.0)
    for special in (math.inf, -math.inf, math.nan):
        there = torch.isnan(v) if math.isnan(special) else v == special
        hit = seen.double() @ there.double() > 0
        out = torch.where(hit & ~torch.isnan(out), out + special, out)
    return out, torch.logsumexp(s, -1)
