"""Plain functions that tests turn into fresh Triton kernels with `triton.jit`."""

from __future__ import annotations

import triton.language as tl


def add_one(x_ptr, y_ptr, n, block: tl.constexpr):
    """y = x + 1."""
    lanes = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + lanes, mask=lanes < n)
    tl.store(y_ptr + lanes, x + 1.0, mask=lanes < n)


def typed(x_ptr, types: tl.constexpr):
    """x[0] = 1, rounded through types[0]."""
    tl.store(x_ptr, tl.full((), 1, types[0]).to(tl.float32))


def scaled(x_ptr, factor, stride, y_ptr, n, block: tl.constexpr, bias: tl.constexpr = 2):
    """y = x[stride * i] * factor + bias."""
    lanes = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + lanes * stride, mask=lanes < n)
    tl.store(y_ptr + lanes, x * factor + bias, mask=lanes < n)
