"""Attention of a few new tokens over cached keys: o = softmax(scale q k^T + mask) v, keys in parts.

The query heads that share a key head are rows of one tile: row r * group + g is head g of query r,
so that every key is loaded once. The keys of a sequence are cut into `splits` parts of whole
blocks, one task each. Every task gives the softmax over its part and its log-sum-exp; `combine`
weighs them (FlashAttention-2, arXiv 2307.08691, section 3.1; "Flash-Decoding", Dao et al., 2023).
Equal parts, whose number the launch chooses, make the bits of a sequence depend on that number;
parts of so many keys each (`part`) do not.

Arrays of `decode`: `q: [batch, kv_heads, rows, d]` with packed rows, `lengths: [batch]`, the keys
of each sequence; `k, v: [batch, kv_heads, keys, d]`, or paged `[pages, page_keys, kv_heads, d]`
with `table: [batch, columns]`, which says where the pages of a sequence are. Query r of n stands
at key position length - n + r. `o: [batch, kv_heads, rows, d]`, or in parts `parts: [batch,
kv_heads, splits, rows, d]` and `sums: [batch, kv_heads, splits, rows]` (lse in powers of 2).
`attention.combine` joins parts. Of 8-bit elements q, k and v are times `scale_q, scale_k, scale_v:
[batch, kv_heads]`, and o is bf16; values are turned on their way through shared memory
(`fuse.turned_operands`).

`mixed` batches have sequences of any number of new tokens, a chunk of a prompt or one: `q, o:
[tokens, kv_heads, group, d]`, of all sequences behind one another, and `tiles: [tasks, 5]`, which
says what a task is (`attention.tasks`): the sequence, the first of its tokens and the end of the
sequence's, how many tokens and keys the sequence has. Rows of a tile are packed as above, with room
for a power of 2 of heads. They are causal and not in parts.

Latent attention (`value_dim`; DeepSeek-V2, arXiv 2405.04434, section 2.1.2, with the up-projections
absorbed): values are the first columns of the keys, so that there is no v, and o is `[..., e]`.

With `sinks: [kv_heads, rows]` a row's sum of weights begins with exp(sink), whose value is 0.

A row that sees no key gives 0. What the caches hold beyond a length has to be finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warploom import tile as t
from warploom.autosched.schedules import Policy
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.kernels.attention.program import LOG2E, refuse_scale
from warploom.tile.index import as_index

HEADS = (64, 128)
LATENT = {576: 512}  # columns of keys, of which the values are so many
PAGES = (16, 32, 64, 128, 256)
PART = 512  # keys of a part, where the bits of a sequence are not to depend on its batch
FIELDS = 5  # numbers that say what a task of a mixed batch is
SLACK = 8.0  # powers of 2 by which a weight may pass 1 where rescaling is lazy
FEW = 64  # packed rows of one group, which mostly waits for memory
UNDER_WAY = 96 * 1024  # bytes of keys and values that an SM asks for ahead


@dataclass(frozen=True)
class DecodeConfig:
    """What is static: the first fields are those of `AttentionConfig`.

    value_dim  values are the first columns of the keys, as many as these; None: they are arrays
    page     tokens of a page; None: the cache is dense
    softcap  scores become softcap * tanh(score / softcap); 0: they stay
    sinks    each head weighs one score more, a number of its own without a value
    split    the keys of a sequence are cut into parts, which `combine` joins
    few      at most 8 packed rows: of 16 rows of a tile the others are not computed
    once     no SM has more than one task
    ragged   SMs take parts as they come, because sequences may have few keys or many
    part     keys of a part; None: equal parts, as many as there are `splits`
    twin     of latent attention: two tiles of rows load the keys of their sequence once for both
    mixed    sequences have numbers of new tokens of their own
    tile     (packed rows, keys) of a block of scores
    """

    dtype: t.DType = t.BF16
    head_dim: int = 128
    value_dim: int | None = None
    group: int = 1
    causal: bool = False
    window: int | None = None
    softcap: float = 0.0
    scale: float | None = None
    page: int | None = None
    sinks: bool = False
    split: bool = True
    part: int | None = None
    few: bool = False
    once: bool = False
    ragged: bool = False
    twin: bool = False
    mixed: bool = False
    tile: tuple[int, int] = (64, 64)

    def __post_init__(self) -> None:
        """Refuse what no kernel here is for."""
        refuse_scale(self.scale)
        heads = HEADS if self.value_dim is None else LATENT
        if self.head_dim not in heads or self.dtype not in (t.BF16, t.FP16, t.E4M3):
            raise InputError(
                f"decode of {self.dtype} heads of {self.head_dim}: expected bf16, fp16 or e4m3 and "
                f"one of {', '.join(map(str, heads))}"
            )
        if self.value_dim not in (None, LATENT.get(self.head_dim)) or (
            self.value_dim and self.mixed
        ):
            raise InputError(
                f"decode of keys of {self.head_dim} with values of {self.value_dim}, "
                f"mixed={self.mixed}: expected {LATENT}, and no mixed batch"
            )
        if self.page is not None and self.page not in PAGES:
            raise InputError(
                f"decode with pages of {self.page} tokens: expected one of "
                f"{', '.join(map(str, PAGES))}"
            )
        if self.group < 1 or (self.window is not None and self.window < 1) or self.softcap < 0:
            raise InputError(
                f"decode group={self.group} window={self.window} softcap={self.softcap}: expected "
                "a group and a window of at least 1 and a cap of at least 0"
            )
        if self.mixed and (self.split or not self.causal):
            raise InputError(
                f"decode mixed=True split={self.split} causal={self.causal}: expected a causal "
                "mask, and keys that are not in parts"
            )
        if self.mixed and self.pitch > self.tile[0]:
            raise InputError(
                f"decode mixed=True group={self.group}: expected at most {self.tile[0]} heads that "
                "share a key head"
            )
        if self.once and (self.ragged or self.mixed):
            raise InputError(
                f"decode once=True ragged={self.ragged} mixed={self.mixed}: expected tasks that "
                "are shared out beforehand"
            )
        if self.few and (self.mixed or self.value_dim or self.tile[0] > FEW):
            raise InputError(
                f"decode few=True mixed={self.mixed} value_dim={self.value_dim} tile={self.tile}: "
                f"expected tiles of {FEW} rows, neither mixed batches nor latent attention"
            )
        if self.sinks and (self.mixed or self.value_dim):
            raise InputError(
                f"decode sinks=True mixed={self.mixed} value_dim={self.value_dim}: expected "
                "neither mixed batches nor latent attention"
            )
        if self.part is not None and (not self.split or self.part < 1 or self.part % self.tile[1]):
            raise InputError(
                f"decode part={self.part} split={self.split}: expected a split into parts of a "
                f"multiple of {self.tile[1]} keys"
            )

    @property
    def factor(self) -> float:
        """The factor on q k^T."""
        return self.scale if self.scale is not None else 1.0 / math.sqrt(self.head_dim)

    @property
    def pitch(self) -> int:
        """Packed rows of a token: in mixed batches of a power of 2 of heads."""
        return 1 << (self.group - 1).bit_length() if self.mixed else self.group

    @property
    def columns(self) -> tuple[int, str]:
        """Columns of values and results, and the name of their axis."""
        return (self.head_dim, "d") if self.value_dim is None else (self.value_dim, "e")

    @property
    def narrow(self) -> bool:
        """8-bit elements."""
        return self.dtype.bits == 8

    @property
    def result(self) -> t.DType:
        """The element type of o."""
        return t.BF16 if self.narrow else self.dtype

    @property
    def lazy(self) -> bool:
        """Whether sums are rescaled only where a row's maximum outgrows its base by `SLACK`: where
        matmuls are most of the work, and not with weights of 8 bits, which have no room for it."""
        many = self.tile[0] > FEW and not (self.narrow or self.mixed)
        return self.value_dim is not None or many

    @property
    def lift(self) -> float:
        """The power of 2 that the weight of a row's largest score is (`AttentionConfig.lift`)."""
        return 4.0 if self.narrow else 0.0

    @property
    def scaled(self) -> str:
        """What has factors."""
        return "" if not self.narrow else "qk" if self.value_dim else "qkv"

    @property
    def arrays(self) -> dict[str, t.Array]:
        """The parameters of `decode`."""
        rows = "tokens kv_heads group" if self.mixed else "batch kv_heads rows"
        keys = "pages page_keys kv_heads d" if self.page else "batch kv_heads keys d"
        found = {"q": t.array(self.dtype, f"{rows} d"), "k": t.array(self.dtype, keys)}
        found |= {} if self.value_dim else {"v": t.array(self.dtype, keys)}
        if self.mixed:
            found["tiles"] = t.array(t.INT32, "tasks fields")
        else:
            found["lengths"] = t.array(t.INT32, "batch")
        if self.page:
            found["table"] = t.array(t.INT32, "batch columns")
        if self.narrow:
            found |= {f"scale_{x}": t.array(t.FP32, "batch kv_heads") for x in self.scaled}
        if self.sinks:
            found["sinks"] = t.array(t.FP32, "kv_heads rows")
        if not self.split:
            return {**found, "o": t.array(self.result, f"{rows} {self.columns[1]}")}
        parts = "batch kv_heads splits rows"
        whole = t.array(t.FP32, f"{parts} {self.columns[1]}")
        return {**found, "parts": whole, "sums": t.array(t.FP32, parts)}


