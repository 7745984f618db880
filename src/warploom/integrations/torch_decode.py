"""Attention of new tokens over a cache of keys as a PyTorch operator: `attention_with_kvcache`.

    out = attention_with_kvcache(q, k_cache, v_cache, cache_seqlens, block_table=table)

Arguments are called as in `flash_attn_with_kvcache`. Kernels are compiled at the first use of a
configuration; after that a call neither waits for the GPU nor reads from it, so that it can be
captured into a CUDA graph: the number of parts follows from shapes, lengths stay on the GPU.
"""

from __future__ import annotations

from typing import Any

from warploom.autosched.schedules import compiled
from warploom.errors import InputError
from warploom.integrations import torch_program as ops
from warploom.kernels.attention.combine import combine, combine_schedule
from warploom.kernels.attention.decode import PART, DecodeConfig, decode, decode_policy
from warploom.kernels.attention.decode_plan import MOST_SPLITS, Plan, planned
from warploom.runtime.tensors import element_type
from warploom.tile import dtype

torch: Any = ops.torch_module()
NARROW = torch.float8_e4m3fn
FACTORS = ("q_descale", "k_descale", "v_descale")

SCHEMA = (
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? block_table=None, "
    "float? softmax_scale=None, bool causal=False, int? window=None, float softcap=0.0, "
    "int num_splits=0, bool batch_invariant=False, Tensor? q_descale=None, "
    "Tensor? k_descale=None, Tensor? v_descale=None, Tensor? sinks=None) -> Tensor"
)


def _config(
    q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, block_table: Any, *options: Any
) -> DecodeConfig:
    """The kernels that a call needs; raises `InputError` where there are none."""
    softmax_scale, causal, window, softcap, _, batch_invariant, *factors, sinks = options
    _check(q, k_cache, v_cache, cache_seqlens, block_table)
    _check_factors(q, k_cache, dict(zip(FACTORS, factors, strict=True)))
    return DecodeConfig(
        dtype=dtype(element_type(q.dtype)),
        head_dim=q.shape[3],
        group=q.shape[2] // k_cache.shape[2],
        causal=causal and q.shape[1] > 1,  # one query stands behind all keys
        window=window,
        softcap=softcap,
        sinks=_sinks(q, sinks) is not None,
        scale=softmax_scale,
        page=None if block_table is None else k_cache.shape[1],
        part=PART if batch_invariant else None,
    )


def _check(q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, block_table: Any) -> None:
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens}
    given |= {} if block_table is None else {"block_table": block_table}
    ops.check_devices("attention_with_kvcache", given)
    problem = ""
    if q.dim() != 4 or k_cache.dim() != 4 or tuple(k_cache.shape) != tuple(v_cache.shape):
        problem = (
            "expected q [batch, queries, heads, d] and caches [batch, keys, kv_heads, d], or "
            "[pages, page, kv_heads, d] with a block_table"
        )
    elif not q.dtype == k_cache.dtype == v_cache.dtype:
        problem = "expected one element type of q and the caches"
    elif q.shape[3] != k_cache.shape[3] or not k_cache.shape[2] or q.shape[2] % k_cache.shape[2]:
        problem = "expected equal head sizes and a whole number of heads for each key head"
    problem = problem or problem_of_lengths(q, k_cache, cache_seqlens, block_table)
    ops.refuse_call("attention_with_kvcache", given, problem)


def problem_of_lengths(q: Any, cache: Any, cache_seqlens: Any, block_table: Any) -> str:
    """What is wrong with the lengths and the block table of a call; "" where nothing is."""
    batch = q.shape[0]
    if cache_seqlens.dtype != torch.int32 or tuple(cache_seqlens.shape) != (batch,):
        return f"expected cache_seqlens of int32 [{batch}]"
    if block_table is None:
        return (
            ""
            if cache.shape[0] == batch
            else "expected a cache for each sequence, or a block_table"
        )
    kind = block_table.dtype == torch.int32 and block_table.dim() == 2
    if not kind or block_table.shape[0] != batch:
        return f"expected a block_table of int32 [{batch}, pages of a sequence]"
    return ""


def _sinks(q: Any, sinks: Any) -> Any:
    """The sinks of a call; raises `InputError` where they are not of its heads."""
    heads = q.shape[2]
    if sinks is not None and (sinks.dtype != torch.float32 or tuple(sinks.shape) != (heads,)):
        raise InputError(
            f"attention_with_kvcache sinks {str(sinks.dtype)[6:]} {list(sinks.shape)}: expected "
            f"fp32 [{heads}], a number a head"
        )
    return sinks


def _check_factors(q: Any, k_cache: Any, factors: dict[str, Any]) -> None:
    given = {name: one for name, one in factors.items() if one is not None}
    shape = (q.shape[0], k_cache.shape[2])
    wrong = [n for n, x in given.items() if x.dtype != torch.float32 or tuple(x.shape) != shape]
    if wrong or (given and q.dtype != NARROW) or (q.dtype == NARROW and len(given) < 3):
        raise InputError(
            f"attention_with_kvcache of {q.dtype} with {sorted(given)}: expected q_descale, "
            f"k_descale and v_descale of fp32 {list(shape)} for {NARROW}, and none for others"
        )


