"""Two kernels launched in turn, the second of which takes what the first leaves in memory."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from warploom.errors import InputError
from warploom.runtime.bound import Bound
from warploom.runtime.interface import Interface
from warploom.runtime.kernel import Kernel
from warploom.runtime.tensors import view
from warploom.tile.dtypes import DType


class Handed:
    """An array between two kernels, as they take anybody's; the type string says only the width."""

    def __init__(self, address: int, shape: tuple[int, ...], kind: DType) -> None:
        self.dtype = kind.library
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": f"<V{kind.bytes}",
            "data": (address, False),
            "version": 3,
        }


class InTurn(Kernel):
    """A kernel and the one that goes on from it, as one: called with the arrays of both but those
    that the first hands to the second, which get memory at the first call of these sizes.

    `lengths` are of dimensions that no array of the caller has. Calls on several streams at a time
    would share that memory: they take an object each.
    """

    def __init__(
        self,
        first: tuple[Interface, bytes],
        second: tuple[Interface, bytes],
        lengths: Mapping[str, int],
        device: int = 0,
    ) -> None:
        super().__init__(*first, device)
        self._second, self._lengths = Kernel(*second, device), dict(lengths)
        reads = {spec.name for spec in second[0].arrays}
        self._handed = [s for s in first[0].arrays if s.name in reads and first[0].written(s.name)]
        self._kept: dict[tuple[int, ...], dict[str, Handed]] = {}

    def __call__(
        self, arrays: Mapping[str, Any], scalars: Mapping[str, float] | None = None, stream: int = 0
    ) -> None:
        """Queue both on `stream`, as `Kernel` does."""
        specs = {spec.name: spec for own in self._both for spec in own.interface.arrays}
        if unknown := set(arrays) - specs.keys():
            raise InputError(
                f"kernel {self.interface.name} has no array {min(map(str, unknown))!r}; it takes "
                f"{', '.join(sorted(specs.keys() - {spec.name for spec in self._handed}))}"
            )
        sizes = dict(self._lengths)
        for name, array in arrays.items():
            sizes |= zip(specs[name].dims, view(array, name, stream).shape, strict=False)
        every = {**self._between(sizes), **arrays}
        given = scalars or {}
        for own in self._both:
            named = {p["name"] for p in own.interface.parameters if p["kind"] == "scalar"}
            taken = {spec.name for spec in own.interface.arrays}
            Kernel.__call__(
                own,
                {name: array for name, array in every.items() if name in taken},
                {name: value for name, value in given.items() if name in named},
                stream,
            )

    def bound(self, arrays: Mapping[str, Any], scalars: Mapping[str, float] | None = None) -> Bound:
        """Two kernels are not bound."""
        raise InputError(f"kernel {self.interface.name} goes on in a second one: call it")

    @property
    def _both(self) -> tuple[Kernel, Kernel]:
        return self, self._second

    def _between(self, sizes: Mapping[str, int]) -> Mapping[str, Handed]:
        """The arrays that are handed on, at these sizes."""
        missing = [dim for spec in self._handed for dim in spec.dims if dim not in sizes]
        if missing:
            raise InputError(f"kernel {self.interface.name} needs an array with {missing[0]!r}")
        shapes = {spec: tuple(sizes[dim] for dim in spec.dims) for spec in self._handed}
        key = tuple(length for shape in shapes.values() for length in shape)
        if key not in self._kept:
            with self._context.entered():
                self._kept[key] = {
                    spec.name: Handed(
                        self._context.zeros(max(16, prod(shape) * spec.dtype.bytes)),
                        shape,
                        spec.dtype,
                    )
                    for spec, shape in shapes.items()
                }
        return self._kept[key]
