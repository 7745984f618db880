"""One row of recurrent attention as PyTorch operators: steps of decoding, the state in place.

`recurrent_step` takes the row of what `torch_recurrent`'s functions take many of;
`selective_state_update` has mamba_ssm's arguments, for Mamba-2's heads. Forward; importing this
module needs torch.
"""

from __future__ import annotations

from typing import Any

from warploom.autosched.schedules import compiled
from warploom.errors import InputError
from warploom.integrations.torch_program import launch, operator, steps, torch_module
from warploom.integrations.torch_recurrent import config_of, default_scale
from warploom.kernels.recurrent.config import RecurrentConfig
from warploom.kernels.recurrent.step import recurrent_step as step_program

torch: Any = torch_module()
SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor? g, Tensor? dt, Tensor? a, "
    "Tensor? bias, Tensor? skip, Tensor? beta, float scale) -> Tensor"
)
TENSORS = ("q", "k", "v", "state", "g", "dt", "a", "bias", "skip", "beta")
BY_HEAD = ("a", "bias", "skip")


def _given(*args: Any) -> tuple[dict[str, Any], RecurrentConfig]:
    """(tensors by name, what the kernel of them is); raises `InputError` for others."""
    tensors = {n: one for n, one in zip(TENSORS, args, strict=False) if one is not None}
    state = tensors["state"]
    rows = {
        name: one if name in BY_HEAD or (name == "g" and one.dim() == 1) else one.unsqueeze(1)
        for name, one in tensors.items()
        if name != "state"
    }
    config = config_of(rows, False)
    sides = (config.key_dim, config.value_dim)
    shape = (*tensors["v"].shape[:2], *(sides if config.decay != "step" else sides[::-1]))
    if tuple(state.shape) != shape or state.dtype != torch.float32:
        raise InputError(
            f"recurrent step state is {list(state.shape)} of {state.dtype}, expected "
            f"{list(shape)} of torch.float32"
        )
    return tensors, config


def _result(given: tuple[dict[str, Any], RecurrentConfig], *_: Any) -> Any:
    v = given[0]["v"]
    return v.new_empty(v.shape)


def _fill(given: tuple[dict[str, Any], RecurrentConfig], out: Any, *args: Any) -> None:
    tensors, config = given
    arrays, scale = tensors | {"o": out}, {"scale": args[-1]}
    launch(("step", config), lambda: compiled(step_program(config)), arrays, scale)


_operator = operator(
    "warploom::recurrent_step", SCHEMA, *steps(_given, _result, _fill), mutates=("state",)
)


def recurrent_step(
    q: Any, k: Any, v: Any, state: Any, g: Any = None, beta: Any = None, scale: float | None = None
) -> Any:
    """The next row of linear attention, simple GLA, GLA or a delta rule; `state` is moved on.

    q, k: [B, H, K] (or fewer heads, shared by neighbours), v: [B, H, V] in bf16; state
    [B, H, K, V] in fp32. g are logarithms: [H], [B, H], or [B, H, K] in bf16; with beta, [B, H],
    a delta rule. Gives o like v. The functions of `torch_recurrent` say more.
    """
    if beta is not None and g is not None:
        beta = beta.to(g.dtype)
    scale = default_scale(q, scale)
    return _operator(q, k, v, state, g, None, None, None, None, beta, scale)


def selective_state_update(
    state: Any,
    x: Any,
    dt: Any,
    A: Any,  # noqa: N803 (mamba_ssm's names)
    B: Any,  # noqa: N803
    C: Any,  # noqa: N803
    D: Any = None,  # noqa: N803
    dt_bias: Any = None,
    dt_softplus: bool = False,
) -> Any:
    """Mamba-2's next row: state: [b, h, p, n] in fp32, moved on; x: [b, h, p]; B, C: [b, g, n].

    dt: [b, h] and A, D, dt_bias: [h], or these expanded along p and n as mamba_ssm's are. Gives y
    like x. Raises `InputError` for numbers of their own for every channel (Mamba-1).
    """
    if dt_bias is not None and not dt_softplus:
        raise InputError("selective_state_update takes dt_bias with dt_softplus=True")
    rates = [_of_heads(one, name, 1) for name, one in (("A", A), ("D", D), ("dt_bias", dt_bias))]
    rate, skip, bias = rates
    if dt_softplus and bias is None:
        bias = torch.zeros_like(rate)
    step = _of_heads(dt, "dt", 2)
    return _operator(C, B, x, state, None, step, rate, bias, skip, None, 1.0)


def _of_heads(one: Any, name: str, rank: int) -> Any:
    """A number a head, from a tensor that may repeat it."""
    while one is not None and one.dim() > rank:
        if one.stride(-1) and one.shape[-1] > 1:
            raise InputError(
                f"selective_state_update {name} of shape {list(one.shape)} has numbers of its own "
                "for every channel: expected one a head, or one expanded"
            )
        one = one[..., 0]
    return one


__all__ = ["recurrent_step", "selective_state_update"]
