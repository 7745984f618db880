"""`warploom judge`: a kernel that somebody else wrote, against a reference."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from warploom.cli.options import Html, Json, Seed
from warploom.errors import CheckFailed, InputError
from warploom.files import write_text_atomically

GPU = "h200"


def judge(
    candidate: Annotated[
        str,
        typer.Argument(
            metavar="CANDIDATE",
            help="FILE.py:FUNCTION, FILE.toml (a launch) or a folder of a build",
        ),
    ],
    against: Annotated[str, typer.Option(metavar="FILE.py", help="the problem, FILE.py[:OBJECT]")],
    on: Annotated[
        str, typer.Option(metavar="cpu|gpu", help="cpu: CUDA is emulated; gpu: it is timed, too")
    ] = "cpu",
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="GPU",
            help=f"with --on gpu: whose limit a time is compared with; {GPU} unless given",
        ),
    ] = None,
    seed: Seed = 0,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Is it right, is it faster, does it cheat? Exit 0 pass, 1 refused, 2 bad input."""
    if gpu is not None and on == "cpu":
        raise InputError("--gpu goes with --on gpu: nothing is timed on a CPU")
    if seed < 0:
        raise InputError(f"--seed {seed}, expected at least 0")
    from warploom.judge import judge as judge_candidate  # noqa: PLC0415 - torch; --help needs none

    show = sys.stderr.isatty()

    def say(text: str) -> None:
        if show:
            print(f"\r\x1b[K{text}"[:120], end="", file=sys.stderr, flush=True)

    verdict = judge_candidate(candidate, against, on, gpu or GPU, seed, say)
    if show:
        print("\r\x1b[K", end="", file=sys.stderr)
    typer.echo(json.dumps(verdict.to_json()) if as_json else str(verdict))
    if html is not None:
        write_text_atomically(html, verdict.to_html())
        print(f"wrote {html}", file=sys.stderr)
    if not verdict.passed:
        raise CheckFailed(f"{candidate} is refused: {', '.join(verdict.checks)}")
