"""warploom: derive, tile, schedule, emit and tune GPU kernels.

The commands as functions, loaded when first used; `dir(warploom)` lists them:

    derive     what a formula becomes: fusion, traffic, bound, tile program
    kernel     a tile program as a function of tensors: a decorator
    run        a kernel on random data, every output compared
    schedule   its software pipeline, solved with a proof
    build      CUDA C++ and machine code
    emulate    a kernel's CUDA C++ on this CPU: races, missing waits, deadlocks
    optimize   the fastest kernel found for a program
    tune       a faster order of machine code, verified
    judge      a kernel that somebody else wrote, beside a reference

`install`, `tuned` and `uninstall` run stored cubins in Triton (`warploom.integrations.triton`).
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warploom.flows.notebook import build, optimize, run, tune
    from warploom.integrations.torch_kernel import kernel
    from warploom.integrations.triton_swap import install, tuned, uninstall

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "build",
    "install",
    "kernel",
    "optimize",
    "run",
    "tune",
    "tuned",
    "uninstall",
]
COMMANDS = "warploom.flows.notebook"
HOMES = {
    **dict.fromkeys(("build", "optimize", "run", "tune"), COMMANDS),
    "kernel": "warploom.integrations.torch_kernel",
    **dict.fromkeys(("install", "tuned", "uninstall"), "warploom.integrations.triton_swap"),
}
ROOMS = ("derive", "emulate", "judge", "schedule")
"""Packages with a command's name: they are called as the command."""


class _Room(ModuleType):
    """A package that is also the command of its name."""

    @property
    def __wrapped__(self) -> Any:
        """The command, whose signature and docstring are shown for the call."""
        return getattr(import_module(COMMANDS), self.__name__.rpartition(".")[2])

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.__wrapped__(*args, **named)


class _House(ModuleType):
    """This package: rooms can be called as soon as they are imported, whoever imports them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ROOMS and isinstance(value, ModuleType):
            value.__class__ = _Room
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _House


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    if name in ROOMS:
        return import_module(f"warploom.{name}")
    raise AttributeError(f"module 'warploom' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, *ROOMS))
