"""Tuning one kernel's machine code: search, confirm, verify, test, and write what a user deploys.

The folder holds, from the first improvement on, the best cubin so far; Ctrl-C, a full disk or a
killed process lose nothing that was found. The result is never a cubin the verifier refuses.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from warploom.errors import CheckFailed, InputError, ToolMissing
from warploom.files import write_bytes_atomically, write_text_atomically
from warploom.integrations.deploy import FolderStore, content_key
from warploom.pipeline.targets import Target
from warploom.report.sass_html import diff_html
from warploom.report.sass_tables import diff_lines
from warploom.runtime import (
    CheckReport,
    CheckSettings,
    LocalMeasurer,
    Measurer,
    MeasureSettings,
    Timing,
    TimingSettings,
    Workload,
)
from warploom.sass.aliasing import AliasMode
from warploom.sass.cubin import Cubin, parse
from warploom.sass.diff import diff
from warploom.sass.verdict import Verdict
from warploom.sass.verify import Verifier
from warploom.search.actions import PROGRAMS, STEPS, moves_of
from warploom.search.driver import Budget, Progress, SearchResult, run_search
from warploom.search.evaluate import DeviceEvaluator, ModelEvaluator
from warploom.search.game import Candidate
from warploom.search.lineage import Base, Step, make_base, prove, read_steps, write_steps
from warploom.search.players import PLAYERS, Player
from warploom.search.tournament import BaseModel, Entry, tournament

SCHEMA: Final = 1
LEADERS: Final = 5
CHAINS: Final = {"gpu": 6, "model": 1}
# Learned players by the name of `--search`, with their profile; they need the extra `rl`.
LEARNED: Final = {
    "ppo": "wide",
    "ppo-guided": "guided",
    "ppo-programs": "programs",
    "ppo-cuasmrl": "cuasmrl",
}
BASES: Final = 4  # programs besides the original, where `--moves` allows others
LEARNER: Final = "ppo"  # the folder of a learned player's checkpoint, logs and replay


@dataclass(frozen=True)
class TuneSettings:
    """What to spend and how. `measure` is `gpu` or `model`."""

    player: str = "guided"
    measure: str = "model"
    seconds: float = 60.0
    candidates: int | None = None
    mode: AliasMode = AliasMode.TRITON
    seed: int = 0
    samples: int = 0
    resume: bool = False
    policy: Path | None = None
    steps: int | None = None
    moves: frozenset[str] = frozenset(STEPS)

    @property
    def programs(self) -> bool:
        """True when the moves may change the program, not only its order."""
        return not self.moves.isdisjoint(PROGRAMS)

    def __post_init__(self) -> None:
        """Refuse unknown names and an empty budget."""
        moves_of(self.moves)
        if self.player in LEARNED and self.moves != frozenset(STEPS):
            raise InputError("--moves: learned players have the moves of their profile")
        if self.programs and self.resume:
            others = ", ".join(PROGRAMS)
            raise InputError(f"--resume goes on in one program; leave out {others}")
        if self.player not in PLAYERS and self.player not in LEARNED:
            known = ", ".join((*PLAYERS, *LEARNED))
            raise InputError(f"--search {self.player!r}, expected one of {known}")
        if self.player not in LEARNED and (self.policy is not None or self.steps is not None):
            raise InputError("--policy and --steps are of learned players: --search ppo")
        if self.measure not in CHAINS:
            raise InputError(f"--measure {self.measure!r}, expected gpu or model")
        if self.seconds <= 0:
            raise InputError(f"--budget {self.seconds} s, expected more than 0")
        if self.samples < 0:
            raise InputError(f"--samples {self.samples}, expected 0 or more")
        for option, count in (("--candidates", self.candidates), ("--steps", self.steps)):
            if count is not None and count < 1:
                raise InputError(f"{option} {count}, expected at least 1")


@dataclass
class TuneReport:
    """What came of it. `speedup` is measured on the GPU, or modelled (`measure` says which).

    `errors`: relative error of each output against float64, of a build folder's kernel on a GPU.
    """

    target: Target
    settings: TuneSettings
    search: SearchResult
    cubin: Cubin
    verdict: Verdict
    speedup: float
    timing: Timing | None = None
    check: CheckReport | None = None
    errors: Mapping[str, float] = field(default_factory=dict[str, float])
    lineage: tuple[Step, ...] = ()
    folder: Path = Path()
    files: dict[str, Path] = field(default_factory=dict[str, Path])

    @property
    def changed(self) -> bool:
        """True when the result is not the original."""
        return self.cubin.data != self.target.cubin.data


def tune(
    target: Target,
    settings: TuneSettings,
    folder: Path,
    on_progress: Callable[[Progress], None] | None = None,
) -> TuneReport:
    """Search one kernel and write the result into `folder`.

    Raises `InputError` when a GPU is asked for and the launch is not known, or the folder cannot be
    written; `CheckFailed` when the final check fails (the folder then holds the original).
    """
    if settings.measure == "gpu" and target.launch is None:
        raise InputError(
            f"{target.source}: measuring on a GPU needs the launch; give --launch FILE.json or a "
            "file.py:object, or use --measure model"
        )
    # What is refused is refused before anything is written or taken away.
    _Keeper(target, settings, folder).resumed()
    player = _player(settings, folder)
    write_bytes_atomically(folder / "original.cubin", target.cubin.data)
    if settings.measure == "model":
        evaluator = ModelEvaluator(target.cubin, target.kernel)
        return _tune(target, settings, player, folder, evaluator, None, on_progress)
    assert target.launch is not None
    with LocalMeasurer(settings=MeasureSettings(rounds=8)) as measurer:
        measurer.prepare(Workload(target.cubin.data, target.launch))
        evaluator = DeviceEvaluator(measurer)
        return _tune(target, settings, player, folder, evaluator, measurer, on_progress)


def _tune(
    target: Target,
    settings: TuneSettings,
    player: Player,
    folder: Path,
    evaluator: ModelEvaluator | DeviceEvaluator,
    measurer: Measurer | None,
    on_progress: Callable[[Progress], None] | None,
) -> TuneReport:
    if settings.programs:
        report = _play_programs(target, settings, player, evaluator, measurer, folder, on_progress)
        return _checked(report, measurer, folder)
    verifier = Verifier(target.cubin, target.kernel, settings.mode)
    keeper = _Keeper(target, settings, folder)
    resumed = keeper.resumed()
    search = run_search(
        target.cubin,
        player,
        evaluator,
        Budget(settings.seconds, settings.candidates),
        target.kernel,
        settings.mode,
        seed=settings.seed,
        chains=CHAINS[settings.measure],
        confirmations=2 if measurer is not None else 0,
        # A learned player goes on from its own checkpoint, which holds the way from the original.
        start=None if settings.player in LEARNED else resumed,
        verifier=verifier,
        moves=settings.moves,
        on_progress=on_progress,
        on_best=keeper.keep,
    )
    report = _choose(target, settings, search, verifier, measurer, keeper)
    return _checked(report, measurer, folder)


def _checked(report: TuneReport, measurer: Measurer | None, folder: Path) -> TuneReport:
    """Run what was chosen beside the original, and write everything."""
    target, settings = report.target, report.settings
    report.folder = folder
    if measurer is not None and report.changed:
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
            report.errors = target.build.check(report.cubin.data)
    write_report(report)
    return report


def _play_programs(
    target: Target,
    settings: TuneSettings,
    player: Player,
    evaluator: ModelEvaluator | DeviceEvaluator,
    measurer: Measurer | None,
    folder: Path,
    on_progress: Callable[[Progress], None] | None,
) -> TuneReport:
    """A tournament over programs in other registers and with pipelined loops.

    The lineage of the result is written to the folder and proved step by step.
    """
    original, name = target.cubin, target.kernel
    bases = [Base(original)]
    for number in range(BASES):
        rng = random.Random(f"{settings.seed}/{number}")
        base = make_base(original, name, settings.mode, settings.moves, rng)
        if all(base.cubin.data != other.cubin.data for other in bases):
            bases.append(base)
    entries = tournament(
        bases,
        player,
        lambda base: evaluator if measurer is not None else BaseModel(original, base.cubin, name),
        Budget(settings.seconds, settings.candidates),
        name,
        settings.mode,
        settings.seed,
        chains=CHAINS[settings.measure],
        confirmations=2 if measurer is not None else 0,
        moves=settings.moves,
        on_progress=on_progress,
    )
    chosen, speedup, timing = _leader(original, entries, measurer)
    steps: tuple[Step, ...] = () if chosen is None else chosen.steps
    if findings := prove(original, name, steps, settings.mode):
        raise CheckFailed(f"{target.source}: the result is not proved: {findings[0]}")
    image = original if chosen is None else parse(chosen.image, "result")
    base = original if chosen is None else chosen.base.cubin
    verdict = Verifier(base, name, settings.mode).check_file(image)
    write_steps(folder / "lineage", steps)
    return TuneReport(
        target, settings, _together(entries), image, verdict, speedup, timing, lineage=steps
    )


def _leader(
    original: Cubin, entries: list[Entry], measurer: Measurer | None
) -> tuple[Entry | None, float, Timing | None]:
    """The best entry, by the model's score or a longer comparison; None when nothing is faster."""
    faster = [entry for entry in entries if entry.score > 1.0][:LEADERS]
    if not faster:
        return None, 1.0, None
    if measurer is None:
        return faster[0], faster[0].score, None
    images = {f"leader {number}": entry.image for number, entry in enumerate(faster)}
    timing = measurer.compare({"original": original.data, **images}, TimingSettings())
    name = max(images, key=lambda leader: timing.ratios[leader].median)
    ratio = timing.ratios[name]
    if ratio.median <= 1.0 or not ratio.clears(timing.control):
        return None, 1.0, timing
    return faster[list(images).index(name)], ratio.median, timing


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


