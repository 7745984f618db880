"""The gradients of attention as a PyTorch operator: `attention_backward`.

Up to three kernels one after another (`kernels.attention.backward`), compiled at first use. With
`deterministic` the gradients have the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from warploom.codegen.compile.build import Built, build
from warploom.codegen.simt.schedule import simt
from warploom.errors import InputError
from warploom.integrations.torch_program import check_devices, current_stream, torch_module
from warploom.kernels.attention import backward as kernels
from warploom.kernels.attention.backward import BackwardConfig
from warploom.runtime.kernel import Kernel
from warploom.runtime.tensors import element_type
from warploom.tile import dtype

torch: Any = torch_module()
_kernels: dict[tuple[Any, ...], Kernel] = {}
FEW_SPILLS = ("spills", "stack")  # a few words outside of the matmuls' registers

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


def _kernel(device: int, key: tuple[Any, ...], make: Callable[[], Built]) -> Kernel:
    if (device, *key) not in _kernels:
        _kernels[device, *key] = make().kernel(device)
    return _kernels[device, *key]


def _simt(program: Any) -> Built:
    return build(program, simt(program))


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
    stream, device = current_stream(q), q.device.index
    # A gradient may be an expanded view, whose pitches are 0.
    grad = grad.contiguous()
    arrays = {"q": q, "k": k, "v": v, "do": grad, "dk": dk, "dv": dv}
    arrays |= {name: torch.empty_like(lse) for name in ("base", "delta")}
    sums = {} if deterministic else {"dq_sum": _sums(config, q)}
    row = {name: arrays[name] for name in ("do", "base", "delta")} | sums
    make = _kernel(device, ("prepare", config), lambda: _simt(kernels.prepare(config)))
    make({**row, "o": out, "lse": lse.contiguous()}, stream=stream)
    if grad_lse is not None:
        # d lse / d scores are the weights, as d out / d scores are without D.
        arrays["delta"] -= grad_lse
    main = _kernel(
        device,
        ("main", config),
        lambda: build(
            kernels.backward(config), kernels.backward_schedule(config), allow=FEW_SPILLS
        ),
    )
    main(arrays | sums, stream=stream)
    if deterministic:
        last = _kernel(
            device,
            ("rows", config),
            lambda: build(kernels.backward_rows(config), kernels.rows_schedule(config)),
        )
        read = {name: arrays[name] for name in ("q", "k", "v", "do", "base", "delta")}
        last(read | {"dq": dq}, stream=stream)
    else:
        last = _kernel(device, ("finish", config), lambda: _simt(kernels.finish(config)))
        last(sums | {"dq": dq}, stream=stream)
    return dq, dk, dv


def _sums(config: BackwardConfig, q: Any) -> Any:
    """Room for the sums of dq."""
    batch, heads, rows, depth = q.shape
    block = config.tile[0]
    blocks = (batch, heads, -(-rows // block), depth, block)
    shape = blocks if config.transposed else q.shape
    return torch.empty(shape, dtype=torch.float32, device=q.device)


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
