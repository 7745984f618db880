"""Both passes of an operator in eager code: one plan a form, and who listens gets the operators."""

import pytest

torch = pytest.importorskip("torch")
torch_direct = pytest.importorskip("warploom.integrations.torch_direct")
torch_passes = pytest.importorskip("warploom.integrations.torch_passes")
torch_program = pytest.importorskip("warploom.integrations.torch_program")
Steps = torch_program.Steps


@pytest.fixture
def made(monkeypatch):
    """o = factor q k v with a second result, its gradients, and what was asked for."""
    monkeypatch.setattr(torch_direct, "DEVICES", {"cpu"})
    monkeypatch.setattr(torch_program, "PLANS", {})
    for module in (torch_program, torch_passes):
        monkeypatch.setattr(module, "ALIGNED", 1)  # where a CPU puts tensors does not count
    asked = []

    def noted(what):
        return lambda *args: asked.append(what) or what

    def results(_, q, *others):
        return torch.empty_like(q), q.new_empty(q.shape[:1])

    def fill(plan, made, q, k, v, factor):
        made[0].copy_(factor * q * k * v)

    def gradients(grad, q, k, v, out, lse, factor):
        asked.append("operator")
        return factor * grad * k * v, factor * grad * q * v, factor * grad * q * k

    def fill_back(plan, made, grad, q, k, v, out, lse, factor):
        pairs = zip(made, (k * v, q * v, q * k), strict=True)
        for one, other in pairs:
            one.copy_(factor * grad * other)

    def like(_, grad, q, k, v, *others):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def form(q, k, v, factor):
        return *torch_program.form_of(q, k, v), factor

    ahead = Steps(noted("ahead"), results, fill, form)
    back = Steps(noted("back"), like, fill_back)
    return torch_passes.both(ahead, back, gradients, lambda factor: (factor,)), asked


def leaves(turned=False):
    shape = (3, 4) if turned else (4, 3)
    tensors = [torch.randn(shape) for _ in range(3)]
    return [(x.T if turned else x).detach().requires_grad_() for x in tensors]


def right(call, q, k, v):
    grads = torch.autograd.grad(call(q, k, v, 2.0), (q, k, v), torch.ones(4, 3))
    wanted = 2.0 * k * v, 2.0 * q * v, 2.0 * q * k
    return all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))


def test_calls_of_one_form_share_both_plans(made):
    call, asked = made
    assert right(call, *leaves()) and right(call, *leaves())
    assert asked == ["ahead", "back"]
    assert right(call, *leaves(turned=True)) and asked == ["ahead", "back"] * 2


def test_what_a_hook_has_moved_gets_a_plan_of_its_own(made):
    call, asked = made
    for turned in (lambda x: x, lambda x: x.T.contiguous().T):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, turned):
            assert right(call, *leaves())
    assert asked == ["ahead", "back", "back"]


def test_who_listens_gets_the_operators(made):
    call, asked = made
    q, k, v = leaves()
    grads = torch.autograd.grad(call(q, k, v, 2.0), (q, k, v), torch.ones(4, 3), create_graph=True)
    assert asked == ["ahead", "operator"] and grads[0].requires_grad
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert call(q, k, v, 2.0) is None
    assert call(*(x.to("meta") for x in (q, k, v)), 2.0) is None
