"""Attention under the names and arguments of other libraries, to be imported in their place:
`scaled_dot_product_attention` of PyTorch, and `flash_attn_func`, `flash_attn_varlen_func`,
`flash_attn_qkvpacked_func` and `flash_attn_varlen_qkvpacked_func` of FlashAttention (2.8).

Layouts are views of the tensors that are given, of at most four dimensions nothing is copied. What
no kernel does, such as dropout, biases and masks that are tensors, is refused with `InputError`.
"""

from __future__ import annotations

from typing import Any

from warploom.errors import InputError
from warploom.integrations.torch_attention_packed import attention_varlen
from warploom.integrations.torch_op import attention

Window = tuple[int, int]
EVERYTHING: Window = (-1, -1)


def _refuse(name: str, **given: Any) -> None:
    """Raise `InputError` for the first argument that asks for what no kernel does."""
    for argument, value in given.items():
        plain = isinstance(value, int | float)
        if value if plain else value is not None:
            shown = value if plain else type(value).__name__
            raise InputError(f"{name} {argument}={shown}: no kernel of warploom's does that")


def _masks(name: str, causal: bool, window_size: Window) -> tuple[bool, int | None]:
    """Whether there is a causal mask, and how many keys a row sees (None: all)."""
    left, right = window_size
    if causal or right == 0:
        return True, None if left < 0 else left + 1
    if left >= 0 or right > 0:
        raise InputError(
            f"{name} window_size={window_size}, causal=False: expected (-1, -1), or a window that "
            "ends at the row's own key, (keys before it, 0)"
        )
    return False, None


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """softmax(scale q k^T + mask) v of `[..., heads, rows, d]`, with gradients.

    PyTorch's causal mask lets row i see keys up to i, which is ours where there are as many keys as
    rows; other causal calls are refused.
    """
    name = "scaled_dot_product_attention"
    _refuse(name, attn_mask=attn_mask, dropout_p=dropout_p)
    if is_causal and query.shape[-2] != key.shape[-2]:
        raise InputError(
            f"{name} is_causal of {query.shape[-2]} rows and {key.shape[-2]} keys: expected as many"
        )
    if query.dim() < 3 or key.dim() != query.dim() or value.dim() != query.dim():
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise InputError(f"{name} of {shapes}: expected [..., heads, rows, d] each")
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        raise InputError(
            f"{name} of {query.shape[-3]} query heads and {key.shape[-3]} key heads: expected as "
            "many, or enable_gqa=True"
        )
    lead = query.shape[:-3]
    q, k, v = (x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    out = attention(q, k, v, causal=is_causal, scale=scale)
    return out if len(lead) == 1 else out.reshape(*lead, *out.shape[1:])


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYTHING,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of `q: [batch, rows, heads, d]` and `k, v: [batch, keys, kv_heads, d]`, with
    gradients; the last row sees the last key."""
    name = "flash_attn_func"
    _refuse(name, dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    _refuse(name, return_attn_probs=return_attn_probs)
    if any(x.dim() != 4 for x in (q, k, v)):
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise InputError(f"{name} of {shapes}: expected [batch, rows, heads, d] each")
    causal, window = _masks(name, causal, window_size)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = attention(
        *(q, k, v, causal, window, softmax_scale), deterministic=deterministic, softcap=softcap
    )
    return out.transpose(1, 2)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYTHING,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """Attention of packed sequences, `q: [tokens, heads, d]` and `k, v: [tokens, kv_heads, d]`,
    with gradients; the last row of a sequence sees its last key."""
    name = "flash_attn_varlen_func"
    _refuse(name, dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    _refuse(name, return_attn_probs=return_attn_probs, block_table=block_table)
    causal, window = _masks(name, causal, window_size)
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attention_varlen(
        *(q, k, v, *bounds),
        causal=causal,
        window=window,
        scale=softmax_scale,
        deterministic=deterministic,
        softcap=softcap,
    )


def flash_attn_qkvpacked_func(qkv: Any, *args: Any, **options: Any) -> Any:
    """`flash_attn_func` of `[batch, rows, 3, heads, d]`, whose parts are read where they lie."""
    _three("flash_attn_qkvpacked_func", qkv, 5, "[batch, rows, 3, heads, d]")
    return flash_attn_func(*qkv.unbind(2), *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Any, cu_seqlens: Any, max_seqlen: int, *args: Any, **options: Any
) -> Any:
    """`flash_attn_varlen_func` of `[tokens, 3, heads, d]`, whose parts are read where they lie."""
    _three("flash_attn_varlen_qkvpacked_func", qkv, 4, "[tokens, 3, heads, d]")
    q, k, v = qkv.unbind(1)
    bounds = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(q, k, v, *bounds, *args, **options)


def _three(name: str, qkv: Any, dims: int, expected: str) -> None:
    if qkv.dim() != dims or qkv.shape[-3] != 3:
        raise InputError(f"{name} of {list(qkv.shape)}: expected {expected}")


__all__ = [
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func",
    "scaled_dot_product_attention",
]
