"""A launch made ready on a device: load images, run them, judge them against the original."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from warploom.errors import CheckFailed, InputError
from warploom.runtime.buffers import Workspace, describe_difference
from warploom.runtime.device import Shape
from warploom.runtime.driver import CudaDevice
from warploom.runtime.helpers import Difference, Helpers
from warploom.runtime.launch import LaunchSpec, Params, pack_arguments


@dataclass(frozen=True)
class Workload:
    """An original cubin, how to launch it and the inputs it is searched on."""

    image: bytes
    spec: LaunchSpec
    seed: int = 0
    pattern: str = "randn"

    @property
    def digest(self) -> str:
        """The SHA-256 of the original image."""
        return image_digest(self.image)


def image_digest(image: bytes) -> str:
    """The SHA-256 of a cubin, the name it goes by in results."""
    return hashlib.sha256(image).hexdigest()


@dataclass(frozen=True)
class Loaded:
    """A candidate loaded as a module of its own."""

    module: Any
    function: Any


class Workbench:
    """A device, the helper kernels and the arenas of one launch.

    Raises `InputError` when the launch asks for more shared memory than the device has.
    """

    def __init__(self, device: CudaDevice, helpers: Helpers, spec: LaunchSpec) -> None:
        most = device.info.shared_optin_bytes
        if spec.shared_bytes > most:
            raise InputError(
                f"launch of {spec.kernel} asks for {spec.shared_bytes} bytes of shared memory, "
                f"{device.info.name} allows {most}"
            )
        self.device = device
        self.helpers = helpers
        self.spec = spec
        self.shape = Shape(spec.grid, spec.block, spec.shared_bytes, spec.cluster)
        self.workspace = Workspace(device, helpers, spec)
        self._params = {
            arena: pack_arguments(
                spec.arguments, self.workspace.addresses(arena), spec.kinds, device
            )
            for arena in (self.workspace.expected, self.workspace.work)
        }

    def close(self) -> None:
        """Give the device memory back."""
        self.workspace.close()

    def load(self, image: bytes) -> Loaded:
        """Load an image as a fresh module; `CudaError` when the driver refuses it."""
        module = self.device.load(image)
        try:
            function = self.device.function(
                module, self.spec.kernel, self.spec.shared_bytes, math.prod(self.spec.cluster)
            )
        except Exception:
            self.device.unload(module)
            raise
        return Loaded(module, function)

    def unload(self, loaded: Loaded) -> None:
        """Unload a module."""
        self.device.unload(loaded.module)

    def params(self, arena: int | None = None) -> Params:
        """The kernel parameters for running in `arena` (the work arena when not given)."""
        return self._params[self.workspace.work if arena is None else arena]

    def launch(self, loaded: Loaded, arena: int | None = None) -> None:
        """Queue one launch in `arena` (the work arena when not given)."""
        self.device.launch(loaded.function, self.shape, self.params(arena))

    def launcher(self, loaded: Loaded) -> Callable[[], None]:
        """What queues a launch in the work arena."""
        return functools.partial(self.launch, loaded)

    def expect(self, original: Loaded, seed: int, patterns: Sequence[str]) -> None:
        """Make fresh inputs and queue the original on them, which writes the expected outputs.

        With several patterns the first is used: sample 0 of the seed.
        """
        space = self.workspace
        self.helpers.reset()
        space.fill(space.pristine, seed, patterns)
        self.device.copy(space.expected, space.pristine, space.layout.nbytes)
        self.launch(original, space.expected)

    def judge(self, candidate: Loaded) -> Difference | None:
        """Run a candidate on the pristine inputs and compare everything; None when equal."""
        self.helpers.reset()
        self.workspace.restore()
        self.launch(candidate)
        self.workspace.compare()
        return self.workspace.difference()

    def check_original(self, original: Loaded) -> None:
        """Refuse an original that cannot serve as a reference.

        Raises `CheckFailed` when it writes outside its buffers, or gives other bits when run twice
        (then no bitwise comparison means anything).
        """
        if broken := self.workspace.broken_guard(self.workspace.expected):
            raise CheckFailed(f"the original {self.spec.kernel} writes into {broken}")
        if found := self.judge(original):
            raise CheckFailed(
                f"the original {self.spec.kernel} is not deterministic: "
                f"{describe_difference(self.workspace.layout, found)} between two runs"
            )
