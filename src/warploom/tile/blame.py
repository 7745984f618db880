"""Whose line it was: an error of a tile program begins with the line of the program."""

from __future__ import annotations

import inspect
from pathlib import Path

from warploom.errors import InputError

_HERE = str(Path(__file__).parent)


def user_line() -> str:
    """`file:line` of the innermost frame outside this package: the line to blame."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    if frame is None:
        return "<unknown line>"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def a_name(value: object, what: str) -> str:
    """`value`, which must be a name as Python's: it becomes one in C++."""
    if not isinstance(value, str) or not value.isidentifier() or not value.isascii():
        raise refuse(f"{what} {shown(value)}: expected a name of letters, digits and _")
    return value


def refuse(message: str) -> InputError:
    """An `InputError` that begins with the user's line."""
    return InputError(f"{user_line()}: {message}")


def shown(value: object) -> str:
    """A value of the wrong kind, short enough for a message."""
    text = repr(value) if isinstance(value, str) else str(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
