"""New keys and values into a cache, dense or paged, with the rotation of keys and queries fused.

Token t of a sequence gets position length + t: its key is rotated by the angles of that position
and stored there, its value stored, and its queries, which are rotated alike, are the result `r`.

Arrays: `k, v: [batch, tokens, kv_heads, d]`, `lengths: [batch]`, the keys that each sequence has
before; `k_cache, v_cache: [batch, keys, kv_heads, d]`, or paged `[pages, page_keys, kv_heads, d]`
with `table: [batch, columns]`; `cos, sin: [positions, half]`; `q, r: [batch, tokens, heads, d]`. An
8-bit cache holds what k and v are of `scale_k, scale_v: [batch, kv_heads]`, clamped to the largest
number of its type. A token that the cache has no room for, and a position without angles, is left
out: its key and value are not stored, its queries are rotated by 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from warploom import tile as t
from warploom.codegen.simt.choose import simt
from warploom.codegen.simt.schedule import GRID, SimtSchedule
from warploom.errors import InputError

AT_A_TIME = 8  # key heads of a task
STYLES = ("", "halves", "pairs")
Place = tuple[t.Index | t.Span | int, ...]


@dataclass(frozen=True)
class AppendConfig:
    """What is static.

    cache   element type of the caches; None: that of k and v
    rotary  "": nothing is rotated; element j of a head goes with j + d / 2 ("halves", GPT-NeoX), or
            2 j with 2 j + 1 ("pairs", GPT-J), whose arrays then are `[..., half, 2]`
    group   query heads of a key head, to be rotated; 0: there are no queries
    page    tokens of a page; None: the caches are dense
    """

    dtype: t.DType = t.BF16
    cache: t.DType | None = None
    head_dim: int = 128
    rotary: str = ""
    angles: t.DType = t.FP32
    group: int = 0
    page: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no kernel here is for."""
        if self.dtype not in (t.BF16, t.FP16) or self.stored not in (self.dtype, t.E4M3):
            raise InputError(
                f"append of {self.dtype} to a cache of {self.stored}: expected bf16 or fp16, to a "
                "cache of that type or e4m3"
            )
        if self.rotary not in STYLES or self.head_dim % 16 or (self.group and not self.rotary):
            raise InputError(
                f"append head_dim={self.head_dim} rotary={self.rotary!r} group={self.group}: "
                f"expected a multiple of 16, one of {STYLES}, and queries only to be rotated"
            )

    @property
    def stored(self) -> t.DType:
        """The element type of the caches."""
        return self.cache or self.dtype

    @property
    def heads_at_a_time(self) -> int:
        """Key heads of a task, with their queries; of pairs, each element of which has an address
        of its own, no more queries than keys otherwise."""
        pairs = self.rotary == "pairs"
        return max(1, AT_A_TIME // max(1, self.group)) if pairs else AT_A_TIME

    @property
    def scaled(self) -> bool:
        """Whether the caches hold parts of a factor."""
        return self.stored != self.dtype

    @property
    def arrays(self) -> dict[str, t.Array]:
        """The parameters of `append`."""
        d = "half two" if self.rotary == "pairs" else "d"
        rows = "pages page_keys" if self.page else "batch keys"
        found = {"k": t.array(self.dtype, f"batch tokens kv_heads {d}")}
        found["v"] = t.array(self.dtype, "batch tokens kv_heads d")
        found["lengths"] = t.array(t.INT32, "batch")
        found["k_cache"] = t.array(self.stored, f"{rows} kv_heads {d}")
        found["v_cache"] = t.array(self.stored, f"{rows} kv_heads d")
        if self.page:
            found["table"] = t.array(t.INT32, "batch columns")
        if self.rotary:
            found |= {x: t.array(self.angles, "positions half") for x in ("cos", "sin")}
        if self.scaled:
            found |= {f"scale_{x}": t.array(t.FP32, "batch kv_heads") for x in "kv"}
        if self.group:
            found |= {x: t.array(self.dtype, f"batch tokens heads {d}") for x in "qr"}
        return found


def append(config: AppendConfig | None = None) -> t.Program:
    """The program of a configuration."""
    chosen = config or AppendConfig()
    return t.trace(_append, chosen.arrays, name="append", config=chosen)


def append_schedule(config: AppendConfig) -> SimtSchedule:
    """Laid over threads by sizes, with all registers: queries are more than one row. Of pairs, what
    one load leaves of a line the next one has."""
    schedule = replace(simt(append(config)), launch=GRID)
    if config.rotary != "pairs":
        return schedule
    lanes = min(schedule.threads, schedule.lanes * schedule.vector)
    return replace(schedule, lanes=lanes, vector=1)


def _append(config: AppendConfig, **arrays: t.Array) -> None:
    count = config.heads_at_a_time
    b, token, group = t.grid(
        batch=t.size("batch"), tokens=t.size("tokens"), heads=t.cdiv(t.size("kv_heads"), count)
    )
    position, first = t.read(arrays["lengths"], b) + token, group * count
    heads = t.span(first, count)
    # Of a token without room all heads lie behind the last one, where nothing is stored.
    room = t.size("columns") * config.page if config.page else t.size("keys")
    kept = t.span(first + position // room * t.size("kv_heads"), count)
    row: Place = (b, position, kept)
    if config.page:
        column = t.minimum_index(position // config.page, t.size("columns") - 1)
        row = (t.read(arrays["table"], b, column), position % config.page, kept)

    def put(which: str, columns: Place, new: t.Tile) -> None:
        if config.scaled:
            new = new.cast(t.FP32) * t.reciprocal(t.load(arrays[f"scale_{which}"], b, heads))
        t.store(arrays[f"{which}_cache"], *row, *columns, tile=new.cast(config.stored))

    every = (t.span(0, config.head_dim),)
    put("v", every, t.load(arrays["v"], b, token, heads, *every))
    if not config.rotary:
        put("k", every, t.load(arrays["k"], b, token, heads, *every))
        return
    half = t.span(0, config.head_dim // 2, "half")
    turns = [t.load(arrays[x], position, half).cast(t.FP32) for x in ("cos", "sin")]
    for columns, part in _rotated(config, arrays["k"], (b, token, heads), turns):
        put("k", columns, part)
    if config.group:
        width = count * config.group
        queries = (b, token, t.span(group * width, width))
        for columns, part in _rotated(config, arrays["q"], queries, turns):
            t.store(arrays["r"], *queries, *columns, tile=part.cast(config.dtype))


def _rotated(
    config: AppendConfig, of: t.Array, at: Place, turns: Sequence[t.Tile]
) -> list[tuple[Place, t.Tile]]:
    """Both halves of some heads, rotated, with the columns where they belong."""
    width = config.head_dim // 2
    half = t.span(0, width, "half")
    columns: list[Place] = [(half,), (t.span(width, width, "half"),)]
    if config.rotary == "pairs":
        columns = [(half, 0), (half, 1)]
    left, right = (t.load(of, *at, *one).cast(t.FP32) for one in columns)
    cos, sin = turns
    return [(columns[0], left * cos - right * sin), (columns[1], left * sin + right * cos)]
