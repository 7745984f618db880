"""Scaled and grouped matrix products of serving as PyTorch operators.

    y = scaled_mm(x, w.t(), scale_a, scale_b)              as torch._scaled_mm
    y = grouped_mm(x, w, offs=offs)                        as torch._grouped_mm
    y = scaled_grouped_mm(x, w, scale_a, scale_b, offs)    as torch._scaled_grouped_mm
    y = masked_grouped_mm(x, w, lengths)                   room for so many rows of every expert

Arguments are called as torch calls them. Kernels are compiled at the first use of a configuration;
after that a call neither waits for the GPU nor reads from it, so that it can be captured into a
CUDA graph: the rows of the experts stay on the GPU, where a small kernel makes the list of tasks.
"""

from __future__ import annotations

from typing import Any

from warploom.autosched.schedules import compiled
from warploom.errors import InputError
from warploom.integrations import torch_program as ops
from warploom.kernels.gemm.grouped import SCALED, GroupedConfig, grouped, work_list, work_schedule
from warploom.kernels.gemm.grouped_plan import plan_grouped
from warploom.kernels.gemm.program import GemmConfig
from warploom.kernels.gemm.variant import choose_gemm
from warploom.tile import dtype

torch: Any = ops.torch_module()
TYPES = ("bf16", "fp16", "e4m3", "e5m2")
OUT = ("bf16", "fp16", "fp32")
SCHEMA = (
    "(Tensor mat_a, Tensor mat_b, Tensor? offs=None, Tensor? lengths=None, Tensor? scale_a=None, "
    "Tensor? scale_b=None, ScalarType? out_dtype=None, bool use_fast_accum=False, "
    "bool swiglu=False, int expected_rows=0) -> Tensor"
)
# What the copy engine wants multiples of: fp32 scales of a pitch, and bytes of an address.
PITCH, ALIGNED = 4, 16


def _config(
    mat_a: Any, mat_b: Any, offs: Any, lengths: Any, scale_a: Any, scale_b: Any, *options: Any
) -> GroupedConfig:
    """The kernel of a call; raises `InputError` where there is none."""
    out_dtype, use_fast_accum, swiglu, _ = options
    given = {"mat_a": mat_a, "mat_b": mat_b, "offs": offs, "lengths": lengths}
    given |= {"scale_a": scale_a, "scale_b": scale_b}
    given = {name: one for name, one in given.items() if one is not None}
    ops.check_devices("grouped_mm", given)
    problem = _problem(mat_a, mat_b, offs, lengths)
    scales = "none"
    if not problem:
        scales, problem = _scales(mat_a, mat_b, scale_a, scale_b)
    if not problem and swiglu and mat_b.shape[-1] % 2:
        problem = "expected an even number of columns for swiglu"
    ops.refuse_call("grouped_mm", given, problem)
    kind = ops.allowed_type(mat_a, "grouped_mm mat_a", TYPES)
    out = dtype("bf16") if kind.bits == 8 else kind
    if out_dtype is not None:
        out = ops.allowed_type(torch.empty(0, dtype=out_dtype, device="meta"), "out_dtype", OUT)
    return GroupedConfig(
        dtype=kind,
        out=out,
        groups="rows" if offs is not None else "none" if lengths is None else "masked",
        scales=scales,
        b="nk" if mat_b.stride(-2) == 1 else "kn",
        swiglu=swiglu,
        promote=kind.bits == 8 and not use_fast_accum,
    )


