"""Long convolution on a GPU: beside a transform in float64, compiled, in a graph."""

import pytest

torch = pytest.importorskip("torch")
ops = pytest.importorskip("warploom.integrations.torch_convolution")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ALONE = 64  # numbers of which the error in norm is no mean yet
BOUND = 8e-3  # relative error in norm: matrices, factors and what lies between are rounded to bf16


def case(batch, heads, taps):
    x = torch.randn(batch, heads, taps, device="cuda").bfloat16()
    decay = torch.exp(-4 * torch.arange(taps, device="cuda") / taps)
    return x, torch.randn(heads, taps, device="cuda") * decay / taps**0.5


def exact(x, kernel, causal):
    taps = x.shape[-1]
    length = 2 * taps if causal else taps
    wide = torch.fft.rfft(x.double(), n=length) * torch.fft.rfft(kernel.double(), n=length)
    return torch.fft.irfft(wide, n=length)[..., :taps]


def error(found, right):
    return float((found.double() - right).norm() / right.norm())


@pytest.mark.parametrize("batch, heads", [(1, 1), (5, 7), (16, 64)])
@pytest.mark.parametrize(
    "taps, causal",
    [(1, True), (256, True), (700, True), (2048, True), (2049, True), (8192, True), (16384, True),
     (512, False), (1024, False), (2048, False), (4096, False)],
)  # fmt: skip
def test_every_length_is_right(batch, heads, taps, causal):
    x, kernel = case(batch, heads, taps)
    # One number alone is off by all its roundings, not by their mean.
    bound = BOUND if x.numel() > ALONE else 4 * BOUND
    assert error(ops.long_convolution(x, kernel, causal), exact(x, kernel, causal)) < bound


@pytest.mark.parametrize("taps, causal", [(1024, True), (8192, True), (1024, False), (4096, False)])
def test_every_sequence_of_many_is_right(taps, causal):
    """Where all groups of all blocks have several tasks."""
    x, kernel = case(19 if taps > 4096 else 67, 128, taps)
    bands = ops.kernel_spectrum(kernel, taps, causal)
    right = exact(x, kernel, causal)
    for _ in range(5):
        off = ops.long_convolution(x, bands, causal).double() - right
        assert float((off.norm(dim=-1) / right.norm(dim=-1)).max()) < 2 * BOUND


@pytest.mark.parametrize("taps, causal", [(700, True), (2048, True), (1024, False), (4096, False)])
def test_gates_are_products(taps, causal):
    x, kernel = case(5, 7, taps)
    before, after = (torch.randn_like(x) for _ in range(2))
    got = ops.long_convolution(x, kernel, causal, before, after)
    right = exact(x.double() * before.double(), kernel, causal) * after.double()
    assert error(got, right) < BOUND


def test_compiled_and_in_a_graph():
    x, kernel = case(4, 8, 1024)
    bands = ops.kernel_spectrum(kernel, 1024)
    call = torch.compile(lambda x: ops.long_convolution(x * 2, bands) + 1)
    right = exact(x * 2, kernel, True) + 1
    assert error(call(x), right) < BOUND
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.long_convolution(x, bands)
    graph.replay()
    assert error(y, exact(x, kernel, True)) < BOUND


@pytest.mark.parametrize("taps, causal", [(700, True), (2048, True), (5000, True), (1024, False)])
def test_gradients_are_those_of_a_transform_in_float64(taps, causal):
    x, kernel = (one.requires_grad_() for one in case(5, 7, taps))
    dy = torch.randn_like(x)
    got = torch.autograd.grad(ops.long_convolution(x, kernel, causal), (x, kernel), dy)
    wide = [one.detach().double().requires_grad_() for one in (x, kernel)]
    want = torch.autograd.grad(exact(*wide, causal), wide, dy.double())
    assert all(error(one, other) < BOUND for one, other in zip(got, want, strict=True))
