"""Long convolution in float64: what `warploom.kernels.convolution.program` is checked by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from warploom.kernels.convolution.config import ConvolutionConfig

Wide = NDArray[np.float64]


def reference(config: ConvolutionConfig, x: NDArray[np.floating], kernel: Wide) -> Wide:
    """y[n] = sum over m of kernel[m] x[n - m], where x is 0 before its begin (`causal`) or comes
    round. `x: [batch, heads, taps]`, `kernel: [heads, taps]`; summed term by term."""
    taps = x.shape[-1]
    wide = np.asarray(x, np.float64)
    before = np.zeros_like(wide) if config.causal else wide
    both = np.concatenate([before, wide], axis=-1)
    windows = np.lib.stride_tricks.sliding_window_view(both, taps, axis=-1)[..., 1:, :]
    return np.einsum("bhnm,hm->bhn", windows, kernel[:, ::-1])
