"""A folder that `warploom build` or `optimize` wrote, as something to tune.

`build.json` names the kernel of the library (or FILE.py:OBJECT) and its settings. They give the
sizes to measure at and the right results in float64.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from warploom import machine
from warploom.autosched.selected import Selected
from warploom.codegen.compile.build import Built, program_key
from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.simt.schedule import SCHEMA as SIMT_SCHEMA
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.engine.points import Space
from warploom.errors import InputError
from warploom.files import read_object, write_text_atomically
from warploom.kernels.check import CheckResult, checked
from warploom.kernels.library import configure, entry
from warploom.kernels.select import select
from warploom.objects import names_object
from warploom.runtime.launch import LaunchSpec
from warploom.runtime.worker import in_own_process

BUILD_NOTE: Final = "build.json"


@dataclass(frozen=True)
class BuildFolder:
    """What a build folder holds: the kernel, and how it was asked for."""

    folder: Path
    built: Built
    kernel: str
    settings: Mapping[str, str]
    gpu: str

    def sizes(self, given: Mapping[str, str]) -> dict[str, int]:
        """The sizes to measure at: `given` {dimension: extent}, sizes that fill the GPU, and what
        the configuration fixes. Raises `InputError` for a name that is no dimension."""
        known, full = entry(self.kernel).sizes, entry(self.kernel).full
        asked = {name: text for name, text in self.settings.items() if name in known}
        if unknown := set(given) - set(known):
            raise InputError(
                f"--set {sorted(unknown)[0]}: {self.folder} was built already; expected one of its "
                f"sizes, {', '.join(known)}"
            )
        _, sizes = configure(self.kernel, {**self.configuration, **asked, **given}, full)
        return sizes

    @property
    def configuration(self) -> dict[str, str]:
        """The settings that are none of the sizes."""
        known = entry(self.kernel).sizes
        return {name: text for name, text in self.settings.items() if name not in known}

    def launch(self, given: Mapping[str, str]) -> LaunchSpec:
        """The launch at `sizes(given)`."""
        if self.built.after is not None:
            raise InputError(
                f"{self.folder}: {self.built.source.name} goes on in a second kernel, "
                f"{self.built.after.source.name}; expected a folder of one"
            )
        scalars = entry(self.kernel).scalars
        return self.built.interface.launch_spec(self.sizes(given), machine.load(self.gpu), scalars)

    def checked(self) -> CheckResult:
        """The check of this kernel on the GPU here, at the sizes of `warploom run`.

        Runs in a process of its own; raises `DeviceError` when that fails or hangs.
        """
        return in_own_process(_check, self.folder, subject=str(self.folder))

    def check(self, cubin: bytes) -> dict[str, float]:
        """The errors of another cubin of this kernel; raises `CheckFailed` for a wrong one."""
        with tempfile.TemporaryDirectory() as text:
            return self.with_cubin(cubin, Path(text)).checked().require().errors

    def with_cubin(self, cubin: bytes, folder: Path) -> BuildFolder:
        """Write this kernel with another cubin to `folder`: a build folder like any other."""
        built = replace(self.built, cubin=cubin, schedule=self._schedule())
        built.write(folder)
        write_build_note(folder, self.kernel, self.settings, self.gpu, built)
        return replace(self, folder=folder, built=built)

    def _schedule(self) -> Mapping[str, Any]:
        return json.loads((self.folder / "schedule.json").read_text())


def write_build_note(
    folder: Path, kernel: str, settings: Mapping[str, str], gpu: str, built: Built
) -> None:
    """Write `build.json` beside a kernel that `built.write(folder)` wrote.

    `kernel` is the name that was asked for (of the library, or FILE.py:OBJECT), `settings` the
    `--set` texts. The cubin's hash ties the note to the file that it describes.
    """
    note = {
        "kernel": kernel,
        "settings": dict(settings),
        "gpu": gpu,
        "schedule": built.schedule["name"],
        "cubin_sha256": hashlib.sha256(built.cubin).hexdigest(),
    }
    write_text_atomically(folder / BUILD_NOTE, json.dumps(note, indent=1) + "\n")


def read_build(folder: Path) -> BuildFolder:
    """The kernel of a folder.

    Raises `InputError` when neither `build` nor `optimize` wrote it, or when its `build.json` was
    written for another cubin than the one that lies there.
    """
    built = Built.read(folder)
    path = folder / BUILD_NOTE
    try:
        note = cast("dict[str, Any]", json.loads(path.read_text()))
        kernel, settings, gpu = str(note["kernel"]), dict(note["settings"]), str(note["gpu"])
        described = str(note["cubin_sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: does not say what was built ({type(error).__name__}: {error}); run warploom "
            "build or optimize again"
        ) from None
    if described != hashlib.sha256(built.cubin).hexdigest():
        raise InputError(
            f"{path} describes another cubin than {folder / built.source.name}.cubin; run warploom "
            "build or optimize again"
        )
    return BuildFolder(folder, built, kernel, settings, gpu)


def from_file(path: Path, name: str, settings: Mapping[str, str], gpu: str) -> Selected:
    """`scheduled` of a file. Raises `InputError` naming file and place."""
    return scheduled(read_object(path, "a kernel schedule"), str(path), name, settings, gpu)


def scheduled(
    table: Mapping[str, Any], where: str, name: str, settings: Mapping[str, str], gpu: str
) -> Selected:
    """A schedule from its JSON data with the program it is for: the one that the kernel gets by
    default, or the one as it was written, where the data says no other; of a user's own, also what
    the rules of `rewrites` make of it at any of its open sizes. Raises `InputError` naming `where`
    for a schedule made for none.
    """
    made_for = str(table.get("program", ""))
    form = SimtSchedule if table.get("schema") == SIMT_SCHEMA else KernelSchedule
    given = form.from_json(table, where)
    chosen = select(name, settings, gpu)
    config, _ = configure(name, settings)
    written = replace(chosen, config=config, program=entry(name).program(config), allow=())
    for one in (written, chosen):
        if made_for in ("", program_key(str(one.program))):
            return replace(one, name=where, schedule=given, tuned=False)
    for searched, program, second in Space(name, settings).programs() if names_object(name) else ():
        if made_for == program_key(str(program)):
            found = replace(written, name=where, config=searched, program=program, schedule=given)
            return found.before(second)
    raise InputError(f"{where}: made for another program than {name} under these settings")


def _check(folder: Path) -> CheckResult:
    """The checking process: the kernel in `folder` at the sizes of `warploom run`."""
    build = read_build(folder)
    config, sizes = configure(build.kernel, build.configuration)
    return checked(build.kernel, config, sizes, build.built)
