"""A built kernel on numpy arrays: the same call as the interpreter's, run by the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from warploom.codegen.compile.build import Built
from warploom.codegen.launching.kernel import Kernel
from warploom.runtime.arrays import DeviceArray
from warploom.tile import Program
from warploom.tile.interpret import bind


def run_on_gpu(
    program: Program,
    built: Built,
    arrays: Mapping[str, NDArray[Any]],
    scalars: Mapping[str, float] | None = None,
    device: int = 0,
) -> dict[str, NDArray[Any]]:
    """Every array as the kernel leaves it; the arguments stay unchanged.

    Values are rounded to the declared element types first, as `tile.interpret` does. Raises
    `InputError` for what the launch refuses and `DeviceError` for a fault.
    """
    values = bind(program, arrays)
    kernel = Kernel(built, device)
    memory = {spec.name: DeviceArray(values[spec.name], spec.dtype.name) for spec in program.arrays}
    try:
        kernel(memory, scalars)
        return {name: array.numpy() for name, array in memory.items()}
    finally:
        for array in memory.values():
            array.free()
