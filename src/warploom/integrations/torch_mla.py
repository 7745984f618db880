"""Multi-head latent attention over a cache as a PyTorch operator: `attention_mla`.

    out = attention_mla(q, kv_cache, cache_seqlens, block_table)

A token's entry in the cache is one key for all heads, whose first columns are its value: 512 of
576 (DeepSeek-V2, arXiv 2405.04434, section 2.1.2, with the up-projections absorbed into q and o).
Arguments are called as in `flash_mla_with_kvcache`. As of `attention_with_kvcache`, calls neither
wait for the GPU nor read from it.
"""

from __future__ import annotations

from typing import Any

from warploom.integrations import torch_program as ops
from warploom.integrations.torch_decode import all_lengths, attend, check_splits, problem_of_lengths
from warploom.kernels.attention.decode import LATENT, PART, DecodeConfig
from warploom.kernels.attention.decode_plan import planned
from warploom.runtime.tensors import element_type
from warploom.tile import dtype

torch: Any = ops.torch_module()
NARROW = torch.float8_e4m3fn
NAME = "warploom::attention_mla"
SCHEMA = (
    "(Tensor q, Tensor kv_cache, Tensor cache_seqlens, Tensor? block_table=None, "
    "int head_dim_v=512, float? softmax_scale=None, bool causal=False, int num_splits=0, "
    "bool batch_invariant=False, Tensor? q_descale=None, Tensor? k_descale=None) -> Tensor"
)


def _config(
    q: Any, kv_cache: Any, cache_seqlens: Any, block_table: Any, *options: Any
) -> DecodeConfig:
    """The kernels that a call needs; raises `InputError` where there are none."""
    head_dim_v, softmax_scale, causal, _, batch_invariant, *factors = options
    given = {"q": q, "kv_cache": kv_cache, "cache_seqlens": cache_seqlens}
    given |= {} if block_table is None else {"block_table": block_table}
    ops.check_devices("attention_mla", given)
    problem = ""
    if q.dim() != 4 or kv_cache.dim() != 4 or kv_cache.shape[2] != 1:
        problem = (
            "expected q [batch, queries, heads, d] and a cache [batch, keys, 1, d], or "
            "[pages, page, 1, d] with a block_table"
        )
    elif q.dtype != kv_cache.dtype or q.shape[3] != kv_cache.shape[3]:
        problem = "expected one element type and one head size of q and the cache"
    elif LATENT.get(q.shape[3]) != head_dim_v:
        problem = f"expected heads of {LATENT}, values of head_dim_v"
    problem = problem or problem_of_lengths(q, kv_cache, cache_seqlens, block_table)
    problem = problem or _problem_of_factors(q, *factors)
    ops.refuse_call("attention_mla", given, problem, f", head_dim_v={head_dim_v}")
    return DecodeConfig(
        dtype=dtype(element_type(q.dtype)),
        head_dim=q.shape[3],
        value_dim=head_dim_v,
        group=q.shape[2],
        causal=causal and q.shape[1] > 1,  # one query stands behind all keys
        scale=softmax_scale,
        page=None if block_table is None else kv_cache.shape[1],
        part=PART if batch_invariant else None,
    )


def _problem_of_factors(q: Any, q_descale: Any, k_descale: Any) -> str:
    given = [one for one in (q_descale, k_descale) if one is not None]
    shape, narrow = (q.shape[0], 1), q.dtype == NARROW
    wrong = any(one.dtype != torch.float32 or tuple(one.shape) != shape for one in given)
    if wrong or len(given) != 2 * narrow:
        return (
            f"expected q_descale and k_descale of fp32 {list(shape)} for {NARROW}, and neither for "
            "others"
        )
    return ""


def _result(config: DecodeConfig, q: Any, *_: Any) -> Any:
    kind = torch.bfloat16 if config.narrow else q.dtype
    return q.new_empty((*q.shape[:3], config.columns[0]), dtype=kind)


def _fill(config: DecodeConfig, out: Any, *args: Any) -> None:
    q, kv_cache, cache_seqlens, block_table, *_, num_splits, _, q_descale, k_descale = args
    batch, queries, heads, d = q.shape
    keys = kv_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    plan = planned(config, batch, queries, keys, ops.multiprocessors(q.device.index), num_splits)
    arrays = {"q": q.reshape(batch, 1, queries * heads, d), "lengths": cache_seqlens}
    if config.narrow:
        arrays |= {"scale_q": q_descale, "scale_k": k_descale}
    if block_table is None:
        arrays["k"] = kv_cache.transpose(1, 2)
    else:
        arrays |= {"k": kv_cache, "table": block_table}
    attend(plan, arrays, out)


_operator = ops.operator(
    NAME, SCHEMA, *ops.steps(_config, _result, _fill), ops.refuse_backward(NAME, "detach q")
)


def attention_mla(
    q: Any,
    kv_cache: Any,
    cache_seqlens: Any = None,
    block_table: Any = None,
    head_dim_v: int = 512,
    softmax_scale: float | None = None,
    causal: bool = False,
    num_splits: int = 0,
    batch_invariant: bool = False,
    q_descale: Any = None,
    k_descale: Any = None,
) -> Any:
    """softmax(scale q c^T + mask) c[..., :head_dim_v] of `q: [batch, queries, heads, d]` over the
    first `cache_seqlens: [batch]` entries c of a cache, `[batch, keys, 1, d]` or, with
    `block_table: [batch, columns]`, `[pages, page, 1, d]`: `[batch, queries, heads, head_dim_v]`.

    `softmax_scale` is d ** -0.5 where it is left out; models say 192 ** -0.5 or more. Query r of n
    stands at key length - n + r. `num_splits` parts of the keys; 0: chosen. Without
    `cache_seqlens` all keys count; an int is the length of all. What the cache holds beyond a
    length has to be finite. Tensors of e4m3 are times `q_descale, k_descale: [batch, 1]` (fp32),
    and give bf16. `batch_invariant` is that of `attention_with_kvcache`. Raises `InputError` for
    what no kernel takes.
    """
    check_splits("attention_mla", num_splits, batch_invariant)
    lengths = all_lengths(q, kv_cache, cache_seqlens, block_table)
    options = (head_dim_v, softmax_scale, causal, num_splits, batch_invariant)
    return _operator(q, kv_cache, lengths, block_table, *options, q_descale, k_descale)


__all__ = ["attention_mla"]
