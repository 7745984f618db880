"""A built kernel of the library on the GPU here, in a process of its own with a watchdog.

Numerics against float64 at small sizes, then time and counted cycles at sizes that fill the GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from warploom.codegen.compile.build import Built, compile_source
from warploom.codegen.compile.probe import LOG, WORDS, probe, readings
from warploom.codegen.launching.kernel import Kernel
from warploom.errors import CheckFailed, InputError, ToolMissing
from warploom.flows.own_process import answer_of
from warploom.kernels.check import CheckResult, checked
from warploom.kernels.library import configure, entry
from warploom.kernels.select import Selected, check_sizes, full_sizes
from warploom.perf.replay import Prediction
from warploom.runtime.arrays import DeviceArray
from warploom.runtime.driver import CudaDevice
from warploom.tile import Program

ROUNDS, REPEATS = 15, 5


@dataclass(frozen=True)
class Measured:
    """What the GPU said.

    check       what a run at small sizes showed
    microseconds, control   medians of two interleaved series of the same kernel
    counted     loop -> [cycles an iteration, SM clock in GHz]; empty with the reason in `uncounted`
    """

    device: str
    check: CheckResult
    sizes: dict[str, int]
    microseconds: float
    control: float
    flops: float
    counted: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    uncounted: str = ""

    @property
    def correct(self) -> bool:
        """The check passed."""
        return self.check.passed

    @property
    def errors(self) -> dict[str, float]:
        """The relative error of each output."""
        return self.check.errors

    def to_json(self) -> dict[str, Any]:
        """The measurement as plain JSON data."""
        return {**asdict(self), "check": self.check.to_json()}

    def rows(self, predicted: Mapping[str, Prediction]) -> list[tuple[str, str]]:
        """The measurement beside the model, for people."""
        errors = ", ".join(
            f"{name} {error:.1e} (allowed {self.check.bounds[name]:.1e})"
            for name, error in self.errors.items()
        )
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        rows = [
            ("device", self.device),
            ("relative error against float64", errors),
            ("sizes timed", sizes),
            ("time", f"{self.microseconds:.1f} us (the same kernel again: {self.control:.1f} us)"),
        ]
        if self.flops:
            rate = self.flops / self.microseconds * 1e-6
            rows.append(("rate", f"{rate:.0f} TFLOP/s"))
        for loop, (cycles, clock) in self.counted.items():
            told = f"{cycles:.0f} counted at {clock:.2f} GHz"
            if not cycles:
                told = "no iteration at these sizes"
            elif loop in predicted:
                model = predicted[loop].cycles
                told += f", {model:.0f} predicted ({model / cycles - 1:+.1%})"
            rows.append((f"cycles an iteration, loop {loop}", told))
        if self.uncounted:
            rows.append(("cycles an iteration", f"not counted: {self.uncounted}"))
        return rows


def measure_in_worker(
    name: str,
    settings: Mapping[str, str],
    selected: Selected,
    built: Built,
    say: Callable[[str], None],
) -> Measured:
    """Measure in a new process; raises `DeviceError` when it fails or hangs.

    The kernel with counters in it has to be compiled; where that cannot be, nothing is counted.
    """
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        built.write(folder / "plain")
        loops: tuple[str, ...] = ()
        uncounted = ""
        try:
            source, loops = probe(built.source)
            cubin, resources = compile_source(source, built.arch, ("spills", "stack"))
            counting = replace(built, source=source, cubin=cubin, resources=resources)
            counting.write(folder / "probe")
        except (ToolMissing, CheckFailed, InputError) as error:
            uncounted = str(error)
        request = {"name": name, "settings": dict(settings), "loops": list(loops)}
        (folder / "request.json").write_text(json.dumps(request))
        say(f"measuring {selected} on the GPU: 5 to 20 s")
        done = answer_of("warploom.flows.optimize_measure", folder, name, "measuring")
        fields: dict[str, Any] = {**done, "check": CheckResult.from_json(done["check"])}
        return replace(Measured(**fields), uncounted=uncounted)


def measure(folder: Path) -> Measured:
    """The worker's side: what `measure_in_worker` wrote to `folder`."""
    request = json.loads((folder / "request.json").read_text())
    name, loops = request["name"], tuple(request["loops"])
    config, small = configure(name, request["settings"])[0], check_sizes(name, request["settings"])
    program, built = entry(name).program(config), Built.read(folder / "plain")
    sizes = full_sizes(name, request["settings"])
    device = CudaDevice(0)
    memory = _memory(program, sizes)
    times = _times(device, Kernel(built), memory)
    counted: dict[str, list[float]] = {}
    if (folder / "probe").is_dir() and loops:
        counted = _counted(device, Kernel(Built.read(folder / "probe")), memory, loops)
    return Measured(
        device.info.name,
        checked(name, config, small, built),
        {dim: sizes[dim] for dim in program.dims},
        statistics.median(times[0]),
        statistics.median(times[1]),
        _flops(name, config, sizes),
        counted,
    )


def _memory(program: Program, sizes: Mapping[str, int]) -> dict[str, DeviceArray]:
    random = np.random.default_rng(0)
    return {
        spec.name: DeviceArray(
            random.standard_normal(tuple(sizes[dim] for dim in spec.dims), np.float32),
            spec.dtype.name,
        )
        for spec in program.arrays
    }


def _times(
    device: CudaDevice, kernel: Kernel, memory: Mapping[str, DeviceArray]
) -> tuple[list[float], list[float]]:
    """Microseconds a launch, two series of the same kernel in turn: time and A/A control."""
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * ROUNDS + 4):
        start, stop = device.event(), device.event()
        device.record(start)
        for _ in range(REPEATS):
            kernel(memory, stream=device.stream)  # events of another stream would not see it
        device.record(stop)
        device.synchronize()
        if number >= 4:
            found[number % 2].append(device.elapsed_us(start, stop) / REPEATS)
    return found


def _counted(
    device: CudaDevice,
    kernel: Kernel,
    memory: Mapping[str, DeviceArray],
    loops: tuple[str, ...],
) -> dict[str, list[float]]:
    address, size = kernel.global_memory(LOG)
    series: list[dict[str, list[float]]] = []
    for _ in range(5):
        device.memset(address, 0, size)
        for _ in range(REPEATS):
            kernel(memory, stream=device.stream)
        device.synchronize()
        data = device.download(address, size)
        words = [int(x) for x in np.frombuffer(data, np.uint64)[: WORDS * len(loops)]]
        series.append(
            {r.loop: [r.cycles_an_iteration, r.gigahertz] for r in readings(loops, words)}
        )
    return {
        loop: [statistics.median(one[loop][i] for one in series) for i in range(2)]
        for loop in loops
    }


def _flops(name: str, config: Any, sizes: Mapping[str, int]) -> float:
    if name == "gemm":
        batch = sizes["batch"] if config.batched else 1
        return 2.0 * batch * sizes["m"] * sizes["n"] * sizes["k"]
    if name == "attention" and config.window is None:
        work = 4.0 * sizes["batch"] * sizes["heads"] * sizes["rows"] * sizes["keys"] * sizes["d"]
        return work * (0.5 if config.causal else 1.0)
    return 0.0


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1])).to_json()))
