"""What a user may ask to tune: a cubin file, a folder that `warploom build` wrote, or
`file.py:object` that yields a captured kernel."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from warploom.errors import InputError
from warploom.files import read_object
from warploom.flows.built import BuildFolder, read_build
from warploom.objects import called, load_object, names_object
from warploom.runtime.launch import LaunchSpec
from warploom.sass.decode.cubin import Cubin, load, parse
from warploom.tile import Program


@dataclass(frozen=True)
class Target:
    """One kernel to work on: its file, its name, and how to launch it when that is known.

    `build` is the folder it was built in, for a kernel of warploom's own.
    """

    cubin: Cubin
    kernel: str
    launch: LaunchSpec | None
    source: str
    build: BuildFolder | None = None


def read_target(
    text: str,
    kernel: str | None,
    launch: Path | None,
    arch: int | None = None,
    sizes: Mapping[str, str] | None = None,
) -> Target:
    """The target of a command line; raises `InputError` naming what was expected.

    `sizes` {dimension: extent} are those to measure a build folder's kernel at.
    """
    if Path(text).is_dir():
        return _folder(text, kernel, launch, arch, sizes or {})
    if sizes:
        raise InputError(f"--set goes with a build folder; {text} is none")
    if names_object(text):
        if launch is not None:
            raise InputError(f"--launch goes with a cubin; {text} brings its own launch")
        return _captured(text, kernel, arch)
    if not text.endswith(".cubin") and not Path(text).is_file():
        raise InputError(
            f"{text}: no such file; expected FILE.cubin, a build folder or file.py:object"
        )
    if arch is not None:
        raise InputError(f"--arch goes with file.py:object; {text} is compiled already")
    cubin = load(text)
    code = cubin.kernel(kernel)
    spec = read_launch(launch) if launch is not None else None
    if spec is not None and spec.kernel != code.name:
        raise InputError(f"{launch} launches {spec.kernel}, not {code.name} of {text}")
    return Target(cubin, code.name, spec, text)


def _folder(
    text: str, kernel: str | None, launch: Path | None, arch: int | None, sizes: Mapping[str, str]
) -> Target:
    if launch is not None or arch is not None:
        raise InputError(f"--launch and --arch go with other targets; {text} is a build folder")
    build = read_build(Path(text))
    name = build.built.source.name
    if kernel is not None and kernel != name:
        raise InputError(f"{text} is kernel {name}, not {kernel}")
    cubin = parse(build.built.cubin, str(Path(text) / f"{name}.cubin"))
    return Target(cubin, name, build.launch(sizes), text, build)


def read_launch(path: Path) -> LaunchSpec:
    """A launch description from JSON: the spec itself, or a manifest that holds one."""
    table = read_object(path, "a launch description")
    described = table.get("launch", table)
    if not described or not isinstance(described, dict):
        raise InputError(f"{path}: not a launch description (expected a JSON object)")
    try:
        return LaunchSpec.from_json(cast("dict[str, Any]", described))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _captured(source: str, kernel: str | None, arch: int | None) -> Target:
    found = load_object(source)
    if type(found).__module__.startswith("triton."):
        raise InputError(
            f"{source} is a Triton kernel, and how it is launched is not known; name a function "
            "that returns warploom.integrations.triton.capture(KERNEL, ARGUMENTS, grid=...), as in "
            "docs/triton.md"
        )
    if isinstance(found, Program) or hasattr(found, "program"):
        raise InputError(
            f"{source} is a tile program; what `warploom build {source} -o FOLDER` writes is tuned "
            "by `warploom tune FOLDER`"
        )
    if callable(found) and not hasattr(found, "cubin"):
        found = _called(source, found, arch)
    for attribute in ("cubin", "launch", "name"):
        if not hasattr(found, attribute):
            raise InputError(
                f"{source} is {type(found).__name__}, expected a CapturedKernel "
                "(warploom.integrations.triton.capture) or a function that returns one"
            )
    captured: Any = found
    if kernel is not None and kernel != captured.name:
        raise InputError(f"{source} is kernel {captured.name}, not {kernel}")
    cubin = parse(captured.cubin, source)
    return Target(cubin, captured.name, captured.launch, source)


def _called(source: str, function: Any, arch: int | None) -> Any:
    """What a user's function gives; every error in it is one of the input."""
    parameters = inspect.signature(function).parameters
    if arch is not None and "arch" not in parameters:
        raise InputError(f"{source} takes no arch; leave out --arch")
    needed = [
        name
        for name, one in parameters.items()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if missing := [name for name in needed if name != "arch" or arch is None]:
        raise InputError(
            f"{source} needs {', '.join(missing)}; expected a function that is called without "
            "arguments, but for arch"
        )
    given = {} if arch is None else {"arch": arch}
    return called(source, lambda: function(**given))