def _player(settings: TuneSettings, folder: Path) -> Player:
    """The player asked for; a learned one keeps its state in the folder.

    Raises `ToolMissing` when the extra `rl` is not installed.
    """
    profile = LEARNED.get(settings.player)
    if profile is None:
        return PLAYERS[settings.player]
    try:
        learned = import_module("warploom.search.rl.player")
    except ImportError as error:
        raise ToolMissing(
            f"--search {settings.player} needs {error.name}; install it with: "
            "pip install 'warploom[rl]'"
        ) from None
    state = folder / LEARNER
    player = learned.player_for(
        profile, settings.seed, state, settings.resume, settings.policy, settings.steps
    )
    if not settings.resume:
        (state / learned.CHECKPOINT).unlink(missing_ok=True)
    return player


def _choose(
    target: Target,
    settings: TuneSettings,
    search: SearchResult,
    verifier: Verifier,
    measurer: Measurer | None,
    keeper: _Keeper,
) -> TuneReport:
    """The best candidate: by the model's score, or by a longer comparison on the GPU."""
    leaders = [candidate.cubin for _, candidate in search.best[:LEADERS]]
    resumed = keeper.resumed()
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
        images = {f"leader {number}": image for number, image in enumerate(leaders)}
        timing = measurer.compare({"original": target.cubin.data, **images}, TimingSettings())
        name = max(images, key=lambda leader: timing.ratios[leader].median)
        if timing.ratios[name].clears(timing.control) and timing.ratios[name].median > 1.0:
            chosen, speedup = parse(images[name], "result"), timing.ratios[name].median
    verdict = verifier.check_file(chosen)
    steps: tuple[Step, ...] = ()
    if not verdict.legal:
        verdict, steps = _lineage(target, settings, chosen, verdict, keeper.folder)
    if not verdict.legal:
        raise CheckFailed(f"{target.source}: the result is {verdict}")
    return TuneReport(target, settings, search, chosen, verdict, speedup, timing, lineage=steps)


