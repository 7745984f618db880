"""Source to cubin with nvcc's wheel, no GPU needed; what the compiler says is part of the answer.

A note that wgmma was serialised or setmaxnreg ignored, a spill or a stack frame is an error unless
allowed by name: each is a large silent slow-down. Results are cached by the hash of source,
compiler and architecture.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from warploom import toolchain
from warploom.codegen.compile.arrival_image import with_waits
from warploom.codegen.compile.entry_image import with_entry
from warploom.codegen.cuda.emit import emit
from warploom.codegen.cuda.emit_sm80 import SM80_ARCHITECTURES, emit_sm80
from warploom.codegen.cuda.simt.emit import emit_simt
from warploom.codegen.invariance.certificate import Certificate, certificate
from warploom.codegen.ir.plan import KernelSchedule
from warploom.codegen.ir.source import CudaSource
from warploom.codegen.passes.lower import lower
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.errors import CheckFailed, InputError, Spills, ToolMissing
from warploom.files import (
    cache_folder,
    keep,
    read_kept,
    write_bytes_atomically,
    write_text_atomically,
)
from warploom.runtime import nvrtc
from warploom.runtime.in_turn import InTurn
from warploom.runtime.interface import Interface
from warploom.runtime.kernel import Kernel
from warploom.sass.decode.cubin import parse
from warploom.sass.decode.kernel import decode
from warploom.tables import html_table
from warploom.tile import Program
from warploom.tile.ops import OPS

SCHEMA = "warploom.kernel"
VERSION = 1
IMAGES = 2  # version of what becomes of the compiler's images
ARRIVE = "mbarrier.arrive"  # in the text of a kernel whose warps arrive at barriers
AFTER = "after"  # the folder of a second kernel
ARCHITECTURES = ("sm_90a",)
GPU_ARCHITECTURES = {"h100": "sm_90a", "h200": "sm_90a"}  # what the commands build for, by GPU
BUILD_ARCHITECTURES = {**GPU_ARCHITECTURES, "a100": "sm_80"}  # what `warploom build` takes
SIMT_ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a")
# What ptxas says (texts, not codes: the codes move between versions) -> the name to allow it by.
FAULTS = {
    "serialized": r"wgmma.*serializ|serializ.*wgmma|Potential Performance Loss",
    "setmaxnreg": r"setmaxnreg.*ignored",
    "injected": r"warpgroup\.(wait|arrive).*(injected|inserted)",
}
ALLOWED = ("spills", "stack", *FAULTS)  # what a build may be told to accept


@dataclass(frozen=True)
class Resources:
    """What the compiler reported: registers a thread at entry, bytes of spills and stack."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    compiler: str
    seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Built:
    """A kernel ready to launch or to ship: source, machine code and what a launch must know.

    `bits` says what its results depend on and in which order it sums (`codegen.invariance`). A
    kernel `after` it goes on from what it leaves in memory; its folder lies in that of the first.
    """

    source: CudaSource
    cubin: bytes
    resources: Resources
    arch: str
    program_text: str = ""
    schedule: Mapping[str, Any] = field(default_factory=dict[str, Any])
    bits: Mapping[str, Any] = field(default_factory=dict[str, Any])
    after: Built | None = None

    def manifest(self) -> dict[str, Any]:
        """Everything but source and cubin, as JSON data."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "arch": self.arch,
            **self.source.to_json(),
            "resources": asdict(self.resources),
            "bits": dict(self.bits),
            **({} if self.after is None else {"after": self.after.source.name}),
            "sha256": hashlib.sha256(self.cubin).hexdigest(),
        }

    def __repr__(self) -> str:
        return (
            f"{self.source.name} for {self.arch}: {self.resources.registers} registers a thread at "
            f"entry, {self.source.shared_bytes:,} B of shared memory, {len(self.cubin):,} B of "
            f"cubin, {self.resources.compiler}"
        )

    def _repr_html_(self) -> str:
        src, res = self.source, self.resources
        rows = [
            ("threads", str(src.threads)),
            ("registers a thread at entry", str(res.registers)),
            ("shared memory", f"{src.shared_bytes:,} B"),
            ("spilled", f"{res.spill_bytes} B"),
            ("machine code", f"{len(self.cubin):,} B"),
            ("compiler", res.compiler),
        ]
        return html_table(f"{src.name} for {self.arch}", rows)

    @property
    def interface(self) -> Interface:
        """What a launch must know of the kernel."""
        taken = Interface.read(self.source.to_json())
        return Interface(**taken, arch=self.arch, registers=self.resources.registers)

    @property
    def taken(self) -> frozenset[str]:
        """The names of the arrays that a call is given: not of what is handed from one kernel to
        the one after it."""
        own = self.interface
        names = {spec.name for spec in own.arrays}
        if self.after is None:
            return frozenset(names)
        second = {spec.name for spec in self.after.interface.arrays}
        return frozenset(one for one in names | second if one not in second or not own.written(one))

    def kernel(self, device: int = 0) -> Kernel:
        """The kernel on a GPU, to be called with arrays, or it and the one after it as one; raises
        what `Kernel` raises."""
        own = self.interface, self.cubin
        if self.after is None:
            return Kernel(*own, device)
        # Dimensions of what is handed on are those of the grid that are written out.
        lengths = {
            axis.removesuffix("_tile"): extent.evaluate({})
            for axis, extent in self.source.grid
            if not extent.symbols()
        }
        return InTurn(own, (self.after.interface, self.after.cubin), lengths, device)

    def write(self, folder: Path) -> None:
        """Write `NAME.cu`, `NAME.cubin`, `schedule.json` and `manifest.json`."""
        name = self.source.name
        write_text_atomically(folder / self.source.file, self.source.text)
        write_bytes_atomically(folder / f"{name}.cubin", self.cubin)
        order = dict(self.schedule)
        if self.program_text:
            order["program"] = program_key(self.program_text)
        write_text_atomically(folder / "schedule.json", json.dumps(order, indent=1) + "\n")
        write_text_atomically(
            folder / "manifest.json", json.dumps(self.manifest(), indent=1) + "\n"
        )
        if self.after is not None:
            self.after.write(folder / AFTER)

    @classmethod
    def read(cls, folder: Path) -> Built:
        """A kernel back from the folder `write` made; raises `InputError` when it is not one."""
        try:
            data = json.loads((folder / "manifest.json").read_text())
            name = data["name"]
            cubin = (folder / f"{name}.cubin").read_bytes()
            text = (folder / f"{name}.cu").read_text()
        except FileNotFoundError as error:
            missing = Path(error.filename).name
            raise InputError(
                f"{folder}: no {missing} in it, expected a folder that warploom build wrote"
            ) from None
        except (OSError, json.JSONDecodeError, KeyError) as error:
            raise InputError(f"{folder}: not a built kernel ({error})") from None
        if data.get("schema") != SCHEMA or data.get("version") != VERSION:
            raise InputError(f"{folder}/manifest.json: expected schema {SCHEMA} version {VERSION}")
        if hashlib.sha256(cubin).hexdigest() != data["sha256"]:
            raise InputError(f"{folder}/{name}.cubin is not the one manifest.json was written for")
        source = CudaSource(**CudaSource.read(data), text=text)
        resources = _resources(data["resources"])
        after = cls.read(folder / AFTER) if "after" in data else None
        bits = data.get("bits", {})
        return cls(source, cubin, resources, data["arch"], bits=bits, after=after)


def program_key(text: str) -> str:
    """What tells a program from others, by its text: a schedule is for one program."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def build(
    program: Program,
    schedule: KernelSchedule | SimtSchedule,
    arch: str = "sm_90a",
    allow: tuple[str, ...] = (),
    debug: bool = False,
) -> Built:
    """Program and schedule to a cubin; raises `CheckFailed` for a fault not in `allow`."""
    if unknown := set(allow) - set(ALLOWED):
        raise InputError(f"allow {sorted(unknown)[0]!r}: expected some of {', '.join(ALLOWED)}")
    if not any(OPS[op.kind].group == "sink" for op in program.ops()):
        raise InputError(f"{program.name} stores nothing: there is nothing to build")
    source, architectures = _emitted(program, schedule, arch, debug)
    cubin, resources = compile_source(source, arch, allow, architectures)
    bits = certified(program, schedule).to_json()
    return Built(source, cubin, resources, arch, str(program), schedule.to_json(), bits)


