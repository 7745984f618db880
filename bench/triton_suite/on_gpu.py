"""Running the suite on a GPU through Triton and torch: inputs, launches, references, best times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

from bench.triton_suite.common import Config, Shape, SuiteKernel, Tensor
from warploom.tile.dtypes import MEMORY


@dataclass(frozen=True)
class TimedConfig:
    """One configuration and its median time; NaN with the reason when it does not run."""

    config: Config
    micros: float
    reason: str = ""


def make_tensors(kernel: SuiteKernel, shape: Shape, seed: int = 0) -> dict[str, Any]:
    """Random inputs and NaN-filled outputs on the GPU, by name."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    tensors: dict[str, Any] = {}
    for item in kernel.arguments(shape):
        if not isinstance(item, Tensor):
            continue
        kind = getattr(torch, MEMORY[item.dtype].library)
        if item.role == "in":
            values = torch.randn(item.shape, generator=generator, device="cuda")
            tensors[item.name] = (values * item.scale).to(kind)
        else:
            tensors[item.name] = torch.full(item.shape, torch.nan, dtype=kind, device="cuda")
    return tensors


def launch(
    kernel: SuiteKernel,
    config: Config,
    tensors: Mapping[str, Any],
    shape: Shape,
    function: Any = None,
) -> Any:
    """Launch through Triton (`function` instead of the kernel's own); returns what it compiled."""
    values = [
        tensors[item.name] if isinstance(item, Tensor) else item.value
        for item in kernel.arguments(shape)
    ]
    return (function or kernel.function)[kernel.grid(shape, config)](
        *values,
        **kernel.constexprs(config),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def worst_error(kernel: SuiteKernel, tensors: Mapping[str, Any]) -> float:
    """The largest ||out - ref|| / ||ref|| over the outputs; NaN when an output holds one."""
    errors = [
        float((tensors[name].double() - right.double()).norm() / right.double().norm())
        for name, right in kernel.reference(tensors).items()
    ]
    return max(errors, key=lambda error: (math.isnan(error), error))


def time_configurations(kernel: SuiteKernel, shape: Shape | None = None) -> list[TimedConfig]:
    """Every configuration checked against the reference and timed (graph replays, warm, median).

    The fastest comes first; a configuration that does not run or is wrong comes last, with why.
    """
    sizes = shape or kernel.shape
    timed = [time_one(kernel, config, sizes) for config in kernel.configs]
    return sorted(timed, key=lambda item: (math.isnan(item.micros), item.micros))


def time_one(kernel: SuiteKernel, config: Config, shape: Shape) -> TimedConfig:
    """One configuration: checked, then timed."""
    tensors = make_tensors(kernel, shape)
    try:
        launch(kernel, config, tensors, shape)
        torch.cuda.synchronize()
    except triton.runtime.errors.OutOfResources as error:
        return TimedConfig(config, float("nan"), str(error).split(". ", maxsplit=1)[0])
    error = worst_error(kernel, tensors)
    if not error <= kernel.tolerance:
        return TimedConfig(config, float("nan"), f"wrong: relative error {error:.2e}")
    millis = triton.testing.do_bench_cudagraph(
        lambda: launch(kernel, config, tensors, shape), rep=100, return_mode="median"
    )
    return TimedConfig(config, 1000.0 * millis)
