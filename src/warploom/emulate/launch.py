"""One launch of any kernel on the emulated machine, in memory of the caller."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from math import prod

from warploom.emulate.build import compiled
from warploom.emulate.kernel import packed_map
from warploom.emulate.report import fault_of
from warploom.emulate.source import as_cpp
from warploom.errors import InputError
from warploom.runtime.launch import LaunchSpec, TensorMap, pack_arguments
from warploom.tile.dtypes import MEMORY, dtype

SIDE_BY_SIDE = 4  # blocks, where a cluster has no more
OF_THE_CODE = 0  # the cluster that the kernel's own attribute says


class EmulatedKernel:
    """A kernel of a CUDA C++ file, compiled for the emulated machine.

    Raises `InputError` for what is not in the emulated subset, or no kernel of that name.
    """

    def __init__(self, text: str, kernel: str, file: str) -> None:
        if not re.search(rf"\b{re.escape(kernel)}\s*\(", text):
            raise InputError(f"{file} has no kernel called {kernel!r}")
        body = as_cpp(text, file)
        entry = (
            'extern "C" const char* run(void** p, unsigned* n) {\n'
            "  machine::Launch how;\n"
            "  how.grid = {n[0], n[1], n[2]}; how.block = {n[3], n[4], n[5]};\n"
            "  how.shared = n[6]; how.cluster = int(n[7]); how.together = int(n[8]);\n"
            f"  how.seed = n[9]; return launch_with({kernel}, p, how);\n}}"
        )
        self.file = file
        self._path = compiled(f'#line 1 "{file}"\n{body}\n{entry}', file, shared=True)
        self._run = ctypes.CDLL(str(self._path)).run
        self._run.restype = ctypes.c_char_p

    def launch(self, spec: LaunchSpec, addresses: Mapping[str, int], seed: int = 1) -> None:
        """Run it to its end on buffers at these addresses, in the order of a seed; raises `Fault`.

        Tensor maps must lie in contiguous rows of 16 bytes, as everywhere.
        """
        params = pack_arguments(spec.arguments, addresses, spec.kinds, self)
        cluster = prod(spec.cluster)
        numbers = (
            *spec.grid, *spec.block, spec.shared_bytes, cluster if cluster > 1 else OF_THE_CODE,
            max(cluster, SIDE_BY_SIDE), seed,
        )  # fmt: skip
        message = self._run(ctypes.c_void_p(params.address), (ctypes.c_uint * 10)(*numbers))
        if message is not None:
            raise fault_of(message.decode(), self._path, seed, [self.file])

    def tensor_map(self, spec: TensorMap, kind: str, address: int) -> bytes:
        """A tensor map as the emulated machine reads it."""
        element = dtype(kind, MEMORY)
        sizes = spec.dims, spec.box, spec.strides
        return packed_map(address, element, spec.swizzle, *sizes).ljust(128, b"\0")
