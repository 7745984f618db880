"""Which attention variant a shape gets: a table and a time model with two constants a variant.

    time = (tasks * task + steps * step) / places + half of the shortest task + start

A task is a row tile of one head; a step is one block of keys of a task. The shape and the masks say
how many there are. `task` and `step` are microseconds of a variant on one SM, for a head size and a
kind of mask. `bench/fit_attention.py` fits them to the measured rows of
`bench/results/attention_variants.json`, and says what the choice for each length would lose without
the rows of that length. A measured length may test the chooser; it is never looked up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from warploom.errors import InputError
from warploom.kernels.attention.program import AttentionConfig
from warploom.kernels.attention.variants import ATTENTION_CHOICES, AttentionChoice
from warploom.machine import load

CONSTANTS_FILE = Path(__file__).with_name("model.json")
SMS = load("h200").integer("sm.count")  # the constants were measured there
START = 3.0  # microseconds: launch, barriers, first copies, last stores
HEAD_DIMS = (64, 96, 128, 256)  # the constants of the next larger one hold for a head size
# Head sizes between that build with the variants of 256. Below, tiles made for the next larger size
# spill (16, 32, 224 causal) or do not fit shared memory (80).
LARGE_HEADS = range(129, 209)
FITS_ALL = "128x64"  # its tile and rings fit with every head size
Lengths = int | Sequence[int]  # of one sequence, or of packed ones

MANY = 512  # batch * heads where the caller does not say


def work_of(
    choice: AttentionChoice, config: AttentionConfig, rows: Lengths, keys: Lengths
) -> tuple[int, int, int]:
    """(row tiles, steps, steps of the shortest row tile) of one head under this tile; packed
    sequences are added up."""
    bq, bk = choice.tile
    steps: list[int] = []
    for count, length in zip(_each(rows), _each(keys), strict=True):
        last = -(-length // bk)
        for tile in range(-(-count // bq)):
            # The row tiles of a cluster take equally long.
            first = tile // choice.cluster_m * choice.cluster_m * bq + length - count
            past = first + choice.cluster_m * bq
            end = min(last, max(0, -(-past // bk))) if config.causal else last
            begin = 0 if config.window is None else max(0, first - config.window + 1) // bk
            steps.append(max(0, end - begin))
    return len(steps), sum(steps), min(steps, default=0)


def _each(lengths: Lengths) -> Sequence[int]:
    return [lengths] if isinstance(lengths, int) else lengths


def kind_of(config: AttentionConfig) -> str:
    """The key of the constants: packed or not, element width, head size, mask."""
    fitting = [d for d in HEAD_DIMS if config.head_dim <= d]
    if not fitting:
        raise InputError(f"attention head_dim={config.head_dim}: there are variants up to 256")
    lead = ("packed " if config.packed else "") + ("8-bit " if config.narrow else "")
    return f"{lead}{fitting[0]} {'causal' if config.causal else 'full'}"


def table_of(config: AttentionConfig) -> Mapping[str, tuple[float, float]]:
    """The measured variants of a configuration's kind and their constants.

    If none was measured, those of dense, then of 16-bit attention with the same head size and mask;
    the last resort is the variant that fits every head size.
    """
    kind, known = kind_of(config), constants()
    dense = kind.removeprefix("packed ")
    for like in (kind, dense, dense.removeprefix("8-bit ")):
        if like in known:
            return known[like]
    return {FITS_ALL: (0.0, 1.0)}


@cache
def constants() -> Mapping[str, Mapping[str, tuple[float, float]]]:
    """Kind -> variant -> (task, step): microseconds on one SM."""
    return json.loads(CONSTANTS_FILE.read_text())["constants"]


def microseconds(
    choice: AttentionChoice,
    config: AttentionConfig,
    rows: Lengths,
    keys: Lengths,
    heads: int,
    of: tuple[float, float],
) -> float:
    """Predicted time of a launch in microseconds; `heads` counts the heads of the whole batch, for
    packed sequences those of one sequence."""
    task, step = of
    tiles, steps, least = work_of(choice, config, rows, keys)
    equal = not config.causal and config.window is None and not config.packed
    if equal and choice.tile_scheduler != "dynamic":
        rounds = -(-tiles * heads // SMS)  # equal tasks in rounds, the last one perhaps not full
        return rounds * (task + step * steps / max(1, tiles)) + START
    return heads * (tiles * task + steps * step) / SMS + (task + step * least) / 2 + START


def _builds(choice: AttentionChoice, config: AttentionConfig) -> bool:
    """Whether the variant has a kernel for the configuration that does not spill."""
    known = config.head_dim in HEAD_DIMS or config.head_dim in LARGE_HEADS
    # Two loops with optimistic rescaling leave no registers for where a sequence lies (76 B at 128
    # full).
    crowded = config.packed and choice.split_mask_loop and choice.optimistic_threshold > 0
    return known and not crowded and choice.takes(config)


def choose_attention(
    rows: Lengths,
    base: AttentionConfig | None = None,
    keys: Lengths | None = None,
    heads: int = MANY,
) -> AttentionChoice:
    """The measured variant with the least predicted time; raises when no head size fits.

    `heads` counts the heads of the whole batch; `keys` is `rows` unless given. For packed sequences
    give the lengths of all, and the heads of one.
    """
    config = base or AttentionConfig()
    table = table_of(config)

    def time(name: str) -> float:
        choice = ATTENTION_CHOICES[name]
        return microseconds(choice, config, rows, keys or rows, heads, table[name])

    fitting = [name for name in table if _builds(ATTENTION_CHOICES[name], config)] or [FITS_ALL]
    table = {FITS_ALL: (0.0, 1.0), **table}
    return ATTENTION_CHOICES[min(fitting, key=time)]