def _problem(mat_a: Any, mat_b: Any, offs: Any, lengths: Any) -> str:
    """What is wrong with the shapes of a call; "" for nothing."""
    dims = (3 if lengths is not None else 2, 2 if offs is None and lengths is None else 3)
    if (mat_a.dim(), mat_b.dim()) != dims or (offs is not None and lengths is not None):
        return (
            "expected mat_a [m, k] and mat_b [experts, k, n] with offs, mat_a [experts, m, k] with "
            "lengths, or two matrices"
        )
    if mat_a.shape[-1] != mat_b.shape[-2]:
        return f"{mat_a.shape[-1]} columns and {mat_b.shape[-2]} rows, expected equal sizes"
    if mat_a.dtype != mat_b.dtype:
        return "expected one element type of mat_a and mat_b"
    if mat_a.stride(-1) != 1 or 1 not in (mat_b.stride(-1), mat_b.stride(-2)):
        return "expected mat_a with contiguous rows, mat_b with contiguous rows or columns"
    if mat_a.dtype.itemsize == 1 and mat_b.stride(-2) != 1:
        return "expected mat_b of 8-bit elements with contiguous columns (w.t() of [n, k])"
    for name, one in (("offs", offs), ("lengths", lengths)):
        if one is not None and (one.dtype != torch.int32 or tuple(one.shape) != mat_b.shape[:1]):
            return f"expected {name} of int32 [{mat_b.shape[0]}], one an expert"
    if lengths is not None and mat_a.shape[0] != mat_b.shape[0]:
        return "expected as many experts of mat_a as of mat_b"
    return ""