def decode(config: DecodeConfig | None = None) -> t.Program:
    """The softmax over each part of the keys."""
    chosen = config or DecodeConfig()
    return t.trace(_decode, chosen.arrays, name="decode", config=chosen)


@dataclass(frozen=True)
class Task:
    """A tile of packed rows of one sequence, over a part of its keys.

    row      the first of its packed rows, of the sequence's own
    queries  new tokens of the sequence
    length   its keys
    load, store  where its rows are, for either, but for the columns
    """

    batch: t.Index
    kv_head: t.Index
    split: t.Index
    splits: t.Index | int
    row: t.Index
    queries: t.Index
    length: t.Index
    load: tuple[t.Index | t.Span, ...]
    store: tuple[t.Index | t.Span, ...]


def _task(config: DecodeConfig, rest: dict[str, t.Array]) -> Task:
    height = config.tile[0]
    if config.mixed:
        # Heads of a tile are neighbours in time: they read neighbours in memory.
        task, kv_head = t.grid(tasks=t.size("tasks"), kv_heads=t.size("kv_heads"))
        batch, first, end, queries, length = (t.read(rest["tiles"], task, n) for n in range(FIELDS))
        row, tokens = (first - end + queries) * config.pitch, height // config.pitch
        heads = t.span(0, config.pitch, "rows")
        load_at = (t.span(first, tokens, "rows"), kv_head, heads)
        store_at = (t.span(first, tokens, "rows", end), kv_head, heads)
        return Task(batch, kv_head, as_index(0), 1, row, queries, length, load_at, store_at)
    splits = t.size("splits") if config.split else 1
    batch, kv_head, split, i = t.grid(
        batch=t.size("batch"),
        kv_heads=t.size("kv_heads"),
        splits=splits,
        rows=t.cdiv(t.size("rows"), height),
    )
    queries = t.size("rows") // config.group
    length = t.read(rest["lengths"], batch)
    at = (batch, kv_head, t.span(i * height, height))
    return Task(batch, kv_head, split, splits, i * height, queries, length, at, at)


