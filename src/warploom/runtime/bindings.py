"""The one door to cuda-bindings: imported when first needed, with the install line when absent."""

from __future__ import annotations

import importlib
from typing import Any

from warploom.errors import ToolMissing

INSTALL = "pip install 'warploom[gpu]'"


def import_binding(name: str) -> Any:
    """`cuda.bindings.<name>` ('driver'); raises `ToolMissing` with the install line.

    Untyped on purpose: the package ships no type information, and what it returns is checked where
    it enters (`driver.py`).
    """
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise ToolMissing(
            f"cuda-bindings 13 is needed to talk to a GPU ({one_line(error)}); "
            f"install it with: {INSTALL}"
        ) from None


def one_line(error: BaseException) -> str:
    """An exception's text on one line."""
    return " ".join(str(error).split())
