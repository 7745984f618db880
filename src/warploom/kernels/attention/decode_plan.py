"""What a call of decode attention runs: its tile, and the parts of the keys, by time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.codegen.ir.plan import LOWER_ROWS
from warploom.kernels.attention.decode import FEW, DecodeConfig

MOST_SPLITS = 128
AT_A_TIME = 8  # parts that `combine` then joins at a time
# Microseconds of a task, of a block of keys on few SMs and on all at a time, and of joining parts:
# a fit to kernels timed on an H200, in place of the model of a launch, which does not know loops
# whose ends tasks read.
BLOCK_BYTES = 64 * 128 * 2  # of keys, in a block that these are of
TASK_US, ALONE_US, TOGETHER_US, COMBINE_US, PART_US = 2.0, 0.72, 0.975, 0.5, 0.1
# Latent attention: a task, a block of keys, and an element that a part leaves for `combine`.
LATENT_TASK_US, LATENT_US, LEFT_US = 6.0, 1.4, 1.2e-6
# Keys of a long cache, and bytes of an element times keys of its parts, where there are others.
LONG, SHARE = 8192, 4096


@dataclass(frozen=True)
class Plan:
    """What a call runs: `decode` of a configuration over so many parts of the keys, and `combine`
    where the configuration is split."""

    config: DecodeConfig
    splits: int

    @property
    def room(self) -> int:
        """The parts that `combine` is compiled for, or joins at a time."""
        return AT_A_TIME if self.config.part else max(2, 1 << (self.splits - 1).bit_length())


def mixed_tile(rows: float) -> tuple[int, int]:
    """The tile of a mixed batch whose sequences have so many packed rows on average."""
    return (2 * FEW, 128) if rows > FEW else (FEW, 64)


def planned(
    config: DecodeConfig, heads: int, queries: int, keys: int, sms: int, splits: int = 0
) -> Plan:
    """The plan for so many heads (sequences times key heads) of at most so many keys.

    The tile fits the packed rows; the parts are `splits`, or as many as take the least time by the
    constants above, or of the size that the configuration says. Results of several queries leave
    packed rows by `combine`, but for latent attention, whose one key head has them in order.
    """
    rows = queries * config.group
    # Blocks of as many bytes, whatever the elements have.
    one_tile = rows <= FEW or config.value_dim  # whose columns the groups share out
    wide = not one_tile or (config.narrow and not config.value_dim)
    few = rows <= LOWER_ROWS and not config.value_dim
    config = replace(config, tile=(FEW if one_tile else 2 * FEW, 128 if wide else 64), few=few)
    if config.part:
        return Plan(config, max(1, -(-keys // config.part)))
    tiles = -(-rows // config.tile[0])
    config = replace(config, twin=bool(config.value_dim) and tiles % 2 == 0)
    tasks = heads * tiles
    blocks = max(1, -(-keys // config.tile[1]))

    def cost(parts: int) -> float:
        rounds, busy = -(-tasks * parts // sms), min(tasks * parts, sms)
        if config.value_dim:
            left = heads * rows * config.value_dim * parts * LEFT_US if parts > 1 else 0.0
            return rounds * (LATENT_TASK_US + -(-blocks // parts) * LATENT_US) + left
        size = config.tile[1] * config.head_dim * config.dtype.bytes / BLOCK_BYTES
        block = max(ALONE_US, TOGETHER_US * busy / sms) * size
        joined = parts * PART_US + COMBINE_US if parts > 1 else 0.0
        return rounds * (TASK_US + -(-blocks // parts) * block) + joined

    chosen = splits or min(range(1, min(MOST_SPLITS, blocks) + 1), key=cost)
    if one_tile and not (splits or config.value_dim) and 2 * tasks > sms:
        # Enough tasks for all SMs: of long caches parts, for lengths that differ.
        parts = min(MOST_SPLITS, keys * config.dtype.bytes // SHARE) if keys >= LONG else 1
        chosen = max(chosen, parts)
        config = replace(config, ragged=chosen > 1)
    packed = queries > 1 and not config.value_dim
    # A causal mask of latent heads of 8 bits leaves no registers for it (32 to 44 B).
    crowded = bool(config.value_dim) and config.narrow and config.causal
    once = not (config.ragged or crowded) and tasks * chosen <= sms
    return Plan(replace(config, split=chosen > 1 or packed, once=once), chosen)
