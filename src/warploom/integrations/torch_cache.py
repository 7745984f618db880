"""New keys and values into a cache as a PyTorch operator: `append_kvcache`.

    q = append_kvcache(k, v, k_cache, v_cache, lengths, table, q, cos, sin)

Keys and queries are rotated by the angles of their positions on the way. Kernels are compiled at
the first use of a configuration; after that a call neither waits for the GPU nor reads from it, so
that it can be captured into a CUDA graph.
"""

from __future__ import annotations

from typing import Any

from warploom.autosched.schedules import compiled
from warploom.integrations import torch_program as ops
from warploom.kernels.attention.append import AppendConfig, append, append_schedule
from warploom.runtime.tensors import element_type
from warploom.tile import dtype

torch: Any = ops.torch_module()
NAME = "warploom::append_kvcache"
SCHEMA = (
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cache_seqlens, "
    "Tensor? block_table=None, Tensor? q=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
    "bool rotary_interleaved=False, Tensor? k_descale=None, Tensor? v_descale=None) -> Tensor"
)
TENSORS = (
    *("k", "v", "k_cache", "v_cache", "cache_seqlens", "block_table"),
    *("q", "rotary_cos", "rotary_sin", "k_descale", "v_descale"),
)
OURS = {
    "cache_seqlens": "lengths",
    "block_table": "table",
    "rotary_cos": "cos",
    "rotary_sin": "sin",
    "k_descale": "scale_k",
    "v_descale": "scale_v",
}


def _named(args: tuple[Any, ...]) -> tuple[dict[str, Any], bool]:
    """The tensors that were given, and whether neighbours are rotated together."""
    *first, pairs, k_descale, v_descale = args
    found = dict(zip(TENSORS, (*first, k_descale, v_descale), strict=True))
    return {name: one for name, one in found.items() if one is not None}, pairs


def _config(given: dict[str, Any], pairs: bool) -> AppendConfig:
    """The kernel that a call needs; raises `InputError` where there is none."""
    ops.check_devices("append_kvcache", given)
    ops.refuse_call("append_kvcache", given, _problem(given))
    k, cos, q = given["k"], given.get("rotary_cos"), given.get("q")
    kinds = {name: dtype(element_type(given[name].dtype)) for name in ("k", "k_cache")}
    return AppendConfig(
        dtype=kinds["k"],
        cache=kinds["k_cache"],
        head_dim=k.shape[3],
        rotary="" if cos is None else "pairs" if pairs else "halves",
        **({} if cos is None else {"angles": dtype(element_type(cos.dtype))}),
        group=0 if q is None else q.shape[2] // k.shape[2],
        page=given["k_cache"].shape[1] if "block_table" in given else None,
    )


def _problem(given: dict[str, Any]) -> str:
    """What is wrong with the tensors of a call; "" where nothing is."""
    k, k_cache, lengths = given["k"], given["k_cache"], given["cache_seqlens"]
    if k.dim() != 4 or k.shape != given["v"].shape or k.dtype != given["v"].dtype:
        return "expected k and v [batch, tokens, kv_heads, d] of one type"
    batch, _, kv_heads, d = k.shape
    if k_cache.dim() != 4 or k_cache.shape != given["v_cache"].shape:
        return "expected caches [batch, keys, kv_heads, d], or [pages, page, kv_heads, d]"
    if tuple(k_cache.shape[2:]) != (kv_heads, d) or k_cache.dtype != given["v_cache"].dtype:
        return f"expected caches of {kv_heads} heads of {d}, of one type"
    if lengths.dtype != torch.int32 or tuple(lengths.shape) != (batch,):
        return f"expected cache_seqlens of int32 [{batch}]"
    return _problem_of_pages(given, batch) or _problem_of_rest(given)


