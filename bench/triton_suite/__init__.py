"""The Triton kernels of the machine-code bench: eight kernels behind one small interface.

`from bench.triton_suite import SUITE` needs `triton` >= 3.6, no torch.
"""

from __future__ import annotations

from bench.triton_suite import (
    attention,
    batched_gemm,
    feed_forward,
    gemm_leaky_relu,
    layernorm,
    rmsnorm,
    skinny_gemm,
    softmax,
)
from bench.triton_suite.common import Config, Scalar, SuiteKernel, Tensor

SUITE: dict[str, SuiteKernel] = {
    module.KERNEL.name: module.KERNEL
    for module in (
        attention,
        gemm_leaky_relu,
        batched_gemm,
        feed_forward,
        softmax,
        layernorm,
        rmsnorm,
        skinny_gemm,
    )
}

__all__ = ["SUITE", "Config", "Scalar", "SuiteKernel", "Tensor"]
