"""The installed Triton, checked: its modules, its version, the function under its decorators."""

from __future__ import annotations

import importlib
from typing import Any

from warploom.errors import InputError, ToolMissing

OLDEST_TRITON = (3, 6)


def triton_module(name: str = "triton") -> Any:
    """A module of the installed Triton; raises `ToolMissing` when absent or older than 3.6."""
    try:
        triton: Any = importlib.import_module("triton")
    except ImportError as error:
        raise ToolMissing(
            f"triton >= 3.6 is needed ({error}); install it with: pip install 'warploom[triton]'"
        ) from None
    version = tuple(int(part) for part in str(triton.__version__).split(".")[:2])
    if version < OLDEST_TRITON:
        raise ToolMissing(
            f"triton {triton.__version__} is too old, 3.6 or newer is needed; "
            "install it with: pip install 'warploom[triton]'"
        )
    return triton if name == "triton" else importlib.import_module(name)


def jit_function(function: Any) -> Any:
    """The `JITFunction` under decorators such as `autotune` and `heuristics`."""
    jit: Any = triton_module("triton.runtime.jit")
    inner = function
    while not isinstance(inner, jit.JITFunction):
        if not hasattr(inner, "fn"):
            raise InputError(
                f"{function!r} is not a Triton kernel, expected a function under @triton.jit"
            )
        inner = inner.fn
    return inner
