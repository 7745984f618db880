"""Our kernels as fla's back end on a GPU, beside fla's own kernels for the same calls."""

from functools import wraps

import pytest

torch = pytest.importorskip("torch")
fla = pytest.importorskip("fla.ops.gated_delta_rule")
ours = pytest.importorskip("warploom.integrations.flash_linear_attention")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def gradients(rule, given, do):
    """Of a rule's o, which fla itself refuses under gates with some versions of Triton."""
    leaves = [one.detach().requires_grad_() for one in given]
    out, _ = rule(*leaves, output_final_state=True)
    return torch.autograd.grad(out, leaves, do)


def close(got, want):
    pairs = list(zip(got, want, strict=True))
    far = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs]
    return all(a.dtype is b.dtype for a, b in pairs) and all(x < 2e-2 for x in far)


def test_a_call_of_fla_gives_the_same_on_our_kernels(monkeypatch):
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(2, 500, 4, 64, device="cuda").bfloat16() for _ in range(4))
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    g = torch.nn.functional.logsigmoid(torch.randn(2, 500, 4, device="cuda")) / 8
    given = q, k, v, g, torch.rand(2, 500, 4, device="cuda").bfloat16()
    ours.register()
    calls = []
    rule = ours.ours.gated_delta_rule

    @wraps(rule)  # the back end reads its parameters
    def counted(*args, **options):
        calls.append(0)
        return rule(*args, **options)

    monkeypatch.setattr(ours.ours, "gated_delta_rule", counted)
    got = fla.chunk_gated_delta_rule(*given, output_final_state=True)
    slopes = gradients(fla.chunk_gated_delta_rule, given, do)
    assert len(calls) == 2
    direct = gradients(rule, given, do)
    assert all(torch.equal(one, other) for one, other in zip(slopes, direct, strict=True))
    monkeypatch.setenv("FLA_WARPLOOM", "0")
    assert close(got, fla.chunk_gated_delta_rule(*given, output_final_state=True))
    assert len(calls) == 2
    try:
        want = gradients(fla.chunk_gated_delta_rule, given, do)
    except RuntimeError as error:
        assert "produces incorrect results" in str(error)
    else:
        assert close(slopes, want)
