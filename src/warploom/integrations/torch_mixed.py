"""Attention of a mixed batch over paged caches as a PyTorch operator: `attention_mixed`.

    out = attention_mixed(q, k_cache, v_cache, cache_seqlens, block_table, cu_seqlens_q)

Chunks of prompts and single new tokens are tasks of one launch: each sequence has the tokens of q
from `cu_seqlens_q[s]` to `cu_seqlens_q[s + 1]`. The list of tasks is made on the GPU, as long as
shapes say that it may have to be, so that a call neither waits for the GPU nor reads from it. The
layers of a model may share one list:

    tasks = get_scheduler_metadata(cu_seqlens_q, cache_seqlens, tokens, heads, kv_heads)
    out = attention_mixed(..., scheduler_metadata=tasks)
"""

from __future__ import annotations

from typing import Any

from warploom.autosched.schedules import compiled
from warploom.codegen.compile.build import build
from warploom.errors import InputError
from warploom.integrations import torch_program as ops
from warploom.kernels.attention.decode import FIELDS, DecodeConfig, decode, decode_policy
from warploom.kernels.attention.decode_plan import mixed_tile
from warploom.kernels.attention.tasks import TaskListConfig, task_list, task_list_schedule
from warploom.runtime.tensors import element_type
from warploom.tile import dtype

torch: Any = ops.torch_module()
NAME = "warploom::attention_mixed"
SCHEMA = (
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor block_table, "
    "Tensor cu_seqlens_q, float? softmax_scale=None, int? window=None, float softcap=0.0, "
    "Tensor? scheduler_metadata=None) -> Tensor"
)
LEAST_ROOM = 32  # sequences that a list of tasks has room for


def _config(*args: Any) -> DecodeConfig:
    """The kernel that a call needs; raises `InputError` where there is none."""
    q, k_cache, v_cache, lengths, table, bounds, softmax_scale, window, softcap, tasks = args
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": lengths}
    given |= {"block_table": table, "cu_seqlens_q": bounds}
    given |= {} if tasks is None else {"scheduler_metadata": tasks}
    ops.check_devices("attention_mixed", given)
    ops.refuse_call("attention_mixed", given, _problem(given))
    return _kernel(
        q.shape[0],
        q.shape[1],
        k_cache.shape[2],
        table.shape[0],
        dtype=dtype(element_type(q.dtype)),
        head_dim=q.shape[2],
        window=window,
        softcap=softcap,
        scale=softmax_scale,
        page=k_cache.shape[1],
    )


def _kernel(tokens: int, heads: int, kv_heads: int, batch: int, **options: Any) -> DecodeConfig:
    """The kernel for so many tokens of so many sequences."""
    group = heads // kv_heads
    tile = mixed_tile(tokens * group / max(1, batch))
    return DecodeConfig(group=group, causal=True, split=False, mixed=True, tile=tile, **options)


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
    tasks = given.get("scheduler_metadata")
    shape = _list_shape(_kernel(q.shape[0], q.shape[1], kv_heads, batch), batch, q.shape[0])
    if tasks is not None and (tasks.dtype != torch.int32 or tuple(tasks.shape) != shape):
        return f"expected scheduler_metadata of int32 {list(shape)}, by get_scheduler_metadata"
    return ""


def _list_shape(config: DecodeConfig, batch: int, tokens: int) -> tuple[int, int]:
    """Of a list with room for all tiles that so many sequences and tokens may have."""
    return batch + tokens // _tile_tokens(config), FIELDS


def _tile_tokens(config: DecodeConfig) -> int:
    return config.tile[0] // config.pitch


