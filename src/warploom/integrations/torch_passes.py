"""A forward and a backward pass in eager code: what both launch is decided once a form of a call.

An operator and its gradient look at all of their arguments, each by itself, and at twice as many as
one who knows both: what a backward pass is given is what the forward pass saw and made. Whatever
listens to operators (`torch_direct`) gets the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from warploom.integrations.torch_direct import alone, plainly
from warploom.integrations.torch_program import Steps, planned, torch_module
from warploom.runtime.kernel import ALIGNED

torch: Any = torch_module()


def both(
    ahead: Steps,
    back: Steps,
    operator: Callable[..., Any],
    linked: Callable[..., tuple[Any, ...]],
    more: int = 0,
) -> Callable[..., Any]:
    """The first result of `ahead` on q, k, v and what else it takes, with the gradients of these
    three by `back`, whose operator is called where somebody listens.

    `linked` gives the arguments of `back` behind the gradient, q, k, v and both results, from the
    arguments of `ahead` behind q, k and v, of which the first `more` are tensors.
    """

    class Passes(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, decided: Any, rest: tuple[Any, ...]) -> Any:
            made = ahead.done(decided, q, k, v, *rest)
            ctx.decided, ctx.rest = decided, rest[more:]
            ctx.save_for_backward(q, k, v, *made, *rest[:more])
            return made[0]

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            q, k, v, out, lse, *others = ctx.saved_tensors
            given = (grad, q, k, v, out, lse, *linked(*others, *ctx.rest))
            if torch.is_grad_enabled() or not plainly(torch, grad):
                return (*operator(*given), None, None)
            form = (
                ctx.decided,
                torch.are_deterministic_algorithms_enabled(),
                # Hooks on what is saved may have put it elsewhere.
                grad.stride(), q.stride(), k.stride(), v.stride(), out.stride(),
                grad.data_ptr() % ALIGNED, q.data_ptr() % ALIGNED, k.data_ptr() % ALIGNED,
                v.data_ptr() % ALIGNED, out.data_ptr() % ALIGNED,
            )  # fmt: skip
            decided = planned(form, lambda: back.plan(*given))
            return (*back.done(decided, *given), None, None)

    apply = alone(torch, Passes)

    def call(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        """The result, or None where somebody listens."""
        if not plainly(torch, q, k, v, *rest[:more]):
            return None
        return apply(q, k, v, ahead.decided(q, k, v, *rest), rest)

    return call