def _fill(config: DecodeConfig, out: Any, *args: Any) -> None:
    q, k_cache, v_cache, cache_seqlens, block_table, *_, num_splits, _ = args[:-4]
    batch, queries, _, d = q.shape
    kv_heads, rows = k_cache.shape[2], queries * config.group
    keys = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    sms = ops.multiprocessors(q.device.index)
    plan = planned(config, batch * kv_heads, queries, keys, sms, num_splits)
    packed = q.unflatten(2, (kv_heads, config.group)).transpose(1, 2)
    arrays = {"q": packed.reshape(batch, kv_heads, rows, d), "lengths": cache_seqlens}
    if config.narrow:
        arrays |= {f"scale_{x}": one for x, one in zip("qkv", args[-4:-1], strict=True)}
    if config.sinks:
        own = args[-1].view(kv_heads, 1, config.group)  # of packed rows
        arrays["sinks"] = own.expand(-1, queries, -1).reshape(kv_heads, rows)
    if block_table is None:
        arrays |= {"k": k_cache.transpose(1, 2), "v": v_cache.transpose(1, 2)}
    else:
        arrays |= {"k": k_cache, "v": v_cache, "table": block_table}
    attend(plan, arrays, out)


def attend(plan: Plan, arrays: dict[str, Any], out: Any) -> None:
    """Run a plan on the arrays of `decode`, into `out: [batch, queries, heads, d]`."""
    q, config = arrays["q"], plan.config
    batch, kv_heads, rows, _ = q.shape
    packed = (batch, kv_heads, rows, config.columns[0])
    parts = {"o": out.view(packed)} if not config.split else _parts(plan, q)
    ops.launch(
        ("decode", config), lambda: compiled(decode(config), decode_policy(config)), arrays | parts
    )
    if not config.split:
        return
    room = plan.room
    taken = parts | ({"lengths": arrays["lengths"]} if config.part else {})
    ops.launch(
        ("combine", config, room),
        lambda: compiled(combine(config, room), combine_schedule(config, room)),
        taken | {"o": out.unflatten(2, (kv_heads, config.group))},
    )


def _parts(plan: Plan, q: Any) -> dict[str, Any]:
    """Room for the result of each part of the keys, and for the sums of its weights."""
    batch, kv_heads, rows, _ = q.shape
    shape = (batch, kv_heads, plan.splits, rows)
    return {
        "parts": torch.empty(
            (*shape, plan.config.columns[0]), dtype=torch.float32, device=q.device
        ),
        "sums": torch.empty(shape, dtype=torch.float32, device=q.device),
    }


def _result(config: DecodeConfig, q: Any, *_: Any) -> Any:
    return q.new_empty(q.shape, dtype=torch.bfloat16 if config.narrow else q.dtype)


NAME = "warploom::attention_with_kvcache"
_operator = ops.operator(
    NAME, SCHEMA, *ops.steps(_config, _result, _fill), ops.refuse_backward(NAME, "detach q")
)


def check_splits(name: str, num_splits: int, batch_invariant: bool) -> None:
    """Raise `InputError` for a number of parts that an operator does not take."""
    if not 0 <= num_splits <= MOST_SPLITS:
        raise InputError(f"{name} num_splits={num_splits}: expected 0 to {MOST_SPLITS}")
    if batch_invariant and num_splits:
        raise InputError(
            f"{name} num_splits={num_splits} batch_invariant=True: parts of one size are as many "
            "as a sequence has; leave num_splits out"
        )


def all_lengths(q: Any, cache: Any, cache_seqlens: Any, block_table: Any) -> Any:
    """The lengths of all sequences, of which a call may say one number or nothing."""
    if cache_seqlens is not None and not isinstance(cache_seqlens, int):
        return cache_seqlens
    pages = 1 if block_table is None else block_table.shape[1]
    length = cache.shape[1] * pages if cache_seqlens is None else cache_seqlens
    return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)


def attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    cache_seqlens: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
    batch_invariant: bool = False,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    sinks: Any = None,
) -> Any:
    """softmax(scale q k^T + mask) v of `q: [batch, queries, heads, d]` over the first
    `cache_seqlens: [batch]` keys of each cache, `[batch, keys, kv_heads, d]` or, with
    `block_table: [batch, columns]`, `[pages, page, kv_heads, d]`; like q in shape and type.

    Query r of n stands at key length - n + r. `window_size` is (keys before it, keys after it) that
    a query sees, -1 for all; after it 0 or all. `num_splits` parts of the keys; 0: chosen. Without
    `cache_seqlens` all keys count; an int is the length of all. What the caches hold beyond a
    length has to be finite. Raises `InputError` for what no kernel takes.

    `sinks: [heads]` (fp32) are scores without a value, one a head, that a row's weights share their
    sum with.

    Tensors of e4m3 are times `q_descale, k_descale, v_descale: [batch, kv_heads]` (fp32), and give
    bf16.

    `batch_invariant`: the bits of a sequence are the same in every batch, because its keys are cut
    into parts of one size, as many as it has itself.
    """
    left, right = window_size
    if right not in (-1, 0) or left < -1:
        raise InputError(
            f"attention_with_kvcache window_size={window_size}: expected (n or -1, 0 or -1)"
        )
    check_splits("attention_with_kvcache", num_splits, batch_invariant)
    cache_seqlens = all_lengths(q, k_cache, cache_seqlens, block_table)
    return _operator(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        block_table,
        softmax_scale,
        causal or right == 0,
        None if left < 0 else left + 1,
        softcap,
        num_splits,
        batch_invariant,
        q_descale,
        k_descale,
        v_descale,
        sinks,
    )


__all__ = ["attention_with_kvcache"]
