"""The optional packages this floor leans on, loaded on first use.

sympy proves identities, cvxpy solves geometric programs, scipy solves the bound's linear program.
They ship no types, so they enter as `Any` here and what they return is checked where it is used.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from warploom.errors import ToolMissing


@cache
def load(module: str) -> Any:
    """The named optional module; raises `ToolMissing` with the install line."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".", maxsplit=1)[0]
        raise ToolMissing(f"derivations need {package}: pip install 'warploom[derive]'") from None


def sympy() -> Any:
    """The sympy module."""
    return load("sympy")


def mpmath() -> Any:
    """The mpmath module (arbitrary precision, a dependency of sympy)."""
    return load("mpmath")


def cvxpy() -> Any:
    """The cvxpy module."""
    return load("cvxpy")
