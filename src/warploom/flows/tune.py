"""Tuning one kernel's machine code: search, confirm, verify, test, and write what a user deploys.

The folder belongs to one kernel. From the first improvement on it holds the best cubin so far.
Ctrl-C, a full disk or a killed process lose nothing that was found, and the same command continues
from it. The result is never a cubin that the verifier refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from warploom.errors import CheckFailed, InputError, ToolMissing
from warploom.files import check_folder
from warploom.flows.targets import Target
from warploom.flows.tune_compare import fastest
from warploom.flows.tune_keep import Keeper, Run
from warploom.flows.tune_report import write_report
from warploom.flows.tuned import LEADERS, LEARNED, LEARNER, TuneReport, TuneSettings
from warploom.runtime import CheckSettings, LocalMeasurer, MeasureSettings, Timing, Workload
from warploom.sass.decode.cubin import Cubin, parse
from warploom.sass.rules.verify import Verifier, counted
from warploom.search.driver import Budget, Progress, SearchResult, run_search
from warploom.search.evaluate import DeviceEvaluator, ModelEvaluator
from warploom.search.players import PLAYERS, Player


def tune(
    target: Target,
    settings: TuneSettings,
    folder: Path,
    on_progress: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> TuneReport:
    """Search one kernel and write the result into `folder`.

    A folder that holds a search of the same kernel is gone on from. `say` is told, in a line, what
    is done before and after the search. Raises `InputError` when a GPU is asked for and the launch
    is not known, or the folder cannot be written or holds something else; `CheckFailed` when the
    final check fails (the folder then holds the original).
    """
    if settings.measure == "gpu" and target.launch is None:
        raise InputError(
            f"{target.source}: measuring on a GPU needs the launch; give --launch FILE.json or a "
            "file.py:object, or use --measure model"
        )
    # What is refused is refused before anything is written or taken away.
    check_folder(folder)
    keeper = Keeper(target, settings, folder)
    player = _player(settings, keeper)
    keeper.begin()
    if keeper.earlier is not None:
        say(f"{folder} holds a search of this kernel that reached {keeper.earlier}: going on")
    if settings.measure == "model":
        evaluator = ModelEvaluator(target.cubin, target.kernel)
        return _tune(Run(keeper, player, evaluator, None, on_progress, say))
    assert target.launch is not None
    with LocalMeasurer(settings=MeasureSettings(rounds=8)) as measurer:
        say("preparing the GPU: inputs, the original's outputs and its time")
        measurer.prepare(Workload(target.cubin.data, target.launch))
        evaluator = DeviceEvaluator(measurer)
        return _tune(Run(keeper, player, evaluator, measurer, on_progress, say))


def _tune(run: Run) -> TuneReport:
    keeper = run.keeper
    target, settings = keeper.target, keeper.settings
    verifier = Verifier(target.cubin, target.kernel, settings.mode)
    resumed = keeper.resumed(verifier)
    # A learned player goes on from its own checkpoint, which holds the way from the original.
    search = run_search(
        target.cubin,
        run.player,
        run.evaluator,
        Budget(settings.seconds, settings.candidates),
        run.options(
            start=None if settings.player in LEARNED else resumed,
            verifier=verifier,
            on_best=keeper.keep,
        ),
    )
    return _checked(_choose(run, search, verifier, resumed), run)


def _checked(report: TuneReport, run: Run) -> TuneReport:
    """Run what was chosen beside the original, and write everything."""
    target, settings = report.target, report.settings
    folder, measurer, say = run.keeper.folder, run.measurer, run.say
    report.folder = folder
    if measurer is not None and report.changed:
        say("running the result beside the original on every input pattern")
        report.check = measurer.check(
            report.cubin.data,
            CheckSettings(samples=settings.samples, state=str(folder / "samples.json")),
        )
        if not report.check.passed:
            report.cubin, report.speedup = target.cubin, 1.0
            write_report(report)
            raise CheckFailed(
                f"{target.source}: the result failed its check: {report.check.detail}"
            )
        if target.build is not None:
            say("comparing the result with the reference in float64")
            report.errors = target.build.check(report.cubin.data)
    say("writing the result")
    write_report(report)
    return report


def _player(settings: TuneSettings, keeper: Keeper) -> Player:
    """The player asked for; a learned one keeps its state in the folder.

    Raises `ToolMissing` when the extra `rl` is not installed.
    """
    profile = LEARNED.get(settings.player)
    if profile is None:
        return PLAYERS[settings.player]
    try:
        learned = import_module("warploom.rl.player")
    except ImportError as error:
        raise ToolMissing(
            f"--search {settings.player} needs {error.name}; install it with: "
            "pip install 'warploom[rl]'"
        ) from None
    state, resume = keeper.folder / LEARNER, keeper.earlier is not None
    player = learned.player_for(
        profile, settings.seed, state, resume, settings.policy, settings.steps
    )
    if not resume:
        (state / learned.CHECKPOINT).unlink(missing_ok=True)
    return player


def _choose(
    run: Run, search: SearchResult, verifier: Verifier, resumed: Cubin | None
) -> TuneReport:
    """The best candidate: by the model's score, or by a longer comparison on the GPU."""
    keeper, measurer, say = run.keeper, run.measurer, run.say
    target, settings = keeper.target, keeper.settings
    leaders = [candidate.cubin for _, candidate in search.best[:LEADERS]]
    if resumed is not None:
        leaders.append(resumed.data)
    timing: Timing | None = None
    chosen, speedup = target.cubin, 1.0
    if measurer is None:
        if search.best and search.best[0][0] > 1.0:
            speedup, candidate = search.best[0]
            chosen = parse(candidate.cubin, "result")
        if resumed is not None and keeper.best > speedup:
            # The model has no noise: what an earlier run in this folder reached still holds.
            chosen, speedup = resumed, keeper.best
    elif leaders:
        place, speedup, timing = fastest(
            measurer, target.cubin.data, leaders, search.candidate_s, say
        )
        if place is not None:
            chosen = parse(leaders[place], "result")
    verdict = counted(verifier.check_file(chosen), target.cubin, chosen, target.kernel)
    if not verdict.legal:
        raise CheckFailed(f"{target.source}: the result is {verdict}")
    return TuneReport(target, settings, search, chosen, verdict, speedup, timing)
