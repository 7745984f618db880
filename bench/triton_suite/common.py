"""What every kernel of the suite says about itself: configurations, arguments, floors, reference.

Shapes are dictionaries of named sizes, so one kernel can be described at any of them. Everything
here works with no GPU and without torch; only `SuiteKernel.reference` receives torch tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Shape = Mapping[str, int]
Grid = tuple[int, int, int]

DTYPE_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "i32": 4}


@dataclass(frozen=True)
class Config:
    """One Triton configuration: compile-time sizes, warps per block and pipeline stages."""

    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        """A short name that is unique within a kernel, such as `128x256x64_w8_s3`."""
        sizes = "x".join(str(value) for value in self.constexprs.values())
        return f"{sizes}_w{self.num_warps}_s{self.num_stages}"


@dataclass(frozen=True)
class Tensor:
    """A tensor argument: C-contiguous, `role` is `in` (random, scaled by `scale`) or `out`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str = "in"
    scale: float = 1.0

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        size = DTYPE_BYTES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True)
class Scalar:
    """A scalar argument of type `i32` or `fp32`."""

    name: str
    dtype: str
    value: int | float


@dataclass(frozen=True)
class SuiteKernel:
    """A Triton kernel with all that compiling, launching, checking and bounding it takes.

    `arguments` and `grid` follow the order of the function's run-time parameters. `reference` maps
    the input tensors by name (torch) to the outputs by name, in float64 or float32; a candidate is
    right when ||out - ref|| / ||ref|| <= `tolerance`. `flops` counts multiply-add as 2 and runs on
    `unit` (`tensor` cores or plain `lanes`); `exponentials` run on the special-function unit.
    """

    name: str
    function: Any
    configs: tuple[Config, ...]
    shape: Shape
    arguments: Callable[[Shape], tuple[Tensor | Scalar, ...]]
    grid: Callable[[Shape, Config], Grid]
    reference: Callable[[Mapping[str, Any]], dict[str, Any]]
    flops: Callable[[Shape], int]
    unit: str = "tensor"
    exponentials: Callable[[Shape], int] = lambda shape: 0
    tolerance: float = 5e-3
    dtype: str = "fp16"
    notes: str = ""
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def bytes_moved(self, shape: Shape | None = None) -> int:
        """Bytes of the memory floor: every input read once, every output written once."""
        arguments = self.arguments(shape or self.shape)
        return sum(item.nbytes for item in arguments if isinstance(item, Tensor))

    def constexprs(self, config: Config) -> dict[str, Any]:
        """All compile-time parameters of the function under `config`."""
        return {**self.constants, **config.constexprs}

    def config(self, name: str) -> Config:
        """The configuration of that name; raises `KeyError` naming those there are."""
        for config in self.configs:
            if config.name == name:
                return config
        known = ", ".join(config.name for config in self.configs)
        raise KeyError(f"{self.name} has no configuration {name!r}, expected one of: {known}")


def shape_text(shape: Shape) -> str:
    """A shape as one readable token, such as `m=2048,n=2048,k=2048`."""
    return ",".join(f"{name}={value}" for name, value in shape.items())


def ceil_div(value: int, step: int) -> int:
    """The number of steps that cover `value`."""
    return -(-value // step)


def tile_configs(
    names: tuple[str, ...], rows: tuple[tuple[int, ...], ...], **fixed: Any
) -> tuple[Config, ...]:
    """Configurations from rows of (sizes..., num_warps, num_stages)."""
    return tuple(
        Config({**dict(zip(names, row[:-2], strict=True)), **fixed}, row[-2], row[-1])
        for row in rows
    )
