"""Attention under other libraries' signatures, without a GPU: what is called and what refused."""

import pytest

from warploom.errors import InputError

torch = pytest.importorskip("torch")
named = pytest.importorskip("warploom.integrations.torch_signatures")


def empty(*shape):
    return torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True)


@pytest.fixture
def called(monkeypatch):
    """What the operators are called with; they give q."""
    calls = []

    def operator(*args, **options):
        calls.append((args, options))
        return args[0]

    monkeypatch.setattr(named, "attention", operator)
    monkeypatch.setattr(named, "attention_varlen", operator)
    return calls


def test_flash_attention_lies_as_rows_and_heads(called):
    qkv = empty(2, 9, 3, 4, 64)
    out = named.flash_attn_qkvpacked_func(
        qkv, softmax_scale=0.5, window_size=(5, 0), deterministic=True
    )
    (args, options) = called[0]
    assert out.shape == (2, 9, 4, 64)
    assert [x.shape for x in args[:3]] == [(2, 4, 9, 64)] * 3 and args[3:] == (True, 6, 0.5)
    assert options == {"deterministic": True, "softcap": 0.0}
    assert all(x._base is not None and x.stride(-1) == 1 for x in args[:3])  # views


def test_packed_sequences_keep_their_bounds(called):
    bounds = torch.empty(3, dtype=torch.int32, device="meta")
    named.flash_attn_varlen_qkvpacked_func(
        empty(20, 3, 4, 64), bounds, 12, causal=True, softcap=30.0
    )
    (args, options) = called[0]
    assert [x.shape for x in args[:3]] == [(20, 4, 64)] * 3
    assert args[3] is bounds and args[4] is bounds and args[5:] == (12, 12)
    wanted = {"causal": True, "window": None, "scale": None, "deterministic": False}
    assert options == wanted | {"softcap": 30.0}


def test_torch_has_any_number_of_dimensions_before_heads(called):
    q, k = empty(2, 5, 4, 9, 64), empty(2, 5, 2, 7, 64)
    out = named.scaled_dot_product_attention(q, k, k, scale=0.5, enable_gqa=True)
    assert out.shape == q.shape and called[0][0][0].shape == (10, 4, 9, 64)
    assert called[0][1] == {"causal": False, "scale": 0.5}
    q = empty(4, 9, 64)
    assert named.scaled_dot_product_attention(q, q, q, is_causal=True).shape == q.shape
    assert called[1][1]["causal"]


def test_results_and_gradients_have_the_shapes_of_tensors():
    q, k = empty(2, 9, 4, 64), empty(2, 9, 2, 64)
    out = named.flash_attn_func(q, k, k, causal=True, deterministic=True)
    grads = torch.autograd.grad(out, (q, k), torch.empty_like(out))
    assert [x.shape for x in (out, *grads)] == [q.shape, q.shape, k.shape]


def test_what_no_kernel_does_is_refused(called):
    q, k = empty(2, 9, 4, 64), empty(2, 7, 4, 64)
    flash, torchs = named.flash_attn_func, named.scaled_dot_product_attention
    calls = {
        "dropout_p=0.1": lambda: flash(q, k, k, 0.1),
        "alibi_slopes=Tensor": lambda: flash(q, k, k, alibi_slopes=q),
        r"window_size=\(5, 5\)": lambda: flash(q, k, k, window_size=(5, 5)),
        "return_attn_probs": lambda: flash(q, k, k, return_attn_probs=True),
        r"expected \[batch, rows, heads, d\] each": lambda: flash(q[0], k, k),
        r"expected \[batch, rows, 3": lambda: named.flash_attn_qkvpacked_func(q),
        "attn_mask=Tensor": lambda: torchs(q, k, k, q),
        "4 rows and 5 keys": lambda: torchs(q, empty(2, 9, 5, 64), q, is_causal=True),
        "9 query heads and 7 key heads": lambda: torchs(q, k, k),
        r"expected \[..., heads, rows, d\] each": lambda: torchs(q, k[0], k),
    }
    for words, call in calls.items():
        with pytest.raises(InputError, match=words):
            call()
    assert not called
