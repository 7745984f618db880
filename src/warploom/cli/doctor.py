"""`warploom doctor`: what is here, what is missing and the line that installs it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from dataclasses import asdict, dataclass
from typing import Any

import typer

from warploom import __version__
from warploom.cli.options import Json
from warploom.errors import ToolMissing, WarploomError
from warploom.runtime import nvrtc
from warploom.runtime.driver import device_count, device_info
from warploom.toolchain import SPECS, find


@dataclass(frozen=True)
class Package:
    """An optional package: its name in the registry, what it is for, the extra that brings it."""

    name: str
    why: str
    extra: str


PACKAGES = (
    Package("cuda-bindings", "load, launch and time cubins on a GPU", "gpu"),
    Package("nvidia-cuda-nvrtc", "compile CUDA C++ in this process", "compile"),
    Package("nvidia-cuda-nvcc", "compile generated CUDA C++ to cubins", "compile"),
    Package("nvidia-cuda-nvdisasm", "read machine code", "sass"),
    Package("ortools", "solve schedules and reorder blocks exactly", "solver"),
    Package("cvxpy", "optimise derivations with a certificate", "derive"),
    Package("sympy", "closed forms of transfer costs", "derive"),
    Package("triton", "tune Triton kernels", "triton"),
    Package("apache-tvm-ffi", "export kernels as one library for torch, JAX and CuPy", "export"),
    Package("torch", "launch on tensors, reference results, baselines", "torch"),
)


LAPTOP = {"sass", "compile", "solver", "derive"}  # what the extra of that name holds


@dataclass(frozen=True)
class Line:
    """One thing looked for. `found` is a version or a description, empty when it is missing."""

    group: str
    name: str
    found: str
    detail: str
    install: str = ""


def doctor(json_output: Json = False) -> None:
    """Print what is here: Python, GPUs, compilers, optional packages, and what to install."""
    lines = [*_basics(), *_gpus(), *_tools(), *_packages()]
    if json_output:
        typer.echo(json.dumps(_report(lines), indent=1))
    else:
        typer.echo(_text(lines))


def _basics() -> list[Line]:
    return [
        Line("here", "warploom", __version__, ""),
        Line("here", "python", platform.python_version(), sys.executable),
        Line("here", "platform", platform.platform(), ""),
    ]


def _gpus() -> list[Line]:
    try:
        count = device_count()
        infos = [device_info(index) for index in range(count)]
    except ToolMissing as error:
        return [Line("gpu", "none visible", "", str(error), "pip install 'warploom[gpu]'")]
    except WarploomError as error:
        return [Line("gpu", "unusable", "", str(error))]
    if not infos:
        why = "no driver or no GPU: only running kernels needs one, everything else works"
        return [Line("gpu", "none", "", why)]
    return [
        Line(
            "gpu",
            f"GPU {info.index}",
            info.name,
            f"{info.arch}, {info.sm_count} SMs, {info.memory_bytes / 2**30:.0f} GiB, "
            f"driver {info.driver_version or 'unknown'}, CUDA {info.cuda_version}",
        )
        for info in infos
    ]


def _tools() -> list[Line]:
    return [_tool(name) for name in SPECS] + [_nvrtc()]


def _tool(name: str) -> Line:
    spec = SPECS[name]
    try:
        tool = find(name)
    except WarploomError as error:
        return Line("tool", name, "", str(error), f"pip install 'warploom[{spec.extra}]'")
    return Line("tool", name, tool.version, f"{tool.origin}: {tool.path}")


def _nvrtc() -> Line:
    install = "pip install 'warploom[gpu]'"
    try:
        major, minor = nvrtc.version(nvrtc.installed())
    except ToolMissing as error:
        return Line("tool", "nvrtc", "", str(error), install)
    return Line("tool", "nvrtc", f"{major}.{minor}", "shared library")


def _packages() -> list[Line]:
    lines: list[Line] = []
    for package in PACKAGES:
        try:
            version = importlib.metadata.version(package.name)
            lines.append(Line("package", package.name, version, package.why))
        except importlib.metadata.PackageNotFoundError:
            install = f"pip install 'warploom[{package.extra}]'"
            lines.append(Line("package", package.name, "", package.why, install))
    return lines


def _report(lines: list[Line]) -> dict[str, Any]:
    groups: dict[str, Any] = {}
    for line in lines:
        entry = {name: value for name, value in asdict(line).items() if name != "group"}
        groups.setdefault(line.group, []).append(entry)
    return {**groups, "install": _installs(lines)}


def _installs(lines: list[Line]) -> list[str]:
    """The install lines of what is missing: each extra once, and the one that holds four others."""
    asked = [line.install for line in lines if not line.found and line.install]
    extras = [
        extra for one in asked for extra in one.partition("[")[2].partition("]")[0].split(",")
    ]
    if set(extras) >= LAPTOP:
        extras = ["laptop", *(extra for extra in extras if extra not in LAPTOP)]
    return [f"pip install 'warploom[{extra}]'" for extra in dict.fromkeys(extras)]


def _text(lines: list[Line]) -> str:
    width = max(len(line.name) for line in lines)
    texts: list[str] = []
    group = ""
    for line in lines:
        if line.group != group:
            group = line.group
            texts.append(f"{'' if not texts else chr(10)}{group}")
        found = line.found or "missing"
        texts.append(f"  {line.name:<{width}}  {found:<12}  {line.detail}".rstrip())
    if missing := _installs(lines):
        texts += ["\nto install what is missing", *(f"  {line}" for line in missing)]
    return "\n".join(texts)
