"""Attention of a mixed batch over paged caches as a PyTorch operator: `attention_mixed`.

    out = attention_mixed(q, k_cache, v_cache, cache_seqlens, block_table, cu_seqlens_q)

Chunks of prompts and single new tokens are tasks of one launch: each sequence has the tokens of q
from `cu_seqlens_q[s]` to `cu_seqlens_q[s + 1]`. The list of tasks is made on the GPU, as long as
shapes say that it may have to be, so that a call neither waits for the GPU nor reads from it.
"""

from __future__ import annotations

from typing import Any

from warploom.autosched.schedules import compiled
from warploom.codegen.compile.build import build
from warploom.errors import InputError
from warploom.integrations.torch_program import (
    check_devices,
    launch,
    operator,
    refuse_backward,
    steps,
    torch_module,
)
from warploom.kernels.attention.decode import FIELDS, DecodeConfig, decode, decode_policy
from warploom.kernels.attention.decode_plan import mixed_tile
from warploom.kernels.attention.tasks import TaskListConfig, task_list, task_list_schedule
from warploom.runtime.tensors import element_type
from warploom.tile import dtype

torch: Any = torch_module()
NAME = "warploom::attention_mixed"
SCHEMA = (
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor block_table, "
    "Tensor cu_seqlens_q, float? softmax_scale=None, int? window=None, float softcap=0.0) -> Tensor"
)
LEAST_ROOM = 32  # sequences that a list of tasks has room for


def _config(*args: Any) -> DecodeConfig:
    """The kernel that a call needs; raises `InputError` where there is none."""
    q, k_cache, v_cache, lengths, table, bounds, softmax_scale, window, softcap = args
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": lengths}
    given |= {"block_table": table, "cu_seqlens_q": bounds}
    check_devices("attention_mixed", given)
    if problem := _problem(given):
        listed = ", ".join(f"{n} {str(t.dtype)[6:]} {list(t.shape)}" for n, t in given.items())
        raise InputError(f"attention_mixed of {listed}: {problem}")
    group = q.shape[1] // k_cache.shape[2]
    rows = q.shape[0] * group / max(1, table.shape[0])
    return DecodeConfig(
        dtype=dtype(element_type(q.dtype)),
        head_dim=q.shape[2],
        group=group,
        causal=True,
        window=window,
        softcap=softcap,
        scale=softmax_scale,
        page=k_cache.shape[1],
        split=False,
        mixed=True,
        tile=mixed_tile(rows),
    )


def _problem(given: dict[str, Any]) -> str:
    """What is wrong with the tensors of a call; "" where nothing is."""
    q, k_cache, table = given["q"], given["k_cache"], given["block_table"]
    if q.dim() != 3 or k_cache.dim() != 4 or k_cache.shape != given["v_cache"].shape:
        return "expected q [tokens, heads, d] and caches [pages, page, kv_heads, d]"
    if not q.dtype == k_cache.dtype == given["v_cache"].dtype or q.element_size() != 2:
        return "expected bf16 or fp16, one element type of q and the caches"
    kv_heads = k_cache.shape[2]
    if q.shape[2] != k_cache.shape[3] or not kv_heads or q.shape[1] % kv_heads:
        return "expected equal head sizes and a whole number of heads for each key head"
    numbers = [given[name] for name in ("cache_seqlens", "block_table", "cu_seqlens_q")]
    batch = table.shape[0]
    shapes = [tuple(one.shape) for one in (numbers[0], numbers[2])]
    if table.dim() != 2 or shapes != [(batch,), (batch + 1,)]:
        return "expected cache_seqlens [batch], block_table [batch, pages], cu_seqlens_q [batch+1]"
    if any(one.dtype != torch.int32 for one in numbers):
        return "expected int32 of cache_seqlens, block_table and cu_seqlens_q"
    return ""


def _tasks(bounds: Any, lengths: Any, tokens: int, config: DecodeConfig) -> Any:
    """`[tasks, 5]`: what every task is (`attention.tasks`), for any `bounds: [batch + 1]` of so
    many tokens; those that are not needed have none."""
    batch, high = lengths.shape[0], config.tile[0] // config.pitch
    own = TaskListConfig(high, max(LEAST_ROOM, 1 << (batch - 1).bit_length()))
    tiles = torch.empty((batch + tokens // high, FIELDS), dtype=torch.int32, device=bounds.device)
    launch(
        ("task_list", own),
        lambda: build(task_list(own), task_list_schedule(own)),
        {"bounds": bounds, "lengths": lengths, "tiles": tiles},
    )
    return tiles


def _result(config: DecodeConfig, q: Any, *_: Any) -> Any:
    return q.new_empty(q.shape)


def _fill(config: DecodeConfig, out: Any, *args: Any) -> None:
    q, k_cache, v_cache, lengths, table, bounds, *_ = args
    heads = (k_cache.shape[2], config.group)
    arrays = {
        "q": q.unflatten(1, heads),
        "k": k_cache,
        "v": v_cache,
        "table": table,
        "tiles": _tasks(bounds, lengths, q.shape[0], config),
        "o": out.unflatten(1, heads),
    }
    launch(("decode", config), lambda: compiled(decode(config), decode_policy(config)), arrays)


_operator = operator(
    NAME, SCHEMA, *steps(_config, _result, _fill), refuse_backward(NAME, "detach q")
)


def attention_mixed(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    cache_seqlens: Any,
    block_table: Any,
    cu_seqlens_q: Any,
    softmax_scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
) -> Any:
    """softmax(scale q k^T + mask) v of the new tokens of several sequences, `q: [tokens, heads,
    d]`, over the first `cache_seqlens: [batch]` keys of each in `k_cache, v_cache: [pages, page,
    kv_heads, d]`, which `block_table: [batch, columns]` finds; like q.

    The last token of a sequence stands at its last key, and each sees the keys up to its own, or
    the last `window` of them. Raises `InputError` for what no kernel takes.
    """
    rest = (softmax_scale, window, softcap)
    return _operator(q, k_cache, v_cache, cache_seqlens, block_table, cu_seqlens_q, *rest)


__all__ = ["attention_mixed"]
