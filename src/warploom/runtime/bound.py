"""A kernel bound to a form of tensors: a call gives addresses and nothing else.

A call of `Kernel` describes every tensor, which for a dozen of them takes longer than the launch.
An operator that has planned a call knows that types, sizes and strides are those of the call it
planned with. What is left is written over the parameters of that call: pointers, and the addresses
of tensor maps, which the driver exchanges without encoding the map again.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warploom.errors import InputError
from warploom.runtime.device import Shape
from warploom.runtime.driver import Context
from warploom.runtime.launch import Params, Pointer, TensorMap


@dataclass(frozen=True)
class Place:
    """A parameter that holds an address: its number, the array's, and bytes into the array."""

    parameter: int
    array: int
    offset: int


class Bound:
    """What launches one kernel on tensors of one form; `Kernel.bound` makes it.

    names     of the arrays, in the order of the parameters' arrays
    least     what the addresses were, modulo `aligned`, when the form was checked
    """

    def __init__(
        self, context: Context, function: Any, shape: Shape, params: Params, form: Form
    ) -> None:
        self._context, self._params, self._form = context, params, form
        self._launch = context.launcher(function, shape, params)
        self._cells = [
            (ctypes.c_uint64.from_address(params.at(place.parameter)), place)
            for place in form.pointers
        ]
        self._maps = [(context.map_at(params.at(p.parameter)), p) for p in form.maps]
        self._lock = threading.Lock()  # the parameters are read while the launch is queued

    def __call__(self, addresses: Mapping[str, int], stream: int, counter: int = 0) -> None:
        """Queue the kernel with its arrays at these addresses, by name, in a thread that has the
        context; `counter`: where a kernel that takes tasks counts them."""
        form = self._form
        at = [addresses[name] for name in form.names]
        if any((one - least) % form.aligned for one, least in zip(at, form.least, strict=True)):
            raise InputError(
                f"arrays at {[hex(one) for one in at]}: expected them {list(form.least)} B past "
                f"multiples of {form.aligned} B, as when the call was planned"
            )
        with self._lock:
            for cell, place in self._cells:
                cell.value = at[place.array] + place.offset
            for one, place in self._maps:
                self._context.move_map(one, at[place.array] + place.offset)
            if form.counter >= 0:
                self._params.put(form.counter, counter.to_bytes(8, "little"))
            self._launch(stream)


@dataclass(frozen=True)
class Form:
    """Where a kernel's parameters have the addresses of its arrays."""

    names: tuple[str, ...]
    least: tuple[int, ...]
    aligned: int
    pointers: tuple[Place, ...]
    maps: tuple[Place, ...]
    counter: int

    @classmethod
    def of(
        cls,
        addresses: Mapping[str, int],
        arguments: Sequence[tuple[int, Any]],
        aligned: int,
        counter: int,
    ) -> Form:
        """That of arrays at these addresses and the arguments that hold them, by their places; the
        place of `counter`, if there is one, is none of theirs."""
        names = tuple(addresses)
        places: dict[type, list[Place]] = {Pointer: [], TensorMap: []}
        for at, one in arguments:
            if at != counter:
                places[type(one)].append(Place(at, names.index(one.buffer), one.offset))
        least = tuple(address % aligned for address in addresses.values())
        pointers, maps = (tuple(places[kind]) for kind in (Pointer, TensorMap))
        return cls(names, least, aligned, pointers, maps, counter)