def _scales(mat_a: Any, mat_b: Any, scale_a: Any, scale_b: Any) -> tuple[str, str]:
    """(what the scales of a call are of, what is wrong with them)."""
    if scale_a is None and scale_b is None:
        return "none", ""
    (*lead, k), (*experts, _, n) = mat_a.shape, mat_b.shape
    deep, wide = -(-k // SCALED), -(-n // SCALED)
    if scale_a is None or scale_b is None or mat_a.dtype.itemsize != 1:
        return "", "expected both scales, of 8-bit elements"
    if not scale_a.dtype == scale_b.dtype == torch.float32:
        return "", "expected scales of float32"
    of_a, of_b = tuple(scale_a.shape), tuple(scale_b.shape)
    if of_a == (*lead, deep) and of_b == (*experts, deep, wide):
        return "blocks", ""
    if of_a in ((*lead,), (*lead, 1)) and of_b in ((*experts, n), (*experts, 1, n)):
        return "rows", ""
    return "", (
        f"expected scales of rows, {[*lead, 1]} and {[*experts, 1, n]}, or of blocks, "
        f"{[*lead, deep]} and {[*experts, deep, wide]}"
    )


def _fill(config: GroupedConfig, out: Any, *args: Any) -> None:
    mat_a, mat_b, offs, lengths, scale_a, scale_b, *_, expected_rows = args
    if mat_a.shape[-1] == 0:
        out.zero_()
        return
    arrays = {"a": mat_a, "b": mat_b.transpose(-1, -2) if config.b == "nk" else mat_b, "c": out}
    if config.scales == "rows":
        arrays["scale_a"] = scale_a.reshape(mat_a.shape[:-1]).contiguous()
        columns = (*mat_b.shape[:-2], mat_b.shape[-1])
        arrays["scale_b"] = scale_b.reshape(columns).contiguous()
    aligned = False
    if config.scales == "blocks":
        arrays["scale_a"] = _last(scale_a.transpose(-1, -2))
        arrays["scale_b"] = _last(scale_b.transpose(-1, -2))
        of_a = arrays["scale_a"]
        aligned = not (of_a.stride(-2) % PITCH or of_a.data_ptr() % ALIGNED)
    experts = 1 if config.groups == "none" else mat_b.shape[0]
    rows = expected_rows or (mat_a.shape[-2] // (experts if offs is not None else 1))
    plan = plan_grouped(config, rows, out.shape[-1], mat_a.shape[-1], aligned)
    if lengths is not None:
        arrays["lengths"] = lengths
    if offs is not None:
        arrays["tasks"] = list_of_tasks(offs, mat_a, plan.config.tile[0], plan.even)
    ops.launch(("grouped", plan), lambda: compiled(grouped(plan.config), plan.policy()), arrays)


def _last(tensor: Any) -> Any:
    """With its last dimension contiguous."""
    if tensor.stride(-1) == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def list_of_tasks(offs: Any, mat_a: Any, rows: int, even: bool = False) -> Any:
    """The tiles of so many rows of `mat_a: [m, k]`, or `even` ones of at most so many (int32
    `[tiles, 3]`: expert, first row, the row after the last), by a kernel on torch's stream; of
    those beyond the last all is 0."""
    experts = offs.shape[0]
    tiles = -(-mat_a.shape[0] // rows) + experts
    tasks = torch.empty((tiles, 3), dtype=torch.int32, device=mat_a.device)
    ops.launch(
        ("work_list", experts, rows, even),
        lambda: compiled(work_list(experts, rows, even), work_schedule(experts)),
        {"ends": offs, "tasks": tasks},
    )
    return tasks


def _result(config: GroupedConfig, mat_a: Any, mat_b: Any, *_: Any) -> Any:
    n = mat_b.shape[-1] // (1 + config.swiglu)
    kind = getattr(torch, config.out.library)
    return mat_a.new_empty((*mat_a.shape[:-1], n), dtype=kind)


NAME = "warploom::grouped_mm"
_operator = ops.operator(
    NAME,
    SCHEMA,
    *ops.steps(_config, _result, _fill),
    ops.refuse_backward(NAME, "detach its arguments"),
)


def _refuse(name: str, bias: Any, scale_result: Any) -> None:
    for what, one in (("bias", bias), ("scale_result", scale_result)):
        if one is not None:
            raise InputError(f"{name} with {what}: no kernel has it; leave it out")


def grouped_mm(
    mat_a: Any, mat_b: Any, offs: Any, bias: Any = None, out_dtype: Any = None, swiglu: bool = False
) -> Any:
    """`mat_a: [m, k]` times `mat_b: [experts, k, n]`: rows up to `offs: [experts]` (int32, rising)
    belong to the first expert, up to the next to the second; `[m, n]`. bf16 or fp16, and fp8
    without scales.

    An expert may have no rows; rows from the last of `offs` on stay as they are (torch gives them
    no values either). `swiglu`: silu of the product with the first half of b's columns, times that
    with the second; `[m, n / 2]`. Raises `InputError` for what no kernel takes.
    """
    _refuse("grouped_mm", bias, None)
    return _operator(mat_a, mat_b, offs, None, None, None, out_dtype, True, swiglu, 0)


def scaled_grouped_mm(
    mat_a: Any,
    mat_b: Any,
    scale_a: Any,
    scale_b: Any,
    offs: Any,
    bias: Any = None,
    scale_result: Any = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
    swiglu: bool = False,
) -> Any:
    """`grouped_mm` of fp8, with fp32 scales of rows, `scale_a: [m]` and `scale_b: [experts, n]`, or
    of blocks, `[m, k / 128]` and `[experts, k / 128, n / 128]`; bf16 unless `out_dtype` says so.

    Without `use_fast_accum`, and always with scales of blocks, sums leave the tensor core every
    128 products. Raises `InputError` for what no kernel takes.
    """
    _refuse("scaled_grouped_mm", bias, scale_result)
    return _operator(
        mat_a, mat_b, offs, None, scale_a, scale_b, out_dtype, use_fast_accum, swiglu, 0
    )


def masked_grouped_mm(
    mat_a: Any,
    mat_b: Any,
    lengths: Any,
    scale_a: Any = None,
    scale_b: Any = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
    swiglu: bool = False,
    expected_rows: int = 0,
) -> Any:
    """`mat_a: [experts, m, k]` times `mat_b: [experts, k, n]`, of the first `lengths: [experts]`
    (int32) rows of every expert; other rows of `[experts, m, n]` are not written.

    Scales as in `scaled_grouped_mm`, of a `[experts, m]` or `[experts, m, k / 128]`.
    `expected_rows` of an expert, for which the kernel is chosen; 0: m. Raises `InputError` for what
    no kernel takes.
    """
    return _operator(
        mat_a, mat_b, None, lengths, scale_a, scale_b, out_dtype, use_fast_accum, swiglu,
        expected_rows,
    )  # fmt: skip


def scaled_mm(
    mat_a: Any,
    mat_b: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any = None,
    scale_result: Any = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> Any:
    """`mat_a: [m, k]` times `mat_b: [k, n]` (columns contiguous) of fp8; bf16 unless `out_dtype`
    says so.

    Scales in fp32: one number each, of rows (`[m, 1]` and `[1, n]`), or of blocks (`scale_a: [m, k
    / 128]`, `scale_b: [k / 128, n / 128]`, which are always summed in fp32 every 128 products).
    Raises `InputError` for what no kernel takes.
    """
    _refuse("scaled_mm", bias, scale_result)
    several = scale_a.numel() > 1 or scale_b.numel() > 1
    if several and _scales(mat_a, mat_b, scale_a, scale_b)[0] != "rows":
        return _operator(
            mat_a, mat_b, None, None, scale_a, scale_b, out_dtype, use_fast_accum, False, 0
        )
    return _whole(mat_a, mat_b, scale_a, scale_b, out_dtype, use_fast_accum)


WHOLE = "warploom::scaled_mm"
WHOLE_SCHEMA = (
    "(Tensor mat_a, Tensor mat_b, Tensor scale_a, Tensor scale_b, ScalarType? out_dtype=None, "
    "bool use_fast_accum=False) -> Tensor"
)


def _whole_config(*args: Any) -> GemmConfig:
    """Of a product whose scales leave its sums: they are factors of the result."""
    mat_a, mat_b, scale_a, scale_b, out_dtype, use_fast_accum = args
    rows = scale_a.numel() > 1 or scale_b.numel() > 1
    scales = (scale_a, scale_b) if rows else (None, None)
    found = _config(mat_a, mat_b, None, None, *scales, out_dtype, use_fast_accum, False, 0)
    if found.dtype.bits != 8 or not scale_a.dtype == scale_b.dtype == torch.float32:
        raise InputError(
            f"scaled_mm of {mat_a.dtype} with scales of {scale_a.dtype} and {scale_b.dtype}: "
            "expected 8-bit elements and float32"
        )
    return GemmConfig(
        dtype=found.dtype,
        out=found.out,
        b="nk",
        scales=not rows,
        row_scales=rows,
        promote=not use_fast_accum,
    )


def _fill_whole(base: GemmConfig, out: Any, *args: Any) -> None:
    mat_a, mat_b, scale_a, scale_b, *_ = args
    if mat_a.shape[1] == 0:
        out.zero_()
        return
    choice = choose_gemm(*out.shape, mat_a.shape[1], base)
    scales = {"scale_a": _row(scale_a), "scale_b": _row(scale_b)}
    ops.launch(
        *ops.variant_kernel("gemm", choice, base), {"a": mat_a, "b": mat_b.t(), "c": out, **scales}
    )


def _row(scales: Any) -> Any:
    """All of them next to each other."""
    return scales.reshape(-1).contiguous()


def _whole_result(base: GemmConfig, mat_a: Any, mat_b: Any, *_: Any) -> Any:
    kind = getattr(torch, base.out.library)
    return mat_a.new_empty((mat_a.shape[0], mat_b.shape[1]), dtype=kind)


_whole = ops.operator(
    WHOLE,
    WHOLE_SCHEMA,
    *ops.steps(_whole_config, _whole_result, _fill_whole),
    ops.refuse_backward(WHOLE, "detach its arguments"),
)


__all__ = ["grouped_mm", "masked_grouped_mm", "scaled_grouped_mm", "scaled_mm"]
