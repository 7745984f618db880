"""The manifest of kernels that are shipped: how each is launched, what its machine code is, and
what may not get worse when it is built again.

Launchers (`templates/`) read the launch from here and know nothing else of a kernel; `compared`
holds the machine code of another build against what is stated here.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from warploom.codegen.compile.build import Built, program_key
from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import CheckFailed, InputError
from warploom.files import read_object
from warploom.machine import architecture
from warploom.perf.replay import replay
from warploom.runtime.dlpack import NAMES
from warploom.runtime.interface import PITCH, Interface
from warploom.sass.decode.cubin import parse
from warploom.sass.decode.kernel import decode
from warploom.sass.rules.lint import ERROR, lint
from warploom.sass.show.stats import stats
from warploom.tile import Program
from warploom.tile.dtypes import DTYPES, dtype

SCHEMA: Final = "warploom.export"
VERSION: Final = 1
FILE: Final = "manifest.json"
# CU_TENSOR_MAP_DATA_TYPE_*; what the hardware only copies goes as bytes.
MAP_TYPES: Final = {"fp32": 7, "bf16": 9, "fp16": 6, "int32": 3}
DLPACK: Final = {name: list(code) for code, name in NAMES.items()}
# What a new build is held against: "same", or "most": no more than before, times a tolerance for
# cycles that the model of the machine gives.
LIMITS: Final = {
    "roles": "same",
    "register_moves": "same",
    "threads": "same",
    "matrix_instructions": "same",
    "serialised_groups": "most",
    "registers": "most",
    "spill_bytes": "most",
    "stack_bytes": "most",
    "shared_bytes": "most",
    "lint_errors": "most",
    "interval": "most",
}
TOLERANCE: Final = 1.02


@dataclass(frozen=True)
class Shipped:
    """A kernel to ship, and from what it is made again.

    `origin` is {"kernel": name or FILE.py:OBJECT, "settings": {...}, "gpu": ...}.
    """

    name: str
    built: Built
    program: Program
    schedule: KernelSchedule | SimtSchedule
    origin: Mapping[str, Any]

    def manifest(self) -> dict[str, Any]:
        """What a manifest says of it."""
        schedule = self.schedule.to_json()
        return {
            "cubin": f"{self.name}.cubin",
            "launch": launch_of(self.built.interface),
            "machine_code": facts(self),
            "bits": dict(self.built.bits),
            "compiler": self.built.resources.compiler,
            "built_from": dict(self.origin),
            "schedule": schedule,
            "sha256": {
                "cubin": hashlib.sha256(self.built.cubin).hexdigest(),
                "source": hashlib.sha256(self.built.source.text.encode()).hexdigest(),
                "program": program_key(str(self.program)),
            },
        }


def manifest_of(shipped: list[Shipped]) -> dict[str, Any]:
    """The manifest of several kernels, with the element types that they take."""
    kernels = {one.name: one.manifest() for one in shipped}
    used = {a["type"] for one in kernels.values() for a in one["launch"]["arrays"]}
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "types": {name: type_of(name) for name in DTYPES if name in used},
        "kernels": kernels,
    }


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest back from its file or folder; raises `InputError` for anything else."""
    path = path / FILE if path.is_dir() else path
    data = read_object(path, "the manifest of an export")
    if (data.get("schema"), data.get("version")) != (SCHEMA, VERSION):
        raise InputError(
            f"{path}: schema {data.get('schema')!r} version {data.get('version')!r}, expected "
            f"{SCHEMA!r} version {VERSION}, which warploom export writes"
        )
    return data


def type_of(name: str) -> dict[str, Any]:
    """An element type as launchers need it."""
    kind = dtype(name)
    return {
        "bytes": kind.bytes,
        "library": kind.library,
        "map": MAP_TYPES.get(name, 0),
        "dlpack": DLPACK[kind.library],
    }


def launch_of(interface: Interface) -> dict[str, Any]:
    """All that a launcher needs: the one description that every form of export is made from.

    `grid` holds index expressions over the dimensions of the arrays. Of a parameter: `align` bytes
    divide the address and the pitches of its array, `multiple` its dimension.
    """
    return {
        "function": interface.name,
        "arch": interface.arch,
        "threads": interface.threads,
        "shared_bytes": interface.shared_bytes,
        "cluster": interface.cluster,
        "cluster_axis": interface.cluster_axis,
        "persistent": interface.persistent,
        "dependent": interface.dependent,
        "grid": [[axis, extent.to_json()] for axis, extent in interface.grid],
        "arrays": [
            {
                "name": one.name,
                "type": one.dtype.name,
                "dims": list(one.dims),
                "role": interface.role(one.name),
            }
            for one in interface.arrays
        ],
        "scalars": [
            {"name": one["name"], "type": one["dtype"]}
            for one in interface.parameters
            if one["kind"] == "scalar"
        ],
        "parameters": [_parameter(one) for one in interface.parameters],
    }


