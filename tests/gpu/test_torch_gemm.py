"""Scaled and grouped products on a GPU: float64 beside them, CUDA graphs, torch.compile."""

import itertools

import pytest

torch = pytest.importorskip("torch")
gemm = pytest.importorskip("warploom.integrations.torch_gemm")
narrow = pytest.importorskip("warploom.integrations.torch_weight_only")
experts = pytest.importorskip("warploom.integrations.torch_experts")
rows_of = pytest.importorskip("warploom.integrations.torch_rows").quantised_rows
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
RAGGED = (200, 0, 1, 64, 387)
N, K = 272, 336


def close(got, want, bound=6e-3):
    return float((got.double() - want).norm() / want.norm()) < bound


def quantised(*shape):
    """(fp8 elements, a scale for 128 of each row's, the values in float64)."""
    values = torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand((*shape[:-1], -(-shape[-1] // 128)), device="cuda") + 0.5
    wide = scales.double().repeat_interleave(128, -1)[..., : shape[-1]]
    return values, scales, values.double() * wide


def blocks(experts, n, k):
    """(fp8 weights [experts, k, n], a scale for 128 x 128, the values in float64)."""
    values = torch.randn(experts, n, k, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(experts, -(-n // 128), -(-k // 128), device="cuda") + 0.5
    wide = scales.double().repeat_interleave(128, 1)[:, :n].repeat_interleave(128, 2)[..., :k]
    double = values.double() * wide
    return tuple(x.transpose(1, 2) for x in (values, scales, double))


def ends(counts):
    return torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32, device="cuda")


def product(a, b, counts):
    """Every expert's rows times its weights, in float64."""
    parts = zip(a.double().split(list(counts)), b.double(), strict=True)
    return torch.cat([x @ w for x, w in parts])


@pytest.mark.parametrize("m", [1, 100, 1000])
@pytest.mark.parametrize("layout", ["columns", "rows"])
def test_block_scales_of_any_layout(m, layout):
    (a, scale_a, x), (b, scale_b, w) = quantised(m, K), blocks(1, N, K)
    if layout == "columns":
        scale_a = scale_a.t().contiguous().t()
    got = gemm.scaled_mm(a, b[0], scale_a, scale_b[0])
    assert close(got, x @ w[0])


@pytest.mark.parametrize("fast", [True, False])
def test_scales_of_rows_and_of_all(fast):
    a, b = (torch.randn(s, K, device="cuda").to(torch.float8_e4m3fn) for s in (300, N))
    of_a, of_b = torch.rand(300, 1, device="cuda"), torch.rand(1, N, device="cuda")
    got = gemm.scaled_mm(a, b.t(), of_a, of_b, use_fast_accum=fast)
    assert close(got, a.double() * of_a @ (b.double().t() * of_b))
    one = torch.tensor(0.5, device="cuda")
    got = gemm.scaled_mm(a, b.t(), one, one, use_fast_accum=fast)
    assert close(got, a.double() @ b.double().t() / 4)


@pytest.mark.parametrize("counts", [RAGGED, (40,) * 24])
@pytest.mark.parametrize("order", ["nk", "kn"])
def test_rows_of_experts(counts, order):
    a = torch.randn(sum(counts), K, device="cuda").bfloat16()
    b = torch.randn(len(counts), N, K, device="cuda").bfloat16().transpose(1, 2)
    b = b if order == "nk" else b.contiguous()
    assert close(gemm.grouped_mm(a, b, ends(counts)), product(a, b, counts))
    halves = product(a, b, counts).chunk(2, 1)
    got = gemm.grouped_mm(a, b, ends(counts), swiglu=True)
    assert close(got, torch.nn.functional.silu(halves[0]) * halves[1])


@pytest.mark.parametrize("counts", [RAGGED, (40,) * 24])
def test_rows_of_experts_in_fp8(counts):
    (a, scale_a, x), (b, scale_b, w) = quantised(sum(counts), K), blocks(len(counts), N, K)
    got = gemm.scaled_grouped_mm(a, b, scale_a, scale_b, ends(counts))
    assert close(got, product(x, w, counts))
    of_a = torch.rand(sum(counts), device="cuda")
    of_b = torch.rand(len(counts), N, device="cuda")
    got = gemm.scaled_grouped_mm(a, b, of_a, of_b, ends(counts))
    want = product(a.double() * of_a[:, None], b.double() * of_b[:, None], counts)
    assert close(got, want)


def test_masked_experts():
    lengths = torch.tensor(RAGGED, dtype=torch.int32, device="cuda")
    (a, scale_a, x), (b, scale_b, w) = quantised(5, 400, K), blocks(5, N, K)
    got = gemm.masked_grouped_mm(a, b, lengths, scale_a, scale_b)
    for expert, count in enumerate(RAGGED):
        assert not count or close(got[expert, :count], x[expert, :count] @ w[expert])


@pytest.mark.parametrize("m", [1, 16, 100, 200])
def test_weights_of_8_bits(m):
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        a = torch.randn(m, K, device="cuda").bfloat16()
        b, scale = torch.randn(N, K, device="cuda").to(kind).t(), torch.rand(N, device="cuda")
        assert close(narrow.weight_only_mm(a, b, scale), a.double() @ b.double() * scale)


@pytest.mark.parametrize("m", [1, 16, 100, 200])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("grouped", [True, False])
def test_weights_of_integers(m, bits, grouped):
    a = torch.randn(m, 512, device="cuda").bfloat16()
    most = 1 << (bits - 1)
    b = torch.randint(-most, most, (N, 512), device="cuda", dtype=torch.int8)
    scale = torch.rand((4, N) if grouped else (N,), device="cuda") + 0.5
    wide = scale.double().repeat_interleave(128, 0) if grouped else scale.double()
    stored = narrow.pack_int4(b) if bits == 4 else b
    got = narrow.weight_only_mm(a, stored.t(), scale)
    assert close(got, a.double() @ (b.double().t() * wide))


@pytest.mark.parametrize("count", [1, 7, 300])
def test_the_layer_of_experts(count):
    x = torch.randn(count, 256, device="cuda").bfloat16()
    up = (torch.randn(8, 384, 256, device="cuda") / 16).bfloat16().transpose(1, 2)
    down = (torch.randn(8, 256, 192, device="cuda") / 16).bfloat16().transpose(1, 2)
    weights, chosen = torch.rand(count, 8, device="cuda").topk(2)
    graph = torch.cuda.CUDAGraph()
    experts.experts_mlp(x, up, down, chosen, weights)
    with torch.cuda.graph(graph):
        got = experts.experts_mlp(x, up, down, chosen, weights)
    graph.replay()
    gate, other = torch.einsum("tk,tjkn->tjn", x.double(), up.double()[chosen]).chunk(2, -1)
    inner = torch.nn.functional.silu(gate) * other
    want = torch.einsum("tjk,tjkn,tj->tn", inner, down.double()[chosen], weights.double())
    assert close(got, want, 1e-2)


@pytest.mark.parametrize("count", [1, 300])
def test_the_layer_of_experts_in_fp8(count):
    x = torch.randn(count, 256, device="cuda").bfloat16()
    e4m3 = {"device": "cuda", "dtype": torch.float32}
    up, down = torch.randn(8, 384, 256, **e4m3), torch.randn(8, 256, 192, **e4m3)
    up, down = (one.to(torch.float8_e4m3fn).transpose(1, 2) for one in (up, down))
    of_up, of_down = torch.rand(8, 384, **e4m3) / 16, torch.rand(8, 256, **e4m3) / 16
    weights, chosen = torch.rand(count, 8, device="cuda").topk(2)
    got = experts.experts_mlp(x, up, down, chosen, weights, of_up, of_down)

    def rounded(rows):
        narrow, scale = rows_of(rows.bfloat16())
        return narrow.double() * scale.double()[..., None]

    wide = up.double() * of_up.double()[:, None], down.double() * of_down.double()[:, None]
    gate, other = torch.einsum("tk,tjkn->tjn", rounded(x), wide[0][chosen]).chunk(2, -1)
    inner = rounded(torch.nn.functional.silu(gate) * other)
    want = torch.einsum("tjk,tjkn,tj->tn", inner, wide[1][chosen], weights.double())
    assert close(got, want, 2e-2)


def test_a_graph_follows_the_rows_of_experts():
    a = torch.randn(652, K, device="cuda").bfloat16()
    b = torch.randn(5, N, K, device="cuda").bfloat16().transpose(1, 2)
    offs = ends(RAGGED)
    gemm.grouped_mm(a, b, offs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gemm.grouped_mm(a, b, offs)
    for counts in (RAGGED, (0, 652, 0, 0, 0), (100, 100, 100, 100, 252)):
        offs.copy_(ends(counts))
        graph.replay()
        assert close(out, product(a, b, counts))


def test_it_compiles():
    a = torch.randn(652, K, device="cuda").bfloat16()
    b = torch.randn(5, N, K, device="cuda").bfloat16().transpose(1, 2)
    made = torch.compile(lambda a, b, offs: gemm.grouped_mm(a, b, offs) + 1.0, fullgraph=True)
    assert close(made(a, b, ends(RAGGED)), product(a, b, RAGGED) + 1.0)
