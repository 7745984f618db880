"""`warploom tune`: make a cubin faster, provably still the same program."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from warploom.cli.options import Json, Out, settings_of
from warploom.cli.sass import Alias
from warploom.errors import InputError, Interrupted, WarploomError
from warploom.files import check_folder
from warploom.flows.targets import Target, read_target
from warploom.flows.tune import tune as run_tune
from warploom.flows.tune_script import Recorded, deploy, is_script, record
from warploom.flows.tuned import TuneReport, TuneSettings
from warploom.objects import names_object
from warploom.sass.flow.aliasing import AliasMode
from warploom.search.actions import STEPS, moves_of
from warploom.search.driver import Progress
from warploom.search.players import PLAYERS

PLAYER_HELP = "; ".join(f"{player.name}: {player.about}" for player in PLAYERS.values()) + (
    "; ppo: reinforcement learning over wide moves; "
    "ppo-guided: the same, four modelled steps to a score; ppo-cuasmrl: as CuAsmRL published it"
)


What = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="FILE.cubin, a folder of warploom build or optimize, FILE.py:OBJECT, or a script "
        "FILE.py: every Triton kernel that it launches",
    ),
]
Measure = Annotated[
    str, typer.Option(metavar="gpu|model|auto", help="auto: the GPU when there is one")
]
Arch = Annotated[int | None, typer.Option(metavar="80|90", help="for FILE.py:OBJECT and a script")]
Sizes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="a size of a build folder's kernel"),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="refuse an --out without a search to go on from")
]
Policy = Annotated[
    Path | None, typer.Option(metavar="FILE", help="ppo: start from this pre-trained policy")
]
Only = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="of a script: tune this kernel, repeatable")
]
Listing = Annotated[
    bool, typer.Option("--list", help="of a script: say what it launches, and tune nothing")
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- ARGUMENT...]", help="a script's own arguments, behind --"),
]


def tune(
    target: What,
    out: Out,
    search: Annotated[str, typer.Option(metavar="PLAYER", help=PLAYER_HELP)] = "guided",
    measure: Measure = "auto",
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="wall clock of a kernel, as 60s, 5m or 2h")
    ] = "60s",
    candidates: Annotated[
        int | None, typer.Option(metavar="N", help="stop after so many candidates")
    ] = None,
    moves: Annotated[
        str, typer.Option(metavar="MOVE,...", help="what a player may change")
    ] = ",".join(STEPS),
    kernel: Annotated[
        str | None, typer.Option(metavar="NAME", help="which kernel of the file")
    ] = None,
    launch: Annotated[
        Path | None, typer.Option(metavar="FILE", help="launch description (JSON)")
    ] = None,
    arch: Arch = None,
    sizes: Sizes = None,
    alias: Alias = AliasMode.STRICT,
    samples: Annotated[
        int, typer.Option(metavar="N", help="random inputs for the final check")
    ] = 0,
    seed: Annotated[int, typer.Option(metavar="N", help="seed of the search")] = 0,
    resume: Resume = False,
    policy: Policy = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="ppo: stop after so many steps in all")
    ] = None,
    only: Only = None,
    listing: Listing = False,
    arguments: Arguments = None,
    json_output: Json = False,
) -> None:
    """Search for a faster order of a kernel's machine code, verify and test it, and write it.

    Of a script: of every Triton kernel that it launches.
    """
    settings = TuneSettings(
        player=search,
        measure=_measure(measure),
        seconds=parse_duration(budget),
        candidates=candidates,
        mode=alias,
        seed=seed,
        samples=samples,
        resume=resume,
        policy=policy,
        steps=steps,
        moves=moves_of(moves.split(",")),
    )
    check_folder(out)
    console = Console(settings.seconds)
    if is_script(target):
        if kernel or launch or sizes:
            raise InputError(f"--kernel, --launch and --set go with other targets; {target} is run")
        found = record(Path(target), arguments or [], out / "recorded", arch, console.say)
        _script(found, found.chosen(only or []), listing, settings, out, console, json_output)
        return
    if only or listing or arguments:
        raise InputError(f"--only, --list and arguments go with a script; {target} is none")
    if names_object(target):
        console.say(f"running {target}")  # a Triton kernel is compiled: seconds
    chosen = read_target(target, kernel, launch, arch, settings_of(sizes))
    report = _searched(chosen, settings, out, console)
    manifest = report.files["manifest"]
    print(json.dumps(json.loads(manifest.read_text()), indent=1) if json_output else str(report))


def _script(
    found: Recorded,
    chosen: tuple[str, ...],
    listing: bool,
    settings: TuneSettings,
    out: Path,
    console: Console,
    json_output: bool,
) -> None:
    """List what a script launched and tune what was chosen of it."""
    console.say(str(found))
    if listing:
        print(json.dumps(dict(found.kernels), indent=1) if json_output else "\n".join(chosen))
        return
    rows: dict[str, TuneReport] = {}
    for name in chosen:
        rows[name] = _searched(found.target(name), settings, out / "kernels" / name, console)
        deploy(rows[name], out / "store")
    if json_output:
        parts = {name: one.files["manifest"].read_text() for name, one in rows.items()}
        print(json.dumps({name: json.loads(text) for name, text in parts.items()}, indent=1))
        return
    kind = "measured" if settings.measure == "gpu" else "modelled (not a measurement)"
    for name, one in rows.items():
        won = f"{one.speedup:.4f}x {kind}" if one.changed else "no win"
        print(f"{name}: {won}; {one.files['diff']}")
    if any(one.changed for one in rows.values()):
        print(f"deploy: warploom.install({str(out / 'store')!r})")


def _searched(target: Target, settings: TuneSettings, out: Path, console: Console) -> TuneReport:
    scored = "the GPU" if settings.measure == "gpu" else "the timing model (no measurement)"
    console.say(
        f"{target.kernel} ({target.cubin.arch}, {target.cubin.compiler}): {settings.player} for "
        f"{settings.seconds:g} s, scored by {scored}; pointers: --alias {settings.mode.value}, "
        f"{settings.mode.about}"
    )
    try:
        return run_tune(target, settings, out, console.show, console.say)
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted; the same command goes on from what lies in {out}"
        ) from None


class Console:
    """What `tune` tells a person while it works: on a terminal one line that changes, elsewhere a
    line now and then."""

    EVERY_S = 10.0  # between two lines of progress that are not on a terminal

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._live = sys.stderr.isatty()
        self._open = False
        self._began: float | None = None
        self._last = 0.0

    def say(self, text: str) -> None:
        """A line of its own."""
        print(("\n" if self._open else "") + text, file=sys.stderr, flush=True)
        self._open = False

    def show(self, progress: Progress) -> None:
        """How far the search is."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        elif not self._live and now - self._last < self.EVERY_S:
            return
        self._last = now
        text = (
            f"{now - self._began:6.1f} of {self._budget_s:g} s  {progress.scored} candidates "
            f"({progress.rate:.1f}/s)  best {progress.best:.4f}x"
        )
        if self._live:
            print(f"\r{text}", end="", file=sys.stderr, flush=True)
            self._open = True
            return
        print(text, file=sys.stderr, flush=True)


def parse_duration(text: str) -> float:
    """Seconds of `90`, `90s`, `5m` or `2h`; raises `InputError` for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", text)
    if match is None:
        raise InputError(f"--budget {text!r}, expected a time such as 60s, 5m or 2h")
    return float(match.group(1)) * {"s": 1, "m": 60, "h": 3600}[match.group(2) or "s"]


def _measure(text: str) -> str:
    if text != "auto":
        return text
    from warploom.runtime.driver import CudaDevice  # noqa: PLC0415 - only when asked to look

    try:
        CudaDevice(0)
    except WarploomError:
        return "model"
    return "gpu"
