"""A user's CUDA C++ file with its own main: compiled, and run under several orders of events."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from warploom.emulate.build import compiled
from warploom.emulate.report import Fault, fault_of
from warploom.emulate.source import as_cpp, read
from warploom.errors import InputError

MARK = "\nFAULT "
FAULT_CODE = 86
WATCH = "static const int emulated = host::watch();\n"
SECONDS = 120.0


@dataclass(frozen=True)
class Run:
    """What a program did under one seed: its output, and the fault that ended it if any."""

    seed: int
    output: str
    fault: Fault | None = None


class CudaProgram:
    """A CUDA C++ file with `main`, compiled for the emulated machine."""

    def __init__(self, text: str, name: str) -> None:
        """Raises `InputError` with file and line for what is not in the emulated subset."""
        self.name, self.text = name, text
        body = as_cpp(text, name)
        if " main(" not in text:
            raise InputError(
                f"{name}: no main: the emulation runs a whole program, which launches its kernels "
                "by <<<...>>> and returns 0 where their results are right"
            )
        self.path = compiled(f'#line 1 "{name}"\n{body}\n{WATCH}', name, shared=False)

    @classmethod
    def of(cls, path: Path) -> CudaProgram:
        """The program of a file."""
        return cls(read(path), str(path))

    def run(self, seed: int = 1, seconds: float = SECONDS) -> Run:
        """One run in the order of a seed."""
        environment = {**os.environ, "EMULATE_SEED": str(seed)}
        try:
            done = subprocess.run(
                [str(self.path)], capture_output=True, text=True, timeout=seconds, check=False,
                env=environment, errors="replace",
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            text = f"deadlock: the program did not end within {seconds:g} s"
            return Run(seed, "", Fault(text, (), seed))
        if done.returncode == FAULT_CODE and MARK in done.stderr:
            message = done.stderr[done.stderr.rindex(MARK) + len(MARK) :].rstrip("\n")
            return Run(seed, done.stdout, fault_of(message, self.path, seed, [self.name]))
        if done.returncode < 0:
            text = f"bounds: the program was ended by signal {-done.returncode}"
            return Run(seed, done.stdout, Fault(text, (), seed))
        if done.returncode:
            last = (done.stdout + done.stderr).strip().splitlines()[-1:]
            text = f"result: the program returned {done.returncode}: {' '.join(last)}"
            return Run(seed, done.stdout, Fault(text, (), seed))
        return Run(seed, done.stdout)
