"""The Triton kernels of a script as targets of `tune`: recorded in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from warploom.errors import InputError
from warploom.files import read_object
from warploom.flows.targets import Target, read_target
from warploom.flows.tuned import TuneReport
from warploom.integrations import triton_record
from warploom.integrations.deploy import FolderStore
from warploom.integrations.triton_access import triton_module
from warploom.tables import as_text


@dataclass(frozen=True)
class Recorded:
    """What a script launched.

    gpu       whether its launches were made; without a GPU they are noted only
    stopped   why it ended before its end, or ""
    kernels   by the name that `--only` takes: launches, grid, arguments, warps, note
    refused   kernels that cannot be taken, and why
    """

    folder: Path
    script: str
    gpu: bool
    stopped: str
    kernels: Mapping[str, Mapping[str, Any]]
    refused: Mapping[str, str]

    def __str__(self) -> str:
        rows = [["kernel", "launches", "grid", "warps", "arguments"]]
        for name, one in self.kernels.items():
            grid = " x ".join(str(extent) for extent in one["grid"])
            note = f" ({one['note']})" if one["note"] else ""
            rows.append(
                [name, str(one["launches"]), grid, str(one["warps"]), one["arguments"] + note]
            )
        lines = [as_text(rows)] if self.kernels else []
        lines += [f"left out: {name}: {why}" for name, why in self.refused.items()]
        if not self.gpu:
            lines.append("no GPU: launches were noted, not made; tensors had no values")
        if self.stopped:
            lines.append(f"{self.script} stopped early: {self.stopped}")
        return "\n".join(lines)

    def chosen(self, only: Sequence[str]) -> tuple[str, ...]:
        """The names to tune: all, or those that were asked for; raises `InputError` for others."""
        for name in only:
            if name not in self.kernels:
                near = get_close_matches(name, self.kernels, n=1)
                hint = f"; nearest: {near[0]}" if near else ""
                raise InputError(
                    f"--only {name}: {self.script} launched {', '.join(self.kernels)}{hint}"
                )
        return tuple(only) or tuple(self.kernels)

    def target(self, name: str) -> Target:
        """One of its kernels, to tune."""
        return read_target(
            str(self.folder / f"{name}.cubin"), None, self.folder / f"{name}.launch.json"
        )


def is_script(text: str) -> bool:
    """Whether a target of `tune` is a script."""
    return text.endswith(".py")


def record(
    script: Path,
    arguments: Sequence[str],
    folder: Path,
    arch: int | None,
    say: Callable[[str], None] = lambda _: None,
) -> Recorded:
    """Run a script and write what it launched into `folder`.

    Ctrl-C ends the script; what it launched until then is kept. Raises `InputError` for a script
    that is not there or launches no Triton kernel, `ToolMissing` without Triton.
    """
    if not script.is_file():
        raise InputError(f"{script}: no such file")
    triton_module()
    say(f"running {script}: its Triton kernels are noted as it launches them")
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / triton_record.RECORD
    place.unlink(missing_ok=True)
    words = [sys.executable, "-m", triton_record.__name__, str(folder), str(arch or 0)]
    process = subprocess.Popen([*words, str(script), *arguments], stdout=2)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        code = process.wait()
    if not place.is_file():
        raise InputError(f"{script}: its process ended with code {code} and left no record")
    found = read_object(place, "what a script launched")
    rows = found["kernels"]
    kernels = {one["name"]: one for one in rows if "name" in one}
    refused = {one["kernel"]: one["refused"] for one in rows if "refused" in one}
    made = Recorded(folder, str(script), found["gpu"], found["stopped"], kernels, refused)
    if not kernels:
        why = [f"it stopped early: {made.stopped}"] if made.stopped else []
        why += [f"{name}: {reason}" for name, reason in refused.items()]
        raise InputError("; ".join([f"{script} launched no Triton kernel that can be taken", *why]))
    return made


def deploy(report: TuneReport, store: Path) -> None:
    """Put what a search found into a store that several kernels share."""
    target = report.target
    store.mkdir(parents=True, exist_ok=True)
    if report.changed and target.launch is not None:
        result = json.loads(report.files["manifest"].read_text())["result"]
        FolderStore(store).put(
            target.cubin.data,
            report.cubin.data,
            target.kernel,
            target.cubin.arch,
            result=result,
            launch=target.launch.to_json(),
        )
