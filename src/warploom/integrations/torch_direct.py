"""Calls of an operator that skip torch's dispatcher where nothing listens to it.

An operator of Python goes through the dispatcher four times, more than a short kernel takes. Plain
tensors on a GPU in eager code need none of it: what runs the operator is called at once, under an
`autograd.Function` where a gradient is wanted. Everything else goes the whole way: graphs that are
compiled or traced, dispatch and function modes, `torch.func.vmap`, subclasses of tensors.

Derivatives by `torch.func` or in forward mode are refused: torch would take those in forward mode
of such an operator for zero, and names no cause where it refuses the others itself.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

DEVICES = {"cuda"}  # where tensors are that a kernel runs on
OPTIONS = {bool, int, float, str, type(None)}  # what else is given


@dataclass(frozen=True)
class Signature:
    """The arguments of a schema: their names and defaults, and how many have none."""

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    required: int

    @classmethod
    def of(cls, schema: str) -> Signature:
        """The signature of a schema such as "(Tensor a, int n=1) -> Tensor"."""
        words = [word.partition("=") for word in schema[1 : schema.rindex(") ->")].split(", ")]
        return cls(
            tuple(declared.split()[-1] for declared, _, _ in words),
            tuple(ast.literal_eval(value or "None") for _, _, value in words),
            sum(not equals for _, equals, _ in words),
        )

    def filled(self, *args: Any) -> tuple[Any, ...]:
        """All arguments, from the first ones."""
        return (*args, *self.defaults[len(args) :])

    def bound(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...] | None:
        """All arguments, or None where the call does not fit: torch has the words for that."""
        if named:
            rest = self.names[len(args) :]
            if not named.keys() <= set(rest):
                return None
            left_out = zip(rest, self.defaults[len(args) :], strict=True)
            if any(name not in named for name in rest[: max(0, self.required - len(args))]):
                return None
            return (*args, *(named.get(name, default) for name, default in left_out))
        if not self.required <= len(args) <= len(self.names):
            return None
        return self.filled(*args)


def direct(
    name: str,
    made: Callable[..., Any],
    signature: Signature,
    run: Callable[..., Any],
    backward: Callable[..., Any] | None,
    context: Callable[..., Any] | None,
    mutates: tuple[str, ...],
) -> Callable[..., Any]:
    """The operator `made`, of that name, as a function that calls `run` where that is the same.

    `backward` and `context` are those that were registered with torch; without `backward`, calls
    that want a gradient go to `made`, whose refusal names the operator.
    """
    torch: Any = importlib.import_module("torch")
    plain = _plain()
    written = tuple(signature.names.index(name) for name in mutates)

    apply = _differentiable(torch, run, backward, context)

    def call(*args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return made(*args, **named)
        if _listened_to(torch):
            if any(_derived(torch, one) for one in (*args, *named.values())):
                raise NotImplementedError(
                    f"{name} under torch.func or in forward mode: it has gradients "
                    "of first order by torch.autograd alone"
                )
            return made(*args, **named)
        bound = signature.bound(args, named)
        if bound is None:
            return made(*args, **named)
        trained = False
        for one in bound:
            if type(one) in plain and (one.is_cuda or one.device.type in DEVICES):
                trained = trained or one.requires_grad
            elif type(one) not in OPTIONS and isinstance(one, torch.Tensor):
                return made(*args, **named)
        if trained and torch.is_grad_enabled():
            return made(*args, **named) if backward is None or written else apply(*bound)
        for place in written:
            if not bound[place].is_inference():
                torch.autograd.graph.increment_version(bound[place])
        return run(*bound)

    return call


@cache
def _plain() -> frozenset[Any]:
    torch: Any = importlib.import_module("torch")
    return frozenset({torch.Tensor, torch.nn.Parameter})


def plainly(torch: Any, *tensors: Any) -> bool:
    """Whether a call of these tensors in eager code needs no dispatcher."""
    if torch.compiler.is_compiling() or _listened_to(torch):
        return False
    plain = _plain()
    for one in tensors:
        if type(one) not in plain or not (one.is_cuda or one.device.type in DEVICES):
            return False
    return True


def alone(torch: Any, function: Any) -> Callable[..., Any]:
    """`apply` of an `autograd.Function` without what it does for transforms of torch.func, where
    there is none."""
    return attrgetter("apply")(super(torch.autograd.Function, function))


def _differentiable(
    torch: Any,
    run: Callable[..., Any],
    backward: Callable[..., Any] | None,
    context: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """`run` with its gradient."""

    class Direct(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            result = run(*args)
            if context is not None:
                context(ctx, args, result)
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            assert backward is not None
            return backward(ctx, *grads)

    return alone(torch, Direct)


def _listened_to(torch: Any) -> bool:
    """Whether a mode, a transform or a trace wants to see every operator."""
    internals = torch._C
    return bool(
        internals._len_torch_dispatch_stack()
        or internals._len_torch_function_stack()
        or internals._functorch.peek_interpreter_stack() is not None
        or internals._get_tracing_state() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def _derived(torch: Any, one: Any) -> bool:
    """Whether a transform of `torch.func` takes derivatives by an argument, or it has a tangent."""
    if not isinstance(one, torch.Tensor):
        return False
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(one):
        if functorch.is_gradtrackingtensor(one):
            return True
        one = functorch.get_unwrapped(one)
    ahead = torch.autograd.forward_ad
    return ahead._current_level >= 0 and ahead.unpack_dual(one).tangent is not None
