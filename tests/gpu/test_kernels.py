"""Kernels on a GPU against the interpreter: run with `make gpu-test`."""

import pytest
from tests.gpu.cases import CASES

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("name", CASES)
def test_the_gpu_agrees_with_the_interpreter(name):
    case = CASES[name]()
    errors = case.errors()
    assert max(errors.values()) <= case.bound, errors