def certified(program: Program, schedule: KernelSchedule | SimtSchedule) -> Certificate:
    """What the bits of a kernel's results depend on, by its block program where it has one."""
    simt = isinstance(schedule, SimtSchedule)
    return certificate(program if simt else lower(program, schedule))


def emitted(
    program: Program, schedule: KernelSchedule | SimtSchedule, arch: str = "sm_90a"
) -> CudaSource:
    """The CUDA C++ that `build` compiles."""
    return _emitted(program, schedule, arch, False)[0]


def _emitted(
    program: Program, schedule: KernelSchedule | SimtSchedule, arch: str, debug: bool
) -> tuple[CudaSource, tuple[str, ...]]:
    """The source, and the architectures that its kind of code is for."""
    if isinstance(schedule, SimtSchedule):
        if arch not in SIMT_ARCHITECTURES:
            raise InputError(f"architecture {arch!r}: expected {', '.join(SIMT_ARCHITECTURES)}")
        return emit_simt(program, schedule, arch), SIMT_ARCHITECTURES
    if arch in SM80_ARCHITECTURES:
        return emit_sm80(lower(program, schedule), arch), SM80_ARCHITECTURES
    return emit(lower(program, schedule), debug), ARCHITECTURES


def compile_source(
    source: CudaSource,
    arch: str,
    allow: tuple[str, ...] = (),
    architectures: tuple[str, ...] = ARCHITECTURES,
) -> tuple[bytes, Resources]:
    """Compile one file; gives the cubin and the compiler's report."""
    if arch not in architectures:
        known = dict.fromkeys((*architectures, *ARCHITECTURES, *SM80_ARCHITECTURES))
        raise InputError(f"architecture {arch!r}: code is emitted for {', '.join(known)}")
    folder = cache_folder() / "cubin"
    told = f"{IMAGES} {arch} {source.file} {source.text}"
    stem = hashlib.sha256(told.encode()).hexdigest()[:32]
    try:
        tool = toolchain.find("nvcc")
    except ToolMissing:
        # A machine with no compiler runs what its cache was filled with elsewhere.
        brought = sorted(folder.glob(f"{stem}-*.cubin"))
        if not brought:
            raise
        resources = _resources(json.loads(brought[-1].with_suffix(".json").read_text()))
        _judge(source, arch, resources, allow)
        return brought[-1].read_bytes(), resources
    report, image = (folder / f"{stem}-{tool.version}.{end}" for end in ("json", "cubin"))
    noted, kept = read_kept(report), read_kept(image)
    if noted is not None and kept is not None:
        resources = _resources(json.loads(noted))
        _judge(source, arch, resources, allow)
        return kept, resources
    cubin, resources = _run(tool, source, arch)
    cubin = _finished(cubin, source)
    # What has a fault is kept too: who then tries another schedule need not find it out again.
    keep(image, cubin)
    keep(report, json.dumps(asdict(resources)).encode())
    _judge(source, arch, resources, allow)
    return cubin, resources


