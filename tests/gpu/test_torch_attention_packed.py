"""Packed attention on a GPU: results and gradients of every sequence beside its own attention."""

import pytest

torch = pytest.importorskip("torch")
packed = pytest.importorskip("warploom.integrations.torch_attention_packed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ROWS, KEYS = (300, 0, 17, 520), (300, 40, 60, 520)


def bounds(lengths):
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.int().cuda()


def case(heads, kv_heads, depth):
    shapes = (sum(ROWS), heads), (sum(KEYS), kv_heads), (sum(KEYS), kv_heads)
    q, k, v = (torch.randn(*s, depth, device="cuda").bfloat16().requires_grad_() for s in shapes)
    return (q, k, v), (bounds(ROWS), bounds(KEYS), max(ROWS), max(KEYS))


def reference(tensors, causal, window):
    """The same in float64, sequence by sequence."""
    q, k, v = tensors
    group, out = q.shape[1] // k.shape[1], []
    for rows, keys in zip(
        q.split(ROWS), zip(k.split(KEYS), v.split(KEYS), strict=True), strict=True
    ):
        own, other = (x.repeat_interleave(group, 1).transpose(0, 1) for x in keys)
        scores = rows.transpose(0, 1) @ own.transpose(1, 2) * q.shape[2] ** -0.5
        row = torch.arange(len(rows), device="cuda")[:, None] + len(keys[0]) - len(rows)
        key = torch.arange(len(keys[0]), device="cuda")
        seen = (key <= row) if causal else torch.ones_like(key <= row)
        seen = seen & (key > row - window) if window else seen
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
        out.append((weights @ other).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("depth", [64, 96, 128])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 100)])
@pytest.mark.parametrize("same", [False, True])
def test_results_and_gradients(depth, causal, window, same):
    tensors, where = case(4, 2, depth)
    grad = torch.randn(tensors[0].shape, device="cuda").bfloat16()
    torch.use_deterministic_algorithms(same)
    try:
        out = packed.attention_varlen(*tensors, *where, causal=causal, window=window)
        got = torch.autograd.grad(out, tensors, grad, retain_graph=True)
        again = torch.autograd.grad(out, tensors, grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not same or all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    wide = [x.detach().double().requires_grad_() for x in tensors]
    want = reference(wide, causal, window)
    expected = torch.autograd.grad(want, wide, grad.double())
    for ours, theirs in zip((out, *got), (want, *expected), strict=True):
        assert float((ours.double() - theirs).norm() / theirs.norm()) < 8e-3


def test_gradients_in_a_whole_graph_and_checks_of_the_operator():
    tensors, where = case(4, 2, 128)

    def loss(*given):
        return packed.attention_varlen(*given, *where, causal=True).float().square().sum()

    torch.compile(loss, fullgraph=True)(*tensors).backward()
    got = [x.grad.clone() for x in tensors]
    for x in tensors:
        x.grad = None
    loss(*tensors).backward()
    for ours, x in zip(got, tensors, strict=True):
        assert float((ours - x.grad).float().norm() / x.grad.float().norm()) < 8e-3
    operator = torch.ops.warploom.attention_varlen_with_lse.default
    torch.library.opcheck(
        operator, (*tensors, *where), test_utils=("test_schema", "test_faketensor")
    )
