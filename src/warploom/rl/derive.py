"""Control fields for whole versions of one block.

The same idea as `edit.rederive` (stalls as short as the distances allow, waits where a consumer
would otherwise overtake, yield and reuse as wished), from the verifier's constraint rows. Like the
editor it proves nothing: `BlockBatch` and the verifier decide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from warploom.rl.batch import BlockBatch
from warploom.rl.rules import BlockRules
from warploom.rl.walk import Walk
from warploom.sass.decode.control import MAX_STALL, MAX_STALL_STAYING
from warploom.sass.rules.versions import Rows, Versions

Ints = npt.NDArray[np.int64]
NO_WISH: Final = -1


@dataclass(frozen=True)
class Wishes(Rows):
    """What K versions ask for, by instruction [K, n]: a least stall (-1: as the order needs),
    the yield hint and the reuse hints."""

    stall: Ints
    stay: Ints
    reuse: Ints

    def repeated(self, count: int) -> Wishes:
        """The wishes of one version, so many times."""
        return self.take([0] * count)


def derived_rules(batch: BlockBatch) -> BlockRules:
    """A block's rules, with the waits of the compiler that no rule explains: they stay with their
    instruction. One that stays can explain another away, so it is asked until none is missing."""
    rules, original = BlockRules(batch), batch.original()
    none = np.zeros_like(original.order)
    wishes = Wishes(np.full_like(none, NO_WISH), none, none)
    while True:
        missing = batch.wait & ~derive(rules, original.order, wishes).wait[0]
        if not missing.any():
            return rules
        rules.sticky = (np.array(rules.sticky) | missing).tolist()


def derive(rules: BlockRules, orders: Ints, wishes: Wishes) -> Versions:
    """Versions [K, n] of orders [K, n]; a block as compiled with no wish keeps its fields."""
    stalls, waits = np.zeros_like(orders), np.zeros_like(orders)
    wished: list[list[int]] = wishes.stall.tolist()
    listed: list[list[int]] = orders.tolist()
    for row, order in enumerate(listed):
        walk, tails = Walk(rules, wished[row]), 0
        for place, mine in enumerate(order):  # the first one's "stall before" is the last place's
            stalls[row, place - 1], waits[row, place] = walk.step(mine)
            tails = max(tails, walk.now + rules.tail[mine])
        waits[row, -1] |= rules.leaving(walk.out)
        stalls[row, -1] = rules.last_stall(walk.now, tails, walk.floor(rules.size))
    return settled(rules.batch, orders, stalls, waits, wishes)


def settled(batch: BlockBatch, order: Ints, stalls: Ints, waits: Ints, wishes: Wishes) -> Versions:
    """Versions from stalls and waits: stalls that fit their field, hints as wished."""
    stalls = _spread_back(stalls)
    stay = np.take_along_axis(wishes.stay, order, 1)
    stay = stay * ((stalls >= 1) & (stalls <= MAX_STALL_STAYING))
    reuse = np.take_along_axis(wishes.reuse, order, 1) * stay
    return _without_stale_reuse(batch, Versions(order, stalls, stay, waits, reuse))


def _without_stale_reuse(batch: BlockBatch, versions: Versions) -> Versions:
    """The versions less the reuse hints whose operand is overwritten before it is read."""
    if not versions.reuse.any():
        return versions
    named = replace(versions, order=batch.canonical(versions.order))
    stale = batch.stale_reuse(named)
    if not stale.any():
        return versions
    reuse = versions.reuse.copy()
    position = batch.positions(named.order)
    for version, row in zip(*np.nonzero(stale), strict=True):
        holder, slot = batch.reuse_rows[row, :2]
        reuse[version, position[version, holder]] &= ~(1 << slot)
    return replace(versions, reuse=reuse)


def _spread_back(stalls: Ints) -> Ints:
    """Stalls of at most 15: what is too long goes to the instructions before."""
    if stalls.max() <= MAX_STALL:
        return stalls
    for place in range(stalls.shape[1] - 1, 0, -1):
        excess = np.maximum(stalls[:, place] - MAX_STALL, 0)
        stalls[:, place] -= excess
        stalls[:, place - 1] += excess
    return stalls
