"""`warploom run --on gpu`: right kernels pass the bounds of their rounding, a fault does not."""

from dataclasses import replace

import pytest

from warploom.codegen.compile.build import compile_source
from warploom.errors import CheckFailed, ToolMissing
from warploom.kernels.check import checked
from warploom.kernels.library import configure
from warploom.kernels.select import select

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
RIGHT = [
    ("gemm", {}),
    ("gemm", {"out": "fp32", "k": "2000"}),
    ("gemm", {"dtype": "e4m3", "out": "fp32", "k": "2000"}),
    ("gemm", {"dtype": "e4m3", "scales": "true", "promote": "true"}),
    ("gemm", {"activation": "gelu", "residual": "true", "bias": "true"}),
    ("gemm", {"activation": "silu", "dual": "true"}),
    ("attention", {"lse": "true"}),
    ("attention", {"dtype": "fp16", "causal": "true", "lse": "true", "rows": "700", "keys": "700"}),
    ("attention", {"dtype": "e4m3"}),
    ("attention", {"head_dim": "64", "window": "50", "group": "2"}),
]


@pytest.mark.parametrize(("name", "settings"), RIGHT, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_defaults_are_as_exact_as_their_rounding_allows(name, settings, seed):
    chosen, sizes = select(name, settings), configure(name, settings)[1]
    found = checked(name, chosen.config, sizes, chosen.build(), seed)
    assert found.passed, found


def test_a_wrong_kernel_fails():
    """Planted fault: a constant of gelu in the emitted code is off by 10 %. Few terms a sum, so
    that elements are where gelu is neither 0 nor its argument."""
    settings = {"activation": "gelu", "k": "8"}
    chosen, sizes = select("gemm", settings), configure("gemm", settings)[1]
    try:
        built = chosen.build()
        text = built.source.text.replace("f), a, -1.0f)", "f), a, -1.1f)")
        assert text != built.source.text
        source = replace(built.source, text=text)
        cubin, resources = compile_source(source, built.arch)
    except ToolMissing as error:
        pytest.skip(f"the fault has to be compiled: {error}")
    wrong = replace(built, source=source, cubin=cubin, resources=resources)
    with pytest.raises(CheckFailed, match="c: "):
        checked("gemm", chosen.config, sizes, wrong).require()
