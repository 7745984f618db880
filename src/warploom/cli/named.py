"""Arguments that list what there is: kernels of the library, GPUs."""

from __future__ import annotations

from typing import Annotated

import typer

from warploom.codegen.compile.build import BUILD_ARCHITECTURES, GPU_ARCHITECTURES
from warploom.kernels.library import KERNELS

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help=f"{', '.join(sorted(KERNELS))}, or FILE.py:OBJECT: your own program"
    ),
]
# Options that are called as their metavar say their name: typer 0.27 takes the metavar's letters.
Hopper = Annotated[str, typer.Option("--gpu", metavar="GPU", help=", ".join(GPU_ARCHITECTURES))]
Gpu = Annotated[str, typer.Option("--gpu", metavar="GPU", help=", ".join(BUILD_ARCHITECTURES))]
