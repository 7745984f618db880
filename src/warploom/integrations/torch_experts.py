"""The feed-forward layer of a mixture of experts as PyTorch operators.

    y = experts_mlp(x, up, down, chosen, weights)     all of it, from the router's choice on
    tokens, offs, places = route(chosen, experts)     the rows of each expert one after another
    rows = gather_rows(x, tokens)
    y = combine_rows(rows, places, weights)           what experts gave, weighed and added up

Nothing waits for the GPU or reads from it, so a CUDA graph follows the router of every step.
"""

from __future__ import annotations

from typing import Any

from warploom.autosched.schedules import compiled
from warploom.errors import InputError
from warploom.integrations import torch_program as ops
from warploom.integrations.torch_gemm import grouped_mm, scaled_grouped_mm
from warploom.integrations.torch_rows import quantised_rows
from warploom.kernels.gemm.experts import combine_rows as combine_program
from warploom.kernels.gemm.experts import gather_rows as gather_program
from warploom.kernels.gemm.experts import rows_schedule
from warploom.tile import DType

TYPES = ("bf16", "fp16")
PITCH = 8  # columns that a lane takes at a time
MOST_TAKEN = 16  # experts of a token: a thread has a line of each in registers
torch: Any = ops.torch_module()


def route(chosen: Any, experts: int) -> tuple[Any, Any, Any]:
    """The order of rows for `chosen: [tokens, taken]`, the experts of each token.

    Gives int32 `(tokens, offs, places)`: `tokens: [rows]` has the token of every row, those of the
    first expert first and in the order of the tokens; `offs: [experts]` the row after each expert's
    last, as `grouped_mm` takes it; `places: [tokens, taken]` where the row of each choice stands.
    """
    if chosen.dim() != 2 or chosen.dtype not in (torch.int32, torch.int64) or experts < 1:
        raise InputError(
            f"route of {chosen.dtype} {list(chosen.shape)} to {experts} experts: expected int32 or "
            "int64 [tokens, taken] and at least one"
        )
    sorted_, order = chosen.flatten().sort(stable=True)
    every = torch.arange(experts, device=chosen.device, dtype=chosen.dtype)
    offs = torch.searchsorted(sorted_, every, right=True, out_int32=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=chosen.device)
    tokens = order.div(chosen.shape[1], rounding_mode="floor")
    return tokens.int(), offs, places.int().view(chosen.shape)


def _check(name: str, rows: Any, indices: Any, **others: Any) -> None:
    """Raise `InputError` for what the kernels of rows do not take."""
    ops.check_devices(name, {"rows": rows, "indices": indices, **others})
    ops.allowed_type(rows, f"{name} rows", TYPES)
    lines = rows.dim() == 2 and rows.stride(1) == 1 and not rows.stride(0) % PITCH
    if not lines or rows.shape[1] % PITCH or rows.data_ptr() % (PITCH * rows.element_size()):
        raise InputError(
            f"{name} of rows {list(rows.shape)} with strides {list(rows.stride())}: expected "
            f"[rows, n] with contiguous rows, n and the pitch multiples of {PITCH}, at an aligned "
            "address"
        )
    if indices.dtype != torch.int32 or not indices.is_contiguous():
        raise InputError(f"{name} with indices {indices.dtype}: expected contiguous int32")


def _gather_plan(x: Any, tokens: Any) -> DType:
    _check("gather_rows", x, tokens)
    if tokens.dim() != 1:
        raise InputError(f"gather_rows with tokens {list(tokens.shape)}: expected one a row")
    return ops.allowed_type(x, "gather_rows x", TYPES)


def _gathered(kind: DType, x: Any, tokens: Any) -> Any:
    return x.new_empty((tokens.shape[0], x.shape[1]))


def _gather(kind: DType, out: Any, x: Any, tokens: Any) -> None:
    ops.launch(
        ("gather_rows", kind),
        lambda: compiled(gather_program(kind), rows_schedule(kind)),
        {"x": x, "tokens": tokens, "sorted": out},
    )


GATHER = "warploom::gather_rows"
_gather_rows = ops.operator(
    GATHER,
    "(Tensor x, Tensor tokens) -> Tensor",
    *ops.steps(_gather_plan, _gathered, _gather),
    ops.refuse_backward(GATHER, "detach its arguments"),
)


