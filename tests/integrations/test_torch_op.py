"""PyTorch operators without a GPU: shapes and types of results, refusals, what autograd says."""

from types import SimpleNamespace

import pytest

from warploom import tile as t
from warploom.autosched.schedules import Policy, schedule_for
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.kernels.attention.program import AttentionConfig
from warploom.kernels.attention.reference import reference
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.tile.typing import quad_places

torch = pytest.importorskip("torch")
torch_op = pytest.importorskip("warploom.integrations.torch_op")
torch_attention = pytest.importorskip("warploom.integrations.torch_attention")
pytest.importorskip("warploom.integrations.torch_attention_packed")
torch_launches = pytest.importorskip("warploom.integrations.torch_launches")
torch_program = pytest.importorskip("warploom.integrations.torch_program")
FakeTensorMode = pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode

BF16 = torch.bfloat16


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_reference_of_attention_is_torchs(causal, scale):
    q, k, v = (torch.randn(2, heads, 9, 24, dtype=torch.float64) for heads in (6, 2, 2))
    config = AttentionConfig(head_dim=24, group=3, causal=causal, scale=scale)
    got, lse = reference(config, {n: x.numpy() for n, x in zip("qkv", (q, k, v), strict=True)})
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=True
    )
    assert torch.allclose(torch.from_numpy(got), want, rtol=1e-12)
    scores = q @ k.repeat_interleave(3, 1).mT * (scale or 24**-0.5)
    scores += torch.full((9, 9), -torch.inf).triu(1) if causal else 0.0
    assert torch.allclose(torch.from_numpy(lse), scores.logsumexp(-1), rtol=1e-12)


@pytest.fixture
def fake():
    with FakeTensorMode() as mode:
        yield mode


def make(*shape, dtype=BF16, device="cuda"):
    return torch.empty(shape, device=device, dtype=dtype)


def leaf(*shape, dtype=BF16):
    """A tensor with a gradient; on "meta", as autograd needs a device this torch was built for."""
    return make(*shape, dtype=dtype, device="meta").requires_grad_()


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        ((3, 5), (5, 7), (3, 7)),
        ((2, 3, 5), (2, 5, 7), (2, 3, 7)),
        ((0, 5), (5, 7), (0, 7)),
        ((3, 0), (0, 7), (3, 7)),
    ],
)
def test_gemm_gives_the_shape_of_a_matmul(fake, a, b, out):
    result = torch_op.gemm(make(*a), make(*b))
    assert tuple(result.shape) == out and result.dtype is BF16 and result.device.type == "cuda"


def test_gemm_of_fp8_gives_bf16(fake):
    fp8 = torch.float8_e4m3fn
    result = torch_op.gemm(make(32, 64, dtype=fp8), make(16, 64, dtype=fp8).T)
    assert result.dtype is BF16


def test_attention_gives_outputs_like_q_and_sums_a_row(fake):
    q, k = make(2, 8, 100, 64), make(2, 2, 300, 64)
    assert torch_op.attention(q, k, k, causal=True).shape == q.shape
    assert torch_op.attention(q, k, k, exact=True).shape == q.shape
    out, lse = torch_op.attention_with_lse(q, k, k)
    assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype is torch.float32


