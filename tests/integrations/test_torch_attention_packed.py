"""Packed attention without a GPU: shapes and types of results, refusals."""

import pytest

from warploom.errors import InputError

torch = pytest.importorskip("torch")
packed = pytest.importorskip("warploom.integrations.torch_attention_packed")


@pytest.fixture
def given():
    shapes = ((9, 4, 64), (20, 2, 64), (20, 2, 64))
    tensors = [torch.empty(of, device="meta", dtype=torch.bfloat16) for of in shapes]
    return tensors, [torch.empty(3, dtype=torch.int32, device="meta") for _ in range(2)]


def test_results_and_gradients_have_the_shapes_of_tensors(given):
    (q, k, v), bounds = given
    out, lse = packed.attention_varlen_with_lse(q, k, v, *bounds, 5, 12)
    assert out.shape == q.shape and lse.shape == (4, 9) and lse.dtype is torch.float32
    wanted = [x.detach().requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(
        packed.attention_varlen(*wanted, *bounds, 5, 12, causal=True), wanted, torch.empty_like(q)
    )
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


def test_what_no_kernel_takes_is_refused(given):
    (q, k, v), bounds = given
    calls = {
        r"\[tokens, heads, d\]": ((q[None], k, v, *bounds), {}),
        "not a whole number": ((q[:, :3], k, v, *bounds), {}),
        "expected one element type": ((q.half(), k, v, *bounds), {}),
        "expected int32": ((q, k, v, bounds[0].long(), bounds[1]), {}),
        "as many for queries as for keys": ((q, k, v, bounds[0], bounds[1][:2]), {}),
        "0 sequences: expected 1 to 16384": ((q, k, v, bounds[0][:1], bounds[1][:1]), {}),
        "window=0": ((q, k, v, *bounds), {"window": 0}),
        "scale=-1": ((q, k, v, *bounds), {"scale": -1.0}),
    }
    for words, (tensors, options) in calls.items():
        with pytest.raises(InputError, match=words):
            packed.attention_varlen(*tensors, 5, 12, **options)
