"""Launching on other people's tensors and streams, in graphs, with strides and without copies."""

import itertools

import pytest
from tests.gpu.cases import OPERATORS, gemm

from warploom.errors import InputError

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
M, N, K = 200, 264, 136


@pytest.fixture(scope="module")
def kernel():
    return gemm(f"{M}x{N}x{K}", "128x256").built().kernel()


def tensors(m=M, n=N, k=K, **rest):
    a = torch.randn(m, k, device="cuda").bfloat16()
    b = torch.randn(k, n, device="cuda").bfloat16()
    return {"a": a, "b": b, "c": torch.full((m, n), float("nan"), device="cuda").bfloat16()}


def right(given):
    want = given["a"].double() @ given["b"].double()
    return float((given["c"].double() - want).norm() / want.norm()) < 5e-3


class OnlyDlpack:
    """A tensor seen through nothing but DLPack."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, stream):
        return self.tensor.__dlpack__(stream=stream)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class OnlyInterface:
    """A tensor seen through nothing but the array interface."""

    def __init__(self, tensor):
        self.dtype = "bfloat16"
        whole = tensor.view(torch.int16)
        self.__cuda_array_interface__ = whole.__cuda_array_interface__


@pytest.mark.parametrize("wrap", [OnlyDlpack, OnlyInterface])
def test_other_protocols_give_the_same_launch(kernel, wrap):
    given = tensors()
    kernel({name: wrap(tensor) for name, tensor in given.items()})
    torch.cuda.synchronize()
    assert right(given)


def test_strided_views_are_read_and_written_in_place(kernel):
    wide = torch.randn(M, 2 * K, device="cuda").bfloat16()
    given = tensors()
    given["a"] = wide[:, K:]
    out = torch.full((M, N + 8), 7.0, device="cuda").bfloat16()
    given["c"] = out[:, :N]
    kernel(given)
    torch.cuda.synchronize()
    assert right(given) and bool((out[:, N:] == 7).all())


def test_a_stream_of_its_own_orders_the_work(kernel):
    given = tensors()
    stream = torch.cuda.Stream()
    ready = torch.zeros(1, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        given["a"].mul_(2.0)  # must happen before the launch reads it
        kernel(given, stream=stream.cuda_stream)
        ready.add_(1)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    assert right(given)


def test_a_captured_graph_replays_on_new_values(kernel):
    given = tensors()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the very first call with these tensors: maps are encoded here
        kernel(given, stream=torch.cuda.current_stream().cuda_stream)
    for _ in range(3):
        given["a"].normal_()
        given["c"].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert right(given)


def test_a_dependent_launch_reads_what_the_one_before_wrote():
    """Each launch may begin while the last one ends; its first read must wait."""
    case = OPERATORS["chained-gemm"]()
    assert case.schedule.launch.dependent
    chained = case.built().kernel()
    turn = torch.linalg.qr(torch.randn(512, 512, device="cuda"))[0].bfloat16().contiguous()
    values = [torch.randn(512, 512, device="cuda").bfloat16()]
    values += [torch.full_like(values[0], float("nan")) for _ in range(40)]
    for left, result in itertools.pairwise(values):
        chained({"a": left, "b": turn, "c": result})
    torch.cuda.synchronize()
    for left, result in itertools.pairwise(values):
        want = left.double() @ turn.double()
        assert float((result.double() - want).norm() / want.norm()) < 5e-3


def test_dimensions_of_length_0(kernel):
    empty = tensors(k=0)
    kernel(empty)
    kernel(tensors(m=0))
    kernel(tensors(n=0))
    torch.cuda.synchronize()
    assert bool((empty["c"] == 0).all())


def test_another_thread_may_launch():
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

    kernel = gemm(f"{M}x{N}x{K}", "128x256").built().kernel()  # has no tensor maps yet
    given = tensors()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(kernel, given).result()
    torch.cuda.synchronize()
    assert right(given)


REFUSED = {
    "must be multiples of 16 B for TMA": lambda: torch.randn(M, K + 1, device="cuda")
    .bfloat16()[:, :K],
    "2 B past one": lambda: torch.randn(M, K + 8, device="cuda").bfloat16()[:, 1 : K + 1],
    "has stride": lambda: torch.randn(K, M, device="cuda").bfloat16().T,
    "between 1 and": lambda: torch.randn(1, K, device="cuda").bfloat16().expand(M, K),
    "the kernel takes bf16": lambda: torch.randn(M, K, device="cuda"),
    "is not on a GPU": lambda: torch.randn(M, K).bfloat16(),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_launched_is_refused(kernel, message):
    with pytest.raises(InputError, match=message):
        kernel({**tensors(), "a": REFUSED[message]()})
