"""What is static in attention backward, and the shapes of the arrays that its kernels share.

Arrays: `q, o, do, dq: [batch, heads, rows, d]`, `k, v, dk, dv: [batch, kv_heads, keys, d]`,
`lse: [batch, heads, rows]`, `base, delta: [batch, heads, places]`, places being rows up to a
multiple of 16, `dq_sum: [batch, heads, blocks, block, d]` or, transposed,
`[batch, heads, blocks, d, block]`, `turns: [batch, heads, blocks]`, and of dk and dv of tiles whose
tasks are cut `piece_sums: [2, slots, keys, d]`.

Packed, sequence s has the tokens `row_bounds[s]` to `row_bounds[s + 1]` of `q, o, do, dq:
[row_tokens, heads, d]`, and so of `k, v, dk, dv`; `lse: [heads, row_tokens]`. What the kernels keep
of rows has whole blocks of every sequence, s from block `row_bounds[s] // block + s` on, which no
two sequences share: `base, delta: [heads, places]`, `dq_sum: [heads, blocks, ...]` and `turns:
[heads, blocks]`. `row_tiles` and `key_tiles: [tasks, fields]` (`kernels.attention.tasks`) say which
block or tile of which sequence a task is: first row, rows, first block, first key and keys of the
sequence, and the number of the tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from warploom.errors import InputError
from warploom.tile import BF16, FP32, INT32, Array, DType, array

LOG2E = math.log2(math.e)
ROWS = 64  # of a task of the programs without a matmul, where sums lie by rows
PITCH = 16  # elements of a vector that lie in an order of their own
ALIGNED = 8  # elements of a head, of which the copy engine wants a multiple
# (rows, keys) of a block of scores, by padded head size
TILES = {64: (128, 128), 96: (64, 128), 128: (64, 128)}


class Style(NamedTuple):
    """How the loop over queries is written, which decides what ptxas makes of its registers.

    taken   the matmul that makes dP starts from -D, which nothing takes off afterwards
    turns   groups make dq in turn, each the whole of it, and not each a part
    behind  dq's matmul comes behind dk's
    held    exponentials stay before the wait for dP
    first   dv's matmul starts before dS is made, beside which it runs
    kept    at head size 96, k stays in registers as the first operand of the matmul that makes S
    wide    at head size 64, tiles of 192 keys and three groups
    """

    taken: bool = False
    turns: bool = False
    behind: bool = False
    held: bool = False
    kept: bool = False
    wide: bool = False
    first: bool = False


PLAIN = Style()
# By padded head size and whether there is a causal mask, the fastest of those that
# `bench.attention_backward` times; else `PLAIN`.
STYLES: dict[tuple[int, bool], Style] = {
    (64, False): Style(turns=True, behind=True),
    (64, True): Style(turns=True, behind=True),
    (96, False): Style(turns=True, behind=True, kept=True),
    (96, True): Style(turns=True, behind=True, kept=True),
    (128, False): Style(turns=True, behind=True, held=True, first=True),
    (128, True): Style(turns=True, behind=True, held=True, first=True),
}
# From so many keys on: shorter sequences end with larger parts of tiles, or begin more loops.
LONG_KEYS = 4096
LONG_STYLES: dict[tuple[int, bool], Style] = {
    (64, True): Style(turns=True, behind=True, wide=True),
}
# Of packed sequences under a causal mask, whatever their lengths.
PACKED_STYLES = {64: LONG_STYLES[64, True], 96: STYLES[96, True]}
# Keys of which sums of one order are faster than any, which adds to zeros, by padded head size and
# whether there is a causal mask.
KEYS_IN_ORDER = {
    (64, False): (range(1 << 31),),
    (64, True): (range(4096),),
    (96, False): (range(2048),),
    (96, True): (range(8192),),
    (128, False): (range(2048),),
    (128, True): (range(2048), range(LONG_KEYS, 8192)),
}
ROUNDS_IN_ORDER = 12  # tasks that an SM has at least then: 15 to 31 where they were timed
# By whether there is a causal mask, of windows and of sums that have one order.
WINDOWED = {
    (64, False): Style(taken=True),
    (64, True): Style(turns=True, behind=True, wide=True),
    (128, False): Style(taken=True, held=True),
    (128, True): Style(turns=True, behind=True, first=True),
}
IN_ORDER = {
    (64, False): Style(turns=True, behind=True),
    (64, True): Style(turns=True, behind=True, wide=True),
    (96, False): STYLES[96, False],
    (96, True): STYLES[96, True],
    (128, False): Style(turns=True, behind=True, first=True),
    (128, True): Style(turns=True, behind=True, first=True),
}
# Of these, by padded head size, where every second head goes backwards.
BOTH_WAYS = {
    64: Style(turns=True, behind=True),
    96: STYLES[96, True],
    128: Style(turns=True, behind=True, held=True, first=True),
}
# Rows of all key heads whose tasks go out together, and heads at most; heads at least, where L2
# holds what so many read and add to, and where sums have one order.
BAND, MOST_HEADS = 16384, 16
LEAST_HEADS = {64: 4}
IN_TURN = 2
PACKED_HEADS = {64: 2}  # heads of a band of packed tasks, by padded head size; else 1
PACKED_ROWS = 32768  # or as many heads as have so many rows
TILE_FIELDS = 6  # numbers of an entry of a list of tiles
# Of 16 columns of k and v, by tile, that registers are left for where dv's matmul comes first, and
# at head size 96 beside k.
HELD_STEPS = {"v_t": (0, 1)}
CUT_DEPTHS = 96, 128  # at 64 a list of tasks costs as much as it saves
CUT_BLOCKS = 24  # blocks of rows that an SM must be spared for pieces to pay
LONG = (192, 256)  # padded head sizes of `backward_passes`


@dataclass(frozen=True)
class BackwardConfig:
    """What is static: element type, head size, masks, query heads of a key head, scale (None: 1 /
    sqrt(head_dim)), and whether every sum has one order, which `fitted` also chooses where it is
    faster.

    A row at position p sees keys p - window + 1 ... p; None: all. `whole_keys`: their number is a
    multiple of a tile's, so that only a causal mask or a window hides any. `listed`: which tasks an
    SM does stands in a list (`kernels.attention.shares`). `band`: those of so many key heads go out
    together, the longest first; 0: one head's after another's. `fitted` chooses.
    `packed`: sequences of different lengths stand behind one another, whose tasks are shared out to
    so many `sms`; `packed_for` chooses. `style`: how the loop is written; None: as measured.
    `value_dim`: the head size of v, o and dO, where it is another than that of q and k, for which
    there are kernels that make each gradient by itself. `softcap`: as of `AttentionConfig`.
    `cut`: of tasks as long as each other, those that do not fill a last round of SMs are cut in
    pieces (`kernels.attention.shares.cut_tasks`). `every_row`: each row sees a key.
    """

    dtype: DType = BF16
    head_dim: int = 128
    causal: bool = False
    window: int | None = None
    group: int = 1
    scale: float | None = None
    deterministic: bool = False
    whole_keys: bool = False
    listed: bool = False
    band: int = 0
    packed: bool = False
    style: Style | None = None
    value_dim: int | None = None
    softcap: float = 0.0
    sms: int = 132
    cut: bool = False
    every_row: bool = False

    def __post_init__(self) -> None:
        """Refuse heads that no tile is for."""
        if not 0 < self.head_dim <= max(LONG) or self.head_dim % ALIGNED:
            raise InputError(
                f"attention backward of heads of {self.head_dim}: expected a multiple of {ALIGNED} "
                f"up to {max(LONG)}"
            )
        if self.window is not None and self.window < 1:
            raise InputError(f"attention backward window={self.window}: expected >= 1")
        if self.softcap < 0:
            raise InputError(f"attention backward softcap={self.softcap}: expected 0 or more")
        if self.value_dim is not None and not (
            self.long and 0 < self.value_dim <= max(LONG) and self.value_dim % ALIGNED == 0
        ):
            raise InputError(
                f"attention backward of heads of {self.head_dim} with values of {self.value_dim}: "
                f"expected heads above {max(TILES)}, and values of a multiple of {ALIGNED} up to "
                f"{max(LONG)}"
            )
        if self.packed and self.long:
            raise InputError(
                f"attention backward of packed heads of {self.head_dim}: expected heads of up to "
                f"{max(TILES)}"
            )

    @property
    def depth(self) -> int:
        """The head size that tiles have: what lies beyond the head is read as zero. Beside 128 rows
        there are no registers for the slope of a soft cap."""
        least = max(self.head_dim, min(TILES) + 1 if self.softcap else 0)
        return min(size for size in (*TILES, *LONG) if size >= least)

    @property
    def value_depth(self) -> int:
        """The same of v, o and dO."""
        if self.value_dim is None:
            return self.depth
        return min(size for size in (*TILES, *LONG) if size >= self.value_dim)

    @property
    def long(self) -> bool:
        """Whether each gradient has a kernel of its own."""
        return self.depth in LONG

    @property
    def tile(self) -> tuple[int, int]:
        """(rows, keys) of a block of scores."""
        rows, keys = TILES[self.depth]
        style = self.written
        return min(rows, 64) if style.wide else rows, 192 if style.wide else keys

    @property
    def factor(self) -> float:
        """The factor on q k^T."""
        return self.scale if self.scale is not None else 1.0 / math.sqrt(self.head_dim)

    @property
    def power(self) -> float:
        """What the scores of a block are multiplied by in the exponent."""
        return self.softcap or self.factor

    @property
    def transposed(self) -> bool:
        """Whether dq is summed with its rows last: where groups share out neither its rows nor its
        columns, and do not make the whole of it in turn."""
        if self.long or self.written.turns:
            return False
        return all(n % self.tile[1] for n in (self.tile[0], self.depth))

    @property
    def sums(self) -> bool:
        """Whether tasks add up dq in memory."""
        return not self.long

    @property
    def fragments(self) -> bool:
        """Whether what the kernels leave one another lies as the registers of matmuls do."""
        return self.sums and not self.transposed

    @property
    def both_ways(self) -> bool:
        """Whether every second head goes backwards (`kernels.attention.both_ways`)."""
        return self.listed and self.deterministic

    @property
    def masked(self) -> bool:
        """Whether some rows do not see all keys of a block."""
        return self.causal or self.window is not None or not self.whole_keys

    @property
    def written(self) -> Style:
        """How its loop is written."""
        key = self.depth, self.causal
        found = STYLES.get(key)
        if self.deterministic:
            ordered = BOTH_WAYS.get(self.depth) if self.both_ways else IN_ORDER.get(key)
            found = PLAIN if self.softcap else ordered
        elif self.window is not None:
            found = WINDOWED.get(key)
        elif self.packed or self.softcap:
            alone = self.causal and self.group == 1 and not self.softcap
            found = PACKED_STYLES.get(self.depth) if alone else PLAIN
        return self.style or found or PLAIN

    @property
    def held_steps(self) -> dict[str, tuple[int, ...]]:
        """What of k and v stays in registers, by tile, beside that of `Style.kept`."""
        style = self.written
        beside_k = self.depth == 96 and style.kept and self.group == 1
        if self.deterministic:
            return HELD_STEPS if beside_k and self.causal else {}
        return HELD_STEPS if beside_k or (style.first and style.held) else {}

    @property
    def sum_depth(self) -> int:
        """The head size of a block's dq: transposed, the groups share it out in tiles of 64."""
        return -(-self.depth // self.tile[1]) * self.tile[1] if self.transposed else self.depth

    @property
    def task_rows(self) -> int:
        """Rows of a task of the programs without a matmul: a block of transposed sums is one, and
        one of packed sequences, of which all is written."""
        return self.tile[0] if self.transposed or self.packed else ROWS

    def turns_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of `turns` for `lead` dimensions and rows."""
        return (*shape[:-1], -(-shape[-1] // self.tile[0]))

    def sums_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of `dq_sum` for the same."""
        block = self.tile[0]
        last = (self.depth, block) if self.transposed else (block, self.depth)
        return (*self.turns_shape(shape), *last)

    def pieces_shape(self, heads: int, keys: int) -> tuple[int, ...]:
        """The shape of `piece_sums`, which begin at zero, of so many heads of keys."""
        left = heads * -(-keys // self.tile[1]) % self.sms
        return 2, left, self.tile[1], self.depth

    def vectors_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of `base` and `delta` for lse of that shape."""
        return (*shape[:-1], -(-shape[-1] // PITCH) * PITCH)

    def places(self, tokens: int, sequences: int) -> int:
        """Rows that `base` and `delta` of packed sequences have."""
        return (tokens // self.tile[0] + sequences) * self.tile[0]

    def arrays(self, names: str) -> dict[str, Array]:
        """The parameters of those names."""
        rows, keys, row = "batch heads rows d", "batch kv_heads keys d", "batch heads rows"
        lead, kept = "batch heads", "batch heads places" if self.sums else row
        if self.packed:
            rows, keys, row = "row_tokens heads d", "key_tokens kv_heads d", "heads row_tokens"
            lead, kept = "heads", "heads places"
        every: dict[str, Array] = dict.fromkeys("q dq o do".split(), array(self.dtype, rows))
        every |= dict.fromkeys("k dk v dv".split(), array(self.dtype, keys))
        if self.value_dim is not None:
            rows, keys = (f"{of.removesuffix('d')}e" for of in (rows, keys))
            every |= dict.fromkeys("o do".split(), array(self.dtype, rows))
            every |= dict.fromkeys("v dv".split(), array(self.dtype, keys))
        every |= {"lse": array(FP32, row)}
        every |= dict.fromkeys("base delta".split(), array(FP32, kept, fragments=self.fragments))
        block = "e block" if self.transposed else "block e"
        every["turns"] = array(INT32, f"{lead} blocks")
        every["dq_sum"] = array(FP32, f"{lead} blocks {block}", fragments=self.fragments)
        every["none"] = array(FP32, f"{lead} blocks {block}")
        every |= dict.fromkeys("row_tiles key_tiles".split(), array(INT32, "tasks fields"))
        every |= dict.fromkeys("key_tasks key_pieces".split(), array(INT32, "tasks place"))
        every["cut_tiles"] = array(INT32, "slots place")
        every["piece_sums"] = array(FP32, "gradients slots slot_keys slot_d")
        return {name: every[name] for name in names.split()}

    def tables(self, of: str) -> str:
        """The names of what says which task is which, for tasks of "rows" or of "keys"."""
        if self.listed and of == "keys":
            return " key_tasks"
        return f" {of.removesuffix('s')}_tiles" if self.packed else ""


def fitted(config: BackwardConfig, rows: int, keys: int, heads: int = 0) -> BackwardConfig:
    """What kernels of a configuration are for that many rows and keys of a sequence, and so many
    key heads of all (0: any number)."""
    if config.packed:
        return config
    if _in_order_pays(config, keys, heads):
        config = replace(config, deterministic=True)
    elif keys >= LONG_KEYS and _plain(config):
        config = replace(config, style=LONG_STYLES.get((config.depth, config.causal)))
    shared_out = not config.deterministic or _both_ways(config, keys)
    listed = config.causal and not config.long and shared_out
    config = replace(config, listed=listed, band=_band(config, rows))
    whole = not config.long and keys % config.tile[1] == 0
    every = rows <= keys or not (config.causal or config.window)
    config = replace(config, whole_keys=whole, every_row=every)
    cut = _cut_pays(config, rows, keys, heads)
    return replace(config, cut=cut, listed=listed or cut)


def _in_order_pays(config: BackwardConfig, keys: int, heads: int) -> bool:
    """Whether sums of one order are faster. The first tiles wait for one another, once."""
    some = KEYS_IN_ORDER.get((config.depth, config.causal), ())
    if not _plain(config) or not any(keys in one for one in some):
        return False
    return heads == 0 or heads * -(-keys // config.tile[1]) >= ROUNDS_IN_ORDER * config.sms


def _both_ways(config: BackwardConfig, keys: int) -> bool:
    """Whether causal tasks that add in turn are listed: the longest ones, of groups or many keys,
    would go out last. Others are short enough to, and at head sizes 64 and 96 loops spill less."""
    long = config.depth == 128 and keys >= LONG_KEYS
    return config.window is None and (config.group > 1 or long)


def _cut_pays(config: BackwardConfig, rows: int, keys: int, heads: int) -> bool:
    """Whether the tasks of the last round are cut. Pieces need two kernels more and zeros."""
    special = config.deterministic or config.window is not None or config.group > 1
    if config.causal or special or config.depth not in CUT_DEPTHS:
        return False
    tiles = -(-keys // config.tile[1])
    rounds, left = divmod(heads * tiles, config.sms)
    saved = -(-rows // config.tile[0]) * (config.sms - left)
    return left > 0 and rounds > 0 and saved >= CUT_BLOCKS * config.sms


def packed_for(
    config: BackwardConfig, rows: int, kv_heads: int, sms: int, longest: int
) -> BackwardConfig:
    """What kernels of packed sequences of so many rows together, the longest of so many keys, are
    on a GPU of so many SMs."""
    few = PACKED_ROWS // max(1, rows)  # heads of as many rows: fewer would not keep all SMs at work
    heads = max(PACKED_HEADS.get(config.depth, 1), min(MOST_HEADS, 1 << few.bit_length() >> 1))
    band = 0 if config.deterministic else math.gcd(kv_heads, heads)
    if longest >= LONG_KEYS and config.causal and _plain(config):
        key = config.depth, True
        config = replace(config, style=LONG_STYLES.get(key) or STYLES.get(key))
    return replace(config, band=band, sms=sms)


def _plain(config: BackwardConfig) -> bool:
    """Whether there is nothing about a configuration that its loop has another form for."""
    special = config.deterministic or config.window is not None or config.softcap
    return config.group == 1 and not special and config.style is None


def _band(config: BackwardConfig, rows: int) -> int:
    """Key heads of a band.

    Causal tasks are of different length: the last to go out must be short. Without a causal mask,
    tiles whose sums have one order begin at the same rows, and each waits for the one before it:
    the fewer of one head there are at a time, the less.
    """
    in_turn = config.deterministic and not config.long
    if config.causal == in_turn:
        return 0
    least = IN_TURN if in_turn else LEAST_HEADS.get(config.depth, 1)
    together = BAND * 128 // config.depth if in_turn else BAND
    heads = max(least, min(MOST_HEADS, 1 << max(1, together // rows).bit_length() - 1))
    return heads if heads > 1 else 0
