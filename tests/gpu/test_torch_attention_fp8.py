"""8-bit attention on a GPU: factors of tensors and heads, both results, ordered values."""

import pytest

torch = pytest.importorskip("torch")
fp8 = pytest.importorskip("warploom.integrations.torch_attention_fp8")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def operands(keys=500, d=128):
    torch.manual_seed(1)
    shapes = ((2, 4, 200, d), (2, 2, keys, d), (2, 2, keys, d))
    return [torch.randn(s, device="cuda").to(torch.float8_e4m3fn) for s in shapes]


def factors(*shape):
    return torch.rand(shape, device="cuda") + 0.5


def expected(tensors, scales, causal):
    shape = {1: (), 2: (..., None, None), 3: (..., None)}
    q, k, v = (
        one.double() * spread(one, scale.double())[shape[scale.dim()]]
        for one, scale in zip(tensors, scales, strict=True)
    )
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], device="cuda").triu(1 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(hidden.bool(), -torch.inf)
    return scores.softmax(-1) @ v


def spread(one, scale):
    """Factors of blocks of 128 rows, one a row."""
    return scale if scale.dim() < 3 else scale.repeat_interleave(128, -1)[..., : one.shape[-2]]


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_factors_of_tensors_heads_and_blocks(causal, d):
    tensors = operands(d=d)
    for scales in (
        [factors(1) for _ in "qkv"],
        [factors(2, 4), factors(2, 2), factors(2, 2)],
        [factors(2, 4, 2), factors(2, 2, 4), factors(2, 2)],
    ):
        want = expected(tensors, scales, causal)
        got = fp8.attention_fp8(*tensors, *scales, causal=causal)
        assert error(got, want) < 0.04
        ordered = fp8.ordered_values(tensors[2])
        again = fp8.attention_fp8(*tensors[:2], ordered, *scales, causal=causal, ordered=True)
        assert torch.equal(got, again)


def test_8_bit_results():
    tensors, scales = operands(), [factors(1) for _ in "qkv"]
    got = fp8.attention_fp8(*tensors, *scales, torch.full((1,), 16.0, device="cuda"))
    assert got.dtype is torch.float8_e4m3fn
    assert error(got.double() / 16.0, expected(tensors, scales, False)) < 0.06


def test_opcheck():
    # torch's check of a schema multiplies the tensors, which it cannot do with 8 bits.
    checks = ("test_autograd_registration", "test_faketensor")
    tensors, scales = operands(), [factors(1) for _ in "qkv"]
    calls = {"attention_fp8": (*tensors, *scales), "ordered_values": (tensors[2],)}
    for name, args in calls.items():
        torch.library.opcheck(getattr(torch.ops.warploom, name).default, args, test_utils=checks)
