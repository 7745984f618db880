"""Machines from TOML files: the shipped ones by name, a user's by path, measured values laid over.

A file reads

    name = "h200"
    title = "NVIDIA H200 SXM 141GB"
    base = "h100"                      # optional: start from another machine
    without = ["dram.latency"]         # optional: inherited values that do not hold here
    aliases = ["h200-sxm"]

    [sources]                          # short names for citations
    sheet = "NVIDIA H200 datasheet"

    [dram]
    bandwidth = { value = 4.8e12, unit = "B/s", source = "sheet", kind = "datasheet" }

A `source` of one word must be a name of `[sources]`; anything with a space is a citation in itself.
What all GPUs of one compute capability have (registers, threads, shared memory) stands in
`data/architectures/`, once for each, and is the base of their files.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, TypeGuard, cast

from warploom.errors import InputError
from warploom.machine.keys import KEYS
from warploom.machine.machine import Machine, Quantity, check_quantity

_HEADER = ("name", "title", "base", "without", "aliases", "sources")
_FIELDS = ("value", "unit", "source", "kind")
_GPUS, _ARCHITECTURES = "data", "data/architectures"


def names() -> list[str]:
    """The shipped machines, by their canonical names."""
    return sorted(_shipped())


def load(name_or_path: str | Path) -> Machine:
    """A machine by name or alias (`h100`, `H100-SXM`, `NVIDIA H200`) or from a TOML file.

    A `Path`, or a string that ends in `.toml` or contains a `/`, is a file. Raises `InputError` on
    an unknown name (listing the known ones and the closest), a missing file or a bad entry.
    """
    if isinstance(name_or_path, Path) or name_or_path.endswith(".toml") or "/" in name_or_path:
        return _load_file(Path(name_or_path), ())
    return _load_shipped(_canonical(name_or_path), ())


def architecture(target: str) -> Machine:
    """What all GPUs of a compile target have: `sm_86`, or with a feature suffix `sm_90a`.

    Raises `InputError` for a target without data, listing those with.
    """
    name = target.rstrip("af")
    if name not in _documents(_ARCHITECTURES):
        known = ", ".join(architectures())
        raise InputError(f"no limits are known of architecture {target!r}: expected {known}")
    return _load_shipped(name, ())


def architectures() -> list[str]:
    """The compile targets whose limits are known, without feature suffixes."""
    return sorted(_documents(_ARCHITECTURES), key=lambda name: (len(name), name))


def largest(key: str) -> int:
    """The largest value of a limit on the architectures that have it: beyond it no GPU goes."""
    known = map(architecture, architectures())
    return max(one.integer(key) for one in known if key in one)


def overlay(machine: Machine, values: str | Path | Mapping[str, Any]) -> Machine:
    """`machine` with measured values on top, each keeping its own source and kind.

    `values` is a TOML file with the layout above (without the header) or a mapping from key to
    `Quantity` or to `{value, unit, source, kind}`. Raises `InputError` naming a bad entry.
    """
    if isinstance(values, str | Path):
        path = Path(values)
        document = _read_toml(path.read_text, str(path))
        if "base" in document:
            raise InputError(f"{path}: an overlay has no base; load it as a machine instead")
        label, added = str(path), _quantities(document, str(path))
    else:
        label = "mapping"
        added = {key: _as_quantity(key, entry, label) for key, entry in values.items()}
    for key, quantity in added.items():
        check_quantity(key, quantity, label)
    merged = {**machine.quantities, **added}
    return replace(machine, quantities=merged, overlays=(*machine.overlays, label))


def _shipped() -> dict[str, dict[str, Any]]:
    """Every shipped GPU's document by canonical name."""
    return _documents(_GPUS)


@functools.cache
def _documents(folder: str) -> dict[str, dict[str, Any]]:
    documents: dict[str, dict[str, Any]] = {}
    for entry in resources.files("warploom.machine").joinpath(folder).iterdir():
        if entry.name.endswith(".toml"):
            document = _read_toml(entry.read_text, entry.name)
            documents[document["name"]] = document
    return documents


def _normalised(name: str) -> str:
    return "-".join(name.lower().replace("_", " ").replace("-", " ").split())


