"""A kernel bound to a form of tensors: a call gives addresses and nothing else.

A call of `Kernel` describes every tensor, which for a dozen of them takes longer than the launch.
An operator that has planned a call knows that types, sizes and strides are those of the call it
planned with. What is left is written over the parameters of that call: pointers, and the addresses
of tensor maps. The driver exchanges those; where that changes the first word of a map alone, which
is tried when a kernel is bound, the word is written without asking it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warploom.errors import InputError
from warploom.runtime.device import Shape
from warploom.runtime.driver import Context
from warploom.runtime.launch import Params, Pointer, TensorMap

OTHER = 1 << 20  # bits by which an address differs from one that it is compared with


@dataclass(frozen=True)
class Place:
    """A parameter that holds an address: its number, the array's, and bytes into the array."""

    parameter: int
    array: int
    offset: int


class Bound:
    """What launches one kernel on tensors of one form; `Kernel.bound` makes it.

    `count`: gives the address at which a kernel that takes tasks counts them.
    """

    def __init__(
        self,
        context: Context,
        function: Any,
        shape: Shape,
        params: Params,
        form: Form,
        count: Callable[[], int],
    ) -> None:
        self.context = context
        self._function, self._shape, self._params = int(function), shape, params
        self._names, self._aligned, self._count = form.names, form.aligned, count
        self._counter = None if form.counter < 0 else params.word(form.counter)
        first = self._first_word_is_address(form)
        moved = () if first else form.maps
        written = (*form.pointers, *form.maps) if first else form.pointers
        self._written = [(params.word(p.parameter), *form.placed(p)) for p in written]
        self._moved = [(params.at(p.parameter), *form.placed(p)) for p in moved]
        self._move = context.direct("cuTensorMapReplaceAddress")
        self._launch = context.direct("cuLaunchKernelEx")
        self._config: tuple[int | None, int, Any] = None, 0, None
        self._lock = threading.Lock()  # the parameters are read while the launch is queued

    def _first_word_is_address(self, form: Form) -> bool:
        """Whether the driver changes a map's first word, to the address, and nothing else of it."""
        for place in form.maps:
            own = self._params.bytes_of(place.parameter)
            there = int.from_bytes(own[:8], "little")
            other = there ^ OTHER
            self.context.direct("cuTensorMapReplaceAddress")(
                self._params.at(place.parameter), other
            )
            moved = self._params.bytes_of(place.parameter)
            self._params.put(place.parameter, own)
            if moved != other.to_bytes(8, "little") + own[8:]:
                return False
        return True

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Queue the kernel with the arrays of the form at these addresses."""
        launch((self,), addresses, stream)

    def queue(self, addresses: Sequence[int], stream: int) -> None:
        """The same in a thread that has the context."""
        aligned, words = self._aligned, self._params.words
        with self._lock:
            for word, array, offset, least in self._written:
                address = addresses[array]
                if (address - least) % aligned:
                    raise self._misplaced(array, address, least)
                words[word] = address + offset
            for at, array, offset, least in self._moved:
                address = addresses[array]
                if (address - least) % aligned:
                    raise self._misplaced(array, address, least)
                self._move(at, address + offset)
            if self._counter is not None:
                words[self._counter] = self._count()
            if self._config[0] != stream:
                config = self.context.config(self._shape, stream)
                self._config = stream, int(config.getPtr()), config
            self._launch(self._config[1], self._function, self._params.address, 0)

    def _misplaced(self, array: int, address: int, least: int) -> InputError:
        return InputError(
            f"array {self._names[array]} at {address:#x}: expected it {least} B past a multiple of "
            f"{self._aligned} B, as when the call was planned"
        )


def launch(kernels: Sequence[Bound], addresses: Sequence[int], stream: int) -> None:
    """Queue kernels of one context and one order of arrays, one after another."""
    context = kernels[0].context
    # A thread that has not used the GPU yet has no context.
    entered = context.enter()
    try:
        for kernel in kernels:
            kernel.queue(addresses, stream)
    finally:
        if entered:
            context.leave()


@dataclass(frozen=True)
class Form:
    """Where a kernel's parameters have the addresses of arrays, which a call gives in the order of
    `names`."""

    names: tuple[str, ...]
    least: tuple[int, ...]
    aligned: int
    pointers: tuple[Place, ...]
    maps: tuple[Place, ...]
    counter: int

    def placed(self, place: Place) -> tuple[int, int, int]:
        """Of a place: the number of its array, the bytes into it, and what the address of that was
        modulo `aligned`."""
        return place.array, place.offset, self.least[place.array]

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
