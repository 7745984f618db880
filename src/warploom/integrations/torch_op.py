"""The library's kernels as PyTorch operators: `gemm`, `attention`, `attention_with_lse`, with
gradients.

Each picks its kernel by shape (`kernels.select`), compiles it at first use, keeps it, and launches
on torch's current stream. Fake tensors work without a GPU or a compiler, so `torch.compile` and
`torch.library.opcheck` do; importing this module needs torch.
"""

from __future__ import annotations

from typing import Any

from warploom.autosched.plans import ADDING
from warploom.autosched.schedules import compiled
from warploom.errors import InputError
from warploom.integrations import torch_program as ops
from warploom.integrations.torch_attention import (
    ATTENTION_TYPES,
    GRADIENTS,
    attention_backward,
    checked_group,
    value_dim,
)
from warploom.integrations.torch_launches import Launches
from warploom.integrations.torch_passes import both
from warploom.kernels.attention.program import AttentionConfig
from warploom.kernels.attention.variants import choose_attention
from warploom.kernels.gemm.program import ACTIVATIONS, GemmConfig, combine
from warploom.kernels.gemm.variant import choose_gemm
from warploom.tile import BF16

torch: Any = ops.torch_module()
GEMM_TYPES = ("bf16", "fp16", "e4m3", "e5m2")
GEMM_SCHEMA = (
    "(Tensor a, Tensor b, Tensor? bias=None, Tensor? residual=None, str activation='none', "
    "float scale=1.0, bool batch_invariant=False) -> Tensor"
)
ATTENTION_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, bool causal=False, int? window=None, float? scale=None, "
    "bool exact=False, bool batch_invariant=False, float softcap=0.0"
)
NOMINAL_ROWS = 128  # for which the kernel is chosen where it is the same for any number of rows


def _order(tensor: Any, name: str, rows: str, cols: str) -> tuple[str, Any]:
    """(storage order, the tensor with its contiguous dimension last)."""
    if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1:
        return rows + cols, tensor
    if tensor.stride(-2) == 1 or tensor.shape[-2] <= 1:
        return cols + rows, tensor.transpose(-1, -2)
    raise InputError(
        f"gemm {name} has strides {list(tensor.stride())}; one of its last two must be 1"
    )


def _gemm_check(
    a: Any, b: Any, bias: Any, residual: Any, activation: str, *options: Any
) -> tuple[Any, ...]:
    """The shape of the result; raises `InputError` for what the kernel does not take."""
    given = {"a": a, "b": b, "bias": bias, "residual": residual}
    ops.check_devices("gemm", {name: one for name, one in given.items() if one is not None})
    if a.dim() not in (2, 3) or b.dim() != a.dim():
        raise InputError(
            f"gemm of {list(a.shape)} and {list(b.shape)}: expected two matrices or two batches"
        )
    if a.shape[-1] != b.shape[-2] or (a.dim() == 3 and a.shape[0] != b.shape[0]):
        raise InputError(
            f"gemm of {list(a.shape)} and {list(b.shape)}: {a.shape[-1]} columns and "
            f"{b.shape[-2]} rows, expected equal sizes"
        )
    if a.dtype != b.dtype:
        raise InputError(f"gemm of {a.dtype} and {b.dtype}: expected one element type")
    ops.allowed_type(a, "gemm a", GEMM_TYPES)
    if activation not in ACTIVATIONS:
        raise InputError(
            f"gemm activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}"
        )
    shape = (*a.shape[:-1], b.shape[-1])
    if bias is not None and tuple(bias.shape) != (shape[-1],):
        raise InputError(f"gemm bias has shape {list(bias.shape)}, expected [{shape[-1]}]")
    if residual is not None and (tuple(residual.shape) != shape or residual.dtype != _out(a)):
        raise InputError(
            f"gemm residual is {residual.dtype} {list(residual.shape)}, expected {_out(a)} "
            f"{list(shape)}"
        )
    return shape


def _out(a: Any) -> Any:
    return torch.bfloat16 if a.dtype.itemsize == 1 else a.dtype


def _gemm_result(shape: tuple[Any, ...], a: Any, *_: Any) -> Any:
    return a.new_empty(shape, dtype=_out(a))


