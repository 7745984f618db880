"""The operator of Hedgehog without a GPU: its result, and what it refuses."""

import re

import pytest

from warploom.errors import InputError

torch = pytest.importorskip("torch")
ops = pytest.importorskip("warploom.integrations.torch_hedgehog")
PARTS = "window", "linear"


def given(**changes):
    def make(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, device="meta", dtype=dtype)

    x, row = make(2, 100, 4, 128), make(4, dtype=torch.float32)
    maps = make(4, 128, 64)
    whole = {"q": x, "k": x, "v": make(2, 100, 4, 64), "q_map": maps, "k_map": maps}
    return whole | {"window": row, "linear": row} | changes


def call(**changes):
    x = given(**changes)
    maps, factors = ([x.pop(name) for name in two] for two in (("q_map", "k_map"), PARTS))
    return ops.hedgehog(**x, maps=maps, factors=factors)


def test_the_result_is_like_v_and_has_no_gradient():
    x = given()
    assert call().shape == x["v"].shape
    with pytest.raises(NotImplementedError, match="hedgehog"):
        call(v=x["v"].requires_grad_()).sum().backward()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"scale": 0.0}, "scale=0.0: expected a number above 0"),
        ({"k": torch.empty(2, 100, 4, 64, device="meta").bfloat16()}, "hedgehog k is"),
        ({"window": torch.empty(4, device="meta").bfloat16()}, "hedgehog window is torch.bfloat16"),
        ({"q_map": torch.empty(4, 128, 32, device="meta").bfloat16()}, "bfloat16 [4, 128, 64]"),
        ({"v": torch.empty(2, 99, 4, 64, device="meta").bfloat16()}, "expected [batch, rows"),
    ],
)  # fmt: skip
def test_other_tensors_are_refused(changes, said):
    with pytest.raises(InputError, match=re.escape(said)):
        call(**changes)
