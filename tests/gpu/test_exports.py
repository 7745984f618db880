"""Exported folders on a GPU: the numbers of each form, on another stream, inside a CUDA graph."""

import importlib.util
import sys

import pytest

from warploom.flows.export import export

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
KERNELS = ["product=gemm", "attend=attention"]
M, N, K = 200, 264, 136


@pytest.fixture(scope="module", params=["python", "torch", "hf-kernels", "tvm-ffi"])
def calls(request, tmp_path_factory):
    """The two kernels of a form as functions of all their arrays."""
    if request.param == "tvm-ffi":
        pytest.importorskip("tvm_ffi")
    folder = tmp_path_factory.mktemp("exports") / "shipped"
    export(KERNELS, request.param, folder, {})
    if request.param == "python":
        kernels = load(folder / "launch.py", "launch").load()
        stream = torch.cuda.current_stream
        return (
            lambda a, b, c: kernels["product"](a=a, b=b, c=c, stream=stream().cuda_stream),
            lambda q, k, v, o: kernels["attend"](q=q, k=k, v=v, o=o, stream=stream().cuda_stream),
        )
    if request.param == "tvm-ffi":
        tvm_ffi = importlib.import_module("tvm_ffi")
        module = tvm_ffi.load_module(str(folder / "shipped.so"))

        def on_stream(name):
            def call(*arrays):
                with tvm_ffi.use_torch_stream():
                    module[name](*arrays)

            return call

        return on_stream("product"), on_stream("attend")
    if request.param == "hf-kernels":
        kernels = pytest.importorskip("kernels")
        package = kernels.get_local_kernel(folder)
    else:
        package = load(folder / "__init__.py", "shipped")
    torch.library.opcheck(package.product, (matrix(M, K), matrix(K, N)))
    return (
        lambda a, b, c: c.copy_(package.product(a, b)),
        lambda q, k, v, o: o.copy_(package.attend(q, k, v)),
    )


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def matrix(*shape):
    return torch.randn(shape, device="cuda").bfloat16()


def close(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm()) < 8e-3


def test_the_numbers_are_those_of_the_reference(calls):
    product, attend = calls
    a, b = matrix(M, K), matrix(K, N)
    c = torch.full((M, N), torch.nan, device="cuda", dtype=torch.bfloat16)
    product(a, b, c)
    assert close(c, a.double() @ b.double())
    q, k, v = (matrix(1, 4, rows, 128) for rows in (200, 136, 136))
    o = torch.full_like(q, torch.nan)
    attend(q, k, v, o)
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert close(o, exact)


def test_a_graph_is_captured_and_replayed(calls):
    product, _ = calls
    a, b, c = matrix(M, K), matrix(K, N), matrix(M, N)
    product(a, b, c)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product(a, b, c)
    a.copy_(matrix(M, K))
    graph.replay()
    assert close(c, a.double() @ b.double())
