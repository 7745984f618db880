"""The kernels of a call, bound to its form, and what they leave one another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from warploom.integrations import torch_program
from warploom.integrations.torch_program import Chosen, copyable, torch_module
from warploom.runtime.bound import Bound, launch
from warploom.tile.dtypes import dtype

torch: Any = torch_module()
APART = 512  # bytes of which the place of an array is a multiple


@dataclass(frozen=True)
class Room:
    """Arrays that kernels leave one another, in one allocation: of each the name, the element type,
    the shape, and how many elements of its last dimension are used."""

    arrays: tuple[tuple[str, str, tuple[int, ...], int], ...] = ()

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        ends = [0]
        for _, kind, shape, _ in self.arrays:
            ends.append(ends[-1] - math.prod(shape) * dtype(kind).bytes // -APART * APART)
        return tuple(ends)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The bytes before each array."""
        return self._ends[:-1]

    def made(self, device: Any) -> Any:
        """The allocation."""
        return torch.empty(self._ends[-1], dtype=torch.uint8, device=device)

    def views(self, made: Any) -> dict[str, Any]:
        """The arrays in it, by name."""
        found: dict[str, Any] = {}
        for (name, kind, shape, used), first in zip(self.arrays, self.offsets, strict=True):
            own = dtype(kind)
            flat = made[first : first + math.prod(shape) * own.bytes]
            found[name] = flat.view(getattr(torch, own.library)).view(shape)[..., :used]
        return found


class Launches:
    """The kernels of a plan, one after another, on tensors of the form that the plan is for.

    `choose` gives them by name. It is asked at the first call, which builds them and binds them to
    its tensors; later calls give addresses alone. `room` says what they leave one another, and
    arrays that are `given` from elsewhere are copied where the copy engine does not take them.
    """

    def __init__(
        self,
        choose: Callable[[], Mapping[str, Chosen]],
        room: Callable[[], Room] = Room,
        given: Sequence[str] = (),
    ) -> None:
        self._choose, self._ask_room, self._copied = choose, room, tuple(given)
        self._room, self._device = Room(), None
        self._bound: dict[str, Bound] = {}
        self._all: tuple[Bound, ...] = ()

    def __call__(
        self,
        arrays: Mapping[str, Any],
        after: Mapping[str, Callable[[Mapping[str, Any]], None]] | None = None,
    ) -> None:
        """Launch them on arrays by name, none of them empty and always in one order; `after` has
        what is done to the arrays of `room` behind a kernel, by its name."""
        if torch_program.only_collected():
            room = self._ask_room()
            self.unbound({**arrays, **room.views(room.made(next(iter(arrays.values())).device))})
            return
        if not self._all:
            self._copied = tuple(name for name in self._copied if not copyable(arrays[name]))
        if self._copied:
            arrays = {**arrays, **{name: arrays[name].contiguous() for name in self._copied}}
        if not self._all:
            self._bind(arrays)
        addresses, made = [one.data_ptr() for one in arrays.values()], None
        if self._room.arrays:
            made = self._room.made(self._device)
            begin = made.data_ptr()
            addresses += [begin + offset for offset in self._room.offsets]
        stream = torch_program.stream_of(self._device)
        if not after:
            launch(self._all, addresses, stream)
            return
        views = self._room.views(made)
        for name, one in self._bound.items():
            one(addresses, stream)
            if name in after:
                after[name](views)

    def _bind(self, arrays: Mapping[str, Any]) -> None:
        like = next(iter(arrays.values()))
        self._device, self._room = like.device, self._ask_room()
        every = {**arrays, **self._room.views(self._room.made(like.device))}
        for name, (key, make) in self._choose().items():
            self._bound[name] = torch_program.built_kernel(key, like, make).bound(every)
        self._all = tuple(self._bound.values())

    def unbound(self, arrays: Mapping[str, Any]) -> None:
        """Launch them on arrays of which some are empty."""
        for key, make in self._choose().values():
            kernel = torch_program.built_kernel(key, next(iter(arrays.values())), make)
            own = {spec.name: arrays[spec.name] for spec in kernel.interface.arrays}
            kernel(own, {}, torch_program.current_stream(next(iter(own.values()))))
