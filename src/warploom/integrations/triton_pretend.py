"""A script's tensors without a GPU: what it puts on "cuda" has a shape and a type, and no values.

torch's "meta" device computes shapes in every build of torch. While `pretending`, what is asked for
on "cuda" is made there, and says that it is on cuda:0; torch and Triton answer what scripts ask of
a device. What needs a value, such as `item()`, raises as torch has it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

from warploom import machine
from warploom.integrations.triton_access import triton_module

GPUS = {90: "h200", 80: "a100"}  # by the architecture that kernels are compiled for


@contextlib.contextmanager
def pretending(arch: int) -> Generator[None]:
    """While this lasts, there seems to be one GPU of that architecture."""
    config: Any = triton_module("triton.runtime").driver
    before = config._active
    config.set_active(_Driver(arch))
    try:
        with _torch(arch):
            yield
    finally:
        config._active = before


@contextlib.contextmanager
def _torch(arch: int) -> Generator[None]:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        yield
        return
    cuda = torch.cuda
    found = _properties(arch)
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "get_device_capability": divmod(arch, 10),
        "get_device_properties": SimpleNamespace(**found),
        "get_device_name": found["name"],
        "synchronize": None,
        "current_stream": SimpleNamespace(cuda_stream=0),
    }
    before = {name: getattr(cuda, name) for name in answers}
    for name, answer in answers.items():
        setattr(cuda, name, functools.partial(_said, answer))
    try:
        with _mode(torch)():
            yield
    finally:
        for name, answer in before.items():
            setattr(cuda, name, answer)


def _said(answer: Any, device: Any = None) -> Any:
    return answer


def _properties(arch: int) -> dict[str, Any]:
    gpu = machine.load(GPUS[arch])
    major, minor = divmod(arch, 10)
    return {
        "name": gpu.title,
        "major": major,
        "minor": minor,
        "multi_processor_count": gpu.integer("sm.count"),
        "warp_size": 32,
    }


class _Driver:
    """Triton's driver where there is none: it answers, and launches nothing."""

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self.utils = SimpleNamespace(get_device_properties=self._found)

    def _found(self, device: int) -> dict[str, Any]:
        found = _properties(self._arch)
        shared = machine.load(GPUS[self._arch]).integer("smem.per_block_max")
        return {
            "multiprocessor_count": found["multi_processor_count"],
            "max_shared_mem": shared,
            "warpSize": 32,
        }

    def get_current_target(self) -> Any:
        """What kernels are compiled for."""
        targets: Any = triton_module("triton.backends.compiler")
        return targets.GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> Any:
        """Where Triton's tutorials put their tensors."""
        torch: Any = importlib.import_module("torch")
        return torch.device("cuda", 0)


def _mode(torch: Any) -> Any:
    """The class of torch's mode that makes tensors on "meta" for "cuda"."""
    overrides: Any = importlib.import_module("torch.overrides")
    there, here = torch.device("meta"), torch.device("cuda", 0)
    is_cuda, device_of = torch.Tensor.is_cuda.__get__, torch.Tensor.device.__get__

    def placed(value: Any, named: bool) -> Any:
        if isinstance(value, torch.device):
            return there if value.type == "cuda" else value
        if named and isinstance(value, str) and value.partition(":")[0] == "cuda":
            return there
        return there if named and isinstance(value, int) and not isinstance(value, bool) else value

    class OnMeta(overrides.TorchFunctionMode):
        def __torch_function__(
            self,
            function: Any,
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            if function == is_cuda:
                return args[0].is_meta
            if function == device_of:
                return here if args[0].is_meta else function(*args)
            if function is torch.Tensor.cuda:
                return args[0].to(there)
            moves = function is torch.Tensor.to
            given = [placed(value, moves and isinstance(value, str)) for value in args]
            named = {key: placed(value, key == "device") for key, value in (kwargs or {}).items()}
            return function(*given, **named)

    return OnMeta