def _gemm_fill(shape: tuple[Any, ...], result: Any, a: Any, b: Any, *options: Any) -> None:
    bias, residual, activation, scale, batch_invariant = options
    kind = ops.allowed_type(a, "gemm a", GEMM_TYPES)
    a_order, a = _order(a, "a", "m", "k")
    b_order, b = _order(b, "b", "k", "n")
    if residual is not None and residual.stride(-1) != 1:
        residual = residual.contiguous()
    base = GemmConfig(
        dtype=kind,
        out=BF16 if kind.bits == 8 else kind,
        a=a_order,
        b=b_order,
        batched=len(shape) == 3,
        bias=bias is not None,
        residual=residual is not None,
        activation=activation,
        scale=scale,
    )
    rows, batch = shape[-2], shape[0] if base.batched else 1
    if batch_invariant:
        rows, batch = NOMINAL_ROWS, 1
    depth = a.shape[-1] if a_order == "mk" else a.shape[-2]
    choice = choose_gemm(rows, shape[-1], depth, base, batch, sliced=True)
    config = choice.config(base)
    kernel = ops.variant_kernel("gemm", choice, base)
    operands, finish = {"a": a, "b": b}, {"c": result}
    if bias is not None:
        finish["bias"] = bias.float().contiguous()
    if residual is not None:
        finish["residual"] = residual
    if not config.workspace:
        ops.launch(*kernel, operands | finish)
        return
    parts = torch.empty((config.slices, *shape), dtype=torch.float32, device=a.device)
    ops.launch(*kernel, operands | {"parts": parts})
    ops.launch(
        ("combine", config), lambda: compiled(combine(config), ADDING), {"parts": parts} | finish
    )


def _gemm_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, bias, _, activation, scale, ctx.batch_invariant = inputs
    ctx.activation, ctx.scale, ctx.bias = activation, scale, bias
    ctx.save_for_backward(a, b)


def _gemm_backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
    # c = scale a b + bias + residual: both matrix gradients are matmuls of the same kernel.
    a, b = ctx.saved_tensors
    if ctx.activation != "none" or a.dtype.itemsize == 1:
        raise NotImplementedError(
            f"warploom::gemm with activation {ctx.activation!r} of {a.dtype} has no backward "
            "kernel; call it under torch.no_grad() or apply the activation outside of it"
        )
    # The dispatcher leaves out arguments that equal their defaults.
    need_a, need_b, need_bias, need_residual = (*ctx.needs_input_grad, False, False)[:4]
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    alike = {"scale": ctx.scale, "batch_invariant": ctx.batch_invariant}
    left = gemm(grad, b.transpose(-1, -2), **alike) if need_a else None
    right = gemm(a.transpose(-1, -2), grad, scale=ctx.scale) if need_b else None
    lead = tuple(range(grad.dim() - 1))
    bias = grad.sum(lead, dtype=torch.float32).to(ctx.bias.dtype) if need_bias else None
    return left, right, bias, grad if need_residual else None, None, None, None