def _lineage(
    target: Target, settings: TuneSettings, chosen: Cubin, verdict: Verdict, folder: Path
) -> tuple[Verdict, tuple[Step, ...]]:
    """The verdict on a result that a learned player found on another program, and its lineage,
    which is written; what no program explains keeps its verdict."""
    for path in sorted((folder / LEARNER / "programs").glob("*/lineage.json")):
        before = read_steps(path.parent)
        last = Step("order", chosen.data, "instructions and control fields in another order")
        if not prove(target.cubin, target.kernel, (*before, last), settings.mode):
            write_steps(folder / "lineage", (*before, last))
            base = parse(before[-1].cubin, target.kernel)
            found = Verifier(base, target.kernel, settings.mode).check_file(chosen)
            return found, (*before, last)
    return verdict, ()


class _Keeper:
    """Writes the best cubin so far with what is needed to go on from it."""

    def __init__(self, target: Target, settings: TuneSettings, folder: Path) -> None:
        self.folder = folder
        self.key = content_key(target.cubin.data)
        self.settings = settings
        self.best = self._state()["speedup"] if settings.resume and self._started() else 1.0

    def keep(self, candidate: Candidate, speedup: float) -> None:
        """Called for every new best of this run; kept when it beats an earlier run's too."""
        if speedup <= self.best:
            return
        self.best = speedup
        write_bytes_atomically(self.folder / "best.cubin", candidate.cubin)
        state = {"schema": SCHEMA, "key": self.key, "speedup": speedup, "seconds": time.time()}
        write_text_atomically(self.folder / "progress.json", json.dumps(state) + "\n")

    def resumed(self) -> Cubin | None:
        """The best of an earlier run in this folder, when asked for."""
        if not self.settings.resume:
            return None
        if not self._started():
            if self.settings.player in LEARNED and (self.folder / LEARNER).is_dir():
                return None  # stopped before its first improvement: only the learner's state
            raise InputError(f"{self.folder} holds no earlier search; leave out --resume")
        if self._state()["key"] != self.key:
            raise InputError(f"{self.folder} holds the search of another kernel; choose another -o")
        return parse((self.folder / "best.cubin").read_bytes(), str(self.folder / "best.cubin"))

    def _started(self) -> bool:
        return (self.folder / "progress.json").is_file()

    def _state(self) -> dict[str, Any]:
        path = self.folder / "progress.json"
        try:
            state = json.loads(path.read_text())
            return {"key": str(state["key"]), "speedup": float(state["speedup"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: not a search's progress ({error})") from None


def write_report(report: TuneReport) -> None:
    """Write tuned.cubin, the readable diff, the manifest and the deployable store entry."""
    folder, target = report.folder, report.target
    diffs = diff(target.cubin, report.cubin, target.kernel)
    text = "\n".join(line.plain for one in diffs for line in diff_lines(one))
    files = {
        "cubin": folder / "tuned.cubin",
        "diff": folder / "diff.txt",
        "diff_html": folder / "diff.html",
        "manifest": folder / "manifest.json",
    }
    write_bytes_atomically(files["cubin"], report.cubin.data)
    write_text_atomically(files["diff"], text + "\n")
    write_text_atomically(files["diff_html"], diff_html(target.cubin, report.cubin, diffs))
    summary = _summary(report)
    if report.changed:
        store = FolderStore(folder / "store")
        launch = target.launch.to_json() if target.launch else None
        store.put(
            target.cubin.data,
            report.cubin.data,
            target.kernel,
            target.cubin.arch,
            result=summary["result"],
            launch=launch,
        )
        files["store"] = folder / "store"
        if target.build is not None:
            files["kernel"] = folder / "kernel"
            target.build.with_cubin(report.cubin.data, files["kernel"])
    write_text_atomically(files["manifest"], json.dumps(summary, indent=1) + "\n")
    report.files = files


def _summary(report: TuneReport) -> dict[str, Any]:
    target, settings, search = report.target, report.settings, report.search
    measured = settings.measure == "gpu"
    return {
        "schema": SCHEMA,
        "key": content_key(target.cubin.data),
        "kernel": target.kernel,
        "arch": target.cubin.arch,
        "compiler": target.cubin.compiler,
        "cubin": "tuned.cubin",
        "sha256": hashlib.sha256(report.cubin.data).hexdigest(),
        "original_sha256": hashlib.sha256(target.cubin.data).hexdigest(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "launch": target.launch.to_json() if target.launch else None,
        "result": {
            "changed": report.changed,
            "speedup": round(report.speedup, 5),
            "speedup_is": "measured" if measured else "modelled, not measured",
            "static_verdict": str(report.verdict),
            "tested_verdict": report.check.to_json() if report.check else "not tested",
            "errors_against_float64": dict(report.errors) or "not measured",
            "timing_verdict": report.timing.to_json() if report.timing else "not measured",
            "search": settings.player,
            "moves": sorted(settings.moves),
            "lineage": [step.why for step in report.lineage],
            "budget_s": settings.seconds,
            "seconds": round(search.seconds, 2),
            "seed": settings.seed,
            "scored": search.scored,
            "outcomes": dict(search.outcomes),
            "actions": dict(search.tally),
            "interrupted": search.interrupted,
        },
    }
