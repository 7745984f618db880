"""From one version of a block to the next: which patches still hold, and how they end now."""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.rl.patches import Patch
from warploom.rl.trace import Trace


@dataclass(frozen=True)
class Change:
    """What differs between a version and the older one it came from: the places [begin, end); the
    latest first issue that matters behind them (`heads`); when all that differs holds up nothing
    any more, now and then; whether both end alike."""

    old: Trace
    begin: int
    end: int
    heads: int
    expires: tuple[int, int]
    same_end: bool


def beside(trace: Trace, old: Trace) -> Change:
    """What differs from an older version, time aside."""
    mine, theirs = _columns(trace), _columns(old)
    differing = [
        place for place, (one, two) in enumerate(zip(mine, theirs, strict=True)) if one != two
    ]
    begin, end = (differing[0], differing[-1] + 1) if differing else (0, 0)
    still = end == trace.size or trace.now[end] == old.now[end]
    expires = [0, 0]
    for side, each in enumerate((trace, old)):
        expires[side] = each.horizon[end]
        if still:  # what came before is issued as it was
            reach, order = each.rules.reach, each.order
            last = (each.now[place] + reach[order[place]] for place in range(begin, end))
            expires[side] = max(last, default=0)
    return Change(
        old,
        begin,
        end,
        0 if still else trace.rules.latest_head,
        (expires[0], expires[1]),
        (trace.floor, trace.cells[-1], trace.regular) == (old.floor, old.cells[-1], old.regular),
    )


def _columns(trace: Trace) -> list[tuple[int, ...]]:
    asked, order = trace.asked, trace.order
    return list(
        zip(
            order,
            [*trace.stalls[:-1], 0],
            trace.waits,
            trace.out[:-1],
            trace.stays,
            trace.alive,
            [asked.stall[number] for number in order],
            [asked.stay[number] for number in order],
            [asked.reuse[number] for number in order],
            [trace.name[number] for number in order],
            strict=True,
        )
    )


def may_keep(trace: Trace, patch: Patch, change: Change) -> bool:
    """Whether a patch worked out beside an older version holds beside this one.

    Everything it was worked out from must lie before what changed between the two, or so far
    behind that nothing before holds anything up there.
    """
    if change.begin == change.end or patch.reads[1] <= change.begin:
        return True
    if patch.odd or patch.reads[0] < change.end:
        return False
    if not patch.issue:
        return True
    old, first = change.old, patch.first
    now, then = trace.origin(first), old.origin(first)
    return (
        change.expires[0] <= now
        and change.expires[1] <= then
        and change.heads <= min(now, then)
        and trace.open[first] == old.open[first]
    )


def rebase(trace: Trace, patch: Patch, change: Change) -> Patch:
    """A patch that may be kept, beside this version: itself where the block ends alike."""
    if change.same_end and trace.ending(patch) == (patch.last_stall, patch.longer):
        return patch
    to_end = patch.end == trace.size
    kept = replace(
        patch,
        cells=dict(patch.cells),
        floor=patch.floor if to_end else trace.floor,
        last_wait=patch.last_wait if to_end else trace.waits[-1],
    )
    if max(patch.end, patch.first + 1) < trace.size:
        kept.cells.pop(trace.size - 1, None)  # only its stall had changed
    trace.finish(kept)
    return kept