def _attention_check(q: Any, k: Any, v: Any, window: int | None, scale: float | None) -> int:
    """Query heads a key head; raises `InputError` for what the kernel does not take."""
    ops.check_devices("attention", {"q": q, "k": k, "v": v})
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
        raise InputError(
            f"attention of {shapes}: expected [batch, heads, rows, d], [batch, kv_heads, keys, d] "
            "and [batch, kv_heads, keys, e]"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InputError(f"attention of {shapes}: batch and head sizes must agree")
    return checked_group("attention", q, k, v, window, scale)


def _attention(lse: bool) -> ops.Steps:
    """The operator with or without sums of exponentials."""

    def plan(q: Any, k: Any, v: Any, *options: Any) -> Launches:
        causal, window, scale, exact, batch_invariant, softcap, *_ = options
        base = AttentionConfig(
            dtype=ops.allowed_type(q, "attention q", ATTENTION_TYPES),
            head_dim=q.shape[3],
            causal=causal,
            window=window,
            group=_attention_check(q, k, v, window, scale),
            lse=lse,
            scale=scale,
            exact=exact,
            value_dim=value_dim(q, v),
            softcap=softcap,
        )
        rows, keys = q.shape[2], k.shape[2]
        heads = q.shape[1] if batch_invariant else q.shape[0] * q.shape[1]

        def choose() -> dict[str, ops.Chosen]:
            choice = choose_attention(rows, base, keys, heads)
            return {"attention": ops.variant_kernel("attention", choice, base)}

        return Launches(choose)

    def form(q: Any, k: Any, v: Any, *options: Any) -> tuple[Any, ...]:
        return "attention", lse, *ops.form_of(q, k, v), *options

    def results(_: Launches, q: Any, k: Any, v: Any, *options: Any) -> Any:
        out = (
            ops.empty_like(q)
            if v.shape[3] == q.shape[3]
            else q.new_empty((*q.shape[:3], v.shape[3]))
        )
        return (out, q.new_empty(q.shape[:3], dtype=torch.float32)) if lse else out

    def fill(launches: Launches, made: Any, q: Any, k: Any, v: Any, *options: Any) -> None:
        arrays = {"q": q, "k": k, "v": v}
        if lse:
            arrays["o"], arrays["lse"] = made
        else:
            arrays["o"] = made
        (launches if k.numel() else launches.unbound)(arrays)

    return ops.Steps(plan, results, fill, form)


def _with_lse_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, causal, window, scale, _, _, ctx.softcap, ctx.deterministic = inputs
    ctx.causal, ctx.window, ctx.scale = causal, window, scale
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _with_lse_backward(ctx: Any, grad: Any, grad_lse: Any) -> tuple[Any, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    if grad is None and grad_lse is None:
        return (None,) * 10
    grad = torch.zeros_like(out) if grad is None else grad
    same = ctx.deterministic or torch.are_deterministic_algorithms_enabled()
    options = (ctx.causal, ctx.window, ctx.scale, same, ctx.softcap)
    found = attention_backward(grad, q, k, v, out, lse, grad_lse, *options)
    return (*found, *(None,) * 7)


def _linked(
    causal: bool, window: int | None, scale: float | None, *options: Any
) -> tuple[Any, ...]:
    """The arguments of `attention_backward` behind lse, of an attention whose lse has no gradient,
    from those of `attention_with_lse` behind v."""
    _, _, softcap, deterministic = options
    same = deterministic or torch.are_deterministic_algorithms_enabled()
    return None, causal, window, scale, same, softcap


_WITH_LSE = _attention(lse=True)
_trained = both(_WITH_LSE, GRADIENTS, attention_backward, _linked)
gemm = ops.operator(
    "warploom::gemm",
    GEMM_SCHEMA,
    *ops.steps(_gemm_check, _gemm_result, _gemm_fill),
    _gemm_backward,
    _gemm_context,
)
attention_with_lse = ops.operator(
    "warploom::attention_with_lse",
    f"{ATTENTION_SCHEMA}, bool deterministic=False) -> (Tensor, Tensor)",
    *ops.steps(*_WITH_LSE),
    _with_lse_backward,
    _with_lse_context,
)
_inference = ops.operator(
    "warploom::attention",
    f"{ATTENTION_SCHEMA}) -> Tensor",
    *ops.steps(*_attention(lse=False)),
    ops.refuse_backward("warploom::attention", "call warploom.integrations.torch_op.attention"),
)


def attention(
    q: Any,
    k: Any,
    v: Any,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    exact: bool = False,
    batch_invariant: bool = False,
    deterministic: bool = False,
    softcap: float = 0.0,
) -> Any:
    """softmax(scale q k^T + mask) v of `q: [batch, heads, rows, d]`, `k: [batch, kv_heads, keys,
    d]` and `v: [batch, kv_heads, keys, e]`, with e other than d where d is above 128; where a
    gradient is wanted, by the operator that keeps lse for it.

    Raises `InputError` for what no kernel takes. Gradients have the same bits in every run where
    they are to be `deterministic`, or under `torch.use_deterministic_algorithms(True)`.
    `batch_invariant`: the kernel is chosen for one sequence, so that the bits of o are the same in
    every batch. `softcap`: scores become softcap * tanh(score / softcap); 0: they stay.
    """
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        options = (causal, window, scale, exact, batch_invariant, softcap, deterministic)
        found = _trained(q, k, v, *options)
        return attention_with_lse(q, k, v, *options)[0] if found is None else found
    return _inference(q, k, v, causal, window, scale, exact, batch_invariant, softcap)


__all__ = ["attention", "attention_backward", "attention_with_lse", "gemm"]
