"""The matrices of a Fourier transform of N = N1 x 64 numbers as two products with a factor between.

With n = 64 a + b and frequency f + N1 g,

    X[f, g] = sum_b (w_N^(b f) sum_a w_N1^(a f) x[a, b]) w_64^(b g),   w_n = exp(-2 pi i / n)

as w_N^((64 a + b) (f + N1 g)) has no part in a g. A tile has 64 rows: 64 / N1 sequences, each with
its own block of the matrices from the left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.kernels.convolution.config import COLUMNS, ROWS, ConvolutionConfig
from warploom.tile import BF16, round_to

Real = NDArray[np.float32]
Wide = NDArray[Any]  # of complex128


def matrices(config: ConvolutionConfig) -> Mapping[str, Real]:
    """The constant arrays of the program, as it takes them: rounded to bf16.

    `left: [64, rows of x]`, `right: [64, 64]`, of causal sequences `back: [64, 64]`, and
    `twiddle: [64, 64]`, each as its real part `_re` and its imaginary part `_im`; the way back is
    by their conjugates.
    Both directions together divide by N, each product by the root of its length.
    """
    factor, each = config.factor, config.factor // (2 if config.causal else 1)
    count = config.heads
    own, zeros = _transform(factor), np.zeros((ROWS - config.taken, ROWS))
    found: dict[str, Wide] = {"left": _blocks(own[:, :each], count), "right": _transform(COLUMNS)}
    if config.causal:
        found["back"] = np.concatenate([_blocks(own[:each], count), zeros])
    named: dict[str, Real] = {}
    for name, matrix in found.items():
        named |= {f"{name}_re": _narrow(np.real(matrix)), f"{name}_im": _narrow(np.imag(matrix))}
    turn = np.outer(np.arange(factor), np.arange(COLUMNS)) / config.length
    twiddle = np.tile(np.exp(-2j * np.pi * turn), (count, 1))
    return named | {
        "twiddle_re": _narrow(np.real(twiddle)),
        "twiddle_im": _narrow(np.imag(twiddle)),
    }


def spectrum(config: ConvolutionConfig, kernel: NDArray[np.floating]) -> Wide:
    """The transform of `kernel: [heads, taps]`, taps at most N, as the program takes it:
    [heads * N1, 64], frequency f + N1 g of a head in its row f and column g."""
    wide = np.fft.fft(kernel.astype(np.float64), config.length, axis=-1)
    split = wide.reshape(len(kernel), COLUMNS, config.factor)
    return split.transpose(0, 2, 1).reshape(-1, COLUMNS)


def windows(config: ConvolutionConfig, kernel: NDArray[np.floating]) -> NDArray[np.floating]:
    """The taps of `kernel: [heads, taps]` that take one block to another one d blocks later, for
    every d, as their transform wants them: [heads, blocks, N], those of negative lags at the end.
    """
    each = config.taps
    count = -(-kernel.shape[-1] // each)
    room = np.pad(kernel, ((0, 0), (each, count * each - kernel.shape[-1])))
    both = [np.roll(room[:, d * each : (d + 2) * each], each, axis=-1) for d in range(count)]
    return np.stack(both, 1)


def _blocks(matrix: Wide, count: int) -> Wide:
    """A matrix with `count` of this one along its diagonal."""
    return np.kron(np.eye(count), matrix)


def _transform(length: int) -> Wide:
    """The matrix of a transform, divided by the root of its length."""
    places = np.arange(length)
    return np.exp(-2j * np.pi * np.outer(places, places) / length) / np.sqrt(length)


def _narrow(values: NDArray[np.float64]) -> Real:
    return np.asarray(round_to(BF16, values), np.float32)
