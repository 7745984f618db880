"""The operator of long convolution without a GPU: shapes of results, the spectrum, refusals."""

import re

import numpy as np
import pytest

from warploom.errors import InputError
from warploom.kernels.convolution.config import COLUMNS, ConvolutionConfig
from warploom.kernels.convolution.matrices import spectrum

torch = pytest.importorskip("torch")
ops = pytest.importorskip("warploom.integrations.torch_convolution")


def make(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, device="meta", dtype=dtype)


@pytest.mark.parametrize(
    "taps, causal", [(1, True), (1000, True), (2048, True), (5000, True), (4096, False)]
)
def test_results_are_like_x(taps, causal):
    x, kernel = make(2, 6, taps), make(6, taps, dtype=torch.float32)
    for given in (kernel, kernel[:, : taps // 2 + 1], ops.kernel_spectrum(kernel, taps, causal)):
        y = ops.long_convolution(x, given, causal)
        assert y.shape == x.shape and y.dtype is torch.bfloat16


def test_gates_are_like_x():
    x, kernel = make(2, 6, 1000), make(6, 700, dtype=torch.float32)
    assert ops.long_convolution(x, kernel, True, x, x).shape == x.shape
    gate = make(2, 6, 1000).requires_grad_()
    ops.long_convolution(x, kernel, pregate=gate).sum().backward()
    assert gate.grad.shape == x.shape
    said = re.escape("postgate is [2, 6, 999], expected [2, 6, 1000]")
    with pytest.raises(InputError, match=said):
        ops.long_convolution(x, kernel, postgate=x[..., 1:])


def test_the_spectrum_is_that_of_the_matrices():
    kernel = np.random.default_rng(2).normal(size=(3, 200))
    right = spectrum(ConvolutionConfig(512), kernel)
    for found, part in zip(
        ops.kernel_spectrum(torch.tensor(kernel), 256), (right.real, right.imag), strict=True
    ):
        assert np.linalg.norm(found.float().numpy() - part) < 4e-3 * np.linalg.norm(part)


def test_the_gradient_of_a_spectrum_is_that_of_autograd():
    x, dy = (torch.randn(3, 2, 100, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    parts = [torch.randn(2, 512).requires_grad_() for _ in range(2)]
    wide = torch.fft.fft(x, n=512) * torch.complex(*parts)
    want = torch.autograd.grad(torch.fft.ifft(wide).real[..., :100], parts, dy)
    found = ops.spectrum_gradient(x, dy, ConvolutionConfig(512))
    for one, other in zip((found.real, found.imag), want, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-5


def test_the_gradient_of_windows_of_a_kernel_is_that_of_the_kernel():
    config, taps = ops.convolution_config(5000, True), 5000
    draw = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(2, 2, taps, generator=draw) for _ in range(2))
    kernel = torch.randn(2, taps, generator=draw).requires_grad_()
    bands = ops.kernel_spectrum(kernel, taps)
    assert bands[0].shape == (2 * 3 * COLUMNS, COLUMNS)
    found = ops._bands(ops.spectrum_gradient(x, dy, config), config)
    found = torch.autograd.grad(bands, kernel, [one.bfloat16() for one in found])[0]
    wide = torch.fft.rfft(kernel, n=2 * taps) * torch.fft.rfft(x, n=2 * taps)
    want = torch.autograd.grad(torch.fft.irfft(wide)[..., :taps], kernel, dy)[0]
    assert float((found - want).norm() / want.norm()) < 8e-3


def test_gradients_are_like_their_tensors():
    x, kernel = make(2, 6, 1000).requires_grad_(), make(6, 700, dtype=torch.float32)
    kernel.requires_grad_()
    ops.long_convolution(x, kernel).sum().backward()
    assert x.grad.shape == x.shape and x.grad.dtype is torch.bfloat16
    assert kernel.grad.shape == kernel.shape and kernel.grad.dtype is torch.float32


@pytest.mark.parametrize(
    "x, kernel, causal, said",
    [
        (make(2, 6, 16385), make(6, 10), True, "of 16385 elements: expected 1 to 16384"),
        (make(2, 6, 1000), make(6, 10), False, "length=1000: expected one of 512"),
        (make(2, 6, 100), make(6, 101), True, "kernel is [6, 101], expected [heads, up to 100]"),
        (make(2, 6, 100), make(5, 100), True, "kernel_re is [40, 64], expected [48, 64]"),
        (make(6, 100), make(6, 100), True, "of x [6, 100]: expected [batch, heads, elements]"),
        (make(2, 6, 100, dtype=torch.float32), make(6, 9), True, "x is torch.float32, expected"),
    ],
)
def test_refusals_name_what_is_wrong(x, kernel, causal, said):
    with pytest.raises(InputError, match=re.escape(said)):
        ops.long_convolution(x, kernel, causal)
