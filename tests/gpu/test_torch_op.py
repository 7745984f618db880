"""Operators on a GPU: torch's own checks of an operator, whole-graph compilation, gradients."""

import pytest

torch = pytest.importorskip("torch")
torch_op = pytest.importorskip("warploom.integrations.torch_op")
torch_attention = pytest.importorskip("warploom.integrations.torch_attention")
torch_signatures = pytest.importorskip("warploom.integrations.torch_signatures")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
M, N, K = 200, 264, 136


def matrix(*shape):
    return torch.randn(shape, device="cuda").bfloat16()


def close(got, want, bound=8e-3):
    return float((got.double() - want.double()).norm() / want.double().norm()) < bound


def heads():
    return matrix(1, 4, 200, 128), matrix(1, 2, 200, 128), matrix(1, 2, 200, 128)


def reference(q, k, v):
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True
    )


def test_opcheck_of_gemm():
    torch.library.opcheck(torch.ops.warploom.gemm.default, (matrix(M, K), matrix(K, N)))
    torch.library.opcheck(
        torch.ops.warploom.gemm.default,
        (matrix(M, K), matrix(K, N)),
        {"bias": matrix(N), "activation": "gelu"},
    )


def test_opcheck_of_gemm_with_gradients():
    a, b = matrix(M, K).requires_grad_(), matrix(K, N).requires_grad_()
    torch.library.opcheck(torch.ops.warploom.gemm.default, (a, b))


def test_opcheck_of_attention():
    torch.library.opcheck(torch.ops.warploom.attention.default, heads(), {"causal": True})
    torch.library.opcheck(torch.ops.warploom.attention_with_lse.default, heads(), {"causal": True})


def test_gemm_of_transposed_views_copies_nothing():
    a, b = matrix(K, M), matrix(N, K)
    assert close(torch_op.gemm(a.T, b.T), a.T.double() @ b.T.double())


def test_a_whole_graph_compiles():
    def block(x, w, bias):
        return torch_op.gemm(x.relu(), w, bias=bias, activation="gelu") * 2

    x, w, bias = matrix(M, K), matrix(K, N), matrix(N)
    got = torch.compile(block, fullgraph=True)(x, w, bias)
    want = torch.nn.functional.gelu(x.relu().double() @ w.double() + bias.double()) * 2
    assert close(got, want)


def test_attention_compiles_and_is_right():
    q, k, v = heads()
    got = torch.compile(
        lambda q, k, v: torch_op.attention(q, k, v, causal=True) + 0, fullgraph=True
    )(q, k, v)
    assert close(got, reference(q, k, v))


def test_attention_reads_the_layout_of_a_projection():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in heads())
    assert close(torch_op.attention(q, k, v, causal=True), reference(q, k, v))


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(64,), (80,), (96,), (128,), (256,), (192, 128)])
def test_gradients_of_attention(sizes, causal, same):
    depth, values = sizes[0], sizes[-1]
    q, k, v = matrix(2, 4, 333, depth), matrix(2, 2, 333, depth), matrix(2, 2, 333, values)
    grad = matrix(2, 4, 333, values)
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.use_deterministic_algorithms(same)
    try:
        torch_op.attention(*ours, causal=causal).backward(grad)
        first = [x.grad.clone() for x in ours]
        for x in ours:
            x.grad = None
        torch_op.attention(*ours, causal=causal).backward(grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not same or all(torch.equal(x.grad, a) for x, a in zip(ours, first, strict=True))
    want = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, 1) for x in want[1:])
    torch.nn.functional.scaled_dot_product_attention(
        want[0], keys, values, is_causal=causal
    ).backward(grad.double())
    for x, y in zip(ours, want, strict=True):
        assert close(x.grad, y.grad, 6e-3)


@pytest.mark.parametrize("depth", [96, 128])
def test_gradients_of_tasks_that_are_cut(depth):
    """160 tiles of keys: 28 are left of a round of 132 SMs."""
    q, k, v = (matrix(1, 5, 4096, depth) for _ in range(3))
    ours, want = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert torch_attention.config_of(*ours).cut or sms != 132
    grad = matrix(1, 5, 4096, depth)
    torch_op.attention(*ours).backward(grad)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        doubles = [x.double() for x in want]
        attended = torch.nn.functional.scaled_dot_product_attention(*doubles)
        attended.backward(grad.double())
    for x, y in zip(ours, want, strict=True):
        assert close(x.grad, y.grad, 6e-3)


@pytest.mark.parametrize("same", [False, True])
def test_gradients_of_attention_with_a_window(same):
    q, k, v = matrix(2, 4, 333, 64), matrix(2, 4, 333, 64), matrix(2, 4, 333, 64)
    grad = matrix(*q.shape)
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.use_deterministic_algorithms(same)
    try:
        torch_op.attention(*ours, causal=True, window=70).backward(grad)
    finally:
        torch.use_deterministic_algorithms(False)
    seen = torch.ones(333, 333, dtype=torch.bool, device=q.device).tril().triu(-69)
    want = [x.double().requires_grad_() for x in (q, k, v)]
    torch.nn.functional.scaled_dot_product_attention(*want, attn_mask=seen).backward(grad.double())
    for x, y in zip(ours, want, strict=True):
        assert close(x.grad, y.grad, 6e-3)


