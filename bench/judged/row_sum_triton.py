"""A candidate in Triton for sums of rows; Triton's interpreter runs it where no GPU is."""

import triton
import triton.language as tl


@triton.jit
def _kernel(x, y, n, block: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, block)
    tl.store(y + row, tl.sum(tl.load(x + row * n + at, mask=at < n, other=0.0)))


@triton.jit
def _unmasked(x, y, n, block: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, block)
    tl.store(y + row, tl.sum(tl.load(x + row * n + at)))


def right(x, y):
    _kernel[(x.shape[0],)](x, y, x.shape[1], triton.next_power_of_2(x.shape[1]))


def unmasked(x, y):
    _unmasked[(x.shape[0],)](x, y, x.shape[1], triton.next_power_of_2(x.shape[1]))
