"""Attention of 8-bit elements as PyTorch operators: `attention_fp8` and `ordered_values`.

q, k and v are `torch.float8_e4m3fn` with factors in fp32, one of a tensor, of every head or of
blocks of rows. The matmul of weights and values wants keys last and in another order
(`kernels.attention.values`): the kernel turns v on its way through shared memory, or takes what
`ordered_values` gave, which saves that work where values are used often.
"""

from __future__ import annotations

from typing import Any

from warploom.autosched.schedules import compiled
from warploom.errors import InputError
from warploom.integrations.torch_program import (
    check_devices,
    launch,
    operator,
    refuse_backward,
    steps,
    torch_module,
    variant_kernel,
)
from warploom.kernels.attention.program import SCALE_BLOCK, AttentionConfig, refuse_scale
from warploom.kernels.attention.values import ordered_values as ordered_program
from warploom.kernels.attention.variants import choose_attention
from warploom.tile import BF16, E4M3
from warploom.tile.typing import QUAD_PLACES

torch: Any = torch_module()
NARROW = torch.float8_e4m3fn
SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor scale_q, Tensor scale_k, Tensor scale_v, "
    "Tensor? scale_o=None, bool causal=False, float? scale=None, bool ordered=False) -> Tensor"
)


def _places(keys: int) -> int:
    return -(-keys // QUAD_PLACES) * QUAD_PLACES


def _check_values(v: Any) -> None:
    """Raise `InputError` for values that no kernel orders."""
    check_devices("ordered_values", {"v": v})
    if v.dim() != 4 or v.dtype != NARROW:
        raise InputError(
            f"ordered_values of {v.dtype} {list(v.shape)}: expected {NARROW} "
            "[batch, kv_heads, keys, d]"
        )


def _ordered_result(_: None, v: Any) -> Any:
    batch, heads, keys, d = v.shape
    return v.new_empty((batch, heads, d, _places(keys)))


def _fill_ordered(_: None, out: Any, v: Any) -> None:
    launch(("ordered_values",), lambda: compiled(ordered_program()), {"v": v, "out": out})


_ordered, _ordered_fake = steps(_check_values, _ordered_result, _fill_ordered)


def _check_factors(q: Any, k: Any, factors: dict[str, Any], more: dict[str, Any]) -> str:
    """What has a factor of its own: a "tensor", a "head" or a "block"; raises `InputError` for
    factors of other shapes."""
    (batch, heads, rows, _), (kv_heads, keys) = q.shape, k.shape[1:3]
    shapes = dict.fromkeys(factors, (batch, kv_heads)) | {"scale_q": (batch, heads)}
    counts = {"scale_q": -(-rows // SCALE_BLOCK), "scale_k": -(-keys // SCALE_BLOCK)}
    blocks = {name: (*shapes[name], count) for name, count in counts.items()}
    single = all(one.numel() == 1 for one in factors.values())
    per = "tensor" if single else "block" if factors["scale_q"].dim() == 3 else "head"
    wanted = shapes | blocks if per == "block" else shapes
    for name, one in {**factors, **more}.items():
        whole = per == "tensor" or name in more
        fits = one.numel() == 1 if whole else tuple(one.shape) == wanted[name]
        if one.dtype != torch.float32 or not fits:
            each = [list(of[name]) for of in (shapes, blocks) if name in of]
            raise InputError(
                f"attention_fp8 {name} is {one.dtype} {list(one.shape)}: expected fp32, one number "
                f"or, as for heads or blocks of {SCALE_BLOCK} rows of q and k, one of {each}"
            )
    return per


def _check(*args: Any) -> AttentionConfig:
    """The configuration of a call; raises `InputError` for what no kernel takes."""
    q, k, v, scale_q, scale_k, scale_v, scale_o, causal, scale, ordered = args
    tensors = {"q": q, "k": k, "v": v}
    factors = {"scale_q": scale_q, "scale_k": scale_k, "scale_v": scale_v}
    more = {} if scale_o is None else {"scale_o": scale_o}
    check_devices("attention_fp8", {**tensors, **factors, **more})
    shapes = ", ".join(f"{name} {one.dtype} {list(one.shape)}" for name, one in tensors.items())
    refusal = f"attention_fp8 of {shapes}: expected {NARROW} [batch, heads, rows, d], "
    if any(one.dim() != 4 or one.dtype != NARROW for one in tensors.values()):
        raise InputError(f"{refusal}[batch, kv_heads, keys, d] and v like k")
    batch, heads, _, d = q.shape
    kv_heads, keys = k.shape[1:3]
    wanted = (batch, kv_heads, *((d, _places(keys)) if ordered else (keys, d)))
    if tuple(v.shape) != wanted or (k.shape[0], k.shape[3]) != (batch, d):
        raise InputError(f"{refusal}[batch, kv_heads, keys, d] and v {list(wanted)}")
    if kv_heads == 0 or heads % kv_heads:
        raise InputError(f"{refusal}whole numbers of query heads a key head")
    per = _check_factors(q, k, factors, more)
    refuse_scale(scale)
    return AttentionConfig(
        dtype=E4M3,
        head_dim=d,
        causal=causal,
        group=heads // kv_heads,
        scale=scale,
        head_scales=per == "head",
        block_scales=per == "block",
        ordered=ordered,
        out=BF16 if scale_o is None else E4M3,
    )


def _result(config: AttentionConfig, q: Any, *_: Any) -> Any:
    return q.new_empty(q.shape, dtype=torch.bfloat16 if config.result is BF16 else NARROW)


def _fill(config: AttentionConfig, out: Any, *args: Any) -> None:
    q, k, v, scale_q, scale_k, scale_v, scale_o, *_ = args
    if k.numel() == 0:
        out.zero_()
        return
    choice = choose_attention(q.shape[2], config, k.shape[2], q.shape[0] * q.shape[1])
    arrays = {"q": q, "k": k, "v": v, "o": out}
    factors = {"scale_q": scale_q, "scale_k": scale_k, "scale_v": scale_v}
    several = config.head_scales or config.block_scales
    shaped = {n: x.contiguous() if several else x.view(1) for n, x in factors.items()}
    if scale_o is not None:
        shaped["scale_o"] = scale_o.view(1)
    launch(*variant_kernel("attention", choice, config), {**arrays, **shaped})


_ordered_operator = operator(
    "warploom::ordered_values",
    "(Tensor v) -> Tensor",
    _ordered,
    _ordered_fake,
    refuse_backward("warploom::ordered_values", "train in 16 bits"),
)
_operator = operator(
    "warploom::attention_fp8",
    SCHEMA,
    *steps(_check, _result, _fill),
    refuse_backward("warploom::attention_fp8", "train in 16 bits"),
)


def ordered_values(v: Any) -> Any:
    """`v: [batch, kv_heads, keys, d]` as the kernels take it, `[batch, kv_heads, d, places]`, where
    places is the next multiple of 16 of keys; raises `InputError` for other tensors."""
    return _ordered_operator(v)


def attention_fp8(
    q: Any,
    k: Any,
    v: Any,
    scale_q: Any,
    scale_k: Any,
    scale_v: Any,
    scale_o: Any = None,
    causal: bool = False,
    scale: float | None = None,
    ordered: bool = False,
) -> Any:
    """softmax(scale q k^T + mask) v of e4m3 `q: [batch, heads, rows, d]` and twice `[batch,
    kv_heads, keys, d]`, each times its factors: fp32 tensors with one number each, or with one of
    every head, `scale_q: [batch, heads]` and `scale_k, scale_v: [batch, kv_heads]`, or of every
    block of 128 rows of q and of k, `scale_q: [batch, heads, q_blocks]` and `scale_k: [batch,
    kv_heads, k_blocks]`, beside `scale_v: [batch, kv_heads]`.

    The result is bf16, or with `scale_o` (one number) e4m3 of that many times it. `ordered`: v is
    what `ordered_values` gave. Raises `InputError` for what no kernel takes.
    """
    factors = (scale_q, scale_k, scale_v, scale_o)
    return _operator(q, k, v, *factors, causal, scale, ordered)


__all__ = ["attention_fp8", "ordered_values"]
