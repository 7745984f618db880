"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from warploom.codegen.compile.build import GPU_ARCHITECTURES
from warploom.errors import InputError
from warploom.kernels.library import KERNELS

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help=f"{', '.join(sorted(KERNELS))}, or FILE.py:OBJECT: your own program"
    ),
]
Gpu = Annotated[str, typer.Option(metavar="GPU", help=", ".join(GPU_ARCHITECTURES))]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="a setting or a size; repeatable"),
]
Out = Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", help="folder for the results")]
Seed = Annotated[int, typer.Option(metavar="N", help="seed of the random inputs")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def settings_of(texts: list[str] | None) -> dict[str, str]:
    """`key=value` texts as a table; raises `InputError` for one without a key or a value."""
    result: dict[str, str] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise InputError(f"--set {text!r}: expected key=value")
        result[key] = value
    return result
