"""Tuning over several programs of one kernel: a tournament, and the lineage of its winner."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

from warploom.errors import CheckFailed
from warploom.flows.tune_compare import fastest
from warploom.flows.tune_keep import LINEAGE, Run
from warploom.flows.tuned import LEADERS, TuneReport
from warploom.runtime import LocalMeasurer, Timing
from warploom.sass.decode.cubin import Cubin, parse
from warploom.sass.rules.verify import Verifier, counted
from warploom.search.driver import Budget, SearchResult
from warploom.search.lineage import Base, Step, make_base, prove, write_steps
from warploom.search.tournament import BaseModel, Entry, tournament

BASES: Final = 4  # programs besides the original, where `--moves` allows others


def play_programs(run: Run) -> TuneReport:
    """A tournament over programs with other scoreboards.

    The best of an earlier search in the folder plays along. The lineage of the result is written to
    the folder and proved step by step. Making the programs counts as search: no further one is made
    when a quarter of the budget is spent.
    """
    keeper, measurer, say = run.keeper, run.measurer, run.say
    target, settings = keeper.target, keeper.settings
    original, name = target.cubin, target.kernel
    began = time.monotonic()
    earlier = keeper.resumed_base()
    bases = [Base(original), *([] if earlier is None else [earlier])]
    for number in range(BASES):
        if time.monotonic() - began > settings.seconds / 4:
            break
        say(f"making program {number + 1} of {BASES} to play on")
        rng = random.Random(f"{settings.seed}/{number}")
        base = make_base(original, name, rng)
        if all(base.cubin.data != other.cubin.data for other in bases):
            bases.append(base)
    entries = tournament(
        bases,
        run.player,
        lambda base: (
            run.evaluator if measurer is not None else BaseModel(original, base.cubin, name)
        ),
        Budget(max(0.0, settings.seconds - (time.monotonic() - began)), settings.candidates),
        run.options(),
        on_best=keeper.keep,
    )
    whole = _together(entries)
    chosen, speedup, timing = _leader(original, entries, whole, measurer, say)
    say("proving the result, step by step")
    steps: tuple[Step, ...] = () if chosen is None else chosen.steps
    if findings := prove(original, name, steps, settings.mode):
        raise CheckFailed(f"{target.source}: the result is not proved: {findings[0]}")
    image = original if chosen is None else parse(chosen.image, "result")
    base = original if chosen is None else chosen.base.cubin
    verdict = counted(Verifier(base, name, settings.mode).check_file(image), base, image, name)
    write_steps(keeper.folder / LINEAGE, steps)
    return TuneReport(target, settings, whole, image, verdict, speedup, timing, lineage=steps)


def _leader(
    original: Cubin,
    entries: list[Entry],
    whole: SearchResult,
    measurer: LocalMeasurer | None,
    say: Callable[[str], None],
) -> tuple[Entry | None, float, Timing | None]:
    """The best entry, by the model's score or a longer comparison; None when nothing is faster."""
    faster = [entry for entry in entries if entry.score > 1.0][:LEADERS]
    if not faster:
        return None, 1.0, None
    if measurer is None:
        return faster[0], faster[0].score, None
    leaders = [entry.image for entry in faster]
    place, speedup, timing = fastest(measurer, original.data, leaders, whole.candidate_s, say)
    return None if place is None else faster[place], speedup, timing


def _together(entries: list[Entry]) -> SearchResult:
    """One account of all rounds: the best candidates and the sums of what became of them."""
    whole = SearchResult(entries[0].result.player, entries[0].result.evaluator)
    for entry in entries:
        found = entry.result
        whole.best += found.best
        whole.tally.update(found.tally)
        whole.outcomes.update(found.outcomes)
        whole.seconds += found.seconds
        whole.scored += found.scored
        whole.measured += found.measured
        whole.interrupted |= found.interrupted
    whole.best.sort(key=lambda pair: -pair[0])
    return whole
