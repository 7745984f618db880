"""A kernel's CUDA C++ on an emulated Hopper, under several orders of events."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from warploom.emulate.program import SECONDS, CudaProgram
from warploom.emulate.report import Fault
from warploom.errors import InputError
from warploom.kernels.check import checked
from warploom.kernels.library import configure
from warploom.kernels.select import select

SEEDS = 5
FILES = (".cu", ".cuh", ".cpp")


@dataclass(frozen=True)
class Emulated:
    """What became of a kernel under the seeds that were tried, up to the first fault.

    output    what a FILE.cu printed under the first seed
    sources   the texts that the lines of a fault are of, by name
    """

    kernel: str
    seeds: tuple[int, ...]
    fault: Fault | None = None
    output: str = ""
    sources: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)

    @property
    def passed(self) -> bool:
        """Whether no order of events showed a fault."""
        return self.fault is None

    def require(self) -> Emulated:
        """This result; raises the `Fault` where there is one."""
        if self.fault is not None:
            raise self.fault
        return self

    def __str__(self) -> str:
        if self.fault is not None:
            return self.fault.shown(dict(self.sources))
        one = len(self.seeds) == 1
        under = f"seed {self.seeds[0]}" if one else f"{len(self.seeds)} orders of events"
        return f"{self.kernel}: no fault under {under}"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def orders(seed: int | None, seeds: int) -> Sequence[int]:
    """The seeds to try: one that is to be replayed, or the first few."""
    if seeds < 1:
        raise InputError(f"--seeds {seeds}: expected at least 1")
    if seed is not None and seed < 0:
        raise InputError(f"--seed {seed}: expected at least 0")
    return range(1, seeds + 1) if seed is None else range(seed, seed + 1)


def emulated(
    what: str, settings: Mapping[str, str], seeds: Sequence[int], timeout: float | None = None
) -> Emulated:
    """Run FILE.cu, or the kernel of that name, once for each seed until one shows a fault.

    timeout   seconds for a run of a FILE.cu, of which 120 are usual

    Raises `InputError` for what is not in the emulated subset, `CheckFailed` for wrong results.
    """
    if what.endswith(FILES):
        if settings:
            raise InputError("--set is for kernels in tile language; a FILE.cu has its own sizes")
        if timeout is not None and timeout <= 0:
            raise InputError(f"--timeout {timeout:g}: expected seconds above 0")
        return _file(Path(what), seeds, SECONDS if timeout is None else timeout)
    if timeout is not None:
        raise InputError("--timeout is for a FILE.cu; a kernel's run ends by itself")
    sizes = configure(what, settings)[1]
    chosen = select(what, settings)
    source = chosen.emitted()
    for seed in seeds:
        try:
            checked(what, chosen.config, sizes, source, seed).require()
        except Fault as fault:
            sources = {source.file: source.text}
            return Emulated(f"{what} ({chosen})", tuple(seeds), fault, sources=sources)
    return Emulated(f"{what} ({chosen})", tuple(seeds))


def _file(path: Path, seeds: Sequence[int], timeout: float) -> Emulated:
    program = CudaProgram.of(path)
    output = ""
    for seed in seeds:
        run = program.run(seed, timeout)
        output = output or run.output
        if run.fault is not None:
            sources = {program.name: program.text}
            return Emulated(str(path), tuple(seeds), run.fault, output, sources)
    return Emulated(str(path), tuple(seeds), None, output)
