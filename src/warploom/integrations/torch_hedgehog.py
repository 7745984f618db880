"""Hedgehog's attention with LoLCATs' window as a PyTorch operator; importing this needs torch."""

from __future__ import annotations

from typing import Any

from warploom.autosched.schedules import compiled
from warploom.errors import InputError
from warploom.integrations import torch_program as ops
from warploom.integrations.torch_recurrent import default_scale
from warploom.kernels.recurrent import hedgehog as kernel

torch: Any = ops.torch_module()
SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor q_map, Tensor k_map, Tensor window, Tensor linear, "
    "float scale) -> Tensor"
)
NAMES = ("q", "k", "v", "q_map", "k_map", "window", "linear")


def hedgehog(
    q: Any, k: Any, v: Any, maps: tuple[Any, Any], factors: tuple[Any, Any],
    scale: float | None = None,
) -> Any:  # fmt: skip
    """A softmax over a row's chunk of 64 and the one before, features over all rows before these.

    q, k: [B, T, H, K], v: [B, T, H, V] and the feature maps of q and of k, [H, K, 64] each, in
    bf16; `factors` say how much the window and how much what is before it count, [H] each in fp32,
    not below 0. K is at most 128, `scale` is 1/sqrt(K) where it is not given. Gives o like v; no
    gradients.
    """
    (q_map, k_map), (window, linear) = maps, factors
    return _operator(q, k, v, q_map, k_map, window, linear, default_scale(q, scale))


def _checked(*args: Any) -> kernel.HedgehogConfig:
    tensors: dict[str, Any] = dict(zip(NAMES, args, strict=False))
    ops.check_devices("hedgehog", tensors)
    q, v = tensors["q"], tensors["v"]
    if q.dim() != 4 or v.dim() != 4 or q.shape[:3] != v.shape[:3]:
        raise InputError(
            f"hedgehog of q {list(q.shape)} and v {list(v.shape)}: expected [batch, rows, heads, "
            "d] and [batch, rows, heads, e]"
        )
    heads, d = q.shape[2:]
    wanted = {
        **dict.fromkeys(("q_map", "k_map"), (heads, d, kernel.FEATURES)),
        **dict.fromkeys(("window", "linear"), (heads,)),
        "k": tuple(q.shape),
    }
    for name, one in tensors.items():
        shape = wanted.get(name, tuple(one.shape))
        kind = torch.float32 if name in ("window", "linear") else torch.bfloat16
        if tuple(one.shape) != shape or one.dtype != kind:
            raise InputError(
                f"hedgehog {name} is {one.dtype} {list(one.shape)}, expected {kind} {list(shape)}"
            )
    if not args[len(NAMES)] > 0:
        raise InputError(f"hedgehog scale={args[len(NAMES)]}: expected a number above 0")
    return kernel.HedgehogConfig(d)


def _result(_: kernel.HedgehogConfig, *args: Any) -> Any:
    return args[2].new_empty(args[2].shape)


def _fill(config: kernel.HedgehogConfig, out: Any, *args: Any) -> None:
    arrays: dict[str, Any] = dict(zip(NAMES, args, strict=False)) | {"o": out}
    policy = kernel.default_policy()
    ops.launch(
        ("hedgehog", config),
        lambda: compiled(kernel.hedgehog(config), policy),
        arrays,
        {"scale": args[len(NAMES)]},
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Nothing: there is no backward pass."""
    del ctx, inputs, output


_operator = ops.operator(
    "warploom::hedgehog",
    SCHEMA,
    *ops.steps(_checked, _result, _fill),
    ops.refuse_backward("hedgehog", "call it under torch.no_grad()"),
    _keep,
)
