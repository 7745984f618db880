"""The Triton kernels that a script launches, with their arguments, as files.

    python -m warploom.integrations.triton_record FOLDER ARCH FILE.py [ARGUMENT...]

The script runs as it would by itself, and every launch is noted before it happens; those that the
autotuner makes to compare configurations are not. Where there is no GPU, its tensors have shapes
and types and no values (`triton_pretend`), launches are noted and not made, and the autotuner takes
its first configuration. The script then goes as far as it needs no value.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
import traceback
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warploom.errors import InputError
from warploom.files import write_bytes_atomically, write_text_atomically
from warploom.integrations.triton_access import triton_module
from warploom.integrations.triton_capture import Call, CapturedKernel, call_of, captured
from warploom.integrations.triton_pretend import pretending
from warploom.objects import run_file

RECORD = "recorded.json"
HOPPER = 90
NO_GPU = "no GPU: the autotuner's first configuration"


@dataclass
class Noted:
    """One form of launch of one kernel: what its machine code and grid follow from."""

    call: Call
    launches: int = 0
    note: str = ""


@dataclass
class Recorder:
    """Every form of launch so far, in order, and the functions whose launches are of no form."""

    notes: dict[Any, Noted] = field(default_factory=dict[Any, Noted])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    launching: bool = True
    comparing: bool = False
    unchosen: set[str] = field(default_factory=set[str])

    def launch(self, function: Any, args: Sequence[Any], grid: Any, named: Named) -> None:
        """Note one launch."""
        name = function.__name__
        try:
            call = call_of(function, *args, grid=grid, **named)
        except InputError as error:
            self.refused[name] = str(error)
            return
        noted = self.notes.setdefault((function, call.form), Noted(call))
        noted.launches += 1
        noted.note = NO_GPU if name in self.unchosen else ""

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """While this lasts, launches are noted; without a GPU they are not made."""
        jit: Any = triton_module("triton.runtime.jit").JITFunction
        tuner: Any = triton_module("triton.runtime.autotuner").Autotuner
        run, bench = jit.run, tuner._bench

        @functools.wraps(run)
        def noted(function: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> Any:
            if not warmup and not self.comparing:
                self.launch(function, args, grid, named)
            if self.launching:
                return run(function, *args, grid=grid, warmup=warmup, **named)
            return None

        @functools.wraps(bench)
        def compared(tuner: Any, *args: Any, **named: Any) -> Any:
            if not self.launching:
                self.unchosen.add(tuner.base_fn.__name__)
                return [1.0, 1.0, 1.0]
            self.comparing = True
            try:
                return bench(tuner, *args, **named)
            finally:
                self.comparing = False

        jit.run, tuner._bench = noted, compared
        try:
            yield
        finally:
            jit.run, tuner._bench = run, bench


Named = Mapping[str, Any]


def record(folder: Path, arch: int, script: Path, arguments: Sequence[str]) -> None:
    """Run a script and write what it launched into `folder`."""
    here, found = gpu_here()
    arch = arch or found
    recorder = Recorder(launching=here)
    with recorder.installed(), contextlib.nullcontext() if here else pretending(arch):
        stopped = ran(script, arguments)
    rows = [
        *written(folder, recorder.notes.values(), arch),
        *({"kernel": name, "refused": why} for name, why in recorder.refused.items()),
    ]
    data = {"script": str(script), "gpu": here, "stopped": stopped, "kernels": rows}
    write_text_atomically(folder / RECORD, json.dumps(data, indent=1) + "\n")


def gpu_here() -> tuple[bool, int]:
    """Whether torch finds a GPU, and for which architecture kernels are compiled: its own, else
    Hopper's. A script without torch brings its own tensors."""
    try:
        cuda: Any = importlib.import_module("torch").cuda
    except ImportError:
        return False, HOPPER
    if not cuda.is_available():
        return False, HOPPER
    major, minor = cuda.get_device_capability()
    return True, 10 * major + minor


def ran(script: Path, arguments: Sequence[str]) -> str:
    """Run a script as Python does; why it stopped before its end, or ""."""
    sys.argv = [str(script), *arguments]
    own_main = sys.modules["__main__"]
    try:
        run_file(script, "__main__")
    except SystemExit as error:
        return "" if error.code in (None, 0) else f"it left Python with {error.code!r}"
    except KeyboardInterrupt:
        return "interrupted"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [one for one in frames if Path(one.filename).resolve() == script.resolve()]
        place = f"{script.name}:{own[-1].lineno}: " if own else ""
        text = (str(error).strip().splitlines() or [""])[0]
        return f"{place}{type(error).__name__}: {text}"
    finally:
        sys.modules["__main__"] = own_main
    return ""


def written(folder: Path, notes: Any, arch: int) -> list[dict[str, Any]]:
    """Compile what was noted and write a cubin and a launch of each, most launched first; launches
    of one cubin are one kernel, at the sizes that it was launched with most."""
    found: dict[str, tuple[Noted, CapturedKernel, int]] = {}
    rows: list[dict[str, Any]] = []
    for noted in sorted(notes, key=lambda one: -one.launches):
        try:
            kernel = captured(noted.call, arch)
        except InputError as error:
            rows.append({"kernel": noted.call.name, "refused": str(error)})
            continue
        first = found.get(kernel.key, (noted, kernel, 0))
        found[kernel.key] = (*first[:2], first[2] + noted.launches)
    taken: dict[str, int] = {}
    for noted, kernel, launches in found.values():
        number = taken[kernel.name] = taken.get(kernel.name, 0) + 1
        name = kernel.name if number == 1 else f"{kernel.name}-{number}"
        write_bytes_atomically(folder / f"{name}.cubin", kernel.cubin)
        launch = json.dumps(kernel.launch.to_json(), indent=1) + "\n"
        write_text_atomically(folder / f"{name}.launch.json", launch)
        rows.append(
            {
                "name": name,
                "kernel": kernel.name,
                "launches": launches,
                "grid": list(kernel.launch.grid),
                "arguments": noted.call.words,
                "warps": kernel.num_warps,
                "stages": kernel.num_stages,
                "compiler": kernel.compiler,
                "note": noted.note,
            }
        )
    return rows


if __name__ == "__main__":
    place, number, script_text, *rest = sys.argv[1:]
    record(Path(place), int(number), Path(script_text), rest)
