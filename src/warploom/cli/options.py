"""Arguments and options that several commands share; nothing here imports a floor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from warploom.errors import InputError

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="a setting or a size; repeatable"),
]
Out = Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", help="folder for the results")]
Seed = Annotated[int, typer.Option(metavar="N", help="seed of the random inputs")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="write one self-contained HTML page")
]


def settings_of(texts: list[str] | None) -> dict[str, str]:
    """`key=value` texts as a table; raises `InputError` for one without a key or a value."""
    result: dict[str, str] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise InputError(f"--set {text!r}: expected key=value")
        result[key] = value
    return result


def say(text: str) -> None:
    """Progress, beside the result."""
    typer.echo(text, err=True)
