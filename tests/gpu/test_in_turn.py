"""Points of two kernels on a GPU: run with `make gpu-test`."""

import pytest

from warploom.autosched.points import Point
from warploom.engine.points import Space
from warploom.errors import InputError
from warploom.kernels.check import checked

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
TEXTBOOK = "examples/textbook_gemm.py:kernel"


def made(plan):
    space = Space(TEXTBOOK, {})
    point = Point((("tile_m", "64"), ("tile_n", "128")), (), "inflight", plan)
    selected = space.selected(point, "h200")
    return selected.config, selected.build()


@pytest.mark.parametrize("plan", [("parts=3",), ("cluster=m_tile:2", "parts=4", "registers=40")])
def test_parts_of_a_sum_are_added_up(plan):
    config, built = made(plan)
    checked(TEXTBOOK, config, {"m": 200, "n": 264, "k": 1000}, built).require()


def test_what_is_handed_on_is_kept_by_size_and_a_graph_may_have_it():
    _, built = made(("parts=3",))
    kernel = built.kernel()
    for m in (64, 192, 64):
        a, b = (torch.randn(x, y, device="cuda").bfloat16() for x, y in ((m, 640), (640, 128)))
        c = torch.empty(m, 128, device="cuda", dtype=torch.bfloat16)
        arrays = {"a": a, "b": b, "c": c}

        def call(arrays=arrays):
            kernel(arrays, stream=torch.cuda.current_stream().cuda_stream)

        call()
        torch.cuda.synchronize()
        expected = (a.double() @ b.double()).bfloat16()
        torch.testing.assert_close(c, expected, rtol=1e-2, atol=1e-1)
        graph = torch.cuda.CUDAGraph()
        c.zero_()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(c, expected, rtol=1e-2, atol=1e-1)
    with pytest.raises(InputError, match="no array 'd'"):
        kernel({**arrays, "d": c})
    with pytest.raises(InputError, match="second one"):
        kernel.bound(arrays)
