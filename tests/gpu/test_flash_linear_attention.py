"""Our kernels as fla's back end on a GPU, beside fla's own kernels for the same calls."""

import pytest

torch = pytest.importorskip("torch")
fla = pytest.importorskip("fla.ops.gated_delta_rule")
ours = pytest.importorskip("warploom.integrations.flash_linear_attention")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def delta_rule(given, do):
    """o, the final state and the gradients."""
    leaves = [one.detach().requires_grad_() for one in given]
    out, state = fla.chunk_gated_delta_rule(*leaves, output_final_state=True)
    return out, state, *torch.autograd.grad(out, leaves, do)


def test_a_call_of_fla_gives_the_same_on_our_kernels(monkeypatch):
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(2, 500, 4, 64, device="cuda").bfloat16() for _ in range(4))
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    g = torch.nn.functional.logsigmoid(torch.randn(2, 500, 4, device="cuda")) / 8
    given = q, k, v, g, torch.rand(2, 500, 4, device="cuda").bfloat16()
    ours.register()
    calls = []
    rule = ours.ours.gated_delta_rule
    monkeypatch.setattr(ours.ours, "gated_delta_rule", lambda *x: calls.append(0) or rule(*x))
    got = delta_rule(given, do)
    monkeypatch.setenv("FLA_WARPLOOM", "0")
    want = delta_rule(given, do)
    assert len(calls) == 1
    for one, other in zip(got, want, strict=True):
        distance = (one.double() - other.double()).norm() / other.double().norm()
        assert one.dtype is other.dtype and float(distance) < 2e-2