def _decode(q: t.Array, k: t.Array, config: DecodeConfig, **rest: t.Array) -> None:
    height, width = config.tile
    task = _task(config, rest)
    batch, kv_head = task.batch, task.kv_head
    room = t.size("columns") * config.page if config.page else t.size("keys")
    length = t.minimum_index(task.length, room)
    first, last = _blocks(config, length, task)
    queries = [t.load(q, *task.load, part) for part in _pieces(config)]
    scales = {x: t.load(rest[f"scale_{x}"], batch, kv_head) for x in config.scaled}
    base, total = t.full(-math.inf, rows=height), t.zeros(rows=height)
    if config.sinks:  # once, in the first part
        scores = t.load(rest["sinks"], kv_head, task.load[2], edge=-math.inf) * LOG2E
        base[:] = t.where(t.number(task.split).equals(0), scores, -math.inf)
        total[:] = t.where(base.equals(-math.inf), 0.0, 1.0)
    columns, axis = config.columns
    acc = t.zeros(t.FP32, **{"rows": height, axis: columns})
    caches = [cache for cache in (k, rest.get("v")) if cache is not None]
    for j in t.loop(first, last):
        keys, values = _block(config, caches, rest.get("table"), (batch, kv_head, j, length))
        products = queries[0] @ keys[0]
        for q_part, k_part in zip(queries[1:], keys[1:], strict=True):
            products += q_part @ k_part
        scores, factor = _scores(config, products, scales)
        row_at = t.coordinate("rows", height, task.row)
        seen = _visible(config, row_at, j * width, length, task.queries)
        scores[:] = t.where(seen, scores, -math.inf)
        block = t.max_along(scores, "keys") * factor
        block = block - config.lift if config.lift else block
        if config.lazy:
            highest = t.where(block > base + (SLACK - config.lift), block, base)
        else:
            highest = t.maximum(base, block)
        # A row that has seen no key keeps -inf; 0 in its place avoids -inf - -inf.
        under = t.where(highest.equals(-math.inf), 0.0, highest)
        rescale = t.exp2(base - under)
        weights = t.exp2(scores * factor - under)
        total[:] = total * rescale + t.sum_along(weights, "keys")
        base[:] = highest
        ordered = weights.quad_order("keys") if config.narrow else weights
        packed = ordered.cast(config.dtype)
        acc[:] = acc * rescale
        acc[:] = acc + packed @ values
    none = total.equals(0.0)
    share = t.where(none, 0.0, t.reciprocal(total))
    out = acc * (share * scales[config.scaled[-1]] if config.narrow else share)
    if not config.split:
        return t.store(rest["o"], *task.store, t.span(0, columns), tile=out.cast(config.result))
    rows = task.store[2]
    t.store(rest["parts"], batch, kv_head, task.split, rows, t.span(0, columns), tile=out)
    sums = t.where(none, -math.inf, base + t.log2(total))
    return t.store(rest["sums"], batch, kv_head, task.split, rows, tile=sums)


