"""The gradients of attention as a PyTorch operator: `attention_backward`.

Three kernels one after another (`kernels.attention.backward`), compiled at first use. With
`deterministic` the gradients have the same bits in every run.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from warploom.autosched.schedules import compiled
from warploom.codegen.compile.build import Built
from warploom.errors import InputError
from warploom.integrations.torch_program import (
    built_kernel,
    check_devices,
    current_stream,
    kind_of,
    operator,
    planned,
    torch_module,
)
from warploom.kernels.attention.backward import BackwardConfig, fitted
from warploom.kernels.attention.gradients import kernel, parts
from warploom.runtime.tensors import element_type
from warploom.tile import dtype

torch: Any = torch_module()

SCHEMA = (
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? grad_lse=None, "
    "bool causal=False, int? window=None, float? scale=None, bool deterministic=False) "
    "-> (Tensor, Tensor, Tensor)"
)


def config_of(
    q: Any,
    k: Any,
    causal: bool,
    window: int | None,
    scale: float | None,
    deterministic: bool,
) -> BackwardConfig:
    """The kernels that shapes need; raises `InputError` where there are none."""
    config = BackwardConfig(
        dtype=dtype(element_type(q.dtype)),
        head_dim=q.shape[3],
        causal=causal,
        window=window,
        group=q.shape[1] // k.shape[1],
        scale=scale,
        deterministic=deterministic,
    )
    return fitted(config, q.shape[2], k.shape[2])


def _check(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
    given = {"grad": grad, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    check_devices("attention_backward", given)
    rows, kinds = tuple(q.shape), {t.dtype for t in (grad, q, k, v, out)}
    shapes = [tuple(t.shape) for t in (grad, out)] + [(*lse.shape, rows[-1])]
    if rows != shapes[0] or shapes.count(rows) != len(shapes) or len(kinds) != 1:
        listed = ", ".join(f"{name} {t.dtype} {list(t.shape)}" for name, t in given.items())
        raise InputError(f"attention_backward of {listed}: expected one type, grad and out like q")


def _build(config: BackwardConfig, part: str) -> Built:
    program, policy, allow = kernel(config, part)
    return compiled(program, policy, allow=allow)


def _checked(args: tuple[Any, ...]) -> tuple[BackwardConfig, tuple[Any, Any, Any]]:
    """(the configuration of a call, fresh gradients of q, k and v)."""
    grad, q, k, v, out, lse, _, *options = args
    _check(grad, q, k, v, out, lse)
    empty = (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
    return config_of(q, k, *options), empty


def _plan(
    tensors: tuple[Any, ...], options: tuple[Any, ...]
) -> tuple[BackwardConfig, list[tuple[str, Any, list[str]]]]:
    """The configuration of a call; its parts, their kernels and the names of their arrays."""
    q, k = tensors[1:3]
    _check(*tensors)
    config = config_of(q, k, *options)
    made = {
        part: built_kernel((config, part), q, partial(_build, config, part))
        for part in parts(config)
    }
    return config, [
        (part, one, [spec.name for spec in one.interface.arrays]) for part, one in made.items()
    ]


def _run(*args: Any) -> tuple[Any, Any, Any]:
    tensors, grad_lse, options = args[:6], args[6], args[7:]
    grad, q, k, v, out, lse = tensors
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    if q.numel() == 0 or k.numel() == 0:
        _checked(args)
        return dq.zero_(), dk.zero_(), dv.zero_()
    key = ("attention_backward", *kind_of(*tensors), *options)
    config, kernels = planned(key, lambda: _plan(tensors, options))
    # A gradient may be an expanded view, whose pitches are 0.
    arrays = {"q": q, "k": k, "v": v, "o": out, "do": grad.contiguous(), "lse": lse.contiguous()}
    arrays |= {"dq": dq, "dk": dk, "dv": dv}
    room = (2, *config.vectors_shape(lse.shape))
    vectors = torch.empty(room, dtype=torch.float32, device=q.device)
    arrays["base"], arrays["delta"] = vectors.narrow(-1, 0, lse.shape[-1]).unbind(0)
    if config.sums:
        room = config.sums_shape(q.shape)
        arrays["dq_sum"] = torch.empty(room, dtype=torch.float32, device=q.device)
    if config.deterministic and config.sums:
        turns = config.turns_shape(q.shape)
        arrays["turns"] = torch.zeros(turns, dtype=torch.int32, device=q.device)
    stream = current_stream(q)
    for part, launched, names in kernels:
        launched({name: arrays[name] for name in names}, stream=stream)
        if part == "prepare" and grad_lse is not None:
            # Scores change lse by the weights, and out by the weights times grad v less delta.
            arrays["delta"] -= grad_lse
    return dq, dk, dv


def _fake(*args: Any) -> tuple[Any, Any, Any]:
    return _checked(args)[1]


attention_backward = operator("warploom::attention_backward", SCHEMA, _run, _fake)