def _finished(image: bytes, source: CudaSource) -> bytes:
    """What the compiler left as it is to run: arrivals wait for loads, a block begins with all its
    threads."""
    if not source.declared_threads and ARRIVE not in source.text:
        return image
    cubin = parse(image, source.name)
    kernel = decode(cubin)
    image = with_waits(cubin, kernel).data
    return with_entry(image, kernel, source.threads) if source.declared_threads else image


def _resources(data: dict[str, Any]) -> Resources:
    notes: list[str] = data.pop("notes")
    return Resources(**data, notes=tuple(notes))


def _run(tool: toolchain.Tool, source: CudaSource, arch: str) -> tuple[bytes, Resources]:
    started = time.perf_counter()
    flags = (f"-arch={arch}", "-std=c++17", "-lineinfo", "-diag-suppress=177")
    file = source.file  # beside the cubin where both are written: `sass show --source` looks there
    library = nvrtc.beside(tool)
    if library is not None:
        options = (*flags, "--ptxas-options=-v")
        cubin, log = nvrtc.compiled(library, source.text, file, options)
        if cubin is not None:
            return cubin, _report(log, tool.version, time.perf_counter() - started)
    # Whatever NVRTC does not compile, nvcc is asked about, so that errors read as nvcc's.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / file).write_text(source.text)
        done = tool.run(
            "-cubin",
            *flags,
            "-O3",
            "-Xptxas",
            "-v",
            "-o",
            str(folder / "kernel.cubin"),
            str(folder / file),
        )
        if done.returncode:
            lines = [
                line for line in done.stderr.splitlines() if "error" in line or "fatal" in line
            ]
            raise CheckFailed(f"nvcc refused {source.name}: {' | '.join(lines) or done.stderr}")
        cubin = (folder / "kernel.cubin").read_bytes()
    return cubin, _report(done.stderr + done.stdout, tool.version, time.perf_counter() - started)


def _report(text: str, version: str, seconds: float) -> Resources:
    def number(pattern: str) -> int:
        match = re.search(pattern, text)
        return int(match.group(1)) if match else 0

    notes = tuple(
        line.strip()
        for line in text.splitlines()
        if any(re.search(pattern, line, re.IGNORECASE) for pattern in FAULTS.values())
    )
    return Resources(
        number(r"Used (\d+) registers"),
        number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        number(r"(\d+) bytes stack frame"),
        f"nvcc {version}",
        round(seconds, 3),
        notes,
    )


def _judge(source: CudaSource, arch: str, resources: Resources, allow: tuple[str, ...]) -> None:
    name = source.name
    if resources.spill_bytes and "spills" not in allow:
        where, remedy = "", "give its groups more registers, "
        if not source.moves_registers:
            most = resources.registers  # what spills has taken all
            where, remedy = f": its {source.threads} threads have {most} each on {arch}", ""
        raise Spills(
            f"{name} spills {resources.spill_bytes} B of registers{where}; make its tile smaller, "
            f"{remedy}or allow 'spills'"
        )
    if resources.stack_bytes and "stack" not in allow:
        raise CheckFailed(f"{name} has a stack frame of {resources.stack_bytes} B; allow 'stack'")
    for note in resources.notes:
        for fault, pattern in FAULTS.items():
            if fault not in allow and re.search(pattern, note, re.IGNORECASE):
                raise CheckFailed(
                    f"{name}: ptxas says: {note} (mostly too many registers: a smaller tile takes "
                    f"fewer; allow {fault!r} to accept it)"
                )