@functools.cache
def _canonical(name: str, where: str = "") -> str:
    """The canonical name behind a name or alias, however it is spelt."""
    table: dict[str, str] = {}
    for canonical, document in _shipped().items():
        for spelling in (canonical, *document.get("aliases", ())):
            table[_normalised(spelling)] = canonical
    wanted = _normalised(name)
    if wanted in table:
        return table[wanted]
    close = get_close_matches(wanted, table, n=1)
    near = f" (closest: {close[0]!r})" if close else ""
    raise InputError(
        f"{where}unknown machine {name!r}: known are {', '.join(names())}{near}; or give the path "
        "of a .toml file"
    )


@functools.cache
def _load_shipped(name: str, seen: tuple[str, ...]) -> Machine:
    document = _documents(_ARCHITECTURES).get(name) or _shipped()[name]
    return _build(document, f"{name}.toml", (*seen, name), None)


def _load_file(path: Path, seen: tuple[str, ...]) -> Machine:
    label = str(path.resolve())
    if label in seen:
        raise InputError(f"{path}: its base leads back to itself ({' -> '.join(seen)})")
    document = _read_toml(path.read_text, str(path))
    return _build(document, str(path), (*seen, label), path.parent)


def _build(
    document: Mapping[str, Any], where: str, seen: tuple[str, ...], folder: Path | None
) -> Machine:
    """A machine from a parsed document; `folder` is where a relative `base` path starts."""
    for required in ("name", "title"):
        if not isinstance(document.get(required), str):
            raise InputError(f"{where}: {required} is missing, expected a text")
    inherited: dict[str, Quantity] = {}
    if "base" in document:
        base = _base(str(document["base"]), where, seen, folder)
        inherited = dict(base.quantities)
    for key in document.get("without", ()):
        if key not in inherited:
            raise InputError(f"{where}: without names {key!r}, which the base does not have")
        del inherited[key]
    quantities = {**inherited, **_quantities(document, where)}
    for key, quantity in quantities.items():
        check_quantity(key, quantity, where)
    return Machine(document["name"], document["title"], quantities)


def _base(name: str, where: str, seen: tuple[str, ...], folder: Path | None) -> Machine:
    if name.endswith(".toml") and folder is not None:
        return _load_file(folder / name, seen)
    known = name in _documents(_ARCHITECTURES)
    canonical = name if known else _canonical(name, f"{where}: ")
    if canonical in seen:
        raise InputError(f"{where}: base {name!r} leads back to itself")
    return _load_shipped(canonical, seen if folder is None else ())


def _quantities(document: Mapping[str, Any], where: str) -> dict[str, Quantity]:
    """The quantities of a document's tables, citations filled in."""
    sources = document.get("sources", {})
    found: dict[str, Quantity] = {}
    for group, table in document.items():
        if group in _HEADER:
            continue
        if not isinstance(table, dict):
            raise InputError(f"{where}: unknown entry {group!r}, expected one of {_HEADER}")
        for key, entry in _flatten(group, cast(dict[str, Any], table)):
            quantity = _as_quantity(key, entry, where)
            if " " not in quantity.source:
                if quantity.source not in sources:
                    raise InputError(
                        f"{where}: {key} cites {quantity.source!r}, which [sources] does not have"
                    )
                quantity = replace(quantity, source=sources[quantity.source])
            found[key] = quantity
    return found


def _flatten(prefix: str, table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, entry in table.items():
        key = f"{prefix}.{name}"
        flat.extend(_flatten(key, entry) if _is_group(entry, key) else [(key, entry)])
    return flat


def _is_group(entry: Any, key: str) -> TypeGuard[dict[str, Any]]:
    """Whether a table holds further keys rather than being a quantity (or a failed one)."""
    return isinstance(entry, dict) and "value" not in entry and key not in KEYS


def _as_quantity(key: str, entry: Any, where: str) -> Quantity:
    if isinstance(entry, Quantity):
        return entry
    if not isinstance(entry, Mapping) or set(cast(Mapping[str, Any], entry)) != set(_FIELDS):
        raise InputError(f"{where}: {key} is {entry!r}, expected {{{', '.join(_FIELDS)}}}")
    return Quantity(**cast(dict[str, Any], entry))


def _read_toml(read: Any, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read())
    except OSError as error:
        raise InputError(f"{where}: cannot read the machine file ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: not a TOML file ({error})") from None
