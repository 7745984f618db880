"""Products of few rows with weights of 8 or 4 bits as a PyTorch operator.

    y = weight_only_mm(x, w.t(), scale)                    fp8 or int8 weights [n, k]
    y = weight_only_mm(x, pack_int4(w).t(), scale)         int8 weights of -8 to 7, packed

The kernel is compiled at the first use of a configuration; CUDA graphs can capture a call.
"""

from __future__ import annotations

from typing import Any

from warploom.autosched.schedules import compiled
from warploom.integrations import torch_program as ops
from warploom.kernels.gemm.weight_only import (
    GROUP,
    WeightOnlyConfig,
    pack_nibbles,
    plan_weight_only,
    weight_only,
    weight_only_policy,
)
from warploom.tile import INT8

NAME = "warploom::weight_only_mm"
PITCH = 4  # columns of scales that the copy engine takes a multiple of
torch: Any = ops.torch_module()


def _config(mat_a: Any, mat_b: Any, scale_b: Any) -> WeightOnlyConfig:
    """The kernel of a call before its tile; raises `InputError` where there is none."""
    given = {"mat_a": mat_a, "mat_b": mat_b, "scale_b": scale_b}
    ops.check_devices("weight_only_mm", given)
    ops.refuse_call("weight_only_mm", given, _problem(mat_a, mat_b, scale_b))
    return WeightOnlyConfig(
        ops.allowed_type(mat_a, "weight_only_mm mat_a", ("bf16", "fp16")),
        weights := ops.allowed_type(mat_b, "weight_only_mm mat_b", ("e4m3", "e5m2", "int8")),
        bits=4 if weights is INT8 and 2 * mat_b.shape[0] == mat_a.shape[1] else 8,
        grouped=scale_b.numel() != mat_b.shape[1],
    )


def _problem(mat_a: Any, mat_b: Any, scale_b: Any) -> str:
    """What is wrong with the shapes of a call; "" for nothing."""
    packed = mat_b.dtype == torch.int8 and not mat_a.shape[-1] % (2 * GROUP)
    depths = [mat_a.shape[-1], *[mat_a.shape[-1] // 2] * packed]
    if mat_a.dim() != 2 or mat_b.dim() != 2 or mat_b.shape[0] not in depths:
        return (
            "expected mat_a [m, k] and mat_b [k, n], or packed int8 [k / 2, n] with k a multiple "
            f"of {2 * GROUP}"
        )
    if mat_a.stride(1) != 1 or mat_b.stride(0) != 1:
        return "expected mat_a with contiguous rows and mat_b with contiguous columns"
    k, n = mat_a.shape[1], mat_b.shape[1]
    groups = [-(-k // GROUP), n]
    if scale_b.dtype != torch.float32 or (scale_b.numel() != n and list(scale_b.shape) != groups):
        return f"expected scale_b of float32 [{n}], one a column, or {groups}"
    if scale_b.numel() != n and n % PITCH:
        return f"expected a multiple of {PITCH} columns where groups have scales"
    return ""


def _fill(base: WeightOnlyConfig, out: Any, mat_a: Any, mat_b: Any, scale_b: Any) -> None:
    if mat_a.shape[1] == 0:
        out.zero_()
        return
    config = plan_weight_only(base, *out.shape, k=mat_a.shape[1])
    scale = scale_b.contiguous() if base.grouped else scale_b.reshape(-1).contiguous()
    ops.launch(
        ("weight_only", config),
        lambda: compiled(weight_only(config), weight_only_policy(config)),
        {"x": mat_a, "w": mat_b.t(), "scale": scale, "y": out},
    )


def _result(base: WeightOnlyConfig, mat_a: Any, mat_b: Any, scale_b: Any) -> Any:
    return mat_a.new_empty((mat_a.shape[0], mat_b.shape[1]))


_operator = ops.operator(
    NAME,
    "(Tensor mat_a, Tensor mat_b, Tensor scale_b) -> Tensor",
    *ops.steps(_config, _result, _fill),
    ops.refuse_backward(NAME, "detach its arguments"),
)


def weight_only_mm(mat_a: Any, mat_b: Any, scale_b: Any) -> Any:
    """`mat_a: [m, k]` of bf16 or fp16 times weights `mat_b: [k, n]` (columns contiguous) of fp8 or
    int8, or `[k / 2, n]` of int8 that `pack_int4` packed; `[m, n]`, of a's type.

    `scale_b` (fp32) has a number a column, `[n]`, or one for each 128 weights of a column, `[k /
    128, n]`. For few rows, up to 128, at the rate at which the weights are read. Raises
    `InputError` for what no kernel takes.
    """
    return _operator(mat_a, mat_b, scale_b)


def pack_int4(weights: Any) -> Any:
    """int8 `[n, k]` of -8 to 7 as int8 `[n, k / 2]`, two numbers a byte (`pack_nibbles`)."""
    return pack_nibbles(weights)


__all__ = ["pack_int4", "weight_only_mm"]
