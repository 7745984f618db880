"""Finding NVIDIA's command-line tools: a stated order, a minimum version, one clear error.

Order, first that is new enough wins: the environment variable `WARPLOOM_<TOOL>`, the PATH, the
registry's wheels (`nvidia/cu13/bin` in site-packages), the copies inside the `triton` package.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from warploom.errors import InputError, ToolMissing


@dataclass(frozen=True)
class ToolSpec:
    """What a tool is for, the oldest version that will do and how to install it."""

    name: str
    minimum: tuple[int, int]
    why: str
    extra: str


@dataclass(frozen=True)
class Tool:
    """A tool that was found: where, which version, and by which step of the order."""

    name: str
    path: Path
    version: str
    origin: str

    def run(
        self, *args: str, timeout: float = 300.0, folder: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the tool, in `folder` where it is given, and capture its output; never raises on a
        non-zero status."""
        command = [str(self.path), *args]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=False, cwd=folder
        )


SPECS: dict[str, ToolSpec] = {
    "nvdisasm": ToolSpec("nvdisasm", (12, 8), "reads machine code", "sass"),
    "ptxas": ToolSpec("ptxas", (13, 3), "older ones miscompile wgmma on Hopper", "compile"),
    "nvcc": ToolSpec("nvcc", (13, 3), "drives ptxas >= 13.3", "compile"),
    "cuobjdump": ToolSpec("cuobjdump", (12, 8), "takes compressed cubins out of a file", "sass"),
}


def candidates(name: str) -> list[tuple[Path, str]]:
    """Every place the tool is found, in the order of preference, as (path, origin)."""
    found: list[tuple[Path, str]] = []
    variable = f"WARPLOOM_{name.upper()}"
    if chosen := os.environ.get(variable):
        if not Path(chosen).is_file():
            raise InputError(f"{variable}={chosen}: no such file, expected the path of {name}")
        found.append((Path(chosen), variable))
    if on_path := shutil.which(name):
        found.append((Path(on_path), "PATH"))
    for package, inner, origin in (
        ("nvidia", "cu13/bin", "wheel"),
        ("triton", "backends/nvidia/bin", "triton"),
    ):
        spec = importlib.util.find_spec(package)
        for root in spec.submodule_search_locations or [] if spec else []:
            path = Path(root) / inner / name
            if path.is_file():
                found.append((path, origin))
    return found


@functools.cache
def version_of(path: Path) -> str:
    """The version a tool prints, such as '13.5.37'; empty when it cannot be run."""
    try:
        text = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    return match.group(1) if match else ""


def find(name: str, minimum: tuple[int, int] | None = None) -> Tool:
    """The first copy of `name` that is new enough; raises `ToolMissing` with the install line."""
    spec = SPECS[name]
    needed = minimum or spec.minimum
    seen: list[str] = []
    for path, origin in candidates(name):
        version = version_of(path)
        if version and tuple(int(part) for part in version.split(".")[:2]) >= needed:
            return Tool(name, path, version, origin)
        seen.append(f"{path} is {version or 'not runnable'}")
    found = "; ".join(seen) if seen else "none found"
    raise ToolMissing(
        f"{name} {needed[0]}.{needed[1]} or newer is needed ({spec.why}): {found}; "
        f"install it with: pip install 'warploom[{spec.extra}]'"
    )