def test_the_gradient_of_the_sums_of_exponentials():
    q, k, v = (matrix(1, 2, 130, 128).requires_grad_() for _ in range(3))
    torch_op.attention_with_lse(q, k, v)[1].sum().backward()
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    scores = wide[0] @ wide[1].transpose(-1, -2) * 128**-0.5
    torch.logsumexp(scores, -1).sum().backward()
    assert close(q.grad, wide[0].grad) and close(k.grad, wide[1].grad)
    assert not bool(v.grad.any())


def test_flash_attention_in_heads_that_lie_behind_rows():
    qkv = matrix(2, 333, 3, 4, 128).requires_grad_()
    grad = matrix(2, 333, 4, 128)

    def found():
        out = torch_signatures.flash_attn_qkvpacked_func(qkv, causal=True, deterministic=True)
        return out, torch.autograd.grad(out, qkv, grad)[0]

    (out, first), (_, again) = found(), found()
    wide = qkv.detach().double().requires_grad_()
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in wide.unbind(2)), is_causal=True
    ).transpose(1, 2)
    want.backward(grad.double())
    assert out.stride() == (333 * 512, 512, 128, 1)
    assert close(out, want) and close(first, wide.grad, 6e-3) and torch.equal(first, again)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_gradients_of_attention_with_a_soft_cap(d):
    q, k, v = (4 * matrix(1, 4, 300, d), matrix(1, 2, 300, d), matrix(1, 2, 300, d))
    grad = matrix(*q.shape)
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    out = torch_op.attention(*ours, causal=True, softcap=5.0)
    out.backward(grad)
    want = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, 1) for x in want[1:])
    scores = 5.0 * torch.tanh(want[0] @ keys.mT * d**-0.5 / 5.0)
    seen = torch.ones(300, 300, dtype=torch.bool, device=q.device).tril()
    expected = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ values
    expected.backward(grad.double())
    assert close(out, expected) and close(torch_op.attention(q, k, v, True, softcap=5.0), expected)
    for x, y in zip(ours, want, strict=True):
        assert close(x.grad, y.grad, 1e-2)


def test_gradients_are_the_same_where_activations_are_made_again():
    q, k, v = (matrix(2, 2, 300, 64).requires_grad_() for _ in range(3))
    grad = matrix(*q.shape)

    def layer(q, k, v):
        return torch_op.attention(q, k, v, causal=True, deterministic=True)

    again = torch.utils.checkpoint.checkpoint(layer, q, k, v, use_reentrant=False)
    found = torch.autograd.grad(again, (q, k, v), grad)
    want = torch.autograd.grad(layer(q, k, v), (q, k, v), grad)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_a_step_is_captured_in_a_graph():
    q, k, v = (matrix(1, 2, 300, 128).requires_grad_() for _ in range(3))
    grad = matrix(*q.shape)

    def step():
        out = torch_op.attention(q, k, v, causal=True, deterministic=True)
        return torch.autograd.grad(out, (q, k, v), grad)

    want = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_gradients_of_attention_in_a_whole_graph():
    def loss(q, k, v):
        return (torch_op.attention(q, k, v, causal=True).float() ** 2).sum()

    q, k, v = (matrix(1, 2, 130, 128).requires_grad_() for _ in range(3))
    torch.compile(loss, fullgraph=True)(q, k, v).backward()
    got = [x.grad.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x.grad = None
    loss(q, k, v).backward()
    assert all(close(a, x.grad) for a, x in zip(got, (q, k, v), strict=True))


def test_gradients_of_gemm():
    a, b = matrix(M, K).requires_grad_(), matrix(K, N).requires_grad_()
    grad = matrix(M, N)
    torch_op.gemm(a, b).backward(grad)
    assert close(a.grad, grad.double() @ b.double().T)
    assert close(b.grad, a.double().T @ grad.double())


def test_a_compiled_graph_is_captured():
    x, w = matrix(M, K), matrix(K, N)
    run = torch.compile(lambda x: torch_op.gemm(x, w), mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        x = matrix(M, K)
        assert close(run(x).clone(), x.double() @ w.double())


@pytest.mark.parametrize("causal", [False, True])
def test_values_of_another_head_size(causal):
    q, k = (torch.randn(2, 4, n, 192, device="cuda").bfloat16() for n in (300, 500))
    v = torch.randn(2, 4, 500, 128, device="cuda").bfloat16()
    got = torch_op.attention(q, k, v, causal=causal)
    scores = q.double() @ k.double().mT / 192**0.5
    if causal:
        at = torch.arange(500, device="cuda")
        scores = scores.masked_fill(at > at[:300, None] + 200, -torch.inf)
    want = torch.softmax(scores, -1) @ v.double()
    assert float((got.double() - want).norm() / want.norm()) < 6e-3
