"""Attention backward: the gradients of q, k and v, one pass over the queries for a tile of keys.

With P = exp(scale q k^T - lse), dP = dO v^T, D = rowsum(dO o) and dS = P (dP - D):
dv = P^T dO, dk = scale dS^T q, dq = scale dS k (FlashAttention-2, arXiv 2307.08691, algorithm 2).

Three programs after one another: `prepare` makes of o, dO and lse what `backward` needs of a row,
`base`, which is lse in powers of 2 (inf for a row that sees no key, or is none), and `delta`, which
is D, and zeroes `dq_sum`; `backward` gives dk and dv, and adds to
`dq_sum` dq of every tile of keys, without the scale; `finish` makes dq of it. The compute groups
share out the rows of dq, or those of its transpose where the head size is long enough for them. The
order of these sums varies from run to run; `deterministic`, tiles of keys add in turn, and every
run has the same bits: `prepare` zeroes `turns`, which counts them, and the first of them needs no
zeros in `dq_sum`. Where a last round of tasks would leave SMs idle, `tail` does pieces of them and
`settle` makes dk and dv of their sums. `backward_config` has the arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from warploom.autosched.schedules import Policy
from warploom.codegen.ir.plan import LaunchPlan
from warploom.kernels.attention.backward_config import TILE_FIELDS, BackwardConfig
from warploom.tile import (
    FP32,
    INT32,
    Array,
    Index,
    Program,
    Span,
    Tile,
    cdiv,
    coordinate,
    exp2,
    grid,
    load,
    loop,
    maximum_index,
    minimum_index,
    read,
    size,
    span,
    store,
    sum_along,
    tanh,
    trace,
    where,
    zeros,
)

LOG2E = math.log2(math.e)
PART_KEYS = 16  # of a task of `settle`
PIECE_FIELDS = 6  # numbers of an entry of a list of pieces
At = tuple[Span | Index, ...]  # a place in an array


@dataclass(frozen=True)
class Sequence:
    """Where one sequence is: how many rows and keys it has, the dimensions before its heads,
    packed, its first row, key and block of rows among all, and where heads go both ways, whether
    this one goes backwards (1 or 0)."""

    rows: Index
    keys: Index
    lead: tuple[Index, ...] = ()
    firsts: tuple[Index, Index, Index] | None = None
    back: Index | None = None

    @classmethod
    def listed(cls, tiles: Array, task: Index) -> tuple[Sequence, Index]:
        """That of an entry of a list of tiles (`kernels.attention.tasks`), and which tile it is."""
        row, rows, block, key, keys, tile = (read(tiles, task, n) for n in range(TILE_FIELDS))
        return cls(rows, keys, (), (row, key, block)), tile

    def row_block(self, head: Index, start: Index, count: int, d: Span, put: bool = False) -> At:
        """Rows from `start` on of arrays like q; to `put` them, those of this sequence alone."""
        if self.firsts is None:
            return (*self.lead, head, span(start, count, "rows"), d)
        first = self.firsts[0]
        return (span(first + start, count, "rows", first + self.rows if put else None), head, d)

    def key_block(self, head: Index, start: Index, count: int, d: Span, put: bool = False) -> At:
        """The same of keys."""
        if self.firsts is None:
            return (*self.lead, head, span(start, count, "keys"), d)
        first = self.firsts[1]
        return (span(first + start, count, "keys", first + self.keys if put else None), head, d)

    def row_numbers(self, head: Index, start: Index, count: int) -> At:
        """Rows of lse."""
        first = start if self.firsts is None else self.firsts[0] + start
        return (*self.lead, head, span(first, count, "rows"))

    def kept_numbers(self, config: BackwardConfig, head: Index, start: Index, count: int) -> At:
        """Rows of base and delta."""
        first = start if self.firsts is None else self.firsts[2] * config.tile[0] + start
        return (*self.lead, head, span(first, count, "rows"))

    def along(self, place: Index, blocks: Index) -> Index:
        """The block at a place among `blocks`."""
        back = self.back
        return place if back is None else back * (blocks - 1) + place * (1 - 2 * back)

    def block(self, head: Index, i: Index) -> tuple[Index, ...]:
        """Block i of the rows in dq_sum and turns."""
        return (*self.lead, head, i if self.firsts is None else self.firsts[2] + i)


def backward(config: BackwardConfig | None = None) -> Program:
    """The gradients of a tile of keys, and its part of the queries'."""
    chosen = config or BackwardConfig()
    sums = " dq_sum turns" if chosen.deterministic else " dq_sum"
    arrays = chosen.arrays(f"q do k v dk dv base delta{sums}{chosen.tables('keys')}")
    return trace(_backward, arrays, name="attention_backward", config=chosen)


