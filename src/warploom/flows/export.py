"""`warploom export` and `warploom check`: kernels as folders that run without warploom, and whether
a build of this compiler still is what a manifest states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from warploom.autosched.selected import Selected
from warploom.codegen.compile.build import ALLOWED, Built, build
from warploom.errors import CheckFailed, InputError
from warploom.files import check_folder
from warploom.flows.built import from_file, read_build, scheduled
from warploom.flows.static_verdict import static_verdict
from warploom.integrations.exports.forms import FORMS, tvm_ffi_tools, write
from warploom.integrations.exports.manifest import (
    Shipped,
    check_files,
    compared,
    facts,
    read_manifest,
)
from warploom.kernels.select import select

GPU = "h200"
Say = Callable[[str], None]


def export(
    kernels: Sequence[str],
    form: str,
    folder: Path,
    settings: Mapping[str, str],
    gpu: str | None = None,
    say: Say = lambda _: None,
) -> list[Path]:
    """Write kernels to a folder in a form of `forms.FORMS`, and give its files.

    A kernel is a name of the library, FILE.py:OBJECT, or a folder of `warploom build`, which brings
    its settings and its machine code; `NAME=` before it says what it is called. Raises `InputError`
    for two of one name, and `CheckFailed` where the machine code breaks a rule.
    """
    if form not in FORMS:
        raise InputError(f"--to {form!r}: expected one of {', '.join(FORMS)}")
    check_folder(folder)
    if form == "tvm-ffi":
        tvm_ffi_tools()  # before anything is built
    if all(Path(_split(text)[1]).is_dir() for text in kernels) and (settings or gpu):
        given = "--set" if settings else "--gpu"
        raise InputError(f"{given}: {kernels[0]} was built already, with settings of its own")
    shipped: list[Shipped] = []
    for text in kernels:
        say(f"building {text}")
        one = _shipped(text, settings, gpu or GPU)
        if one.name in {other.name for other in shipped}:
            another = f"NAME={_split(text)[1]}"
            raise InputError(f"two kernels are called {one.name}: give one as {another}")
        verdict = static_verdict(one.built, allow=("spills", "stack"))
        if not verdict.passed:
            raise CheckFailed(f"{text} is not shipped: {verdict}")
        shipped.append(one)
    return write(form, shipped, folder)


def _split(text: str) -> tuple[str, str]:
    """(the name asked for or "", the kernel) of `NAME=KERNEL`."""
    name, equals, kernel = text.partition("=")
    return (name, kernel) if equals and name.isidentifier() else ("", text)


def _shipped(text: str, settings: Mapping[str, str], gpu: str) -> Shipped:
    name, kernel = _split(text)
    if Path(kernel).is_dir():
        found = read_build(Path(kernel))
        own, gpu, settings, built = found.kernel, found.gpu, found.settings, found.built
        chosen = from_file(Path(kernel) / "schedule.json", own, settings, gpu)
    else:
        own, chosen = kernel, select(kernel, settings, gpu)
        built = chosen.build()
    origin = {"kernel": own, "settings": dict(settings), "gpu": gpu}
    called = name or built.source.name
    return Shipped(called, built, chosen.program, chosen.schedule, origin)


def check(path: Path, say: Say = lambda _: None) -> list[dict[str, Any]]:
    """Build the kernels of a manifest again, here, and hold them against it: a row a kernel, with
    what it lost as lines. Raises `CheckFailed` for a cubin that is not the manifest's."""
    manifest = read_manifest(path)
    check_files(path if path.is_dir() else path.parent, manifest)
    rows: list[dict[str, Any]] = []
    for name, stated in manifest["kernels"].items():
        say(f"building {name}")
        chosen = _again(name, stated)
        built = _rebuilt(chosen)
        origin = stated["built_from"]
        found = Shipped(name, built, chosen.program, chosen.schedule, origin)
        lost = compared(name, stated["machine_code"], facts(found))
        now, before = found.manifest(), stated["sha256"]
        if now["launch"] != stated["launch"]:
            lost.append(f"{name}: launch is not what the manifest states: export it again")
        lost += [
            f"{name}: bits.{part} is {now['bits'].get(part)}, the manifest states {one}"
            for part, one in stated["bits"].items()
            if now["bits"].get(part) != one
        ]
        same = {part: now["sha256"][part] == before[part] for part in before}
        compilers = {"stated": stated["compiler"], "here": built.resources.compiler}
        rows.append({"kernel": name, "lost": lost, "same": same, "compiler": compilers})
    return rows


def _again(name: str, stated: Mapping[str, Any]) -> Selected:
    """What a manifest's kernel was built from; raises `InputError` where it is no more."""
    origin = stated["built_from"]
    schedule, where = stated["schedule"], f"schedule of {name}"
    made_for = {**schedule, "program": stated["sha256"]["program"]}
    return scheduled(made_for, where, origin["kernel"], origin["settings"], origin["gpu"])


def _rebuilt(chosen: Selected) -> Built:
    """Whatever the compiler makes of it: what is wrong with it is compared, not refused."""
    return build(chosen.program, chosen.schedule, chosen.arch, ALLOWED)
