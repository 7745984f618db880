"""`warploom.kernel` on a GPU: numbers, types, streams, graphs, torch.compile, what is refused."""

import math

import pytest

import warploom
from warploom import tile as t
from warploom.errors import InputError

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@warploom.kernel(a="m k", b="k n", c="m n")
def scaled(a, b, c, tile: int = 128):
    i, j = t.grid(m=t.cdiv(t.size("m"), tile), n=t.cdiv(t.size("n"), tile))
    rows, cols = t.span(i * tile, tile), t.span(j * tile, tile)
    total = t.zeros(m=tile, n=tile)
    for step in t.loop(t.cdiv(t.size("k"), 64)):
        part = t.span(step * 64, 64)
        total += t.load(a, rows, part) @ t.load(b, part, cols)
    t.store(c, rows, cols, tile=(total * t.scalar("factor")).cast(c.dtype))


@warploom.kernel(x="m n", y="m n", largest=t.array(t.FP32, "m"))
def shifted(x, y, largest, block: int = 4):
    (i,) = t.grid(m=t.cdiv(t.size("m"), block))
    rows, cols = t.span(i * block, block), t.span(0, 512)
    wide = t.load(x, rows, cols, edge=-math.inf).cast(t.FP32)
    top = t.max_along(wide, "n")
    t.store(largest, rows, tile=top)
    t.store(y, rows, cols, tile=(wide - top).cast(y.dtype))


def matrix(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda").to(dtype)


def close(got, want, bound=8e-3):
    return float((got.double() - want.double()).norm() / want.double().norm()) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(200, 264, 136), (1, 8, 8), (513, 1000, 2048)])
def test_sizes_and_types_are_those_of_the_tensors(dtype, sizes):
    m, n, k = sizes
    a, b = matrix(m, k, dtype=dtype), matrix(k, n, dtype=dtype)
    got = scaled(a, b, 0.5)
    assert got.dtype is dtype and got.device == a.device
    assert close(got, 0.5 * (a.double() @ b.double()))
    assert torch.equal(scaled(a, b, factor=0.5, tile=64).isnan(), torch.zeros_like(got).bool())


def test_a_kernel_without_a_matmul_gives_two_arrays():
    x = matrix(77, 500)
    y, largest = shifted(x)
    assert torch.equal(largest, x.float().amax(1))
    assert close(y, x.double() - x.double().amax(1, keepdim=True))


def test_a_call_is_queued_on_the_current_stream_and_captured():
    a, b = matrix(256, 256), matrix(256, 256)
    scaled(a, b, 1.0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        a.copy_(matrix(256, 256))  # a call on another stream would read what was there before
        got = scaled(a, b, 1.0)
    torch.cuda.current_stream().wait_stream(side)
    assert close(got, a.double() @ b.double())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = scaled(a, b, 1.0)
    a.copy_(matrix(256, 256))
    graph.replay()
    assert close(got, a.double() @ b.double())


def test_torch_compile_takes_it_whole_once_it_was_called():
    a, b = matrix(128, 64), matrix(64, 128)
    scaled(a, b, 2.0)
    whole = torch.compile(lambda a, b: scaled(a, b, 2.0).relu() + 1, fullgraph=True)
    assert close(whole(a, b), (2.0 * (a.double() @ b.double())).relu() + 1)


def test_a_second_call_builds_nothing_and_costs_little():
    a, b = matrix(64, 64), matrix(64, 64)
    first, second = scaled(a, b, 1.0), scaled(a, b, 1.0)
    count = len(scaled.operators)
    assert torch.equal(first, second)
    scaled(matrix(128, 64), b, 1.0)
    assert len(scaled.operators) == count, "another size, the same kernel"


def test_a_program_is_taken_as_it_is():
    made = warploom.kernel(scaled.program())
    a, b = matrix(100, 72), matrix(72, 40)
    assert torch.equal(made(a, b, 1.0), scaled(a, b, 1.0))
    with pytest.raises(InputError, match="a is fp16, it was declared bf16"):
        made(a.half(), b.half(), 1.0)
    with pytest.raises(InputError, match="b is on cpu, expected a CUDA device"):
        made(a, b.cpu(), 1.0)


def test_what_is_wrong_with_a_tensor_is_said():
    a = matrix(100, 72)
    with pytest.raises(InputError, match="dimension 'k' is 72 in one array, 100 in b"):
        scaled(a, a, 1.0)
    with pytest.raises(InputError, match="multiple"):
        scaled(matrix(16, 17), matrix(17, 16), 1.0)