def _parameter(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("interleaved"):
        raise InputError(
            f"array {given['array']} of pairs: launchers do not check that neighbours have no room "
            "between them; build with a schedule that is not aligned"
        )
    kept = {"kind": given["kind"]} | {
        name: given[name] for name in ("array", "name", "dim") if name in given
    }
    if given["kind"] == "dim":
        kept["multiple"] = given.get("multiple", 1)
    if given["kind"] in ("map", "pointer"):
        copied = given["kind"] == "map" or given.get("aligned")
        kept["type"], kept["written"] = given["dtype"], bool(given.get("written"))
        kept["align"] = max(PITCH if copied else 1, given.get("line", 1))
    if given["kind"] == "map":
        kept["box"], kept["swizzle"] = list(given["box"]), given["swizzle"]
        kept["promotion"] = given.get("promotion", 256)
    return kept


def facts(shipped: Shipped) -> dict[str, Any]:
    """What the machine code is: who does what with how many registers, spills, matrix instructions,
    and cycles an iteration of each loop, by the replay of the code."""
    built, schedule = shipped.built, shipped.schedule
    kernel = decode(parse(built.cubin, shipped.name), None)
    counted = stats(parse(built.cubin, shipped.name), kernel)
    moves = Counter(
        f"{item.line.opcode} {item.line.text.split()[-1]}"
        for item in kernel.instructions
        if item.base == "USETMAXREG"
    )
    interval: dict[str, float] = {}
    if isinstance(schedule, KernelSchedule) and counted.matrix_instructions:
        gpu = str(shipped.origin["gpu"])
        found = replay(shipped.program, schedule, built.cubin, gpu).loops
        interval = {loop: round(one.cycles, 1) for loop, one in found.items()}
    return {
        "roles": _roles(built, schedule),
        "register_moves": dict(sorted(moves.items())),
        "threads": built.source.threads,
        "registers": built.resources.registers,
        "spill_bytes": built.resources.spill_bytes,
        "stack_bytes": built.resources.stack_bytes,
        "shared_bytes": built.source.shared_bytes,
        "instructions": counted.instructions,
        "matrix_instructions": counted.matrix_instructions,
        "serialised_groups": counted.serialised_groups,
        "lint_errors": sum(one.severity == ERROR for one in lint(kernel)),
        "interval": interval,
    }


def _roles(built: Built, schedule: KernelSchedule | SimtSchedule) -> dict[str, dict[str, int]]:
    """Warps and registers a thread of each group of warps."""
    if isinstance(schedule, KernelSchedule):
        groups = schedule.any_loop.groups
        return {g.name: {"warps": g.warps, "registers": g.registers or 0} for g in groups}
    warps = built.source.threads // architecture(built.arch).integer("limits.warp_size")
    return {"all": {"warps": warps, "registers": built.resources.registers}}


def compared(name: str, stated: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """What a new build lost: a line a field of `LIMITS`, or none."""
    lost: list[str] = []
    for field, rule in LIMITS.items():
        before, now = _flat(stated[field]), _flat(found[field])
        for part in before.keys() | now.keys():
            was, has = before.get(part), now.get(part)
            slack = TOLERANCE if field == "interval" else 1
            fine = was == has
            if rule == "most" and was is not None and has is not None:
                fine = has <= was * slack
            if not fine:
                limit = "at most " if rule == "most" else ""
                shown = f"{field}{f'.{part}' if part else ''}"
                lost.append(f"{name}: {shown} is {has}, the manifest states {limit}{was}")
    return sorted(lost)


def _flat(value: Any) -> dict[str, Any]:
    """A table of tables as one, with dotted names; of a number, under no name."""
    if not isinstance(value, Mapping):
        return {"": value}
    found: dict[str, Any] = {}
    for name, one in cast("Mapping[str, Any]", value).items():
        found |= {
            f"{name}.{rest}" if rest else str(name): leaf for rest, leaf in _flat(one).items()
        }
    return found


def check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise `CheckFailed` for a cubin beside the manifest that is missing or another one."""
    for name, about in manifest["kernels"].items():
        path = folder / about["cubin"]
        if not path.is_file():
            continue  # forms that hold it within a library
        if hashlib.sha256(path.read_bytes()).hexdigest() != about["sha256"]["cubin"]:
            raise CheckFailed(f"{name}: {path} is not the cubin that the manifest states")


def as_text(manifest: Mapping[str, Any]) -> str:
    """The text of its file."""
    return json.dumps(manifest, indent=1) + "\n"