def _blocks(config: DecodeConfig, length: t.Index, task: Task) -> tuple[t.Index, t.Index]:
    """The blocks of keys of a part: all that some query sees are cut into equal parts. Of a mixed
    batch they end where the last row of the tile sees no more."""
    width = config.tile[1]
    begin, end = 0, t.cdiv(length, width)
    if config.mixed:
        last = t.cdiv(task.row + config.tile[0], config.pitch)
        end = t.minimum_index(end, t.cdiv(length - task.queries + last, width))
    if config.window is not None:
        begin = t.maximum_index(length - task.queries - (config.window - 1), 0) // width
    splits = task.splits
    share = config.part // width if config.part else (end - begin + splits - 1) // splits
    first = task.split * share + begin
    return first, t.minimum_index(first + share, end)


def _pieces(config: DecodeConfig) -> list[t.Span]:
    """The columns of keys and queries, in pieces of which the first may be the values."""
    first = config.value_dim or config.head_dim
    rest = config.head_dim - first
    return [t.span(0, first), *([t.span(first, rest)] if rest else [])]


def _block(
    config: DecodeConfig,
    caches: Sequence[t.Array],
    table: t.Array | None,
    at: tuple[t.Index, t.Index, t.Index, t.Index],
) -> tuple[list[t.Tile], t.Tile]:
    """A block of keys in pieces, and its values; the pages beyond the last one are that page
    again."""
    batch, kv_head, j, length = at
    width, pieces = config.tile[1], _pieces(config)

    def operands(place: Callable[[t.Array, t.Span], t.Tile]) -> tuple[list[t.Tile], t.Tile]:
        keys = [place(caches[0], piece) for piece in pieces]
        if config.value_dim:
            return keys, _operand(config, keys[0].rename("d", "e"))
        return keys, _operand(config, place(caches[1], pieces[0]))

    if table is None or config.page is None:
        return operands(lambda c, d: t.load(c, batch, kv_head, t.span(j * width, width), d))
    page = config.page
    last = t.cdiv(length, page) - 1
    if page >= width:
        pages = [t.read(table, batch, j * width // page)]
        tokens = t.span(j * width % page, width, "keys")
    else:
        count = width // page
        pages = [t.read(table, batch, t.minimum_index(j * count + n, last)) for n in range(count)]
        tokens = t.span(0, page, "keys")
    return operands(lambda cache, d: t.load(cache, pages, tokens, kv_head, d))


def _operand(config: DecodeConfig, values: t.Tile) -> t.Tile:
    return values.T.quad_order("keys") if config.narrow else values


def _scores(
    config: DecodeConfig, scores: t.Tile, scales: dict[str, t.Tile]
) -> tuple[t.Tile, t.Tile | float]:
    """The scores, and what multiplies them in the exponent."""
    factor: t.Tile | float = config.factor
    if config.narrow:
        factor = scales["q"] * scales["k"] * factor
    if not config.softcap:
        return scores, factor * LOG2E
    return t.tanh(scores * (factor * (1.0 / config.softcap))) * config.softcap, LOG2E


def _visible(
    config: DecodeConfig, row_at: t.Tile, first_key: t.Index, length: t.Index, queries: t.Index
) -> t.Tile:
    """Key n is seen by query r up to its own position p, n <= p = length - queries + r, which in
    packed rows r * group + g is (n - length + queries) * group <= row."""
    width = config.tile[1]
    seen = t.coordinate("keys", width, first_key) < length
    beyond = t.coordinate("keys", width, first_key - (length - queries)) * config.pitch
    if config.causal:
        seen = (row_at >= beyond) & seen
    if config.window is not None:
        seen = (row_at < beyond + config.window * config.pitch) & seen
    return seen


def decode_policy(config: DecodeConfig) -> Policy:
    """One group of warps for 64 rows; the queries of the next task come beside this one's keys."""
    if config.value_dim:
        # One group makes the weights, and both have half of the columns of the result.
        launch = LaunchPlan(
            split="e",
            cluster=("rows_tile", 2) if config.twin else ("", 1),
            persistent=not config.once,
            store="direct",
            dependent=True,
            fetch_early=2,
            skip_unit=config.lazy,
            l2_promotion=128,
        )
        if not config.narrow:
            return Policy("lcsf", launch, 2, 2, registers=(40, 232))
        # Turning values takes the time, and the more of it the fewer registers its warps have.
        launch = launch.with_options(staged_slots=2)
        return Policy("overlapped", launch, 2, 2, registers=(72, 216))
    height, width = config.tile
    depth = max(2, UNDER_WAY // (2 * width * config.head_dim * config.dtype.bytes))
    launch = LaunchPlan(
        split="rows" if height > FEW else "",
        persistent=not config.once,
        store="direct",
        dependent=True,
        fetch_early=_fetched_early(config, depth),
        task_rings={} if config.once else {"q_t": 2},
        tile_scheduler="dynamic" if config.ragged else "static",
        reads_ahead=config.page is not None and not (config.narrow and height > FEW),
        skip_unit=config.lazy,
        l2_promotion=128,
        read_once=not config.mixed and height == FEW,
        lower_rows=config.few,
    )
    # The producer, which holds the numbers of pages, would spill with fewer. One group of 8 bits
    # leaves more to the warps beside it, which turn values.
    registers = (56, 224) if config.page and config.lazy else (40, 232)
    if config.narrow and height == FEW:
        registers = (104, 232)
    order = "overlapped-early" if config.lazy else "overlapped"
    return Policy(order, launch, height // FEW, depth, registers=registers)


def _fetched_early(config: DecodeConfig, depth: int) -> int:
    """Iterations whose keys L2 is asked for early. A part is few blocks, and so is what pages of 8
    bits hold: more than one ahead on all SMs delays the first. The list of tasks of a mixed batch
    may be in the making."""
    if config.mixed:
        return 0
    few = config.split and config.once
    return 1 if few or (config.narrow and config.page is not None) else depth
