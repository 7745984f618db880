"""Launching a built kernel on the caller's tensors and stream: no copies, no host sync.

Everything that can be wrong with a call (type, shape, strides, alignment, device, architecture,
shared memory) is refused with its numbers before the launch. What a call hands to the driver is
kept by address, shape and strides: a repeated call encodes nothing, and a call inside a captured
graph does nothing but the launch. A call whose tensors only lie elsewhere, as in the steps of a
training loop, is not checked again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from warploom.errors import DeviceError, InputError
from warploom.runtime.bound import Bound, Form
from warploom.runtime.device import Shape
from warploom.runtime.driver import Context
from warploom.runtime.interface import COUNTER, PITCH, SCRATCH_BYTES, Interface, pitches_of
from warploom.runtime.launch import Argument, Params, Scalar, TensorMap, packed
from warploom.runtime.tensors import View, view
from warploom.tile.dtypes import dtype
from warploom.tile.ir import Array

COUNTERS = 1024  # launches of one kernel with a dynamic walk that may be in flight at a time
KEPT = 1024  # calls whose parameters are kept
ALIGNED = 128  # bytes: what is demanded of an address divides them
# Kernels count in 32-bit integers, and round up to tiles and grids.
LONGEST = 2**31 - 2**16
MOST_PITCH = 1 << 40

# Maps a kernel's name and compiled cubin to the image to load.
Lookup = Callable[[str, bytes], bytes]
_lookups: list[Lookup] = []


def replace_images(lookup: Lookup | None) -> None:
    """Ask `lookup` for the image of every kernel loaded from now on; None asks nobody.

    Nothing of it is on the launch path. What it raises, loading raises.
    """
    _lookups[:] = [] if lookup is None else [lookup]


def image_of(name: str, cubin: bytes) -> bytes:
    """The image to load for a compiled cubin; raises what the lookup refuses."""
    return _lookups[0](name, cubin) if _lookups else cubin


@dataclass
class _Call:
    """What one set of tensors and scalars hands to the driver; no blocks: there is nothing to do.

    `counter` is the place of the parameter that tells where tasks are taken; -1: there is none.
    """

    shape: Shape | None
    params: Params
    counter: int


@dataclass(frozen=True)
class _Form:
    """What all calls have in common whose tensors differ in their addresses alone.

    slots       the bytes of every parameter; those of `addressed` are not filled in
    addressed   the parameters that hold an address, by their places
    """

    shape: Shape | None
    slots: tuple[bytes, ...] = ()
    addressed: tuple[tuple[int, Argument], ...] = ()
    counter: int = -1


class Kernel:
    """A built kernel on one CUDA device; raises `InputError` when that device cannot run it."""

    def __init__(self, interface: Interface, cubin: bytes, device: int = 0) -> None:
        self.interface, self.cubin = interface, cubin
        self._names = frozenset(spec.name for spec in interface.arrays)
        self._no_scalars = "scalar" not in interface.kinds
        self._context = Context(device, f"kernel {interface.name}")
        self._calls: dict[tuple[Any, ...], _Call] = {}
        self._forms: dict[tuple[Any, ...], _Form] = {}
        self._maps: dict[tuple[TensorMap, str, int], bytes] = {}
        self._check_device()
        self._module = self._context.load(image_of(interface.name, cubin))
        shape = replace(interface.shape(1), cluster=(interface.cluster, 1, 1), dependent=False)
        self._function = self._context.function(
            self._module, interface.name, interface.shared_bytes, interface.cluster
        )
        self._blocks = self._context.resident_blocks(self._function, shape)
        if self._blocks == 0 and interface.cluster > 1:
            fits = f"no cluster of {interface.cluster} blocks of {interface.name} fits this GPU"
            raise DeviceError(fits)
        if self._blocks == 0:
            raise interface.misfit("this GPU")
        # Each launch returns its counter to 0, so the next to use the slot finds it ready.
        kinds = interface.kinds
        self._counters = self._context.zeros(4 * COUNTERS) if "counter" in kinds else 0
        self._scratch = self._context.zeros(SCRATCH_BYTES) if "map" in kinds else 0
        self._launches = 0

    def __call__(
        self, arrays: Mapping[str, Any], scalars: Mapping[str, float] | None = None, stream: int = 0
    ) -> None:
        """Queue the kernel on `stream` (a CUstream as an integer; 0: the default stream)."""
        name, specs = self.interface.name, self.interface.arrays
        given: Any = arrays
        if not isinstance(given, Mapping):
            raise InputError(
                f"kernel {name} takes a table of arrays by name, not {type(given).__name__}"
            )
        queue: Any = stream
        if not isinstance(queue, int):
            raise InputError(
                f"stream is a {type(queue).__name__}, expected its handle, an integer: "
                "stream.cuda_stream of torch's, stream.ptr of CuPy's"
            )
        if unknown := set(arrays) - self._names:
            raise InputError(
                f"kernel {name} has no array {min(map(str, unknown))!r}; it takes "
                f"{', '.join(spec.name for spec in specs)}"
            )
        views = {spec.name: self._view(spec, arrays, stream) for spec in specs}
        if self._context.current:
            self._queue(views, scalars or {}, stream)
            return
        # A thread that has not used the GPU yet has no context, and tensor maps need one too.
        with self._context.entered():
            self._queue(views, scalars or {}, stream)

    def _queue(self, views: Mapping[str, View], given: Mapping[str, float], stream: int) -> None:
        scalars = {} if self._no_scalars and not given else self.interface.scalars(given)
        # By their bytes: 0.0 and -0.0 are equal.
        key = (*views.values(), *(scalar.pack() for scalar in scalars.values()))
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= KEPT:
                for kept in (self._calls, self._forms, self._maps):
                    kept.clear()
            call = self._calls[key] = self._call(views, scalars)
        if call.shape is None:
            return
        for one in {v.stream for v in views.values()} - {None, stream}:
            self._context.wait_for(one, stream)
        counter = self._counted()
        if call.counter >= 0:
            call.params.put(call.counter, counter.to_bytes(8, "little"))
        self._context.launch_on(stream, self._function, call.shape, call.params)

    def bound(self, arrays: Mapping[str, Any], scalars: Mapping[str, float] | None = None) -> Bound:
        """What launches the kernel on tensors of the types, sizes, strides and device of these,
        given the addresses of all of `arrays` in their order and a stream; raises what a call on
        those that it takes raises.

        None of them is empty.
        """
        views = {spec.name: self._view(spec, arrays, 0) for spec in self.interface.arrays}
        empty = [name for name, of in views.items() if 0 in of.shape]
        if empty:
            raise InputError(f"array {empty[0]} is empty: a bound kernel needs an address of each")
        given = self.interface.scalars(scalars or {})
        form, call = self._form(views, given), self._call(views, given)
        if form.shape is None:
            raise InputError(f"kernel {self.interface.name} has no task: nothing is bound")
        places = {name: views[name].address if name in views else 0 for name in arrays}
        known = Form.of(places, form.addressed, ALIGNED, form.counter)
        context, function = self._context, self._function
        return Bound(context, function, form.shape, call.params, known, self._counted)

    def _counted(self) -> int:
        """Where the next launch counts, if it does."""
        place = self._counters + 4 * (self._launches % COUNTERS)
        self._launches += 1
        return place

    def resident_tasks(self, tasks: int) -> int:
        """How many of so many tasks the GPU runs at a time."""
        return max(1, min(tasks, self._blocks // self.interface.cluster))

    def global_memory(self, name: str) -> tuple[int, int]:
        """Address and bytes of a `__device__` variable of the kernel's file."""
        return self._context.global_memory(self._module, name)

    def tensor_map(self, spec: TensorMap, kind: str, address: int) -> bytes:
        """A tensor map's 128 bytes, encoded once."""
        key = (spec, kind, address)
        if key not in self._maps:
            self._maps[key] = self._context.tensor_map(spec, kind, address)
        return self._maps[key]

    def _call(self, views: Mapping[str, View], scalars: Mapping[str, Scalar]) -> _Call:
        form = self._form(views, scalars)
        slots, types = list(form.slots), self.interface.types
        addresses = {COUNTER: self._counters}
        for name, of in views.items():
            addresses[name] = self._scratch if 0 in of.shape else of.address
        for place, argument in form.addressed:
            slots[place] = packed(argument, addresses, types, self)
        return _Call(form.shape, Params(slots), form.counter)

    def _form(self, views: Mapping[str, View], scalars: Mapping[str, Scalar]) -> _Form:
        kinds = [
            (v.address % ALIGNED, v.shape, v.strides, v.dtype, v.writable) for v in views.values()
        ]
        key = (*kinds, *(scalar.pack() for scalar in scalars.values()))
        if key not in self._forms:
            self._forms[key] = self._checked(views, scalars)
        return self._forms[key]

    def _checked(self, views: Mapping[str, View], scalars: Mapping[str, Scalar]) -> _Form:
        own = self.interface
        sizes = self._sizes(views)
        for name, of in views.items():
            self._check_memory(name, of)
        tasks = own.tasks(sizes)
        if tasks > LONGEST:
            raise InputError(f"kernel {own.name}: {tasks:,} tasks, at most {LONGEST:,}")
        blocks = tasks * own.cluster
        if own.persistent:
            blocks = min(blocks, self._blocks)
        if blocks > LONGEST:
            raise InputError(
                f"kernel {own.name}: {blocks:,} blocks, a grid has at most {LONGEST:,}"
            )
        if blocks == 0:
            return _Form(None)
        self._check_parameters(views, sizes)
        shapes = {name: of.shape for name, of in views.items()}
        strides = {name: of.strides for name, of in views.items()}
        arguments = own.arguments(shapes, strides, sizes, scalars)
        kinds = [p["kind"] for p in own.parameters]
        return _Form(
            own.shape(blocks),
            tuple(one.pack() if isinstance(one, Scalar) else b"" for one in arguments),
            tuple((at, one) for at, one in enumerate(arguments) if not isinstance(one, Scalar)),
            kinds.index("counter") if "counter" in kinds else -1,
        )

    def _view(self, spec: Array, arrays: Mapping[str, Any], stream: int) -> View:
        if spec.name not in arrays:
            raise InputError(f"kernel {self.interface.name} needs array {spec}")
        found = view(arrays[spec.name], spec.name, stream)
        if found.dtype != spec.dtype.name:
            raise InputError(f"array {spec.name} is {found.dtype}, the kernel takes {spec.dtype}")
        if len(found.shape) != len(spec.dims):
            raise InputError(f"array {spec} was given with shape {list(found.shape)}")
        if found.shape[-1] > 1 and found.strides[-1] != 1:
            raise InputError(
                f"array {spec.name}: its last dimension {spec.dims[-1]!r} has stride "
                f"{found.strides[-1]}, expected 1; make it contiguous or build the transposed form"
            )
        if found.device not in (None, self._context.index):
            raise InputError(
                f"array {spec.name} is on device {found.device}, the kernel was loaded on device "
                f"{self._context.index}"
            )
        return found

    def _sizes(self, views: Mapping[str, View]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for spec in self.interface.arrays:
            for dim, extent in zip(spec.dims, views[spec.name].shape, strict=True):
                if sizes.setdefault(dim, extent) != extent:
                    raise InputError(
                        f"dimension {dim!r} is {sizes[dim]} in one array, {extent} in {spec.name}"
                    )
                if extent > LONGEST:
                    raise InputError(
                        f"dimension {dim!r} of {spec.name} is {extent:,} long, at most {LONGEST:,}"
                    )
        return sizes

    def _check_parameters(self, views: Mapping[str, View], sizes: Mapping[str, int]) -> None:
        for p in self.interface.parameters:
            if sizes.get(p.get("name", ""), 0) % p.get("multiple", 1):
                raise InputError(
                    f"kernel {self.interface.name}: dimension {p['name']} is {sizes[p['name']]}, "
                    f"expected a multiple of {p['multiple']}: it was built for aligned lines"
                )
            if "array" not in p:
                continue
            of, name = views[p["array"]], p["array"]
            if p.get("written") and not of.writable:
                raise InputError(f"array {name} is read-only, the kernel writes to it")
            if p["kind"] == "map" or p.get("aligned"):
                check_copies(of, name, "TMA" if p["kind"] == "map" else "copies of 16 B")
            line, inner = p.get("line", 1), 1
            if p.get("interleaved"):
                inner = 2
                if of.shape[-1] != 2 or tuple(of.strides[-2:]) != (2, 1):
                    raise InputError(
                        f"array {name} is {list(of.shape)} with strides {list(of.strides)}: "
                        "expected two neighbours in its last dimension, and no room between pairs"
                    )
            steps = [
                s for s, n in zip(of.strides[:-inner], of.shape[:-inner], strict=True) if n > 1
            ]
            if of.address % line or any(s * dtype(of.dtype).bytes % line for s in steps):
                raise InputError(
                    f"array {name} at {of.address:#x} with strides {list(of.strides)}: expected "
                    f"multiples of {line} B: the kernel was built for aligned lines"
                )

    def _check_memory(self, name: str, of: View) -> None:
        """Raise for elements across their own size, and for outputs that overlap themselves."""
        element = dtype(of.dtype).bytes
        if of.address % element:
            raise InputError(
                f"array {name}: address {of.address:#x} is no multiple of its {element} B elements"
            )
        if not self.interface.written(name):
            return
        reach = 0
        for step, extent in sorted(
            (abs(s), n) for s, n in zip(of.strides, of.shape, strict=True) if n > 1
        ):
            if step <= reach:
                raise InputError(
                    f"array {name} is written to, but strides {list(of.strides)} of shape "
                    f"{list(of.shape)} let its elements overlap; give it memory of its own"
                )
            reach += step * (extent - 1)

    def _check_device(self) -> None:
        own, attribute = self.interface, self._context.attribute
        number = own.arch.removeprefix("sm_")
        built = int(number.rstrip("abcdef"))
        present = 10 * attribute("COMPUTE_CAPABILITY_MAJOR") + attribute("COMPUTE_CAPABILITY_MINOR")
        # Machine code runs on its own generation from its own minor version on; "a" only there.
        exact = not number.isdigit()
        if present != built if exact else (present // 10 != built // 10 or present < built):
            raise InputError(
                f"kernel {own.name} was built for {own.arch}, device {self._context.index} is "
                f"sm_{present}; build it for that architecture"
            )
        limit = attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        if own.shared_bytes > limit:
            raise InputError(
                f"kernel {own.name} needs {own.shared_bytes:,} B of shared memory, the GPU has "
                f"{limit:,}"
            )


def check_copies(of: View, name: str, purpose: str) -> None:
    """Raise `InputError`, with the numbers, for a tensor whose rows cannot be copied by 16 bytes.

    Rules of `cuTensorMapEncodeTiled` (CUDA driver API): address and pitches are multiples of 16
    bytes, the innermost dimension has stride 1, pitches are below 2^40.
    """
    if 0 in of.shape:
        return
    element = dtype(of.dtype).bytes
    pitches = pitches_of(of.shape, of.strides, element)
    if of.address % PITCH:
        raise InputError(
            f"array {name}: address {of.address:#x} must be a multiple of {PITCH} B for {purpose}, "
            f"it is {of.address % PITCH} B past one; start the view at a multiple of "
            f"{PITCH // element} elements"
        )
    if any(pitch % PITCH for pitch in pitches):
        raise InputError(
            f"array {name}: pitches {pitches} B must be multiples of {PITCH} B for {purpose}; pad "
            f"its last dimension of {of.shape[-1]} to a multiple of {PITCH // element} elements"
        )
    if any(not 0 < pitch < MOST_PITCH for pitch in pitches):
        raise InputError(
            f"array {name}: pitches {pitches} B must be between 1 and 2^40 - 1 for {purpose}; copy "
            "an expanded or reversed view first"
        )
