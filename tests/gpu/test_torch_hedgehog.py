"""Hedgehog's attention on a GPU, beside its weights in float64."""

import pytest

from warploom.kernels.recurrent.hedgehog import reference

torch = pytest.importorskip("torch")
ops = pytest.importorskip("warploom.integrations.torch_hedgehog")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BOUND = 5e-3  # relative error in norm: weights, features, states and results are rounded to bf16


@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_it_is_a_softmax_in_a_window_and_features_before_it(rows):
    q, k, v = (torch.randn(2, rows, 4, 128, device="cuda").bfloat16() for _ in range(3))
    maps = [(torch.randn(4, 128, 64, device="cuda") / 11).bfloat16() for _ in range(2)]
    parts = torch.rand(2, 4, device="cuda").unbind()
    given = {"q": q, "k": k, "v": v, "q_map": maps[0], "k_map": maps[1]}
    given |= dict(zip(("window", "linear"), parts, strict=True))
    right = reference({name: one.double().cpu().numpy() for name, one in given.items()}, 128**-0.5)
    want = torch.from_numpy(right).cuda()
    got = ops.hedgehog(q, k, v, maps, parts).double()
    assert float((got - want).norm() / want.norm()) < BOUND
