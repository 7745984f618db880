"""Kernels on a GPU against float64: run with `make gpu-test`."""

import numpy as np
import pytest

from warploom.codegen.build import build
from warploom.codegen.launch import Kernel
from warploom.errors import InputError
from warploom.kernels.library import entry

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def launch(name, config, arrays):
    kernel = Kernel(build(entry(name).program(config), entry(name).schedule(config)))
    kernel(arrays, stream=torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()


@pytest.mark.parametrize("shape", [(256, 256, 128), (200, 264, 72), (1, 8, 8), (1000, 1000, 1000)])
def test_gemm(shape):
    m, n, k = shape
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
    c = torch.full((m, n), np.nan, device="cuda", dtype=torch.bfloat16)
    launch("gemm", entry("gemm").config(), {"a": a, "b": b, "c": c})
    want = a.double() @ b.double()
    assert float((c.double() - want).norm() / want.norm()) < 4e-3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1, 130, 1024])
def test_attention(rows, causal):
    config = entry("attention").config(causal=causal)
    q, k, v = (torch.randn(2, 4, rows, 128, device="cuda").bfloat16() for _ in range(3))
    o = torch.full_like(q, np.nan)
    launch("attention", config, {"q": q, "k": k, "v": v, "o": o})
    want = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=causal
    )
    assert float((o.double() - want).norm() / want.norm()) < 8e-3


def test_a_pitch_that_tma_cannot_take_is_refused():
    a = torch.randn(64, 60, device="cuda").bfloat16()[:, :57]
    b = torch.randn(57, 64, device="cuda").bfloat16()
    c = torch.empty(64, 64, device="cuda").bfloat16()
    with pytest.raises(InputError, match="multiples of 16 B for TMA"):
        launch("gemm", entry("gemm").config(), {"a": a, "b": b, "c": c})
