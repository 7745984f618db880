"""The gradients of attention as a PyTorch operator: `attention_backward`.

Up to three kernels one after another (`kernels.attention.backward`), compiled at first use. With
`deterministic` the gradients have the same bits in every run.
"""

from __future__ import annotations

from typing import Any

from warploom.codegen.compile.build import build
from warploom.errors import InputError
from warploom.integrations.torch_program import check_devices, current_stream, torch_module
from warploom.kernels.attention.backward import BackwardConfig, kernel
from warploom.runtime.kernel import Kernel
from warploom.runtime.tensors import element_type
from warploom.tile import dtype

torch: Any = torch_module()
_kernels: dict[tuple[BackwardConfig, str, int], Kernel] = {}

SCHEMA = (
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? grad_lse=None, "
    "bool causal=False, float? scale=None, bool deterministic=False) -> (Tensor, Tensor, Tensor)"
)


def config_of(
    q: Any, k: Any, causal: bool, scale: float | None, deterministic: bool
) -> BackwardConfig:
    """The kernels that shapes need; raises `InputError` where there are none."""
    return BackwardConfig(
        dtype=dtype(element_type(q.dtype)),
        head_dim=q.shape[3],
        causal=causal,
        group=q.shape[1] // k.shape[1],
        scale=scale,
        deterministic=deterministic,
    )


def _check(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
    given = {"grad": grad, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    check_devices("attention_backward", given)
    rows, kinds = tuple(q.shape), {t.dtype for t in (grad, q, k, v, out)}
    shapes = [tuple(t.shape) for t in (grad, out)] + [(*lse.shape, rows[-1])]
    if rows != shapes[0] or shapes.count(rows) != len(shapes) or len(kinds) != 1:
        listed = ", ".join(f"{name} {t.dtype} {list(t.shape)}" for name, t in given.items())
        raise InputError(f"attention_backward of {listed}: expected one type, grad and out like q")


def _kernel(config: BackwardConfig, part: str, device: int) -> Kernel:
    """A kernel of a configuration, built when first asked for."""
    key = (config, part, device)
    if key not in _kernels:
        program, schedule, allow = kernel(config, part)
        _kernels[key] = build(program, schedule, allow=allow).kernel(device)
    return _kernels[key]


def _run(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    grad_lse: Any = None,
    causal: bool = False,
    scale: float | None = None,
    deterministic: bool = False,
) -> tuple[Any, Any, Any]:
    _check(grad, q, k, v, out, lse)
    config = config_of(q, k, causal, scale, deterministic)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    # A gradient may be an expanded view, whose pitches are 0.
    arrays = {"q": q, "k": k, "v": v, "o": out, "do": grad.contiguous(), "lse": lse.contiguous()}
    arrays |= {"dq": dq, "dk": dk, "dv": dv}
    arrays |= {name: torch.empty_like(arrays["lse"]) for name in ("base", "delta")}
    if not deterministic:
        room = config.sums_shape(q.shape)
        arrays["dq_sum"] = torch.empty(room, dtype=torch.float32, device=q.device)
    for part in config.parts:
        one = _kernel(config, part, q.device.index)
        given = {spec.name: arrays[spec.name] for spec in one.interface.arrays}
        one(given, stream=current_stream(q))
        if part == "prepare" and grad_lse is not None:
            # Scores change lse by the weights, and out by the weights times grad v less delta.
            arrays["delta"] -= grad_lse
    return dq, dk, dv


def _fake(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    grad_lse: Any = None,
    causal: bool = False,
    scale: float | None = None,
    deterministic: bool = False,
) -> tuple[Any, Any, Any]:
    _check(grad, q, k, v, out, lse)
    config_of(q, k, causal, scale, deterministic)
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    return dq, dk, dv


attention_backward: Any = torch.library.custom_op(
    "warploom::attention_backward", _run, mutates_args=(), schema=SCHEMA
)
attention_backward.register_fake(_fake)
