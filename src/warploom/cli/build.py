"""`warploom build`: a tile program to a cubin."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from warploom.codegen.build import ALLOWED, BUILD_ARCHITECTURES, GPU_ARCHITECTURES
from warploom.codegen.build import build as build_kernel
from warploom.codegen.plan import KernelSchedule
from warploom.codegen.schedules import NAMES, schedule_named
from warploom.codegen.simt.schedule import SCHEMA as SIMT_SCHEMA
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import InputError
from warploom.files import check_folder, write_text_atomically
from warploom.kernels.library import configure, entry
from warploom.kernels.older import older_kernel
from warploom.pipeline.built import BUILD_NOTE

Name = Annotated[str, typer.Argument(help="gemm, attention, or FILE.py:OBJECT: your own program")]
Gpu = Annotated[str, typer.Option(help=", ".join(GPU_ARCHITECTURES))]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="key=value: a setting or a size; repeatable")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def settings_of(texts: list[str] | None) -> dict[str, str]:
    """`key=value` texts as a table; raises `InputError` for one without a key or a value."""
    result: dict[str, str] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise InputError(f"--set {text!r}: expected key=value")
        result[key] = value
    return result


def read_schedule(path: Path) -> KernelSchedule | SimtSchedule:
    """A schedule from a JSON file; raises `InputError` naming file and place."""
    try:
        data: Any = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object, a kernel schedule")
    table = cast("dict[str, Any]", data)
    if table.get("schema") == SIMT_SCHEMA:
        return SimtSchedule.from_json(table, str(path))
    return KernelSchedule.from_json(table, str(path))


def build(
    name: Name,
    out: Annotated[Path, typer.Option("-o", "--out", help="folder for the results")],
    gpu: Annotated[str, typer.Option(help=", ".join(BUILD_ARCHITECTURES))] = "h200",
    settings: Settings = None,
    schedule: Annotated[
        str, typer.Option(help="default, a schedule.json, or " + ", ".join(NAMES))
    ] = "default",
    allow: Annotated[
        list[str] | None,
        typer.Option(help="accept by name: " + ", ".join(ALLOWED)),
    ] = None,
    as_json: Json = False,
) -> None:
    """Emit and compile a kernel: NAME.cu, NAME.cubin, schedule.json, manifest.json, build.json."""
    if gpu not in BUILD_ARCHITECTURES:
        raise InputError(f"--gpu {gpu!r}: code is emitted for {', '.join(BUILD_ARCHITECTURES)}")
    arch = BUILD_ARCHITECTURES[gpu]
    check_folder(out)
    started = time.perf_counter()
    given, accepted = settings_of(settings), tuple(allow or ())
    config, _ = configure(name, given)
    kernel = entry(name)
    program = kernel.program(config)
    chosen = kernel.schedule(config)
    if schedule.endswith(".json"):
        chosen = read_schedule(Path(schedule))
    elif arch != "sm_90a" and isinstance(chosen, KernelSchedule):
        # The default of a program is made for Hopper: elsewhere loads run ahead and matmuls do not.
        order = "lcsf" if schedule == "default" else schedule
        fixed, asked = "tile" in given, config
        config, chosen = older_kernel(kernel, asked, arch, order, accepted, fixed, _say)
        program = kernel.program(config)
        if config != asked:
            given["tile"] = ",".join(map(str, config.tile))
    elif schedule != "default":
        chosen = schedule_named(program, schedule, chosen.launch, gpu, arch=arch)
    built = build_kernel(program, chosen, arch, accepted)
    built.write(out)
    note = {"kernel": name, "settings": given, "gpu": gpu}
    write_text_atomically(out / BUILD_NOTE, json.dumps(note, indent=1) + "\n")
    seconds = time.perf_counter() - started
    if as_json:
        typer.echo(json.dumps({**built.manifest(), "seconds": round(seconds, 3)}))
        return
    res = built.resources
    typer.echo(
        f"{program.name} for {gpu}, schedule {chosen.name}: {built.source.threads} threads, "
        f"{res.registers} registers at entry, {built.source.shared_bytes} B of shared memory, "
        f"{res.compiler}, {seconds:.2f} s -> {out}"
    )


def _say(text: str) -> None:
    typer.echo(text, err=True)
