"""`warploom schedule`: a proven schedule for a loop of a kernel or a graph from JSON."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

import typer
from rich.console import Console

from warploom.cli.options import Settings, settings_of
from warploom.errors import InputError
from warploom.files import check_folder, write_text_atomically
from warploom.flows.schedule import problem_of
from warploom.report.schedule_html import schedule_html
from warploom.schedule import service
from warploom.schedule.view import picture
from warploom.schedule.view.trace import chrome_trace

BEAT = 2.0  # seconds between lines of progress; what is done sooner says nothing


class Progress:
    """Which step is on, and how long the whole may still take: a line on stderr now and then."""

    def __init__(self, limit: float) -> None:
        self._limit, self._begin = limit, time.perf_counter()
        self._step, self._done = "reading", threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def say(self, step: str) -> None:
        """The step that begins."""
        self._step = step

    def _beat(self) -> None:
        wait = BEAT / 2  # the first line soon
        while not self._done.wait(wait):
            spent, wait = time.perf_counter() - self._begin, BEAT
            most = (1 + service.CONFIRMING) * self._limit
            print(f"{spent:5.0f} s of at most {most:.0f}: {self._step}", file=sys.stderr)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()


def schedule(
    name: str = typer.Argument(
        metavar="NAME",
        help="gemm, attention, FILE.py:OBJECT, a graph's .json file or one that --json wrote",
    ),
    gpu: str = typer.Option(
        "",
        "--gpu",
        metavar="GPU",
        help="the machine whose costs and limits apply: h200, or the one a file was solved for",
    ),
    settings: Settings = None,
    loop: str = typer.Option(
        "", "--loop", metavar="LOOP", help="which loop of a kernel; the first with a matmul"
    ),
    costs: str = typer.Option(
        "", "--costs", metavar="COSTS", help="override costs: load.latency=520,mma.issue=10:16:30"
    ),
    cost_end: str = typer.Option(
        "high",
        "--at",
        metavar="nominal|low|high",
        help="end of each cost's interval; a schedule of high costs is robust",
    ),
    groups: int = typer.Option(
        0, metavar="N", help="4-warp compute groups on offer to a graph of a file"
    ),
    registers: int = typer.Option(
        0, metavar="N", help="most registers a thread may use, for a graph of a file"
    ),
    stages: int = typer.Option(0, metavar="N", help="most iterations in flight; 0: no limit"),
    top: int = typer.Option(1, metavar="N", help="how many distinct optimal programs"),
    time_limit: float = typer.Option(60.0, metavar="SECONDS", help="for the whole solve"),
    seed: int = typer.Option(1, metavar="N", help="seed of the solver"),
    workers: int = typer.Option(
        1, metavar="N", help="solver threads; more than 1 is not reproducible"
    ),
    json_out: str = typer.Option(
        "", "--json", metavar="FILE", help="write graph, target, schedule; - is stdout"
    ),
    trace: str = typer.Option("", metavar="FILE", help="write a Perfetto / Chrome trace"),
    svg: str = typer.Option("", metavar="FILE", help="write a picture of the steady state"),
    html: str = typer.Option(
        "", metavar="FILE", help="write a page: the proof, and the steady state to look at"
    ),
) -> None:
    """Solve, prove, check, simulate and draw the schedule of one loop."""
    for path in (json_out, trace, svg, html):
        if Path(path or "-").is_dir():
            raise InputError(f"cannot write {path}: it is a directory, expected a file name")
        if path and path != "-":
            check_folder(Path(path).parent)
    request = service.Request(
        gpu, costs, cost_end, groups, registers, stages, top, time_limit, seed, workers
    )
    problem = problem_of(name, settings_of(settings), loop, request)
    console = Console(stderr=json_out == "-", highlight=False, soft_wrap=True)
    with Progress(time_limit) as progress:
        result = service.answer(problem, top, progress.say)
    service.show(result, console)
    if json_out == "-":
        typer.echo(json.dumps(service.to_json(result)))
    elif json_out:
        write_text_atomically(Path(json_out), json.dumps(service.to_json(result), indent=1) + "\n")
    drawn = result.graph, result.target, result.schedule
    if trace:
        write_text_atomically(Path(trace), json.dumps(chrome_trace(*drawn)) + "\n")
    if svg:
        write_text_atomically(Path(svg), picture.svg(*drawn))
    if html:
        write_text_atomically(Path(html), schedule_html(*drawn))
