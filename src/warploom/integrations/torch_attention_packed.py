"""Attention of packed sequences as PyTorch operators, with gradients: `attention_varlen`.

q is `[tokens, heads, d]`, k and v are `[tokens, kv_heads, d]`; sequence s has the tokens
`cu_seqlens[s]` to `cu_seqlens[s + 1]`, as in FlashAttention's `flash_attn_varlen_func`. Which tile
of which sequence a task is stands in lists that kernels make of the bounds on the GPU, so that no
call waits for it. The forward kernel is `kernels.attention.program`, the gradients are those of
`kernels.attention.backward`, compiled at first use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from warploom.codegen.compile.build import Built, build
from warploom.errors import InputError
from warploom.integrations.torch_attention import (
    ATTENTION_TYPES,
    ONCE,
    checked_group,
    gradients_like,
    kernels_of,
)
from warploom.integrations.torch_launches import Launches, Room
from warploom.integrations.torch_passes import both
from warploom.integrations.torch_program import (
    Chosen,
    Steps,
    allowed_type,
    check_devices,
    empty_like,
    form_of,
    multiprocessors,
    operator,
    refuse_backward,
    steps,
    torch_module,
    variant_kernel,
)
from warploom.kernels.attention.backward_config import TILE_FIELDS, BackwardConfig, packed_for
from warploom.kernels.attention.program import AttentionConfig
from warploom.kernels.attention.tasks import (
    MOST_PACKED,
    TileListConfig,
    tile_list,
    tile_list_schedule,
)
from warploom.kernels.attention.variants import choose_attention
from warploom.kernels.tuned.variant import Variant

torch: Any = torch_module()
LEAST_ROOM = 32  # sequences that a list of tasks has room for
BOUNDS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k"
MASKS = "bool causal=False, int? window=None, float? scale=None"
FORWARD = (
    f"(Tensor q, Tensor k, Tensor v, {BOUNDS}, {MASKS}, bool exact=False, "
    "float softcap=0.0, bool deterministic=False) -> (Tensor, Tensor)"
)
BACKWARD = (
    f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {BOUNDS}, {MASKS}, "
    "bool deterministic=False, float softcap=0.0) -> (Tensor, Tensor, Tensor)"
)


def _with_none(bounds: Any) -> Any:
    """The bounds with a sequence of no tokens behind the last."""
    return torch.cat((bounds, bounds[-1:]))


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
    if not 1 < len(cu_q) <= MOST_PACKED + 1:
        raise InputError(
            f"attention_varlen cu_seqlens_q of {len(cu_q) - 1} sequences: expected 1 to "
            f"{MOST_PACKED}"
        )
    _, _, _, window, scale, *_ = options
    checked_group("attention_varlen", q, k, v, window, scale)


def _room(sequences: int) -> int:
    """Sequences that a list of tasks has room for."""
    return max(LEAST_ROOM, 1 << (sequences - 1).bit_length())


def _list_kernel(own: TileListConfig) -> Chosen:
    """The key of what makes a list of tasks, and what builds it."""
    return ("tile_list", own), lambda: build(tile_list(own), tile_list_schedule(own))


def _forward_plan(q: Any, k: Any, v: Any, *options: Any) -> tuple[Callable[[], int], Launches]:
    """(what gives the rows of a tile, the kernel) of a call."""
    _check(q, k, v, *options)
    cu_q, _, max_q, max_k, causal, window, scale, exact, softcap, _ = options
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
        softcap=softcap,
    )
    # Sequences as long as the longest, which is all the host knows.
    alike, heads = len(cu_q) - 1, q.shape[1]

    @cache
    def choice() -> Variant:
        return choose_attention((max_q,) * alike, base, (max_k,) * alike, heads)

    def choose() -> dict[str, Chosen]:
        count = choice().config(base).tile[0]
        own = TileListConfig((count, count), "rows", "causal", brief=True, room=_room(alike))
        kernel = variant_kernel("attention", choice(), base)
        return {own.name: _list_kernel(own), "attention": kernel}

    return (lambda: choice().config(base).tile[0]), Launches(choose)


def _forward_form(q: Any, k: Any, v: Any, *options: Any) -> tuple[Any, ...]:
    return "attention_varlen", *form_of(q, k, v), len(options[0]), *options[2:]


def _forward_results(_: Any, q: Any, *others: Any) -> tuple[Any, Any]:
    return empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _forward(plan: Any, made: tuple[Any, Any], q: Any, k: Any, v: Any, *options: Any) -> None:
    (tile, launches), (cu_q, cu_k, *_) = plan, options
    arrays = {"q": q, "k": k, "v": v, "o": made[0], "lse": made[1]}
    arrays |= {"row_ends": cu_q.contiguous(), "key_ends": cu_k.contiguous()}
    arrays["row_bounds"] = _with_none(cu_q)
    arrays["key_bounds"] = arrays["row_bounds"] if cu_k is cu_q else _with_none(cu_k)
    tasks = len(q) // tile() + len(cu_q) - 1
    arrays["tiles"] = torch.empty((tasks, 2), dtype=torch.int32, device=q.device)
    arrays["row_tiles"] = arrays["tiles"]
    (launches if k.numel() else launches.unbound)(arrays)


@dataclass(frozen=True)
class Plan:
    """What a backward pass launches."""

    launches: Launches


def _backward_plan(*args: Any) -> Plan:
    grad, q, k, v, out, _, *options = args
    longest, causal, window, scale, deterministic, softcap = options[3:]
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
        softcap=softcap,
    )
    sms = multiprocessors(q.device.index)
    config = packed_for(config, len(q), k.shape[1], sms, longest)
    sequences = len(options[0]) - 1
    room = partial(room_between, config, q.shape[1], len(q), len(k), sequences)
    return Plan(Launches(partial(_kernels, config, sequences), room, ("do",)))


def _backward_form(*args: Any) -> tuple[Any, ...]:
    return "attention_varlen_backward", *form_of(*args[:6]), len(args[6]), *args[8:]


def lists(config: BackwardConfig, sequences: int) -> tuple[TileListConfig, TileListConfig]:
    """What makes the lists of tasks of rows and of keys.

    Tiles of keys that add in turn stand in order: each waits for tiles that began before it.
    """
    room = _room(sequences)
    order = "sequences" if config.deterministic else "causal" if config.causal else "all"
    return (
        TileListConfig(config.tile, "rows", "sequences", room=room),
        TileListConfig(config.tile, "keys", order, room=room),
    )


def room_between(config: BackwardConfig, heads: int, rows: int, keys: int, sequences: int) -> Room:
    """What the kernels of a backward pass leave one another: of rows as in other gradients, and
    both lists, as long as so many tokens and sequences may need; that of keys is a whole number of
    rounds of a band's tasks over all SMs."""
    row_tiles, key_tiles = (
        tokens // count + sequences for tokens, count in zip((rows, keys), config.tile, strict=True)
    )
    if not config.deterministic:
        band = max(1, config.band)
        rounds = -(-key_tiles * band // config.sms)
        key_tiles = -(-rounds * config.sms // band)
    vectors = (heads, config.places(rows, sequences))
    shapes = {"base": vectors, "delta": vectors, "dq_sum": tuple(config.sums_shape(vectors))}
    tiles: dict[str, tuple[int, ...]] = {
        "row_tiles": (row_tiles, TILE_FIELDS),
        "key_tiles": (key_tiles, TILE_FIELDS),
    }
    every = [(name, "fp32", shape) for name, shape in shapes.items()]
    if config.deterministic:
        tiles["turns"] = tuple(config.turns_shape(vectors))
    every += [(name, "int32", shape) for name, shape in tiles.items()]
    return Room(tuple((name, kind, shape, shape[-1]) for name, kind, shape in every))


def _kernels(config: BackwardConfig, sequences: int) -> dict[str, Chosen]:
    """All that a call launches, by name."""

    def made(own: TileListConfig) -> Callable[[], Built]:
        return lambda: build(tile_list(own), tile_list_schedule(own))

    return {x.name: (("tile_list", x), made(x)) for x in lists(config, sequences)} | kernels_of(
        config
    )


def _backward(plan: Plan, made: tuple[Any, ...], *args: Any) -> None:
    grad, q, k, v, out, lse, cu_q, cu_k, *_ = args
    dq, dk, dv = made
    if q.numel() == 0 or k.numel() == 0:
        for one in made:
            one.zero_()
        return
    arrays = {"q": q, "k": k, "v": v, "o": out, "do": grad, "lse": lse.contiguous()}
    arrays |= {"dq": dq, "dk": dk, "dv": dv}
    arrays |= {"row_ends": cu_q.contiguous(), "key_ends": cu_k.contiguous()}
    plan.launches(arrays)


def _context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, max_q, max_k, causal, window, scale, _, ctx.softcap, ctx.deterministic = inputs
    ctx.options = (max_q, max_k, causal, window, scale)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad: Any, _: Any) -> tuple[Any, ...]:
    q, k, v, cu_q, cu_k, out, lse = ctx.saved_tensors
    if grad is None:
        return (None,) * 13
    same = ctx.deterministic or torch.are_deterministic_algorithms_enabled()
    options = (*ctx.options, same, ctx.softcap)
    found = attention_varlen_backward(grad, q, k, v, out, lse, cu_q, cu_k, *options)
    return (*found, *(None,) * 10)


def _linked(cu_q: Any, cu_k: Any, *options: Any) -> tuple[Any, ...]:
    """The arguments of the gradients behind lse from those of the forward pass behind v."""
    *where, _, softcap, deterministic = options
    same = deterministic or torch.are_deterministic_algorithms_enabled()
    return cu_q, cu_k, *where, same, softcap


_AHEAD = Steps(_forward_plan, _forward_results, _forward, _forward_form)
_BACK = Steps(_backward_plan, gradients_like, _backward, _backward_form)
attention_varlen_backward = operator(
    "warploom::attention_varlen_backward",
    BACKWARD,
    *steps(*_BACK),
    refuse_backward("warploom::attention_varlen_backward", ONCE),
)
attention_varlen_with_lse = operator(
    "warploom::attention_varlen_with_lse", FORWARD, *steps(*_AHEAD), _gradients, _context
)
_trained = both(_AHEAD, _BACK, attention_varlen_backward, _linked, more=2)


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
    deterministic: bool = False,
    softcap: float = 0.0,
) -> Any:
    """softmax(scale q k^T + mask) v of every sequence, `[tokens, heads, d]`, with gradients.

    `cu_seqlens_q, cu_seqlens_k: [sequences + 1]`, int32, on the GPU, from 0 to the numbers of
    tokens. The longest sequence is what the forward kernel is chosen for; any number gives the
    right result. Masks are those of `attention`, of each sequence by itself. Raises `InputError`
    for what no kernel takes. Gradients have the same bits in every run where they are
    to be `deterministic`, or under `torch.use_deterministic_algorithms(True)`; they are of heads of
    up to 128. `softcap` is that of `attention`.
    """
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    given = (q, k, v, *bounds, causal, window, scale, exact, softcap, deterministic)
    trained = q.requires_grad or k.requires_grad or v.requires_grad
    found = _trained(*given) if trained and torch.is_grad_enabled() else None
    return attention_varlen_with_lse(*given)[0] if found is None else found
