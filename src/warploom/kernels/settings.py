"""Settings as texts: what `--set key=value` and the points of a table say."""

from __future__ import annotations

from typing import Any

from warploom.errors import InputError
from warploom.tile import dtype


def parse(name: str, key: str, text: str, kind: str) -> Any:
    """The value of a kernel's setting, of the kind that its configuration gives; raises
    `InputError` where the text is none."""
    kind, _, absent = kind.partition(" | ")
    try:
        if absent and text == "none":
            return None
        if kind == "bool":
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        if kind == "DType":
            return dtype(text)
        if kind.startswith("tuple"):
            values = tuple(int(part) for part in text.split(","))
            if len(values) != kind.count("int"):
                raise ValueError
            return values
        return {"int": int, "float": float}.get(kind, str)(text)
    except (ValueError, KeyError):
        raise InputError(f"{name}: {key}={text!r}, expected {_words(kind)}") from None


def _words(kind: str) -> str:
    """What a kind of setting looks like on the command line."""
    if kind.startswith("tuple"):
        return f"{kind.count('int')} whole numbers, as 128,256"
    words = {"bool": "true or false", "int": "a whole number", "float": "a number"}
    return words[kind]
