"""Attention backward: the gradients of q, k and v, one pass over the queries for a tile of keys.

With P = exp(scale q k^T - lse), dP = dO v^T, D = rowsum(dO o) and dS = P (dP - D):
dv = P^T dO, dk = scale dS^T q, dq = scale dS k (FlashAttention-2, arXiv 2307.08691, algorithm 2).

Three programs after one another: `prepare` makes of o, dO and lse what `backward` needs of a row,
`base`, which is lse in powers of 2 (inf for a row that sees no key), and `delta`, which is D, and
zeroes `dq_sum`; `backward` gives dk and dv, and adds to `dq_sum` dq of every tile of keys, without
the scale; `finish` makes dq of it. The compute groups share out the rows of dq, or those of its
transpose where the head size is long enough for them. The order of these sums varies from run to
run; `deterministic`, tiles of keys add in turn, which `turns` counts, and every run has the same
bits.

Arrays: `q, o, do, dq: [batch, heads, rows, d]`, `k, v, dk, dv: [batch, kv_heads, keys, d]`,
`lse, base, delta: [batch, heads, rows]`, `dq_sum: [batch, heads, rows, d]` or, transposed, block of
rows after block of rows, `[batch, heads, blocks, d, block]`, and `turns: [batch, heads, blocks]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from warploom.autosched.schedules import Policy
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.tile import (
    BF16,
    FP32,
    INT32,
    Array,
    DType,
    Index,
    Program,
    Span,
    Tile,
    array,
    cdiv,
    coordinate,
    exp2,
    grid,
    load,
    loop,
    maximum_index,
    minimum_index,
    size,
    span,
    store,
    sum_along,
    trace,
    where,
    zeros,
)

LOG2E = math.log2(math.e)
ROWS = 64  # of a task of the programs without a matmul, where sums lie by rows
PITCH = 4  # elements of 16 bytes, of which the copy engine wants a multiple
ALIGNED = 8  # elements of a head, of which the copy engine wants a multiple
# (rows, keys) of a block of scores, by padded head size
TILES = {64: (128, 128), 96: (64, 128), 128: (64, 128)}


class Style(NamedTuple):
    """How the loop over queries is written, which decides what ptxas makes of its registers.

    late    dv is added to behind dS, so that its matmul runs beside the groups' meeting
    ahead   an iteration's first matmul starts before the end of the one before
    branch  blocks that need no mask are told apart, rather than masked like the others
    """

    late: bool = False
    ahead: bool = True
    branch: bool = True


# By padded head size and whether there is a causal mask, as measured; else `Style()`.
STYLES: dict[tuple[int, bool], Style] = {
    (64, False): Style(late=True, ahead=False),
    (64, True): Style(late=True, ahead=False),
    (96, False): Style(late=True, ahead=False),
    (96, True): Style(late=True, ahead=False),
    (128, False): Style(late=True, ahead=False),
}
IN_TURN = 16384  # rows from which sums without a causal mask are added in turn
# Rows, from the first to the last number, for which causal tasks go out in pairs, by head size.
PAIRED: dict[int, tuple[int, int]] = {64: (1024, 8192), 128: (2048, 8192)}
LONG = (192, 256)  # padded head sizes of `backward_passes`


@dataclass(frozen=True)
class BackwardConfig:
    """What is static: element type, head size, masks, query heads of a key head, scale (None: 1 /
    sqrt(head_dim)), and whether every sum has one order.

    A row at position p sees keys p - window + 1 ... p; None: all. `whole_keys`: their number is a
    multiple of a tile's, so that only a causal mask or a window hides any. `paired`: causal tasks
    go out in pairs of a long and a short one, which L2 must have room for. `split`: dq has a kernel
    of its own, which makes the scores again; a way to one order of sums. `fitted` chooses.
    """

    dtype: DType = BF16
    head_dim: int = 128
    causal: bool = False
    window: int | None = None
    group: int = 1
    scale: float | None = None
    deterministic: bool = False
    whole_keys: bool = False
    paired: bool = False
    split: bool = False

    def __post_init__(self) -> None:
        """Refuse heads that no tile is for."""
        if not 0 < self.head_dim <= max(LONG) or self.head_dim % ALIGNED:
            raise InputError(
                f"attention backward of heads of {self.head_dim}: expected a multiple of {ALIGNED} "
                f"up to {max(LONG)}"
            )
        if self.window is not None and self.window < 1:
            raise InputError(f"attention backward window={self.window}: expected >= 1")

    @property
    def depth(self) -> int:
        """The head size that tiles have: what lies beyond the head is read as zero."""
        return min(size for size in (*TILES, *LONG) if size >= self.head_dim)

    @property
    def long(self) -> bool:
        """Whether each gradient has a kernel of its own."""
        return self.depth in LONG

    @property
    def tile(self) -> tuple[int, int]:
        """(rows, keys) of a block of scores."""
        return TILES[self.depth]

    @property
    def factor(self) -> float:
        """The factor on q k^T."""
        return self.scale if self.scale is not None else 1.0 / math.sqrt(self.head_dim)

    @property
    def transposed(self) -> bool:
        """Whether dq is summed with its rows last."""
        return not self.long and self.tile[0] < self.tile[1]

    @property
    def sums(self) -> bool:
        """Whether tasks add up dq in memory."""
        return not (self.long or self.split)

    @property
    def masked(self) -> bool:
        """Whether some rows do not see all keys of a block."""
        return self.causal or self.window is not None or not self.whole_keys

    @property
    def style(self) -> Style:
        """How its loop is written."""
        return STYLES.get((self.depth, self.causal), Style())

    @property
    def sum_depth(self) -> int:
        """The head size of a block's dq: transposed, the groups share it out in tiles of 64."""
        return -(-self.depth // self.tile[1]) * self.tile[1] if self.transposed else self.depth

    def turns_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of `turns`, which begin at zero, for queries of that shape."""
        return (*shape[:2], -(-shape[2] // self.tile[0]))

    @property
    def task_rows(self) -> int:
        """Rows of a task of the programs without a matmul: a block of transposed sums is one."""
        return self.tile[0] if self.transposed else ROWS

    def sums_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of `dq_sum` for queries of that shape."""
        block = self.tile[0]
        last = (self.sum_depth, block) if self.transposed else (block, self.depth)
        return (*shape[:2], -(-shape[2] // block), *last)

    def vectors_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Room of `base` and `delta` for lse of that shape: a pitch that the copy engine takes."""
        return (*shape[:-1], -(-shape[-1] // PITCH) * PITCH)

    def arrays(self, names: str) -> dict[str, Array]:
        """The parameters of those names."""
        rows, keys, row = "batch heads rows d", "batch kv_heads keys d", "batch heads rows"
        every: dict[str, Array] = dict.fromkeys("q o do dq".split(), array(self.dtype, rows))
        every |= dict.fromkeys("k v dk dv".split(), array(self.dtype, keys))
        every |= dict.fromkeys("lse base delta".split(), array(FP32, row))
        block = "e block" if self.transposed else "block e"
        every["turns"] = array(INT32, "batch heads blocks")
        fragments = not self.transposed  # which `finish` would have to turn out of fragments
        every["dq_sum"] = array(FP32, f"batch heads blocks {block}", fragments=fragments)
        every["none"] = array(FP32, f"batch heads blocks {block}")
        return {name: every[name] for name in names.split()}


def fitted(config: BackwardConfig, rows: int, keys: int) -> BackwardConfig:
    """What kernels of a configuration are for that many rows and keys of a sequence."""
    low, high = PAIRED.get(config.depth, (1, 0))
    paired = config.causal and not config.deterministic and low <= rows <= high
    whole = not config.long and keys % config.tile[1] == 0
    # Tiles that begin at the same rows wait for one another at first: long sequences hide it.
    split = config.deterministic and not (config.long or config.causal) and rows < IN_TURN
    return replace(config, whole_keys=whole, paired=paired, split=split)


def backward(config: BackwardConfig | None = None) -> Program:
    """The gradients of a tile of keys, and its part of the queries'."""
    chosen = config or BackwardConfig()
    sums = "" if chosen.split else " dq_sum turns" if chosen.deterministic else " dq_sum"
    arrays = chosen.arrays(f"q do k v dk dv base delta{sums}")
    return trace(_backward, arrays, name="attention_backward", config=chosen)


def prepare(config: BackwardConfig) -> Program:
    """What the backward pass needs to know of a row, and sums of zero where tasks add to them."""
    arrays = config.arrays("o do lse base delta")
    if config.sums:
        arrays |= {"dq_sum": config.arrays("none")["none"]}  # zeros have no order
    return trace(_prepare, arrays, name="attention_backward_prepare", config=config)


def finish(config: BackwardConfig) -> Program:
    """The gradients of the queries from their sums."""
    arrays = config.arrays("dq_sum dq")
    return trace(_finish, arrays, name="attention_backward_finish", config=config)


def _task(config: BackwardConfig) -> tuple[Index, Index, Index, Span, Span]:
    count = config.task_rows
    batch, head, i = grid(batch=size("batch"), heads=size("heads"), rows=cdiv(size("rows"), count))
    return batch, head, i, span(i * count, count), span(0, config.depth)


def _sums_at(config: BackwardConfig, i: Index) -> tuple[Span | Index, ...]:
    """Where the sums of block i of the rows are, after batch and head."""
    rows = span(0, config.tile[0], "rows")
    if not config.transposed:
        return i, rows, span(0, config.depth, "d")
    return i, span(0, config.sum_depth, "d" if config.sum_depth == config.depth else "e"), rows


def _prepare(config: BackwardConfig, o: Array, do: Array, lse: Array, **made: Array) -> None:
    batch, head, i, rows, d = _task(config)
    out, grad = (load(x, batch, head, rows, d).cast(FP32) for x in (o, do))
    sums = load(lse, batch, head, rows)
    base = where(sums.equals(-math.inf), math.inf, sums * LOG2E)
    store(made["base"], batch, head, rows, tile=base)
    store(made["delta"], batch, head, rows, tile=sum_along(out * grad, "d"))
    if not config.sums:
        return
    if config.transposed:
        none = zeros(e=config.sum_depth, rows=config.task_rows)
        at = (i, span(0, config.sum_depth, "e"), span(0, config.task_rows, "rows"))
    else:
        none, at = zeros(rows=ROWS, d=config.depth), _rows_of_sums(config, i)
    store(made["dq_sum"], batch, head, *at, tile=none)


def _rows_of_sums(config: BackwardConfig, i: Index) -> tuple[Index, Span, Span]:
    """Where the sums of the rows of a task are, where blocks have several tasks."""
    tasks = config.tile[0] // ROWS
    return i // tasks, span(i % tasks * ROWS, ROWS, "rows"), span(0, config.depth, "d")


def _finish(config: BackwardConfig, dq_sum: Array, dq: Array) -> None:
    batch, head, i, rows, d = _task(config)
    if config.transposed:
        columns = span(0, config.depth, "d")
        sums = load(dq_sum, batch, head, i, columns, span(0, config.task_rows, "rows")).T
    else:
        sums = load(dq_sum, batch, head, *_rows_of_sums(config, i))
    store(dq, batch, head, rows, d, tile=(sums * config.factor).cast(config.dtype))


def _backward(
    config: BackwardConfig, q: Array, do: Array, k: Array, v: Array, **rest: Array
) -> None:
    (bq, bk), d = config.tile, span(0, config.depth)
    batch, kv_head, j = grid(
        batch=size("batch"), kv_heads=size("kv_heads"), keys=cdiv(size("keys"), bk)
    )
    keys = span(j * bk, bk)
    key_tile, value_tile = load(k, batch, kv_head, keys, d), load(v, batch, kv_head, keys, d)
    dk, dv = zeros(keys=bk, d=config.depth), zeros(keys=bk, d=config.depth)
    wide = key_tile
    if config.sums and config.depth < config.sum_depth:
        wide = load(k, batch, kv_head, keys, span(0, config.sum_depth, "e"))
    shift = size("keys") - size("rows")
    first, blocks = row_blocks(config, j, config.tile)
    for n in loop(blocks * config.group):
        head = kv_head * config.group + (n // blocks if config.group > 1 else 0)
        i = first + (n % blocks if config.group > 1 else n)
        rows = span(i * bq, bq)
        queries, grads = load(q, batch, head, rows, d), load(do, batch, head, rows, d)
        base = load(rest["base"], batch, head, rows)
        delta = load(rest["delta"], batch, head, rows)
        scores, grad = key_tile @ queries, value_tile @ grads
        seen = seen_by_keys(config, (bq, i * bq + shift), (bk, j * bk))
        if config.masked and config.style.branch:
            scores[:] = where(seen, scores, -math.inf)
        weights = exp2(scores * (config.factor * LOG2E) - base)
        if config.masked and not config.style.branch:
            weights = where(seen, weights, 0.0)
        if not config.style.late:
            dv += weights.cast(config.dtype) @ grads
        change = (weights * (grad - delta)).cast(config.dtype)
        if config.style.late:
            dv += weights.cast(config.dtype) @ grads
        if config.split:
            dk += change @ queries
            continue
        dq = wide @ change if config.transposed else change @ key_tile
        dk += change @ queries
        turn = None
        if config.deterministic:
            turn = (rest["turns"], (batch, head, i), _turn(config, i * bq + shift, j))
        store(rest["dq_sum"], batch, head, *_sums_at(config, i), tile=dq, add=True, turn=turn)
    store(rest["dk"], batch, kv_head, keys, d, tile=(dk * config.factor).cast(config.dtype))
    store(rest["dv"], batch, kv_head, keys, d, tile=dv.cast(config.dtype))


def row_blocks(
    config: BackwardConfig, j: Index, tile: tuple[int, int]
) -> tuple[Index | int, Index]:
    """(first block of rows, how many) that see a key of tile j; `tile`: rows and keys of each."""
    (bq, bk), shift, last = tile, size("keys") - size("rows"), size("rows")
    first = maximum_index(0, j * bk - shift) // bq if config.causal else 0
    if config.window is not None:
        last = maximum_index(0, minimum_index(last, j * bk + bk - 1 + config.window - shift))
    return first, maximum_index(0, cdiv(last, bq) - first)


def key_blocks(
    config: BackwardConfig, i: Index, tile: tuple[int, int]
) -> tuple[Index | int, Index]:
    """(first block of keys, how many) that a row of tile i sees."""
    (bq, bk), shift, last = tile, size("keys") - size("rows"), size("keys")
    if config.causal:
        last = maximum_index(0, minimum_index(last, i * bq + bq + shift))
    first: Index | int = 0
    if config.window is not None:
        first = maximum_index(0, i * bq + shift - config.window + 1) // bk
    return first, maximum_index(0, cdiv(last, bk) - first)


Block = tuple[int, Index]  # length and first position


def seen_by_keys(config: BackwardConfig, rows: Block, keys: Block) -> Tile:
    """Which keys of a block its rows see, `[keys, rows]`, or `[keys]` where all rows see the same.

    Keys behind the last one are seen by no row: their scores of 0 could have an infinite weight.
    """
    row_at, key_at = coordinate("rows", *rows), coordinate("keys", *keys)
    seen = key_at <= row_at if config.causal else key_at < size("keys")
    return seen if config.window is None else seen & (key_at > row_at - config.window)


def seen_by_rows(config: BackwardConfig, rows: Block, keys: Block) -> Tile:
    """The same, `[rows, keys]` or `[keys]`."""
    row_at, key_at = coordinate("rows", *rows), coordinate("keys", *keys)
    seen = row_at >= key_at if config.causal else key_at < size("keys")
    return seen if config.window is None else (row_at - config.window < key_at) & seen


def _turn(config: BackwardConfig, row: Index, j: Index) -> Index:
    """How many tiles of keys add to a block of rows before tile j does; `row`: the first position
    of the block. Causal tasks begin where their rows do, so the last tile that a block sees comes
    first, and none waits for another to get there.
    """
    bq, bk = config.tile
    if config.causal:
        return minimum_index(cdiv(size("keys"), bk), (row + bq + bk - 1) // bk) - 1 - j
    return j if config.window is None else j - maximum_index(0, row - config.window + 1) // bk


def backward_policy(config: BackwardConfig) -> Policy:
    """Program order, with the matmuls of an iteration in flight until their results are read.

    Causal tasks go to the next free SM, which reads and adds to few heads at a time. Pairs of tasks
    are of equal length, but have more heads at work: 16384 rows of heads of 128 lost a third on an
    H200, where L2 does not hold their sums.
    """
    scheduler = "static" if not config.causal else "serpentine" if config.paired else "dynamic"
    launch = LaunchPlan(
        split="keys",
        tile_scheduler=scheduler,
        staged_slots=2,
        store_warps=not config.split,
        reverse=("keys_tile",) if config.deterministic and config.causal else (),
        rotate_loops=config.style.ahead,
    )
    early = config.style.ahead or config.causal
    order = ("inflight" if config.style.ahead else "lcsf") + ("-early" if early else "")
    return Policy(order, launch, groups=config.tile[1] // 64, depth=2, vectors=True)
