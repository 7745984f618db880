"""8-bit attention without a GPU: shapes and types of results, refusals."""

import pytest

from warploom.errors import InputError

torch = pytest.importorskip("torch")
fp8 = pytest.importorskip("warploom.integrations.torch_attention_fp8")
FakeTensorMode = pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode


@pytest.fixture
def tensors():
    with FakeTensorMode():
        yield [narrow(2, 4, 9, 64), narrow(2, 2, 20, 64), narrow(2, 2, 20, 64)]


def narrow(*shape):
    return torch.empty(shape, device="cuda", dtype=torch.float8_e4m3fn)


def factors(*shape, dtype=torch.float32):
    return torch.empty(shape, device="cuda", dtype=dtype)


def test_results_are_bf16_or_of_8_bits(tensors):
    scales = [factors(1) for _ in "qkv"]
    assert fp8.attention_fp8(*tensors, *scales).dtype is torch.bfloat16
    got = fp8.attention_fp8(*tensors, factors(2, 4), factors(2, 2), factors(2, 2), factors(1))
    assert got.dtype is torch.float8_e4m3fn and got.shape == (2, 4, 9, 64)
    of_blocks = factors(2, 4, 1), factors(2, 2, 1), factors(2, 2)
    assert fp8.attention_fp8(*tensors, *of_blocks).shape == (2, 4, 9, 64)


def test_values_in_order_have_whole_groups_of_places(tensors):
    ordered = fp8.ordered_values(tensors[2])
    assert ordered.shape == (2, 2, 64, 32)
    scales = [factors(1) for _ in "qkv"]
    assert fp8.attention_fp8(*tensors[:2], ordered, *scales, ordered=True).shape == (2, 4, 9, 64)


def test_what_no_kernel_takes_is_refused(tensors):
    q, k, v = tensors
    one = factors(1)
    for changed in (
        (q.bfloat16(), k, v, one, one, one),
        (q, k, narrow(2, 2, 64, 20), one, one, one),
        (q, narrow(2, 3, 20, 64), narrow(2, 3, 20, 64), one, one, one),
        (q, k, v, factors(2, 4), one, one),
        (q, k, v, factors(2, 4, 2), factors(2, 2, 1), factors(2, 2)),
        (q, k, v, factors(2, 4, 1), factors(2, 2, 1), factors(2, 2, 1)),
        (q, k, v, one, one, factors(1, dtype=torch.float16)),
    ):
        with pytest.raises(InputError, match=r"attention_fp8 .*expected"):
            fp8.attention_fp8(*changed)