def tail(config: BackwardConfig) -> Program:
    """The same for pieces of tasks, which add to what `settle` makes the gradients of."""
    arrays = config.arrays("q do k v piece_sums base delta dq_sum key_pieces")
    return trace(_backward, arrays, name="attention_backward_tail", config=config)


def prepare(config: BackwardConfig) -> Program:
    """What the backward pass needs to know of a row, and sums of zero where tasks add to them in
    any order; where each has a turn, that none has added."""
    turns = " turns" if config.deterministic and config.sums else ""
    arrays = config.arrays(f"o do lse base delta{turns}{config.tables('rows')}")
    if config.sums and not turns:
        arrays |= {"dq_sum": config.arrays("none")["none"]}  # zeros have no order
    return trace(_prepare, arrays, name="attention_backward_prepare", config=config)


def finish(config: BackwardConfig) -> Program:
    """The gradients of the queries from their sums."""
    turns = " turns" if config.deterministic and not config.every_row else ""
    arrays = config.arrays(f"dq_sum dq{turns}{config.tables('rows')}")
    return trace(_finish, arrays, name="attention_backward_finish", config=config)


def settle(config: BackwardConfig) -> Program:
    """The gradients of tiles of keys whose tasks were cut, from the sums of the pieces."""
    arrays = config.arrays("piece_sums dk dv cut_tiles")
    return trace(_settle, arrays, name="attention_backward_settle", config=config)


