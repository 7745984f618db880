"""Compiling a kernel of the suite with no GPU: from (kernel, configuration) to a captured cubin."""

from __future__ import annotations

from bench.triton_suite.common import Config, Shape, SuiteKernel, Tensor
from warploom.integrations.triton_capture import (
    CapturedKernel,
    ScalarArgument,
    TensorArgument,
    capture,
)


def compile_offline(
    kernel: SuiteKernel, config: Config, arch: int = 90, shape: Shape | None = None
) -> CapturedKernel:
    """The cubin of `kernel` under `config` for compute capability `arch`, with its launch."""
    sizes = shape or kernel.shape
    arguments = {
        parameter: (
            TensorArgument(item.dtype, item.shape, item.role, name=item.name)
            if isinstance(item, Tensor)
            else ScalarArgument(item.dtype, item.value)
        )
        for parameter, item in zip(run_time_names(kernel), kernel.arguments(sizes), strict=True)
    }
    return capture(
        kernel.function,
        arguments,
        constexprs=kernel.constexprs(config),
        grid=kernel.grid(sizes, config),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        arch=arch,
    )


def run_time_names(kernel: SuiteKernel) -> list[str]:
    """The function's run-time parameters, in order."""
    return [item.name for item in kernel.function.params if not item.is_constexpr]
