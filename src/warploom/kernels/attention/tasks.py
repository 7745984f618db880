"""Lists of tasks, made on the GPU: which tile of which sequence each task is.

Of a mixed batch (`task_list`): `bounds: [batch + 1]`, where the tokens of each sequence begin;
`lengths: [batch]`, its keys; `tiles: [tasks, 5]`: of every task the sequence, its first token, the
end of the sequence's tokens, and how many tokens and keys the sequence has. A task finds its
sequence as the number of sequences whose tiles end before it. Tasks that are not needed have no
tokens and no keys.

Of packed sequences (`tile_list`): `row_ends, key_ends: [sequences + 1]`, where the rows and keys of
each begin and the last ends; `row_tiles` or `key_tiles: [tasks, 6]`: the first row of a sequence,
its rows, its first block (`kernels.attention.backward_config`), its first key, its keys, and the
number of a tile. Where the longest tasks come first, the one at place p is found from how many are
longer than so many tiles, by halving: all places at once, and nothing is sorted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom import tile as t
from warploom.codegen.ir.plan import LaunchPlan
from warploom.codegen.simt.choose import simt
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import InputError

MOST = 1024  # sequences of a mixed batch
AT_A_TIME = 4096  # tasks times sequences that a block looks at
MOST_PACKED = 16384  # packed sequences
HALVINGS = 16  # a sequence has fewer tiles than 2 to this power


@dataclass(frozen=True)
class TaskListConfig:
    """Tokens of a tile, a power of 2; sequences that there is room for."""

    tokens: int = 64
    room: int = 64

    def __post_init__(self) -> None:
        """Refuse what does not fit a block."""
        if not 1 <= self.room <= MOST or self.tokens < 1 or self.tokens & (self.tokens - 1):
            raise InputError(
                f"list of tasks of {self.room} sequences in tiles of {self.tokens} tokens: "
                f"expected at most {MOST} sequences and a power of 2"
            )

    @property
    def tasks(self) -> int:
        """Tasks that a block lists."""
        return AT_A_TIME // self.room


def task_list(config: TaskListConfig | None = None) -> t.Program:
    """The program of a configuration."""
    arrays = {"bounds": t.array(t.INT32, "bounds"), "lengths": t.array(t.INT32, "batch")}
    arrays["tiles"] = t.array(t.INT32, "tasks fields")
    return t.trace(_task_list, arrays, name="task_list", config=config or TaskListConfig())


def task_list_schedule(config: TaskListConfig) -> SimtSchedule:
    """Laid over threads by sizes; what follows is launched meanwhile."""
    return replace(simt(task_list(config)), launch=LaunchPlan(persistent=False, dependent=True))


@dataclass(frozen=True)
class TileListConfig:
    """What is static in a list of tiles.

    tile    rows of a block and keys of a tile
    of      "rows" or "keys"
    order   "sequences": one after another; or the longest task first, which is as long as "all"
            tiles of its sequence, or "causal": of rows those up to its own, of keys those from it
    brief   an entry is the number of the sequence, and that of the tile
    room    sequences that there is room for, a power of 2
    """

    tile: tuple[int, int] = (64, 128)
    of: str = "keys"
    order: str = "causal"
    brief: bool = False
    room: int = 64

    def __post_init__(self) -> None:
        """Refuse what does not fit a block, and words that mean nothing."""
        if not 1 <= self.room <= MOST_PACKED or self.room & (self.room - 1):
            raise InputError(
                f"list of tiles of {self.room} packed sequences: expected at most {MOST_PACKED}"
            )
        if self.of not in ("rows", "keys") or self.order not in ("sequences", "causal", "all"):
            raise InputError(
                f"list of tiles of {self.of!r} in the order {self.order!r}: expected 'rows' or "
                "'keys', and 'sequences', 'causal' or 'all'"
            )

    @property
    def tasks(self) -> int:
        """Tasks that a block lists."""
        return max(1, AT_A_TIME // self.room)

    @property
    def name(self) -> str:
        """The name of the list."""
        return f"{self.of.removesuffix('s')}_tiles"


def tile_list(config: TileListConfig | None = None) -> t.Program:
    """The program of a configuration."""
    chosen = config or TileListConfig()
    arrays = {name: t.array(t.INT32, "ends") for name in ("row_ends", "key_ends")}
    arrays[chosen.name] = t.array(t.INT32, "tasks fields")
    return t.trace(_tile_list, arrays, name="tile_list", config=chosen)


def tile_list_schedule(config: TileListConfig) -> SimtSchedule:
    """Laid over threads by sizes."""
    return replace(simt(tile_list(config)), launch=LaunchPlan(persistent=False))


def _tile_list(
    row_ends: t.Array, key_ends: t.Array, config: TileListConfig, **tiles: t.Array
) -> None:
    (block,) = t.grid(blocks=t.cdiv(t.size("tasks"), config.tasks))
    sequences = t.size("ends") - 1
    which = t.coordinate("sequences", config.room, 0)
    whole = t.zeros(t.INT32, tasks=config.tasks, sequences=config.room)

    def of_sequences(ends: t.Array) -> tuple[t.Tile, t.Tile]:
        """Where they begin, and how long they are."""
        there = which < sequences
        begins = t.where(there, t.load(ends, t.span(0, config.room, "sequences")), 0)
        stops = t.load(ends, t.span(1, config.room, "sequences"))
        return begins, t.where(there, stops - begins, 0)

    (row, rows), (key, keys) = of_sequences(row_ends), of_sequences(key_ends)
    count = config.tile[config.of == "keys"]
    counts = whole + ((keys if config.of == "keys" else rows) + (count - 1)) // count
    place = t.coordinate("tasks", config.tasks, block * config.tasks)

    def longer(than: t.Tile) -> t.Tile:
        """How many tasks are as long as more than so many tiles."""
        if config.order == "causal":
            return t.sum_along(t.maximum(counts - than, 0), "sequences")
        return t.sum_along(t.where(than < counts, counts, 0), "sequences")

    # Of the task at a place: all that are longer precede.
    length = t.zeros(t.INT32, tasks=config.tasks)
    if config.order != "sequences":
        for bit in reversed(range(HALVINGS)):
            more = length + (1 << bit)
            length = t.where(longer(more - 1) <= place, length, more)
    if config.order == "causal":
        equal = t.where(length <= counts, whole + 1, 0)  # tasks of that length in each sequence
    elif config.order == "all":
        equal = t.where((length <= counts) & (counts <= length), counts, 0)
    else:
        equal = counts
    after = place if config.order == "sequences" else place - longer(length)
    ends = t.cumsum(equal, "sequences")
    own = (ends - equal <= after) & (after < ends)
    if config.order != "sequences":
        own = own & (whole + length > 0)

    def of_its_sequence(numbers: t.Tile) -> t.Tile:
        return t.sum_along(t.where(own, whole + numbers, 0), "sequences")

    if config.order == "causal":
        tile = counts - length if config.of == "keys" else length - 1
    else:
        tile = after - (ends - equal)
    blocks = row // config.tile[0] + which
    fields = (which, tile) if config.brief else (row, rows, blocks, key, keys, tile)
    found = [of_its_sequence(x) for x in fields]
    none = 1 - t.sum_along(t.where(own, whole + 1, 0), "sequences")
    last = t.read(row_ends, sequences)
    nowhere = {0: last, 2: last // config.tile[0] + sequences, 3: t.read(key_ends, sequences)}
    if config.brief:
        nowhere = {0: sequences}
    at = t.span(block * config.tasks, config.tasks)
    for field, one in enumerate(found):
        there = one + none * t.number(nowhere[field], t.INT32) if field in nowhere else one
        t.store(tiles[config.name], at, field, tile=there)


def _task_list(bounds: t.Array, lengths: t.Array, tiles: t.Array, config: TaskListConfig) -> None:
    (block,) = t.grid(blocks=t.cdiv(t.size("tasks"), config.tasks))
    every = t.span(0, config.room, "sequences")
    there = t.coordinate("sequences", config.room, 0) < t.size("batch")
    begins = t.where(there, t.load(bounds, every), 0)
    counts = t.where(there, t.load(bounds, t.span(1, config.room, "sequences")) - begins, 0)
    # Exact: a number of tokens below 2^24 by a power of 2.
    needed = ((counts + (config.tokens - 1)).cast(t.FP32) * (1.0 / config.tokens)).cast(t.INT32)
    whole = t.zeros(t.INT32, tasks=config.tasks, sequences=config.room)
    ends = whole + t.cumsum(needed, "sequences")
    task = t.coordinate("tasks", config.tasks, block * config.tasks)
    before = ends <= task
    own = (ends - needed <= task) & (task < ends)
    tile = task - t.sum_along(t.where(before, whole + needed, 0), "sequences")

    def of_its_sequence(numbers: t.Tile) -> t.Tile:
        return t.sum_along(t.where(own, whole + numbers, 0), "sequences")

    begin, count = of_its_sequence(begins), of_its_sequence(counts)
    sequence = of_its_sequence(t.coordinate("sequences", config.room, 0))
    fields = (
        sequence,
        begin + tile * config.tokens,
        begin + count,
        count,
        of_its_sequence(t.load(lengths, every)),
    )
    place = t.span(block * config.tasks, config.tasks)
    for field, one in enumerate(fields):
        t.store(tiles, place, field, tile=one)