def _settle(
    config: BackwardConfig, piece_sums: Array, dk: Array, dv: Array, cut_tiles: Array
) -> None:
    count, keys, d = PART_KEYS, config.tile[1], span(0, config.depth, "d")
    slot, part = grid(slots=size("slots"), parts=keys // count)
    batch, head, j = (read(cut_tiles, slot, n) for n in range(3))
    own = Sequence(size("keys"), size("keys"), (batch,))
    at = own.key_block(head, j * keys + part * count, count, d, put=True)
    for which, (to, factor) in enumerate(((dk, config.factor), (dv, 1.0))):
        sums = load(piece_sums, which, slot, span(part * count, count, "keys"), d)
        store(to, *at, tile=(sums * factor).cast(config.dtype))


def _task(config: BackwardConfig, rest: dict[str, Array]) -> tuple[Sequence, Index, Index]:
    """(sequence, head, number) of a task of rows."""
    if config.packed:
        head, task = grid(heads=size("heads"), tasks=size("tasks"))
        sequence, i = Sequence.listed(rest["row_tiles"], task)
        return sequence, head, i
    tasks = cdiv(size("rows"), config.task_rows)
    batch, head, i = grid(batch=size("batch"), heads=size("heads"), rows=tasks)
    return Sequence(size("rows"), size("rows"), (batch,)), head, i


def _sums_at(config: BackwardConfig, place: tuple[Index, ...]) -> At:
    """Where the sums of a block of the rows are."""
    rows = span(0, config.tile[0], "rows")
    if not config.transposed:
        return *place, rows, span(0, config.depth, "e" if config.depth == config.tile[1] else "d")
    return *place, span(0, config.sum_depth, "d" if config.sum_depth == config.depth else "e"), rows


def _prepare(config: BackwardConfig, o: Array, do: Array, lse: Array, **rest: Array) -> None:
    sequence, head, i = _task(config, rest)
    count, d = config.task_rows, span(0, config.value_depth, "d")
    at = sequence.row_block(head, i * count, count, d)
    out, grad = (load(x, *at).cast(FP32) for x in (o, do))
    sums = load(lse, *sequence.row_numbers(head, i * count, count))
    base = where(sums.equals(-math.inf), math.inf, sums * LOG2E)
    delta = sum_along(out * grad, "d")
    if config.packed:  # behind the last row are those of the next sequence
        own = coordinate("rows", count, i * count) < sequence.rows
        base, delta = where(own, base, math.inf), where(own, delta, 0.0)
    kept = sequence.kept_numbers(config, head, i * count, count)
    store(rest["base"], *kept, tile=base)
    store(rest["delta"], *kept, tile=delta)
    if not config.sums:
        return
    if config.deterministic:
        block = i // (config.tile[0] // count)
        store(rest["turns"], *sequence.block(head, block), tile=zeros(INT32))
        return
    if config.transposed:
        none = zeros(e=config.depth, rows=count)
        where_ = (*sequence.block(head, i), span(0, config.depth, "e"), span(0, count, "rows"))
    else:
        none, where_ = zeros(rows=count, d=config.depth), _part_of_sums(config, sequence, head, i)
    store(rest["dq_sum"], *where_, tile=none)


def _part_of_sums(config: BackwardConfig, sequence: Sequence, head: Index, i: Index) -> At:
    """Where the sums of the rows of a task are, where blocks may have several tasks."""
    count, d = config.task_rows, span(0, config.depth, "d")
    tasks = config.tile[0] // count
    return *sequence.block(head, i // tasks), span(i % tasks * count, count, "rows"), d


def _finish(config: BackwardConfig, dq_sum: Array, dq: Array, **rest: Array) -> None:
    sequence, head, i = _task(config, rest)
    count, d = config.task_rows, span(0, config.depth, "d")
    if config.transposed:
        place = sequence.block(head, i)
        sums = load(dq_sum, *place, d, span(0, count, "rows")).T
    else:
        sums = load(dq_sum, *_part_of_sums(config, sequence, head, i))
    if "turns" in rest:  # nobody has begun the sums of rows that see no key
        *lead, block = sequence.block(head, i // (config.tile[0] // count))
        begun = read(rest["turns"], *lead, minimum_index(block, size("blocks") - 1))
        sums = where(coordinate("rows", count, 0) < count * minimum_index(1, begun), sums, 0.0)
    at = sequence.row_block(head, i * count, count, span(0, config.depth), put=True)
    store(dq, *at, tile=(sums * config.factor).cast(config.dtype))


def _tile_of_keys(config: BackwardConfig, rest: dict[str, Array]) -> tuple[Sequence, Index, Index]:
    """(sequence, key head, number) of a task of keys."""
    if config.packed:
        head, task = _in_order() if config.deterministic else _shared_out(config)
        sequence, j = Sequence.listed(rest["key_tiles"], task)
        return sequence, head, j
    back = None
    if config.listed:
        (task,) = grid(tasks=size("tasks"))
        batch, head, j = (read(rest["key_tasks"], task, n) for n in range(3))
        back = read(rest["key_tasks"], task, 3) if config.both_ways else None
    else:
        tasks = cdiv(size("keys"), config.tile[1])
        batch, head, j = grid(batch=size("batch"), kv_heads=size("kv_heads"), keys=tasks)
    return Sequence(size("rows"), size("keys"), (batch,), back=back), head, j


def _in_order() -> tuple[Index, Index]:
    """(key head, number in the list) of a task, one head after another: tiles that add in turn."""
    head, task = grid(kv_heads=size("kv_heads"), tasks=size("tasks"))
    return head, task


def _shared_out(config: BackwardConfig) -> tuple[Index, Index]:
    """The same, where SM s does the tasks (band, round, s)."""
    sms, band = config.sms, max(1, config.band)
    bands, rounds = size("kv_heads") // band, size("tasks") * band // sms
    return dealt(config, *grid(bands=bands, rounds=rounds, sms=sms))


def dealt(config: BackwardConfig, number: Index, turn: Index, sm: Index) -> tuple[Index, Index]:
    """The task of an SM in a round of band `number`, so that all SMs have about as much to do.

    The heads of a band are at work at the same time. Their tiles come longest first, and are dealt
    out forwards and backwards in turn. What that leaves uneven is the same in every band: each
    second one is dealt out the other way round, and the next two begin with other SMs.
    """
    sms, band = config.sms, max(1, config.band)
    place = (sm + sms - number // 2 * (3 * sms // 8) % sms) % sms
    back = (number + turn) % 2
    at = turn * sms + place + back * (sms - 1 - 2 * place)
    return number * band + at % band, at // band


@dataclass(frozen=True)
class Piece:
    """Some iterations of a tile's task: the place of its sums, the first of them and how many."""

    slot: Index
    first: Index
    count: Index

    @classmethod
    def listed(cls, pieces: Array) -> tuple[Sequence, Index, Index, Piece]:
        """That of a task: (sequence, key head, tile, piece)."""
        (task,) = grid(tasks=size("tasks"))
        batch, head, j, *rest = (read(pieces, task, n) for n in range(PIECE_FIELDS))
        return Sequence(size("rows"), size("keys"), (batch,)), head, j, cls(*rest)


def _backward(
    config: BackwardConfig, q: Array, do: Array, k: Array, v: Array, **rest: Array
) -> None:
    (bq, bk), d, piece = config.tile, span(0, config.depth), None
    if "key_pieces" in rest:
        own, kv_head, j, piece = Piece.listed(rest["key_pieces"])
    else:
        own, kv_head, j = _tile_of_keys(config, rest)
    at = own.key_block(kv_head, j * bk, bk, d)
    key_tile, value_tile = load(k, *at), load(v, *at)
    dk, dv = zeros(keys=bk, d=config.depth), zeros(keys=bk, d=config.depth)
    wide, columns = key_tile, key_tile.rename("d", "e") if config.depth == bk else key_tile
    if config.depth < config.sum_depth:
        wide = load(k, *own.key_block(kv_head, j * bk, bk, span(0, config.sum_depth, "e")))
    left = key_tile.copy() if config.written.kept else key_tile
    shift = own.keys - own.rows
    first, blocks = row_blocks(config, j, config.tile, own.rows, own.keys)
    for n in loop(blocks * config.group if piece is None else piece.count):
        number = n if piece is None else piece.first + n
        head = kv_head * config.group + (number // blocks if config.group > 1 else 0)
        place = number % blocks if config.group > 1 else number
        i = first + own.along(place, blocks)
        rows = own.row_block(head, i * bq, bq, d)
        queries, grads = load(q, *rows), load(do, *rows)
        kept = own.kept_numbers(config, head, i * bq, bq)
        base, delta = load(rest["base"], *kept), load(rest["delta"], *kept)
        scores, slope = capped(config, left @ queries)
        grad = _weights_change(config, value_tile, grads, delta)
        seen = seen_by_keys(config, (bq, i * bq + shift), (bk, j * bk), own.keys)
        if config.masked:
            scores[:] = where(seen, scores, -math.inf)
        weights = exp2(scores * (config.power * LOG2E) - base)
        if config.written.first:
            dv += weights.cast(config.dtype) @ grads
        inner = grad if config.written.taken else grad - delta
        changed = weights * inner
        change = (changed if slope is None else changed * slope).cast(config.dtype)
        if not config.written.first:  # its matmul runs beside the groups' meeting
            dv += weights.cast(config.dtype) @ grads
        if config.written.behind:
            dk += change @ queries
        dq = wide @ change if config.transposed else change @ columns
        if not config.written.behind:
            dk += change @ queries
        block, number = own.block(head, i), _turn(config, i * bq + shift, j, own)
        turn = (rest["turns"], block, number) if config.deterministic else None
        store(rest["dq_sum"], *_sums_at(config, block), tile=dq, add=True, turn=turn)
    if piece is None:
        to = own.key_block(kv_head, j * bk, bk, d, put=True)
        store(rest["dk"], *to, tile=(dk * config.factor).cast(config.dtype))
        store(rest["dv"], *to, tile=dv.cast(config.dtype))
        return
    for which, tile in enumerate((dk, dv)):
        to = which, piece.slot, span(0, bk, "keys"), span(0, config.depth, "d")
        store(rest["piece_sums"], *to, tile=tile, add=True)


def _weights_change(config: BackwardConfig, values: Tile, grads: Tile, delta: Tile) -> Tile:
    """dP, from which D is taken off already where the style says so."""
    if not config.written.taken:
        return values @ grads
    rows, keys = config.tile
    grad = zeros(keys=keys, rows=rows) - delta
    grad += values @ grads
    return grad


def capped(config: BackwardConfig, scores: Tile) -> tuple[Tile, Tile | None]:
    """Scores under the soft cap, and by how much they change with those without."""
    if not config.softcap:
        return scores, None
    found = tanh(scores * (config.factor / config.softcap))
    return found, 1.0 - found * found


def row_blocks(
    config: BackwardConfig, j: Index, tile: tuple[int, int], rows: Index, keys: Index
) -> tuple[Index | int, Index]:
    """(first block of rows, how many) that see a key of tile j; `tile`: rows and keys of each."""
    (bq, bk), shift, last = tile, keys - rows, rows
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


def seen_by_keys(config: BackwardConfig, rows: Block, keys: Block, last: Index) -> Tile:
    """Which keys of a block its rows see, `[keys, rows]`, or `[keys]` where all rows see the same.

    Keys behind the last of `last` are seen by no row: their scores of 0 could have an infinite
    weight.
    """
    row_at, key_at = coordinate("rows", *rows), coordinate("keys", *keys)
    seen = key_at <= row_at if config.causal else key_at < last
    return seen if config.window is None else seen & (key_at > row_at - config.window)


def seen_by_rows(config: BackwardConfig, rows: Block, keys: Block) -> Tile:
    """The same, `[rows, keys]` or `[keys]`."""
    row_at, key_at = coordinate("rows", *rows), coordinate("keys", *keys)
    seen = row_at >= key_at if config.causal else key_at < size("keys")
    return seen if config.window is None else (row_at - config.window < key_at) & seen


def _turn(config: BackwardConfig, row: Index, j: Index, own: Sequence) -> Index:
    """How many tiles of keys add to a block of rows before tile j does; `row`: the first position
    of the block. Causal tasks begin where their rows do, so the last tile that a block sees comes
    first, and none waits for another to get there. Where a head goes backwards the first tile does
    (`kernels.attention.both_ways`).
    """
    bq, bk = config.tile
    if config.causal:
        turn = minimum_index(cdiv(own.keys, bk), (row + bq + bk - 1) // bk) - 1 - j
        return turn if own.back is None else turn + own.back * (j - turn)
    return j if config.window is None else j - maximum_index(0, row - config.window + 1) // bk


def _one_cursor(config: BackwardConfig) -> bool:
    """Whether the rings of an iteration share a cursor: each the faster, case by case."""
    if config.depth == 64:
        return config.causal or config.deterministic
    return config.depth == 96 and (config.causal or config.written.kept)


def backward_policy(config: BackwardConfig) -> Policy:
    """Program order, with the matmuls of an iteration in flight until their results are read.

    Where tasks are listed each SM has its own, of a band of heads at a time: L2 does not hold the
    sums of more. Others under a causal mask go to the next free SM, which costs registers.
    """
    shared_out = config.listed or config.packed
    static = shared_out or not config.causal
    backwards = config.deterministic and config.causal and not config.listed
    launch = LaunchPlan(
        split="keys",
        tile_scheduler="static" if static else "dynamic",
        supergroup=0 if shared_out else config.band,
        grouped="row" if shared_out else "all",
        one_cursor=_one_cursor(config),
        kept_places=config.written.first and config.written.held,
        held_steps=config.held_steps,
        staged_slots=2,
        fence_at_meeting=True,
        in_turn=config.written.turns,
        store_warps=True,
        hold_arithmetic=config.written.held,
        start_behind_wait=config.written.first,
        reverse=("tasks_tile" if config.packed else "keys_tile",) if backwards else (),
    )
    order = "lcsf-early" if config.causal else "lcsf"
    groups = config.tile[1] // 64
    # What copying warps know of turns; groups do without.
    registers = (40, 232) if config.both_ways and config.written.first else None
    depth = 3 if config.depth == 96 and config.written.kept else 2  # of 128 there is no room
    return Policy(order, launch, groups=groups, depth=depth, registers=registers, vectors=True)
