"""Attention of packed sequences as PyTorch operators, with gradients: `attention_varlen`.

q is `[tokens, heads, d]`, k and v are `[tokens, kv_heads, d]`; sequence s has the tokens
`cu_seqlens[s]` to `cu_seqlens[s + 1]`, as in FlashAttention's `flash_attn_varlen_func`. Which tile
of which sequence a task is stands in tables that torch makes of the bounds on the GPU, so that no
call waits for it. The forward kernel is `kernels.attention.program`, the gradients are those of
`kernels.attention.backward`, compiled at first use.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from warploom.autosched.schedules import compiled
from warploom.codegen.compile.build import Built
from warploom.errors import InputError
from warploom.integrations.torch_attention import ATTENTION_TYPES, checked_group
from warploom.integrations.torch_program import (
    addresses,
    allowed_type,
    built_kernel,
    check_devices,
    copyable,
    current_stream,
    empty_like,
    form_of,
    operator,
    planned,
    torch_module,
    variant_kernel,
)
from warploom.kernels.attention.backward_config import BackwardConfig
from warploom.kernels.attention.gradients import kernel, parts
from warploom.kernels.attention.program import AttentionConfig
from warploom.kernels.attention.variants import choose_attention

torch: Any = torch_module()
BOUNDS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k"
MASKS = "bool causal=False, int? window=None, float? scale=None"
FORWARD = f"(Tensor q, Tensor k, Tensor v, {BOUNDS}, {MASKS}, bool exact=False) -> (Tensor, Tensor)"
BACKWARD = (
    f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {BOUNDS}, {MASKS}, "
    "bool deterministic=False) -> (Tensor, Tensor, Tensor)"
)


def tile_table(bounds: Any, count: int, most: int, longest_last: bool | None = None) -> Any:
    """`[most, 2]`, int32: (sequence, tile) of every tile of `count` tokens of the sequences between
    `bounds: [sequences + 1]`, and for the rest (sequences, 0).

    Tiles are in order; by `longest_last` those of the longest sequences come first, and of one
    sequence the last or the first.
    """
    lengths = bounds.diff()
    tiles = (lengths + (count - 1)) // count
    ends = tiles.cumsum(0)
    number = torch.arange(most, device=bounds.device)
    sequence = torch.searchsorted(ends, number, right=True)
    known = sequence < len(lengths)
    at = sequence.clamp(max=len(lengths) - 1)
    tile = torch.where(known, number - (ends - tiles)[at], 0)
    if longest_last is not None:
        left = tile + 1 if longest_last else tiles[at] - tile
        order = torch.where(known, left, 0).argsort(descending=True, stable=True)
        sequence, tile = sequence[order], tile[order]
    return torch.stack((sequence, tile), 1).int()


def _with_none(bounds: Any) -> Any:
    """The bounds with a sequence of no tokens behind the last."""
    return torch.cat((bounds, bounds[-1:]))


def _most(tokens: int, count: int, bounds: Any) -> int:
    """Tiles of `count` tokens that the sequences may have."""
    return tokens // count + len(bounds) - 1


def _check(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *options: Any) -> None:
    """Raise `InputError` for what the kernels do not take."""
    named = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    check_devices("attention_varlen", named)
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise InputError(
            f"attention_varlen of {shapes}: expected [tokens, heads, d] and twice "
            "[tokens, kv_heads, d]"
        )
    for name, bounds in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if bounds.dtype != torch.int32 or bounds.shape != cu_q.shape or bounds.dim() != 1:
            raise InputError(
                f"attention_varlen {name} is {bounds.dtype} {list(bounds.shape)}: expected int32 "
                "[sequences + 1], as many for queries as for keys"
            )
    if len(cu_q) < 2:
        raise InputError("attention_varlen cu_seqlens_q has no sequence: expected two numbers")
    _, _, _, window, scale, *_ = options
    checked_group("attention_varlen", q, k, v, window, scale)


def _forward_plan(q: Any, k: Any, v: Any, *options: Any) -> tuple[int, Any]:
    """(rows of a tile, the kernel) of a call."""
    _check(q, k, v, *options)
    cu_q, _, max_q, max_k, causal, window, scale, exact = options
    base = AttentionConfig(
        dtype=allowed_type(q, "attention_varlen q", ATTENTION_TYPES),
        head_dim=q.shape[2],
        causal=causal,
        window=window,
        group=q.shape[1] // k.shape[1],
        lse=True,
        scale=scale,
        exact=exact,
        packed=True,
    )
    alike = len(cu_q) - 1  # sequences as long as the longest, which is all the host knows
    choice = choose_attention((max_q,) * alike, base, (max_k,) * alike, q.shape[1])
    key, make = variant_kernel("attention", choice, base)
    return choice.config(base).tile[0], built_kernel(key, q, make)


def _empty(q: Any) -> tuple[Any, Any]:
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return empty_like(q), lse


def _forward(q: Any, k: Any, v: Any, *options: Any) -> tuple[Any, Any]:
    out, lse = _empty(q)
    cu_q, cu_k = options[:2]
    if q.numel() == 0:
        _check(q, k, v, *options)
        return out, lse
    key = ("attention_varlen", *form_of(q, k, v), len(cu_q), *options[2:])
    rows, made, launches = planned(key, lambda: (*_forward_plan(q, k, v, *options), []))
    arrays = {"q": q, "k": k, "v": v, "o": out, "lse": lse}
    arrays |= {"row_bounds": _with_none(cu_q), "key_bounds": _with_none(cu_k)}
    arrays["tiles"] = tile_table(cu_q, rows, _most(len(q), rows, cu_q), longest_last=True)
    if k.numel() == 0:
        made(arrays, stream=current_stream(q))
        return out, lse
    if not launches:
        launches.append(made.bound(arrays))
    launches[0](addresses(arrays), current_stream(q))
    return out, lse


def _forward_fake(q: Any, k: Any, v: Any, *options: Any) -> tuple[Any, Any]:
    _check(q, k, v, *options)
    return _empty(q)


def _build(config: BackwardConfig, part: str) -> Built:
    program, policy, allow = kernel(config, part)
    return compiled(program, policy, allow=allow)


def _backward_plan(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
    """(configuration, the kernels of its parts) of a call."""
    grad, q, k, v, out, _ = tensors
    causal, window, scale, deterministic = options[4:]
    _check(q, k, v, *options)
    if {grad.dtype, out.dtype} != {q.dtype} or not grad.shape == out.shape == q.shape:
        raise InputError(
            f"attention_varlen_backward of grad {grad.dtype} {list(grad.shape)} and out "
            f"{out.dtype} {list(out.shape)}: expected both like q, {q.dtype} {list(q.shape)}"
        )
    config = BackwardConfig(
        dtype=allowed_type(q, "attention_varlen q", ATTENTION_TYPES),
        head_dim=q.shape[2],
        causal=causal,
        window=window,
        group=q.shape[1] // k.shape[1],
        scale=scale,
        deterministic=deterministic,
        packed=True,
    )
    return config, [
        built_kernel((config, part), q, partial(_build, config, part)) for part in parts(config)
    ]


def arrays_between(config: BackwardConfig, q: Any, sequences: int) -> dict[str, Any]:
    """What the backward kernels keep of rows between them."""
    rows = (q.shape[1], config.places(len(q), sequences))
    make = partial(torch.empty, dtype=torch.float32, device=q.device)
    base, delta = make((2, *rows)).unbind(0)
    found = {"base": base, "delta": delta, "dq_sum": make(config.sums_shape(rows))}
    if config.deterministic:
        turns = config.turns_shape(rows)
        found["turns"] = torch.zeros(turns, dtype=torch.int32, device=q.device)
    return found


def tables(config: BackwardConfig, cu_q: Any, cu_k: Any, rows: int, keys: int) -> dict[str, Any]:
    """Bounds and tasks of the backward kernels; `rows` and `keys` are all tokens.

    Tiles of keys that add in turn stand in order: each waits for tiles that began before it.
    """
    row_count, key_count = config.tile
    order = None if config.deterministic else False
    return {
        "row_bounds": _with_none(cu_q),
        "key_bounds": _with_none(cu_k),
        "row_tiles": tile_table(cu_q, row_count, _most(rows, row_count, cu_q)),
        "key_tiles": tile_table(cu_k, key_count, _most(keys, key_count, cu_k), order),
    }


def _backward(*args: Any) -> tuple[Any, Any, Any]:
    tensors, options = args[:6], args[6:]
    grad, q, k, v, out, lse = tensors
    cu_q, cu_k = options[:2]
    dq, dk, dv = empty_like(q), empty_like(k), empty_like(v)
    if q.numel() == 0 or k.numel() == 0:
        _check(q, k, v, *options)
        return dq.zero_(), dk.zero_(), dv.zero_()
    arrays = {"q": q, "k": k, "v": v, "o": out, "do": copyable(grad), "lse": lse.contiguous()}
    key = ("attention_varlen_backward", *form_of(*arrays.values()), len(cu_q), *options[2:])
    config, kernels, launches = planned(key, lambda: (*_backward_plan(tensors, options), []))
    arrays |= {"dq": dq, "dk": dk, "dv": dv, **arrays_between(config, q, len(cu_q) - 1)}
    arrays |= tables(config, cu_q, cu_k, len(q), len(k))
    if not launches:
        launches += [
            one.bound({spec.name: arrays[spec.name] for spec in one.interface.arrays})
            for one in kernels
        ]
    where, stream = addresses(arrays), current_stream(q)
    for launch in launches:
        launch(where, stream)
    return dq, dk, dv


def _backward_fake(*args: Any) -> tuple[Any, Any, Any]:
    _, q, k, v, _, _, *options = args
    _check(q, k, v, *options)
    return empty_like(q), empty_like(k), empty_like(v)


def _context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, max_q, max_k, causal, window, scale, _ = inputs
    ctx.options = (max_q, max_k, causal, window, scale)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad: Any, _: Any) -> tuple[Any, ...]:
    q, k, v, cu_q, cu_k, out, lse = ctx.saved_tensors
    if grad is None:
        return (None,) * 11
    same = torch.are_deterministic_algorithms_enabled()
    found = attention_varlen_backward(grad, q, k, v, out, lse, cu_q, cu_k, *ctx.options, same)
    return (*found, *(None,) * 8)


attention_varlen_backward = operator(
    "warploom::attention_varlen_backward", BACKWARD, _backward, _backward_fake
)
attention_varlen_with_lse = operator(
    "warploom::attention_varlen_with_lse", FORWARD, _forward, _forward_fake, _gradients, _context
)


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    exact: bool = False,
) -> Any:
    """softmax(scale q k^T + mask) v of every sequence, `[tokens, heads, d]`, with gradients.

    `cu_seqlens_q, cu_seqlens_k: [sequences + 1]`, int32, on the GPU, from 0 to the numbers of
    tokens. The longest sequence is what the forward kernel is chosen for; any number gives the
    right result. Masks are those of `attention`, of each sequence by itself. Raises `InputError`
    for what no kernel takes. Gradients are the same in every run under
    `torch.use_deterministic_algorithms(True)`; they are of heads of up to 128.
    """
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attention_varlen_with_lse(q, k, v, *bounds, causal, window, scale, exact)[0]
