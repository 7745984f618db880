"""Which of several schedules `optimize` builds: each is compiled, judged and replayed.

Schedules come one at a time, because solving one takes seconds that may not be needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from warploom.autosched.points import Point
from warploom.autosched.schedules import NAMES, Policy, fitting_name, schedule_for
from warploom.autosched.selected import Selected
from warploom.autosched.solve import Search
from warploom.codegen.compile.build import Built
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.engine.explored import Explored
from warploom.engine.points import Space
from warploom.engine.search import search
from warploom.engine.store import PointStore
from warploom.errors import MISSING, CheckFailed, DeviceError, ToolMissing, WarploomError
from warploom.files import cache_folder
from warploom.flows.optimize_measure import measure_in_worker
from warploom.flows.optimized import BEST, SOLVE, OptimizeSettings, Rival, Say, Trial
from warploom.flows.static_verdict import StaticVerdict, static_verdict
from warploom.kernels.check import checked
from warploom.kernels.select import DEFAULT, check_sizes, full_sizes, select
from warploom.perf.gates import Rates
from warploom.perf.launch_time import Launch, why_slower
from warploom.perf.replay import Prediction, replay

MEASURED, MORE = 8, 8  # points that a GPU measures: of different forms, and what these tell of
SHOWN = 12  # points of a search in the table

POINTS = "points.sqlite"  # in the cache: every point that a search tried
Offer = tuple[str, Selected | WarploomError]  # a schedule by name, or why there is none


@dataclass(frozen=True)
class Usable:
    """A schedule that compiled to code which passes the static verdict."""

    selected: Selected
    built: Built
    verdict: StaticVerdict
    trial: Trial


def choose(
    settings: OptimizeSettings, measuring: bool, say: Say
) -> tuple[Usable, tuple[Trial, ...], tuple[Rival, ...]]:
    """The fastest of the schedules on offer, what every one was worth, and the points of a search.

    As measured, where a GPU is here and several are of use; else by the replay of the machine code.
    The tuned table's entry was measured before, against other tiles too: without a GPU no replay
    overrules it. What has no schedule, does not compile (or was not brought, where there is no
    compiler), fails the static verdict or computes wrong numbers is left out. Raises `CheckFailed`
    when nothing is left.
    """
    trials: list[Trial] = []
    usable: list[Usable] = []
    explored = Explored()
    if settings.searches:
        usable, trials, explored = _searched(settings, measuring, say)
    for name, offer in () if usable else _offers(settings, say):
        if usable and not settings.compare and name not in (usable[0].selected.name, SOLVE):
            break  # the other names are there for when none before them is of use
        found = _tried(name, offer, settings, say)
        usable += [found] if isinstance(found, Usable) else []
        trials.append(found.trial if isinstance(found, Usable) else found)
    if measuring and len(usable) > 1:
        usable = [_timed(one, settings, say) for one in usable]
        usable += [*_likely(usable, explored, settings, say)]
        known = {trial.name for trial in trials}
        trials += [one.trial for one in usable if one.trial.name not in known]
        _remember(usable, explored.keys)
        timed = {one.trial.name: one.trial for one in usable}
        trials = [timed.get(trial.name, trial) for trial in trials]
        usable = [one for one in usable if not one.trial.refused]
    if not usable:
        if lacking := [trial.refused for trial in trials if MISSING in trial.refused]:
            raise ToolMissing(f"{settings.name}: {lacking[0]}")
        told = "; ".join(f"{trial.name}: {trial.refused}" for trial in trials)
        raise CheckFailed(f"{settings.name}: no schedule is of use: {told}")
    times = {trial.name: trial.microseconds for trial in trials}
    space = [
        Rival(str(one.point), one.microseconds, times.get(str(one.point)), one.row.told or {})
        for one in explored.useful
    ]
    return min(usable, key=lambda one: one.trial.rank), tuple(trials), tuple(space)


def _searched(
    settings: OptimizeSettings, measuring: bool, say: Say
) -> tuple[list[Usable], list[Trial], Explored]:
    """The fastest points of a search through a user's program: to measure where a GPU is here, else
    the one predicted to be fastest; and the next ones as trials that were not compiled again;
    and all points."""
    space = Space(settings.name, settings.settings, settings.seconds)
    sizes = full_sizes(settings.name, settings.settings)
    plain = Point(next(iter(space.sizes())))
    # A program that is wrong as it was written says so now, and not after the search.
    small = check_sizes(settings.name, settings.settings)
    checked(settings.name, space.config(plain), small).require()
    if fitting_name(space.rewritten(plain)) is None:
        say("no search: without matmuls tiles lie over threads")
        return [], [], Explored()
    with closing(PointStore(cache_folder() / POINTS)) as store:
        explored = search(space, sizes, settings.gpu, store, settings.effort or "normal", say)
    say(str(explored))
    usable: list[Usable] = []
    trials: list[Trial] = []
    wanted = MEASURED if measuring else 1
    for one in explored.forms(SHOWN) if measuring else explored.useful[:SHOWN]:
        told, best = (found.row.told or {} for found in (one, explored.useful[0]))
        limits = str(told.get("limits", ""))
        if one is not explored.useful[0]:
            limits += f"; beside the first, {why_slower(told, best)}"
        known = Trial(str(one.point), launch=one.row.predicted, limits=limits)
        if len(usable) == wanted:
            trials.append(known)
            continue
        selected = space.selected(one.point, settings.gpu)
        rates = Launch(selected.program, selected.launch, sizes, settings.gpu).rates()
        found = _tried(selected.name, selected, settings, say, rates)
        if isinstance(found, Usable):
            space.check(one.point, small)
            trial = replace(found.trial, launch=known.launch, limits=known.limits)
            found = replace(found, trial=trial)
            usable.append(found)
        trials.append(found.trial if isinstance(found, Usable) else found)
    return usable, trials, explored


def _likely(
    timed: list[Usable], explored: Explored, settings: OptimizeSettings, say: Say
) -> Iterator[Usable]:
    """More points of a search, measured: what is likely to be the fastest by those that were."""
    times = {one.trial.name: one.trial.microseconds for one in timed}
    space = Space(settings.name, settings.settings, settings.seconds)
    sizes = full_sizes(settings.name, settings.settings)
    points = {str(one.point): one.point for one in explored.useful}
    measured = {points[name]: time for name, time in times.items() if name in points}
    for _ in range(MORE if measured else 0):
        one = next(iter(explored.likely(measured)), None)
        if one is None:
            return
        measured[one.point] = None  # unless it is of use
        selected = space.selected(one.point, settings.gpu)
        rates = Launch(selected.program, selected.launch, sizes, settings.gpu).rates()
        found = _tried(selected.name, selected, settings, say, rates)
        if not isinstance(found, Usable):
            continue
        space.check(one.point, check_sizes(settings.name, settings.settings))
        found = replace(found, trial=replace(found.trial, launch=one.row.predicted))
        found = _timed(found, settings, say)
        if found.trial.microseconds is not None and not found.trial.refused:
            measured[one.point] = found.trial.microseconds
            yield found


def _remember(timed: list[Usable], keys: Mapping[str, tuple[str, ...]]) -> None:
    """Write what was measured into the rows of a search."""
    if not keys:
        return
    store = PointStore(cache_folder() / POINTS)
    for one in timed:
        row = store.find(keys[one.trial.name])
        if row is not None and one.trial.microseconds is not None:
            store.put(keys[one.trial.name], replace(row, measured=one.trial.microseconds))
    store.close()


def _offers(settings: OptimizeSettings, say: Say) -> Iterator[Offer]:
    """Schedules by name, the most promising first."""
    search = Search(seconds=settings.seconds, replayed=True)
    if settings.schedule != BEST:
        if settings.schedule == SOLVE:
            _say_solving(settings, say)
        first = _select(settings, settings.schedule, search, say)
        yield settings.schedule, first
        return
    first = _select(settings, DEFAULT, search, say)
    yield first.name, first
    if isinstance(first.schedule, SimtSchedule) or (first.tuned and not settings.compare):
        return
    # A variant's name is none of these: all of them are others.
    for name in (SOLVE, *(name for name in NAMES if name not in (SOLVE, first.name))):
        if name == SOLVE:
            _say_solving(settings, say)
        yield name, _renamed(first, name, settings.gpu, search, say)


def _select(settings: OptimizeSettings, policy: str, search: Search, say: Say) -> Selected:
    return select(settings.name, settings.settings, settings.gpu, policy, search, say=say)


def _say_solving(settings: OptimizeSettings, say: Say) -> None:
    say(f"solving the schedule, at most {settings.seconds:g} s for each search of a loop")


def _renamed(
    first: Selected, name: str, gpu: str, search: Search, say: Say
) -> Selected | WarploomError:
    """The same program and launch plan under the schedule of that name, or why there is none."""
    try:
        policy = Policy(name, first.launch, search=search)
        schedule = schedule_for(first.program, policy, gpu, first.arch, say)
    except WarploomError as error:
        return error
    return replace(first, name=name, schedule=schedule, tuned=False)


def _tried(
    name: str,
    offer: Selected | WarploomError,
    settings: OptimizeSettings,
    say: Say,
    rates: Rates | None = None,
) -> Usable | Trial:
    trial = Trial(name, tuned=isinstance(offer, Selected) and offer.tuned)
    try:
        if isinstance(offer, WarploomError):
            raise offer
        say(f"compiling {offer}")
        built = offer.build()
        verdict = static_verdict(built, offer.allow)
        if not verdict.passed:
            raise CheckFailed("; ".join(verdict.faults))
    except WarploomError as error:
        trial = replace(trial, refused=str(error))
        say(str(trial))
        return trial
    trial = replace(trial, **_replayed(offer, built, settings.gpu, rates))
    say(str(trial))
    return Usable(offer, built, verdict, trial)


def _replayed(
    selected: Selected, built: Built, gpu: str, rates: Rates | None
) -> Mapping[str, object]:
    """What the replay says, as fields of a `Trial`: predictions by loop, or why there are none.

    `rates` are those of its loads, where the sizes of the arrays are known.
    """
    if isinstance(selected.schedule, SimtSchedule):
        return {"unpredicted": "a kernel without matmuls; the replay follows loops with them"}
    try:
        found: Mapping[str, Prediction] = replay(
            selected.program, selected.schedule, built.cubin, gpu, rates=rates
        ).loops
    except CheckFailed as error:
        return {"unpredicted": str(error)}
    return {"predicted": found}


def _timed(one: Usable, settings: OptimizeSettings, say: Say) -> Usable:
    """With the time on the GPU here, or why it is of no use."""
    try:
        measured = measure_in_worker(settings.name, settings.settings, one.selected, one.built, say)
        trial = replace(one.trial, microseconds=measured.microseconds)
        if not measured.correct:
            trial = replace(
                trial, refused="wrong numbers on the GPU: " + "; ".join(measured.check.problems)
            )
    except (DeviceError, ToolMissing) as error:
        trial = replace(one.trial, refused=str(error))
    say(str(trial))
    return replace(one, trial=trial)
