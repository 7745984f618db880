"""The optional package `warploom-kernels`: machine code of the library's defaults, for machines
that have no compiler and for a first call without a wait.

Its `pack.json` has kernels and choices of variants by key: a hash of what they were asked for,
which is every setting of a configuration. It counts for one state of the sources that decide on
machine code, whose hash it has: with others nothing of it is used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

from warploom.errors import InputError, WarploomWarning
from warploom.files import read_object
from warploom.runtime.interface import Interface

PACKAGE: Final = "warploom_kernels"
INDEX: Final = "pack.json"
SCHEMA: Final = "warploom.pack"
VERSION: Final = 1
ROOMS: Final = (  # what decides on machine code, and which variant a shape gets
    "autosched",
    "codegen",
    "kernels",
    "machine",
    "perf",
    "rewrites",
    "schedule",
    "tile",
)
SOURCES: Final = Path(__file__).parents[2]


@dataclass(frozen=True)
class Pack:
    """An installed pack.

    kernels  by key: {"cubin": file, "sha256": of it, "interface": what a launch must know}
    choices  by key: {name of the variant: its point}
    """

    folder: Path
    kernels: Mapping[str, Mapping[str, Any]]
    choices: Mapping[str, Mapping[str, Any]]

    def kernel(self, key: tuple[Any, ...]) -> tuple[Interface, bytes] | None:
        """The kernel that an operator asks for under `key`; None: it is compiled.

        Raises `InputError` for a cubin that is not the one the index was written for.
        """
        found = self.kernels.get(hashed(key)) if self.kernels else None
        if found is None:
            return None
        path = self.folder / found["cubin"]
        cubin = path.read_bytes()
        if hashlib.sha256(cubin).hexdigest() != found["sha256"]:
            raise InputError(f"{path} is corrupt: install warploom-kernels again")
        about = found["interface"]
        more = {"arch": about["arch"], "registers": about["registers"]}
        return Interface(**Interface.read(about), **more), cubin

    def recall(self, table: str, config: Any, sizes: Any) -> Mapping[str, Any] | None:
        """The variant that a tuned table chose for a configuration and sizes, by its name."""
        return self.choices.get(hashed((table, config, sizes))) if self.choices else None

    def note(self, table: str, config: Any, sizes: Any, chosen: Any) -> None:
        """A pack is written once (`flows.pack`)."""


@cache
def installed() -> Pack:
    """The pack that is installed, for the sources that run; an empty one where there is none."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        return Pack(Path(), {}, {})
    folder = Path(found.submodule_search_locations[0])
    data = read_object(folder / INDEX, "the index of a pack of kernels")
    stated = (data.get("schema"), data.get("version"), data.get("sources"))
    if stated != (SCHEMA, VERSION, sources()):
        warnings.warn(
            f"the kernels in {folder} were built from other sources of warploom and are not used: "
            "install the warploom-kernels of this version",
            WarploomWarning,
            stacklevel=2,
        )
        return Pack(folder, {}, {})
    return Pack(folder, data["kernels"], data["choices"])


def sources() -> str:
    """A hash of all files that decide which machine code a kernel of the library has."""
    mixed = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((SOURCES / room).rglob("*")):
            if path.suffix not in ("", ".pyc"):
                mixed.update(f"{path.relative_to(SOURCES)}\0".encode())
                mixed.update(hashlib.sha256(path.read_bytes()).digest())
    return mixed.hexdigest()


def hashed(asked: Any) -> str:
    """The key of what was asked for: the same in every process."""
    return hashlib.sha256(_stated(asked).encode()).hexdigest()


def _stated(value: Any) -> str:
    if is_dataclass(value):
        parts = (f"{one.name}={_stated(getattr(value, one.name))}" for one in fields(value))
        return f"{type(value).__name__}({','.join(parts)})"
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        return f"{{{','.join(f'{name}:{_stated(table[name])}' for name in sorted(table))}}}"
    if isinstance(value, frozenset):
        return f"{{{','.join(sorted(map(_stated, cast('frozenset[Any]', value))))}}}"
    if isinstance(value, tuple | list):
        return f"({','.join(map(_stated, cast('tuple[Any, ...]', value)))})"
    return repr(value)


def index(kernels: Mapping[str, Any], choices: Mapping[str, Any]) -> str:
    """The text of a pack's index."""
    head = {"schema": SCHEMA, "version": VERSION, "sources": sources()}
    return json.dumps({**head, "kernels": kernels, "choices": choices}, indent=0) + "\n"
