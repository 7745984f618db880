"""Operators called without torch's dispatcher: where they may be, and that they do the same."""

from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
torch_direct: Any = pytest.importorskip("warploom.integrations.torch_direct")
torch_program: Any = pytest.importorskip("warploom.integrations.torch_program")


def made(name: str, ran: list[str], **given: Any) -> Callable[..., Any]:
    """An operator of the CPU that multiplies, and says what went through the dispatcher."""

    def run(x: Any, bias: Any, scale: float) -> Any:
        ran.append("run")
        return x * scale if bias is None else x * scale + bias

    def fake(x: Any, bias: Any, scale: float) -> Any:
        return x.new_empty(x.shape)

    def backward(ctx: Any, grad: Any) -> Any:
        ran.append("backward")
        return grad * ctx.scale, grad, None

    def context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[2]

    schema = "(Tensor x, Tensor? bias=None, float scale=1.0) -> Tensor"
    parts = {"backward": backward, "context": context} | given
    return torch_program.operator(f"warploom_tests::{name}", schema, run, fake, **parts)


@pytest.fixture
def dispatched(monkeypatch):
    """Calls on the CPU are direct; the names of operators that torch's dispatcher was given."""
    monkeypatch.setattr(torch_direct, "DEVICES", {"cpu"})
    seen: list[str] = []
    apply = torch._library.custom_ops.CustomOpDef.__call__

    def call(self: Any, *args: Any, **named: Any) -> Any:
        seen.append(self._qualname)
        return apply(self, *args, **named)

    monkeypatch.setattr(torch._library.custom_ops.CustomOpDef, "__call__", call)
    return seen


def test_plain_tensors_go_straight_to_the_kernel(dispatched):
    ran: list[str] = []
    op, x, bias = made("straight", ran), torch.randn(4), torch.randn(4)
    for got, want in (
        (op(x), x),
        (op(x, bias), x + bias),
        (op(x, scale=3.0), 3 * x),
        (op(x, scale=2.0, bias=bias), 2 * x + bias),
        (op(x, None, 2.0), 2 * x),
    ):
        assert torch.equal(got, want)
    assert not dispatched and ran == ["run"] * 5


def test_gradients_are_those_of_the_operator(dispatched):
    ran: list[str] = []
    op = made("gradients", ran)
    x, bias = (torch.randn(4, requires_grad=True) for _ in range(2))
    found = torch.autograd.grad(op(x, bias, 2.0).square().sum(), (x, bias))
    assert not dispatched and ran == ["run", "backward"]
    whole = torch.ops.warploom_tests.gradients(x, bias, 2.0)
    want = torch.autograd.grad(whole.square().sum(), (x, bias))
    assert all(torch.equal(*pair) for pair in zip(found, want, strict=True))
    assert op(x.detach(), bias, 2.0).requires_grad
    with torch.no_grad():
        assert not op(x, bias).requires_grad


def test_calls_that_do_not_fit_are_refused_in_torchs_words(dispatched):
    op, x = made("refused", []), torch.randn(4)
    for args, named in (((), {}), ((x, None, 1.0, 2), {}), ((x,), {"x": x}), ((x,), {"other": 1})):
        with pytest.raises((RuntimeError, TypeError)):
            op(*args, **named)
    assert len(dispatched) == 4


def test_without_a_gradient_of_its_own_torch_refuses(dispatched):
    op, x = made("none", [], backward=None, context=None), torch.randn(4, requires_grad=True)
    result = op(x)
    assert dispatched == ["warploom_tests::none"]
    with pytest.raises(RuntimeError, match="autograd formula was registered"):
        result.sum().backward()


def test_what_listens_sees_the_operator(dispatched):
    class Subclass(torch.Tensor):
        pass

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    op, x = made("heard", []), torch.randn(4)
    with Mode():
        op(x)
    assert "warploom_tests.heard.default" in names
    op(x.as_subclass(Subclass))
    with torch.device("cpu"):  # a function mode
        op(x)
    op(torch.empty(4, device="meta"))
    assert len(dispatched) == 4
    torch.func.vjp(lambda y: y * 2, x)
    op(x)
    assert len(dispatched) == 4
    torch.func.vmap(op)(x)
    assert len(dispatched) == 5


def test_a_compiled_graph_holds_the_operator(dispatched):
    op, graphs = made("compiled", []), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    whole = torch.compile(lambda x: op(x * 2, scale=3.0), fullgraph=True, backend=backend)
    x = torch.randn(4)
    assert torch.equal(whole(x), x * 2 * 3)
    assert "warploom_tests.compiled" in graphs[0].code


def test_what_is_written_in_place_counts_its_versions(dispatched):
    def run(x: Any, state: Any) -> Any:
        state.detach().add_(x)
        return x * 2

    schema = "(Tensor x, Tensor(a!) state) -> Tensor"
    fake = lambda x, state: x.new_empty(x.shape)  # noqa: E731
    op = torch_program.operator("warploom_tests::step", schema, run, fake, mutates=("state",))
    x, state = torch.ones(4), torch.zeros(4)
    before = state._version
    op(x, state)
    assert state._version > before and float(state.sum()) == 4 and not dispatched
    with torch.inference_mode():
        op(torch.ones(4), torch.zeros(4))
    assert not dispatched


def test_derivatives_that_torch_would_lose_are_refused(dispatched):
    op, x, w = made("transformed", []), torch.randn(4), torch.randn(4)
    with pytest.raises(NotImplementedError, match="transformed under torch"):
        torch.func.grad(lambda x: op(x).sum())(x)
    with pytest.raises(NotImplementedError, match="transformed under torch"):
        torch.func.jvp(op, (x,), (w,))
    with pytest.raises(NotImplementedError, match="transformed under torch"):
        torch.func.grad(lambda x: torch.func.vmap(op)(x).sum())(x[None])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, w)
        with pytest.raises(NotImplementedError, match="or in forward mode"):
            op(w, bias=dual)
        assert torch.equal(op(x), x)  # has no tangent
    assert torch.equal(torch.func.grad(lambda x: (x * op(w)).sum())(x), w)  # not by x