def _listed(bounds: Any, lengths: Any, tokens: int, heads: int, kv_heads: int) -> DecodeConfig:
    """The kernel that a list is for; raises `InputError` where there is none."""
    given = {"cu_seqlens_q": bounds, "cache_seqlens": lengths}
    ops.check_devices("get_scheduler_metadata", given)
    shapes = tuple(bounds.shape), tuple(lengths.shape)
    right = lengths.dim() == 1 and shapes[0] == (shapes[1][0] + 1,)
    whole = kv_heads > 0 and heads % kv_heads == 0
    if not (right and whole) or any(one.dtype != torch.int32 for one in given.values()):
        raise InputError(
            f"get_scheduler_metadata of cu_seqlens_q {list(shapes[0])}, cache_seqlens "
            f"{list(shapes[1])}, heads={heads} kv_heads={kv_heads}: expected int32 [batch+1] and "
            "[batch], and a whole number of heads for each key head"
        )
    return _kernel(tokens, heads, kv_heads, shapes[1][0])


def _list_result(config: DecodeConfig, bounds: Any, lengths: Any, tokens: int, *_: int) -> Any:
    return bounds.new_empty(_list_shape(config, lengths.shape[0], tokens))


def _fill_list(config: DecodeConfig, tiles: Any, bounds: Any, lengths: Any, *_: int) -> None:
    own = TaskListConfig(
        _tile_tokens(config), max(LEAST_ROOM, 1 << (lengths.shape[0] - 1).bit_length())
    )
    ops.launch(
        ("task_list", own),
        lambda: build(task_list(own), task_list_schedule(own)),
        {"bounds": bounds, "lengths": lengths, "tiles": tiles},
    )


def _result(config: DecodeConfig, q: Any, *_: Any) -> Any:
    return q.new_empty(q.shape)


def _fill(config: DecodeConfig, out: Any, *args: Any) -> None:
    q, k_cache, v_cache, lengths, table, bounds, *_, tasks = args
    heads = (k_cache.shape[2], config.group)
    if tasks is None:
        tasks = _list_result(config, bounds, lengths, q.shape[0])
        _fill_list(config, tasks, bounds, lengths)
    arrays = {
        "q": q.unflatten(1, heads),
        "k": k_cache,
        "v": v_cache,
        "table": table,
        "tiles": tasks,
        "o": out.unflatten(1, heads),
    }
    ops.launch(("decode", config), lambda: compiled(decode(config), decode_policy(config)), arrays)


_operator = ops.operator(
    NAME, SCHEMA, *ops.steps(_config, _result, _fill), ops.refuse_backward(NAME, "detach q")
)
_list_operator = ops.operator(
    "warploom::attention_mixed_tasks",
    "(Tensor cu_seqlens_q, Tensor cache_seqlens, SymInt tokens, int heads, int kv_heads) -> Tensor",
    *ops.steps(_listed, _list_result, _fill_list),
)


def get_scheduler_metadata(
    cu_seqlens_q: Any, cache_seqlens: Any, tokens: int, heads: int, kv_heads: int
) -> Any:
    """The list of tasks of a batch, int32 `[tasks, 5]` (`kernels.attention.tasks`), made on the GPU
    from `cu_seqlens_q: [batch + 1]` and `cache_seqlens: [batch]`, for `tokens` rows of q: what a
    call of `attention_mixed` makes for itself, for all layers of a step that have as many heads.
    Raises `InputError` for other tensors and heads."""
    return _list_operator(cu_seqlens_q, cache_seqlens, tokens, heads, kv_heads)


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
    scheduler_metadata: Any = None,
) -> Any:
    """softmax(scale q k^T + mask) v of the new tokens of several sequences, `q: [tokens, heads,
    d]`, over the first `cache_seqlens: [batch]` keys of each in `k_cache, v_cache: [pages, page,
    kv_heads, d]`, which `block_table: [batch, columns]` finds; like q.

    The last token of a sequence stands at its last key, and each sees the keys up to its own, or
    the last `window` of them. `scheduler_metadata` is what `get_scheduler_metadata` gave for this
    batch; without it every call makes the list of its tasks. Raises `InputError` for what no kernel
    takes.
    """
    rest = (softmax_scale, window, softcap, scheduler_metadata)
    return _operator(q, k_cache, v_cache, cache_seqlens, block_table, cu_seqlens_q, *rest)


__all__ = ["attention_mixed", "get_scheduler_metadata"]