def _problem_of_pages(given: dict[str, Any], batch: int) -> str:
    table = given.get("block_table")
    if table is None:
        fits = given["k_cache"].shape[0] == batch
        return "" if fits else "expected a cache for each sequence, or a block_table"
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != batch:
        return f"expected a block_table of int32 [{batch}, pages of a sequence]"
    return ""


def _problem_of_rest(given: dict[str, Any]) -> str:
    k, q = given["k"], given.get("q")
    batch, tokens, kv_heads, d = k.shape
    turns = [given[name] for name in ("rotary_cos", "rotary_sin") if name in given]
    if len(turns) == 1 or any(one.dim() != 2 or one.shape[1] != d // 2 for one in turns):
        return f"expected both rotary_cos and rotary_sin [positions, {d // 2}], or neither"
    if turns and (turns[0].shape != turns[1].shape or turns[0].dtype != turns[1].dtype):
        return "expected rotary_cos and rotary_sin of one shape and type"
    if q is not None:
        whole = q.dim() == 4 and not q.shape[2] % max(1, kv_heads) and q.dtype == k.dtype
        if not turns or not whole or (*q.shape[:2], q.shape[3]) != (batch, tokens, d):
            return f"expected q [{batch}, {tokens}, heads, {d}] like k, to be rotated"
    narrow = given["k_cache"].dtype != k.dtype
    factors = [given.get(name) for name in ("k_descale", "v_descale")]
    shapes = [None if one is None else tuple(one.shape) for one in factors]
    wanted = (batch, kv_heads) if narrow else None
    if shapes != [wanted, wanted] or any(
        one is not None and one.dtype != torch.float32 for one in factors
    ):
        return (
            f"expected k_descale and v_descale of fp32 [{batch}, {kv_heads}] for caches of 8 bits, "
            "and neither for others"
        )
    return ""


def _plan(*args: Any) -> AppendConfig:
    return _config(*_named(args))


def _result(config: AppendConfig, *args: Any) -> Any:
    q = _named(args)[0].get("q")
    return args[0].new_empty(0) if q is None else q.new_empty(q.shape)


def _fill(config: AppendConfig, out: Any, *args: Any) -> None:
    if args[0].numel() == 0:
        return
    given, _ = _named(args)
    arrays = {OURS.get(name, name): one for name, one in given.items()}
    arrays |= {"r": out} if config.group else {}
    if config.rotary == "pairs":
        for name in set(arrays) & {"k", "k_cache", "q", "r"}:
            arrays[name] = arrays[name].unflatten(-1, (-1, 2))
    ops.launch(
        ("append", config), lambda: compiled(append(config), append_schedule(config)), arrays
    )


# Without queries the result is empty, and the caches are written all the same.
RUN, FAKE = ops.steps(_plan, _result, _fill, in_place=True)
_operator = ops.operator(NAME, SCHEMA, RUN, FAKE, mutates=("k_cache", "v_cache"))


def append_kvcache(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    cache_seqlens: Any,
    block_table: Any = None,
    q: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    k_descale: Any = None,
    v_descale: Any = None,
) -> Any:
    """Write `k, v: [batch, tokens, kv_heads, d]` behind the first `cache_seqlens: [batch]` keys of
    each cache, `[batch, keys, kv_heads, d]` or, with `block_table: [batch, columns]`,
    `[pages, page, kv_heads, d]`.

    With `rotary_cos, rotary_sin: [positions, d / 2]` keys are rotated by the angles of their
    positions, and `q: [batch, tokens, heads, d]` is rotated alike and given back (without q an
    empty tensor): halves together, or neighbours where `rotary_interleaved`. Caches of e4m3 hold
    what k and v are of `k_descale, v_descale: [batch, kv_heads]`. Tokens for which there is no room
    are left out. Raises `InputError` for what no kernel takes.
    """
    rotary = (rotary_cos, rotary_sin, rotary_interleaved)
    return _operator(
        k, v, k_cache, v_cache, cache_seqlens, block_table, q, *rotary, k_descale, v_descale
    )


__all__ = ["append_kvcache"]