def gather_rows(x: Any, tokens: Any) -> Any:
    """`x[tokens]` of bf16 or fp16 `[count, n]`, n a multiple of 8, and int32 `tokens: [rows]`.

    Raises `InputError` for what the kernel does not take.
    """
    return _gather_rows(x, tokens)


def _combine_plan(rows: Any, places: Any, weights: Any) -> DType:
    _check("combine_rows", rows, places, weights=weights)
    alike = places.dim() == 2 and weights.shape == places.shape and weights.is_contiguous()
    if not alike or weights.dtype != torch.float32 or not 1 <= places.shape[1] <= MOST_TAKEN:
        raise InputError(
            f"combine_rows with places {list(places.shape)} and weights {weights.dtype} "
            f"{list(weights.shape)}: expected [tokens, taken] of both, weights of contiguous "
            f"float32, and 1 to {MOST_TAKEN} taken"
        )
    return ops.allowed_type(rows, "combine_rows rows", TYPES)


def _combined(kind: DType, rows: Any, places: Any, weights: Any) -> Any:
    return rows.new_empty((places.shape[0], rows.shape[1]))


def _combine(kind: DType, out: Any, rows: Any, places: Any, weights: Any) -> None:
    taken = places.shape[1]
    ops.launch(
        ("combine_rows", kind, taken),
        lambda: compiled(combine_program(taken, kind), rows_schedule(kind)),
        {"rows": rows, "places": places, "weights": weights, "y": out},
    )


COMBINE = "warploom::combine_rows"
_combine_rows = ops.operator(
    COMBINE,
    "(Tensor rows, Tensor places, Tensor weights) -> Tensor",
    *ops.steps(_combine_plan, _combined, _combine),
    ops.refuse_backward(COMBINE, "detach its arguments"),
)


def combine_rows(rows: Any, places: Any, weights: Any) -> Any:
    """`y[t] = sum over j of weights[t, j] * rows[places[t, j]]`, in fp32 and in the order of j.

    `rows: [all, n]` of bf16 or fp16, n a multiple of 8, `places` (int32) and `weights` (fp32)
    `[tokens, taken]`. Raises `InputError` for what the kernel does not take.
    """
    return _combine_rows(rows, places, weights)


def experts_mlp(
    x: Any,
    up: Any,
    down: Any,
    chosen: Any,
    weights: Any,
    scale_up: Any = None,
    scale_down: Any = None,
) -> Any:
    """The SwiGLU layer of every token's experts, weighed and added up; `[tokens, width]`.

    x        [tokens, width], bf16 or fp16
    up       [experts, width, 2 inner]: gates, then what they are multiplied by
    down     [experts, inner, width]
    chosen   [tokens, taken], the experts of each token (int32 or int64)
    weights  [tokens, taken], fp32, of the router
    scale_up, scale_down  fp32 [experts, 2 inner] and [experts, width], of the columns of e4m3
             weights; tokens, and what stands between both products, become e4m3 with a scale a row

    Raises `InputError` for what the products do not take, and where one scale is missing.
    """
    if (scale_up is None) != (scale_down is None):
        raise InputError("experts_mlp with one of scale_up and scale_down: expected both or none")
    tokens, offs, places = route(chosen, up.shape[0])
    if scale_up is None:
        inner = grouped_mm(gather_rows(x, tokens), up, offs, swiglu=True)
        return combine_rows(grouped_mm(inner, down, offs), places, weights)
    options: dict[str, Any] = {"offs": offs, "out_dtype": x.dtype, "use_fast_accum": True}
    narrow, scale = quantised_rows(x)
    # Rows are copied as they are, two elements as one.
    rows = gather_rows(narrow.view(x.dtype), tokens).view(narrow.dtype)
    inner = scaled_grouped_mm(rows, up, scale[tokens], scale_up, swiglu=True, **options)
    narrow, scale = quantised_rows(inner)
    results = scaled_grouped_mm(narrow, down, scale, scale_down, **options)
    return combine_rows(results, places, weights)


__all__ = ["combine_rows", "experts_mlp", "gather_rows", "route"]