REFUSED = {
    "5 columns and 6 rows": lambda: torch_op.gemm(make(3, 5), make(6, 7)),
    "one element type": lambda: torch_op.gemm(make(3, 5), make(5, 7, dtype=torch.float16)),
    "gemm a is float64": lambda: torch_op.gemm(
        make(3, 5, dtype=torch.float64), make(5, 7, dtype=torch.float64)
    ),
    "activation='swish'": lambda: torch_op.gemm(make(3, 5), make(5, 7), activation="swish"),
    r"bias has shape \[6\], expected \[7\]": lambda: torch_op.gemm(
        make(3, 5), make(5, 7), bias=make(6)
    ),
    "residual is": lambda: torch_op.gemm(make(3, 5), make(5, 7), residual=make(3, 6)),
    "two matrices or two batches": lambda: torch_op.gemm(make(5), make(5, 7)),
    "6 query heads over 4 key heads": lambda: torch_op.attention(
        make(1, 6, 8, 64), make(1, 4, 8, 64), make(1, 4, 8, 64)
    ),
    "head sizes must agree": lambda: torch_op.attention(
        make(1, 4, 8, 64), make(1, 4, 8, 128), make(1, 4, 8, 128)
    ),
    "window=0": lambda: torch_op.attention(
        make(1, 4, 8, 64), make(1, 4, 8, 64), make(1, 4, 8, 64), window=0
    ),
    "scale=0.0: expected a number above 0": lambda: torch_op.attention(
        make(1, 4, 8, 64), make(1, 4, 8, 64), make(1, 4, 8, 64), scale=0.0
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_kernel_takes_is_refused_before_a_launch(fake, message):
    with pytest.raises(InputError, match=message):
        REFUSED[message]()


CPU, OTHER = {"device": "cpu"}, {"device": "cuda:1"}
ELSEWHERE = {
    r"gemm a is on cpu, expected a CUDA device; move it with a\.cuda\(\)": lambda: torch_op.gemm(
        make(3, 5, **CPU), make(5, 7, **CPU)
    ),
    "attention q is on cpu, expected a CUDA device": lambda: torch_op.attention(
        *[make(1, 4, 8, 64, **CPU)] * 3
    ),
    "attention k is on cpu, expected a CUDA device": lambda: torch_op.attention_with_lse(
        make(1, 4, 8, 64, device="meta"), *[make(1, 4, 8, 64, **CPU)] * 2
    ),
    "::copied x is on cpu, expected a CUDA device": lambda: torch_program.torch_program(
        "warploom_tests::copied", program(), schedule()
    )(make(5, 32, dtype=torch.float32, **CPU), 2.0),
}


@pytest.mark.parametrize("message", ELSEWHERE)
def test_a_tensor_on_no_gpu_is_refused_in_one_line(message):
    with pytest.raises(InputError, match=message) as found:
        ELSEWHERE[message]()
    assert len(str(found.value).splitlines()) == 1


def test_tensors_on_two_gpus_are_refused(fake):
    with pytest.raises(InputError, match="gemm b is on cuda:1, a on cuda:0: expected one device"):
        torch_op.gemm(make(3, 5, device="cuda:0"), make(5, 7, **OTHER))


def test_gemm_has_gradients_of_the_right_shapes():
    a, b, bias = leaf(3, 5), leaf(5, 7), leaf(7, dtype=torch.float32)
    torch_op.gemm(a, b, bias=bias).sum().backward()
    assert a.grad.shape == a.shape and b.grad.shape == b.shape and bias.grad.shape == (7,)


def test_attention_has_gradients_of_the_right_shapes():
    q, k = leaf(2, 4, 8, 64), leaf(2, 2, 9, 64)
    torch_op.attention(q, k, k, causal=True).sum().backward()
    assert q.grad.shape == q.shape and k.grad.shape == k.shape
    q, v = leaf(2, 4, 8, 192), leaf(2, 4, 8, 128)
    torch_op.attention(q, q, v).sum().backward()
    assert q.grad.shape == q.shape and v.grad.shape == v.shape
    q = leaf(2, 4, 8, 264)
    with pytest.raises(InputError, match="backward of heads of 264: expected a multiple of 8"):
        torch_op.attention(q, q, q).sum().backward()


def test_a_missing_backward_says_so():
    result = torch_op.gemm(leaf(3, 5), leaf(5, 7), activation="gelu")
    with pytest.raises(NotImplementedError, match=r"warploom::gemm .*no backward kernel"):
        result.sum().backward()


def test_compiling_a_whole_graph_keeps_the_operator():
    seen = []

    def keep(graph, inputs):
        seen.append(graph)
        return graph.forward

    def f(a, b):
        return torch_op.gemm(a.relu(), b, activation="relu") + 1

    compiled = torch.compile(f, backend=keep, fullgraph=True, dynamic=True)
    for m in (3, 4):
        result = compiled(make(m, 5, device="meta"), make(5, 7, device="meta"))
        assert tuple(result.shape) == (m, 7)
    assert len(seen) == 1 and "warploom.gemm" in seen[0].code


# ---- any program


def scaled(x, y):
    (i,) = t.grid(m=t.cdiv(t.size("m"), 64))
    rows, cols = t.span(i * 64, 64), t.span(0, 32)
    t.store(y, rows, cols, tile=t.load(x, rows, cols) * t.scalar("factor"))


def program(body=scaled):
    return t.trace(body, {"x": t.array(t.FP32, "m n"), "y": t.array(t.FP32, "m n")})


def schedule():
    config = GemmConfig()
    return schedule_for(gemm(config), Policy("inflight", LaunchPlan(split="m"), groups=2, depth=4))


def test_a_program_becomes_an_operator(fake):
    made = torch_program.torch_program("warploom_tests::scaled", program(), schedule())
    schema = torch.ops.warploom_tests.scaled.default._schema
    assert str(schema).endswith("(Tensor x, float factor) -> Tensor")
    result = made(make(5, 32, dtype=torch.float32), 2.0)
    assert result.shape == (5, 32) and result.dtype is torch.float32
    with pytest.raises(InputError, match="given with shape"):
        made(make(5, dtype=torch.float32), 2.0)


def test_an_operator_runs_what_its_table_has_for_the_sizes(monkeypatch):
    """One kernel for all sizes that get the same variant."""
    asked, keys = [], []

    def chosen(where, settings):
        asked.append((where, dict(settings)))
        wide = int(settings["n"]) > 512
        return SimpleNamespace(name="wide" if wide else "narrow", build=lambda: settings)

    monkeypatch.setattr(torch_program, "select", chosen)
    monkeypatch.setattr(torch_program, "check_devices", lambda *_: None)
    monkeypatch.setattr(torch_program, "current_stream", lambda _: 0)
    monkeypatch.setattr(
        torch_program, "built_kernel", lambda key, *_: keys.append(key) or (lambda *_, **__: None)
    )
    where = "examples/textbook_gemm.py:kernel"
    torch_program.torch_kernel("warploom_tests::tabled", where, {"tile_m": "64"})
    run = torch_program.RUNS["warploom_tests::tabled"]
    for n in (256, 1024, 256, 512):
        assert run(make(8, 64, device="cpu"), make(64, n, device="cpu")).shape == (8, n)
    assert [one["n"] for _, one in asked] == ["256", "1024", "512"]  # once for each shape
    assert asked[0] == (where, {"tile_m": "64", "m": "8", "k": "64", "n": "256"})
    names = ["narrow", "wide", "narrow", "narrow"]
    assert keys == [("warploom_tests::tabled", one) for one in names]
    with pytest.raises(InputError, match="no such file"):
        torch_program.torch_kernel("warploom_tests::absent", "absent.py:kernel")


def test_a_program_that_reads_what_it_writes_is_no_operator():
    def again(x, y):
        (i,) = t.grid(m=t.cdiv(t.size("m"), 64))
        rows, cols = t.span(i * 64, 64), t.span(0, 32)
        t.store(y, rows, cols, tile=t.load(x, rows, cols) + t.load(y, rows, cols))

    with pytest.raises(InputError, match="array y is read and written"):
        torch_program.torch_program("warploom_tests::again", program(again), schedule())
    with pytest.raises(InputError, match="expected 'library::name'"):
        torch_program.torch_program("again", program(), schedule())


def test_a_batch_invariant_call_has_one_kernel_for_all_batches(monkeypatch):
    keys = []
    monkeypatch.setattr(torch_program, "PLANS", {})
    monkeypatch.setattr(torch_program, "check_devices", lambda *_: None)
    none = torch_program.Unlaunched(SimpleNamespace(arrays=()))
    monkeypatch.setattr(torch_program.Unlaunched, "bound", lambda *_: None, raising=False)
    monkeypatch.setattr(torch_launches, "launch", lambda *_: None)
    monkeypatch.setattr(torch_program, "stream_of", lambda _: 0)
    monkeypatch.setattr(torch_program, "built_kernel", lambda key, *_: keys.append(key) or none)

    def gemm(rows, invariant):
        shape = torch.empty(rows, 64).bfloat16(), torch.empty(64, 256).bfloat16()
        return torch_program.RUNS["warploom::gemm"](*shape, None, None, "none", 1.0, invariant)

    def attention(batch, invariant):
        q = torch.empty(batch, 2, 256, 64).bfloat16()
        options = (True, None, None, False, invariant, 0.0)
        torch_program.RUNS["warploom::attention"](q, q, q, *options)

    for call, sizes in ((gemm, (1, 130, 5000)), (attention, (1, 8, 40))):
        for invariant in (True, False):
            keys.clear()
            for size in sizes:
                call(size, invariant)
            assert (len(set(keys)) == 1) == invariant, (call, keys)


def test_shapes_of_gradients_need_no_address(monkeypatch):
    """Tensors of a graph that is compiled have none."""

    def none(_):
        raise RuntimeError("no address")

    monkeypatch.setattr(torch.Tensor, "data_ptr", none)
    q, lse = torch.empty(2, 4, 256, 64, device="meta").bfloat16(), torch.empty(8, 256)
    found = torch.ops.warploom.attention_backward(q, q, q, q, q, lse.to("meta").view(2, 4, 256))
    assert [x.shape for x in found] == [q.shape] * 3
    q, lse = q.view(512, 4, 64), torch.empty(4, 512, device="meta")
    bounds = torch.empty(3, device="meta").int()
    packed = torch.ops.warploom.attention_varlen_backward
    found = packed(q, q, q, q, q, lse, bounds, bounds, 256, 256)
    assert [x.shape for x in found] == [q.shape] * 3


def test_values_of_another_head_size_have_gradients():
    q, k, v = leaf(2, 4, 300, 192), leaf(2, 4, 500, 192), leaf(2, 4, 500, 128)
    torch_op.attention(q, k, v, causal=True).sum().backward()
    assert [tuple(x.grad.shape) for x in (q, k, v)] == [tuple(x.shape) for x in (q, k, v)]


def test_what_is_taken_off_a_vector_in_fragments_finds_its_rows():
    delta, rows = torch.zeros(2, 112), torch.arange(200.0).view(2, 100)
    torch_attention.subtract(delta, rows, in_fragments=True)
    padded = torch.nn.functional.pad(rows, (0, 12))
    assert torch.equal(delta, -padded[:, quad_places(112)])


def test_a_list_of_tasks_is_made_before_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch_program, "PLANS", {})
    monkeypatch.setattr(torch_attention, "check_devices", lambda *_: None)
    q, lse = (torch.empty(of, device="meta") for of in ((2, 4, 2048, 128), (2, 4, 2048)))
    q = q.bfloat16()
    call = (q, q, q, q, q, lse, None, True, None, None, False, 0.0)
    with torch_program.collecting() as built:
        torch_program.RUNS["warploom::attention_backward"](*call)
        assert len(built) == 3
        for name in ("is_available", "is_current_stream_capturing"):
            monkeypatch.setattr(torch.cuda, name, lambda: True)
        with pytest.raises(InputError, match=r"q \[2, 4, 2048, 128\] for the first time while a"):
            torch_program.RUNS["warploom::attention_backward"](*call)
