"""Attention forward: o = softmax(scale q k^T + mask) v, one pass over the keys.

Arrays: `q, o: [batch, heads, rows, d]`, `k, v: [batch, kv_heads, keys, d]`, `lse: [batch, heads,
rows]` (natural logarithm). Packed: `q, o: [row_tokens, heads, d]`, sequence s in tokens
`row_bounds[s]` to `row_bounds[s + 1]`, and so for `k, v`; `tiles` says which row tile of which
sequence a task is. Query row r stands at key position r + keys - rows, so that the last
row sees every key (FlashAttention's convention). A row that sees no key gives o = 0, lse = -inf.
Source: online softmax of FlashAttention-2 (arXiv 2307.08691, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from warploom import tile as t
from warploom.autosched.schedules import Policy
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.rewrites.masks import skip_masked_blocks, split_mask_loop
from warploom.rewrites.rescaling import lazy_rescale, optimistic_rescale

LOG2E = math.log2(math.e)
SCALE_BLOCK = 128  # rows of q or k that share a factor, where blocks have theirs
LEAST_SCALE = 2.0**-120  # such factors and what is made of them are normal numbers of fp32


def refuse_scale(scale: float | None) -> None:
    """Refuse a factor under which the largest score is not the one of the largest weight."""
    if scale is not None and not LEAST_SCALE <= scale <= 1.0 / LEAST_SCALE:
        raise InputError(
            f"attention scale={scale}: expected a number above 0, {LEAST_SCALE:.0e} to "
            f"{1.0 / LEAST_SCALE:.0e}"
        )


@dataclass(frozen=True)
class AttentionConfig:
    """What is static in attention: element types, head size, masks, and how a tile is computed.

    group       query heads that share one key head
    window      a row at position p sees keys p - window + 1 ... p; None: all
    scale       the factor on q k^T, above 0; None: 1 / sqrt(head_dim)
    softcap     scores become softcap * tanh(score / softcap); 0: they stay
    packed      sequences of different lengths stand behind one another (`task_table`)
    tile        (rows, keys) of a task's block of scores
    split_mask_loop  blocks of keys that all rows see run in a loop of their own, without a mask.
                That helps long sequences and hurts short ones: the pipeline drains between loops
    rescale_threshold  lazy rescaling, the rule of FlashAttention-4: the sums of a row are rescaled
                only when its maximum has grown by more than so many powers of 2. Weights of fp16
                reach 2 ** rescale_threshold: at most 15
    optimistic_threshold  optimistic rescaling: a block is weighed by a base that the blocks before
                it gave, so that most blocks need neither a maximum nor a rescaling. The base is
                raised where a row's sum exceeds 2 ** optimistic_threshold. A block whose weights
                add up to more than their type bears is weighed again, by its maximum. For 16-bit
                elements; at most 15, which fp16 holds
    exact       every block is weighed by the largest score so far, as FlashAttention does; neither
                threshold may be set, and no variant sets one
    head_scales of 8-bit elements: every head has its own factors, `scale_q: [batch, heads]` and
                `scale_k, scale_v: [batch, kv_heads]`; otherwise there is one of each
    block_scales of 8-bit elements: every block of `SCALE_BLOCK` rows of q and of k has its own
                factor, `scale_q: [batch, heads, q_blocks]`, `scale_k: [batch, kv_heads, k_blocks]`,
                and every head of v
    value_dim   the head size of v and o, where it is another than that of q and k (MLA: 192 and
                128), which are of 16 bits and above 128: there are variants of those
    ordered     of 8-bit elements: v is `[..., d, places]` with its keys in the order of quads
                (`kernels.attention.values`); else it is row-major and turned in the kernel
    out         the element type of o; None: bf16 for 8-bit elements, else theirs. An 8-bit o is
                multiplied by `scale_o: [one]` before it is rounded
    """

    dtype: t.DType = t.BF16
    head_dim: int = 128
    causal: bool = False
    window: int | None = None
    group: int = 1
    lse: bool = False
    scale: float | None = None
    rescale_threshold: float = 0.0
    split_mask_loop: bool = False
    tile: tuple[int, int] = (128, 128)
    packed: bool = False
    optimistic_threshold: float = 0.0
    exact: bool = False
    head_scales: bool = False
    block_scales: bool = False
    ordered: bool = False
    out: t.DType | None = None
    value_dim: int | None = None
    softcap: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if self.split_mask_loop and self.window is not None:
            raise InputError(
                "attention split_mask_loop=True with a window: no block is seen by all rows"
            )
        if self.optimistic_threshold and (
            self.rescale_threshold or not 0 < self.optimistic_threshold <= 15
        ):
            raise InputError(
                f"attention optimistic_threshold={self.optimistic_threshold} dtype={self.dtype} "
                f"rescale_threshold={self.rescale_threshold}: expected 0 to 15 and no "
                "rescale_threshold"
            )
        refuse_scale(self.scale)
        factors = self.head_scales or self.block_scales
        own = factors or self.ordered or self.out not in (None, self.dtype)
        if (own and not self.narrow) or (self.head_scales and self.block_scales):
            raise InputError(
                f"attention dtype={self.dtype} head_scales={self.head_scales} "
                f"block_scales={self.block_scales} ordered={self.ordered} out={self.out}: expected "
                "8-bit elements and factors of heads or of blocks, or none of them"
            )
        if self.block_scales and any(SCALE_BLOCK % side for side in self.tile):
            raise InputError(
                f"attention block_scales=True tile={self.tile}: expected divisors of {SCALE_BLOCK}"
            )
        if self.narrow and (self.packed or self.value_dim):
            raise InputError(
                f"attention dtype={self.dtype} packed={self.packed} value_dim={self.value_dim}: "
                "expected 16-bit elements"
            )
        if self.value_dim and not 128 < self.head_dim <= 256:
            raise InputError(
                f"attention head_dim={self.head_dim} value_dim={self.value_dim}: expected a "
                "head_dim of 136 to 256, or both equal"
            )
        if self.exact and (self.optimistic_threshold or self.rescale_threshold):
            raise InputError(
                f"attention exact=True optimistic_threshold={self.optimistic_threshold} "
                f"rescale_threshold={self.rescale_threshold}: expected neither threshold"
            )
        if self.group < 1 or (self.window is not None and self.window < 1):
            raise InputError(f"attention group={self.group} window={self.window}: expected >= 1")
        if self.softcap < 0 or (self.softcap and self.narrow):
            raise InputError(
                f"attention softcap={self.softcap} dtype={self.dtype}: expected 0 or more, of "
                "16-bit elements"
            )

    @property
    def factor(self) -> float:
        """The factor on q k^T."""
        return self.scale if self.scale is not None else 1.0 / math.sqrt(self.head_dim)

    @property
    def values(self) -> int:
        """The head size of v and o."""
        return self.value_dim or self.head_dim

    @property
    def narrow(self) -> bool:
        """8-bit elements: scale_* are factors of q, k and v."""
        return self.dtype.bits == 8

    @property
    def result(self) -> t.DType:
        """The element type of o."""
        return self.out or (t.BF16 if self.narrow else self.dtype)

    @property
    def lift(self) -> float:
        """The power of 2 that the weight of a row's largest score is: 8-bit weights would lose what
        is below 2 ** -9."""
        return 4.0 if self.narrow else 0.0

    @property
    def arrays(self) -> dict[str, t.Array]:
        """The parameters of the program."""
        rows, keys = ("batch heads rows d", "batch kv_heads keys d")
        if self.packed:
            rows, keys = ("row_tokens heads d", "key_tokens kv_heads d")
        specs = {"q": t.array(self.dtype, rows), "k": t.array(self.dtype, keys)}
        if self.value_dim:
            rows, keys = (of.removesuffix("d") + "e" for of in (rows, keys))
        specs["v"] = t.array(self.dtype, "batch kv_heads d places" if self.ordered else keys)
        specs["o"] = t.array(self.result, rows)
        if self.narrow:
            dims = dict.fromkeys("kv", "batch kv_heads") | {"q": "batch heads"}
            if self.block_scales:
                dims |= {x: f"{dims[x]} {x}_blocks" for x in "qk"}
            elif not self.head_scales:
                dims = dict.fromkeys("qkv", "one")
            specs |= {f"scale_{x}": t.array(t.FP32, dims[x]) for x in "qkv"}
        if self.result.bits == 8:
            specs["scale_o"] = t.array(t.FP32, "one")
        if self.packed:
            specs |= {x: t.array(t.INT32, "bounds") for x in ("row_bounds", "key_bounds")}
            specs["tiles"] = t.array(t.INT32, "tasks pair")
        lse = t.array(t.FP32, "heads row_tokens" if self.packed else "batch heads rows")
        return {**specs, "lse": lse} if self.lse else specs


def attention(config: AttentionConfig | None = None) -> t.Program:
    """The tile program of attention forward: the textbook, and what the configuration makes of it
    by the rules of `warploom.rewrites`."""
    chosen = config or AttentionConfig()
    plain = replace(chosen, split_mask_loop=False, rescale_threshold=0.0, optimistic_threshold=0.0)
    program = _skipped(plain)
    if chosen.split_mask_loop:
        program = split_mask_loop(program)
    if chosen.rescale_threshold:
        program = lazy_rescale(program, chosen.rescale_threshold)
    if chosen.optimistic_threshold:
        program = optimistic_rescale(program, chosen.optimistic_threshold)
    return program


@lru_cache(maxsize=128)
def _skipped(config: AttentionConfig) -> t.Program:
    """The textbook without the blocks that are masked: several variants begin with it."""
    return skip_masked_blocks(textbook(config))


def textbook(config: AttentionConfig) -> t.Program:
    """Online softmax over all blocks of keys, each masked and weighed under the maximum so far."""
    front = _packed if config.packed else _dense
    return t.trace(front, config.arrays, name="attention", config=config)


@dataclass(frozen=True)
class Task:
    """A row tile of one sequence: its number, the lengths, and where everything is."""

    number: t.Index
    rows: t.Index
    keys: t.Index
    queries: t.Tile
    key_block: Callable[[t.Index], t.Tile]
    value_block: Callable[[t.Index], t.Tile]
    put: Callable[[t.Tile, t.Tile | None], None]
    factor: Callable[[str], t.Tile]
    block_factor: Callable[[t.Index], t.Tile] | None = None  # of a block of keys


def _dense(
    q: t.Array, k: t.Array, v: t.Array, o: t.Array, config: AttentionConfig, **rest: t.Array
) -> None:
    (bq, bk), d, e = config.tile, t.span(0, config.head_dim), t.span(0, config.values, "d")
    batch, head, i = t.grid(
        batch=t.size("batch"), heads=t.size("heads"), rows=t.cdiv(t.size("rows"), bq)
    )
    rows, kv_head = t.span(i * bq, bq), head // config.group

    def value_block(j: t.Index) -> t.Tile:
        keys = t.span(j * bk, bk, "keys")
        if config.ordered:
            return t.load(v, batch, kv_head, e, keys)
        block = t.load(v, batch, kv_head, keys, e)
        return block.T.quad_order("keys") if config.narrow else block

    def put(out: t.Tile, natural: t.Tile | None) -> None:
        t.store(o, batch, head, rows, e, tile=out)
        if natural is not None:
            t.store(rest["lse"], batch, head, rows, tile=natural)

    def factor(of: str) -> t.Tile:
        at: tuple[t.Index | int, ...] = (0,)
        if config.head_scales or config.block_scales:
            at = (batch, head if of == "q" else kv_head)
        if of == "q" and config.block_scales:
            at = (*at, i // (SCALE_BLOCK // bq))
        return t.load(rest[f"scale_{of}"], *at)

    def block_factor(j: t.Index) -> t.Tile:
        return t.load(rest["scale_k"], batch, kv_head, j // (SCALE_BLOCK // bk))

    task = Task(
        i,
        t.size("rows"),
        t.size("keys"),
        t.load(q, batch, head, rows, d),
        lambda j: t.load(k, batch, kv_head, t.span(j * bk, bk), d),
        value_block,
        put,
        factor,
        block_factor if config.block_scales else None,
    )
    _forward(config, task, rest)


def _packed(
    q: t.Array, k: t.Array, v: t.Array, o: t.Array, config: AttentionConfig, **rest: t.Array
) -> None:
    (bq, bk), d, e = config.tile, t.span(0, config.head_dim), t.span(0, config.values, "d")
    head, task_at = t.grid(heads=t.size("heads"), tasks=t.size("tasks"))
    sequence, i = t.read(rest["tiles"], task_at, 0), t.read(rest["tiles"], task_at, 1)
    first, last = (t.read(rest["row_bounds"], sequence + n) for n in (0, 1))
    from_key, to_key = (t.read(rest["key_bounds"], sequence + n) for n in (0, 1))
    kv_head = head // config.group
    rows = t.span(first + i * bq, bq, "rows", last)

    def block(of: t.Array, j: t.Index, columns: t.Span) -> t.Tile:
        return t.load(of, t.span(from_key + j * bk, bk, "keys"), kv_head, columns)

    def put(out: t.Tile, natural: t.Tile | None) -> None:
        t.store(o, rows, head, e, tile=out)
        if natural is not None:
            t.store(rest["lse"], head, rows, tile=natural)

    def key_block(j: t.Index) -> t.Tile:
        return block(k, j, d)

    def value_block(j: t.Index) -> t.Tile:
        return block(v, j, e)

    queries = t.load(q, t.span(first + i * bq, bq, "rows"), head, d)

    def factor(of: str) -> t.Tile:
        return t.load(rest[f"scale_{of}"], 0)

    task = Task(i, last - first, to_key - from_key, queries, key_block, value_block, put, factor)
    _forward(config, task, rest)


def _forward(config: AttentionConfig, task: Task, rest: dict[str, t.Array]) -> None:
    (bq, bk), i = config.tile, task.number
    scale: t.Tile | float = (config.softcap or config.factor) * LOG2E
    if config.narrow:
        scale = task.factor("q") * scale
    if config.narrow and task.block_factor is None:
        scale = task.factor("k") * scale
    every = scale
    row_at = t.coordinate("rows", bq, i * bq + (task.keys - task.rows))
    base, total = t.full(-math.inf, rows=bq), t.zeros(rows=bq)
    acc = t.zeros(rows=bq, d=config.values)
    for j in t.loop(t.cdiv(task.keys, bk)):
        scores = task.queries @ task.key_block(j)
        if config.softcap:
            scores = t.tanh(scores * (config.factor / config.softcap))
        scores[:] = t.where(_visible(config, task, row_at, j * bk), scores, -math.inf)
        if task.block_factor is not None:
            scale = task.block_factor(j) * every
        # The base under which the largest score has the weight 2 ** lift.
        block = t.max_along(scores, "keys") * scale
        highest = t.maximum(base, block - config.lift if config.lift else block)
        # A row that has seen no key keeps -inf; 0 in its place avoids -inf - -inf.
        under = t.where(highest.equals(-math.inf), 0.0, highest)
        rescale = t.exp2(base - under)
        weights = t.exp2(scores * scale - under)
        total[:] = total * rescale + t.sum_along(weights, "keys")
        base[:] = highest
        ordered = weights.quad_order("keys") if config.narrow else weights
        packed = ordered.cast(config.dtype)
        acc[:] = acc * rescale
        acc[:] = acc + packed @ task.value_block(j)
    none = total.equals(0.0)
    share = t.where(none, 0.0, t.reciprocal(total))
    if config.narrow:
        share = share * task.factor("v")
    if config.result.bits == 8:
        share = share * t.load(rest["scale_o"], 0)
    out = (acc * share).cast(config.result)
    if not config.lse:
        return task.put(out, None)
    natural = (base + t.log2(total)) * (1.0 / LOG2E)
    return task.put(out, t.where(none, -math.inf, natural))


def _visible(config: AttentionConfig, task: Task, row_at: t.Tile, first_key: t.Index) -> t.Tile:
    key_at = t.coordinate("keys", config.tile[1], first_key)
    seen = t.minimum(row_at + 1, task.keys) > key_at if config.causal else key_at < task.keys
    return seen if config.window is None else seen & (row_at - config.window < key_at)


def default_policy(config: AttentionConfig) -> Policy:
    """FlashAttention-3's: two groups in ping-pong, P V one iteration behind Q K^T, rings of two."""
    reverse = ("rows_tile",) if config.causal and not config.packed else ()
    launch = LaunchPlan(
        split="rows",
        reverse=reverse,
        skip_unit=max(config.rescale_threshold, config.optimistic_threshold) > 0,
        skip_voted=config.optimistic_threshold > 0,
    )
    return Policy("pingpong", launch, groups=config.tile[0] // 64, depth=2)
