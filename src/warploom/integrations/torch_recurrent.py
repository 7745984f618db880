"""Recurrent attention as PyTorch operators, with the argument names and layouts of others.

`linear_attention`, `retention`, `simple_gla`, `gla`, `delta_rule` and `gated_delta_rule` take what
flash-linear-attention's functions of these names take, `mamba_chunk_scan_combined` what mamba_ssm's
does. Tensors are used where they lie; only states of Mamba change their axes. All have gradients
(`torch_recurrent_backward`); importing this module needs torch.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from warploom.autosched.schedules import compiled
from warploom.errors import InputError
from warploom.integrations import torch_program as ops
from warploom.integrations.torch_recurrent_backward import gradients
from warploom.integrations.torch_rows import swiglu
from warploom.integrations.torch_segments import alone, best_count, run_segments
from warploom.kernels.recurrent import solved
from warploom.kernels.recurrent.backward import ALLOW, slots_of
from warploom.kernels.recurrent.program import RecurrentConfig, default_policy, recurrent
from warploom.kernels.recurrent.task import CHUNK
from warploom.tile import BF16, FP32

torch: Any = ops.torch_module()
SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? dt, Tensor? a, Tensor? bias, Tensor? skip, "
    "Tensor? beta, Tensor? initial, float scale, bool final, bool keep=False, bool taylor=False) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
KEPT = "states", "inverse", "fresh"
TENSORS = ("q", "k", "v", "g", "dt", "a", "bias", "skip", "beta", "initial")


def config_of(
    tensors: dict[str, Any], final: bool, keep: bool = False, taylor: bool = False
) -> RecurrentConfig:
    """What the kernel of these tensors is; raises `InputError` for what it does not take."""
    ops.check_devices("recurrent attention", tensors)
    q, k, v = (tensors[name] for name in "qkv")
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4 or q.shape != k.shape or q.shape[:2] != v.shape[:2]:
        raise InputError(
            f"recurrent attention of {shapes}: expected twice [batch, rows, groups, d] and "
            "[batch, rows, heads, e]"
        )
    if q.shape[2] == 0 or v.shape[2] % q.shape[2]:
        raise InputError(f"recurrent attention of {shapes}: heads must be a multiple of groups")
    if not q.dtype == k.dtype == v.dtype == torch.bfloat16:
        raise InputError(
            f"recurrent attention of {q.dtype}, {k.dtype}, {v.dtype}: expected torch.bfloat16"
        )
    batch, rows, heads, e = v.shape
    tokens, states = (batch, rows, heads), (batch, heads, q.shape[3], e)
    own = {"dt": tokens, "a": (heads,), "bias": (heads,), "skip": (heads,), "initial": states}
    by_rank = {1: (heads,), 4: (*tokens, q.shape[3])}
    own["g"] = by_rank.get(tensors["g"].dim(), tokens) if "g" in tensors else tokens
    own["beta"] = tokens
    for name, shape in own.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            raise InputError(
                f"recurrent attention {name} has shape {list(tensors[name].shape)}, expected "
                f"{list(shape)}"
            )
    gate, beta = tensors.get("g", tensors.get("dt")), tensors.get("beta")
    kinds = {torch.float32: FP32, torch.bfloat16: BF16}
    for name, one in tensors.items():
        narrow = one is beta or (one is gate and one.dim() > 1)
        wide = name not in "qkv" and not narrow
        if (wide and one.dtype != torch.float32) or one.dtype not in kinds:
            raise InputError(f"recurrent attention {name} is {one.dtype}, expected torch.float32")
    by_channel = gate is not None and gate.dim() == 4
    if by_channel and beta is not None and beta.dtype != torch.float32:
        raise InputError(f"recurrent attention beta is {beta.dtype}, expected torch.float32")
    given = [gate] if by_channel else [gate, beta]
    gates = {kinds[one.dtype] for one in given if one is not None and one.dim() > 1}
    if len(gates) > 1:
        raise InputError(f"recurrent attention beta is {tensors['beta'].dtype}, expected g's type")
    ranks = {1: "head", 3: "token", 4: "channel"}
    decay = "none" if gate is None else "step" if "dt" in tensors else ranks[gate.dim()]
    return RecurrentConfig(
        decay=decay,
        delta=beta is not None,
        taylor=taylor,
        softplus="bias" in tensors,
        gates=next(iter(gates), FP32),
        key_dim=q.shape[3],
        value_dim=e,
        shared=q.shape[2] == 1,
        skip="skip" in tensors,
        initial="initial" in tensors,
        final=final,
        states=keep,
    )


def _given(args: tuple[Any, ...]) -> dict[str, Any]:
    named = zip(TENSORS, args, strict=False)
    return {name: one for name, one in named if one is not None}


def _plan(*args: Any) -> RecurrentConfig:
    scale, *options = args[len(TENSORS) :]
    if not scale > 0:
        raise InputError(f"recurrent attention scale={scale}: expected a number above 0")
    return config_of(_given(args), *options)


def _results(config: RecurrentConfig, q: Any, k: Any, v: Any, *_: Any) -> tuple[Any, ...]:
    """o, the final state, and what gradients need (`KEPT`); empty where it is not asked for."""
    batch, rows, heads, e = v.shape
    chunks, delta = -(-rows // CHUNK), config.states and config.delta
    final = (batch, heads, q.shape[3], e) if config.final else (0,)
    states = (batch, chunks, heads, e, q.shape[3]) if config.states else (0,)
    inverse = (batch, chunks, slots_of(config, heads), CHUNK, CHUNK) if delta else (0,)
    return (
        v.new_empty(v.shape),
        v.new_empty(final, dtype=torch.float32),
        *(v.new_empty(shape) for shape in (states, inverse, v.shape if delta else (0,))),
    )


def _fill(config: RecurrentConfig, results: tuple[Any, ...], *args: Any) -> None:
    tensors, scale, (out, state, *kept) = _given(args), args[len(TENSORS)], results
    if out.numel() == 0:
        if tensors["v"].shape[1] == 0 and config.final:
            state.copy_(tensors["initial"]) if config.initial else state.zero_()
        return
    arrays = tensors | {"o": out} | ({"final": state} if config.final else {})
    if config.in_two:
        _run_in_two(config, arrays | {"final": state}, scale)
    elif (count := best_count(config, out)) > 1:
        run_segments(config, arrays, scale, count)
    else:
        names = KEPT if config.delta else KEPT[:1]
        arrays |= dict(zip(names, kept, strict=False)) if config.states else {}
        allow = ALLOW if config.states else ()
        ops.launch(
            (config,),
            lambda: compiled(recurrent(config), default_policy(config), allow=allow),
            arrays,
            {"scale": scale},
        )


def _run_in_two(config: RecurrentConfig, arrays: dict[str, Any], scale: float) -> None:
    """What chunks need of themselves, then the chunks."""
    v = arrays["v"]
    shape = (v.shape[0], -(-v.shape[1] // CHUNK), v.shape[2], CHUNK, CHUNK)
    arrays |= {name: v.new_empty(shape) for name in solved.SQUARES}
    few = alone(config, v)
    for program, policy in solved.kernels(config, few):
        given = {one.name: arrays[one.name] for one in program.arrays}
        make = partial(compiled, program, policy, allow=solved.FEW)
        ops.launch((program.name, config, few), make, given, {"scale": scale})


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """What the backward pass needs of a call."""
    ctx.scale, ctx.final, ctx.keep, _ = inputs[len(TENSORS) :]
    ctx.save_for_backward(*inputs[: len(TENSORS)], *output[2:])


def _backward(ctx: Any, do: Any, dfinal: Any, *_: Any) -> tuple[Any, ...]:
    inputs, kept = ctx.saved_tensors[: len(TENSORS)], ctx.saved_tensors[len(TENSORS) :]
    if not ctx.keep:
        raise NotImplementedError(
            "warploom::recurrent has no backward kernel for features of second order, for delta "
            "rules with decays of channels or keys above 64, nor without keep=True; call it under "
            "torch.no_grad()"
        )
    tensors = _given(inputs)
    more = dict(zip(KEPT, kept, strict=True))
    more = more if "beta" in tensors else {"states": more["states"]}
    found = gradients(tensors | more, do, dfinal if ctx.final else None, ctx.scale)
    return *[found.get(name) for name in TENSORS], None, None, None, None


_operator = ops.operator(
    "warploom::recurrent", SCHEMA, *ops.steps(_plan, _results, _fill), _backward, _save
)


def simple_gla(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    g_gamma: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
) -> tuple[Any, Any]:
    """Attention with a decay of every row (`g`: [B, T, H]) or head (`g_gamma`: [H]), logarithms.

    q, k: [B, T, H, K] (or fewer heads, shared by neighbours), v: [B, T, H, V] in bf16; states
    [B, H, K, V] in fp32. Gives (o like v, final state or None). Not both of `g` and `g_gamma`.
    """
    if g is not None and g_gamma is not None:
        raise InputError("simple_gla takes g or g_gamma, not both")
    gates = g if g_gamma is None else g_gamma
    return _called(
        (q, k, v, gates, None, initial_state), default_scale(q, scale), output_final_state
    )


def gla(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
) -> tuple[Any, Any]:
    """Attention with a decay of every row and channel of the keys, g: [B, T, H, K] in bf16.

    g are logarithms, at most 0; K is at most 64. Otherwise as `simple_gla`.
    """
    return _called((q, k, v, g, None, initial_state), default_scale(q, scale), output_final_state)


def gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
) -> tuple[Any, Any]:
    """The delta rule under decays of every row: g (logarithms) and beta are [B, T, H].

    Keys have norms of about 1; K is at most 128. Otherwise as `simple_gla`.
    """
    beta = beta if g is None else beta.to(g.dtype)
    return _called((q, k, v, g, beta, initial_state), default_scale(q, scale), output_final_state)


def kimi_delta_attention(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
) -> tuple[Any, Any]:
    """The delta rule under decays of every row and channel, fla's `chunk_kda`: g: [B, T, H, K].

    g are logarithms, in bf16; keys have norms of about 1; K is at most 64. No gradients.
    """
    beta, scale = beta.float(), default_scale(q, scale)
    return _called((q, k, v, g, beta, initial_state), scale, output_final_state)


def delta_rule(
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
) -> tuple[Any, Any]:
    """`gated_delta_rule` without decay."""
    return gated_delta_rule(q, k, v, None, beta, scale, initial_state, output_final_state)


def default_scale(q: Any, scale: float | None) -> float:
    """1/√K where none is given."""
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale


def _called(tensors: tuple[Any, ...], scale: float, final: bool) -> tuple[Any, Any]:
    """o and the final state, or None, of q, k, v, gates, beta and the initial state."""
    *gated, beta, start = tensors
    out, state = _call((*gated, None, None, None, None, beta, start), scale, final)
    return out, state if final else None


def _call(given: tuple[Any, ...], scale: float, final: bool) -> tuple[Any, Any]:
    """o and the final state; the states that gradients need are kept where there will be some."""
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    g, beta = (given[TENSORS.index(name)] for name in ("g", "beta"))
    long = given[0].shape[-1] > CHUNK or (g is not None and g.dim() == 4)
    keep = trained and not (beta is not None and long)
    return _operator(*given, scale, final, keep)[:2]


def linear_attention(
    q: Any,
    k: Any,
    v: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
) -> tuple[Any, Any]:
    """Attention without decay or normaliser; arguments and results as `simple_gla`'s."""
    return simple_gla(q, k, v, None, None, scale, initial_state, output_final_state)


def based(
    q: Any, k: Any, v: Any, scale: float | None = None, use_norm: bool = True, eps: float = 1e-6
) -> Any:
    """Attention whose weights are 1 + s + s^2 / 2 with s = scale q k (Based); K is at most 16.

    With `use_norm` rows are divided by the sum of their weights and `eps`: the kernel has that sum
    as one more column of v, for which a V of 64 takes a second task. Gives o like v; no gradients.
    """
    if not use_norm:
        return _operator(q, k, v, *[None] * 7, default_scale(q, scale), False, False, True)[0]
    ones = torch.zeros_like(v[..., :8])
    ones[..., 0] = 1.0
    wide = based(q, k, torch.cat([v, ones], -1), scale, use_norm=False)
    whole = wide[..., v.shape[-1], None].float() + eps
    return (wide[..., : v.shape[-1]] / whole).to(v.dtype)


def retention(
    q: Any,
    k: Any,
    v: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
) -> tuple[Any, Any]:
    """RetNet's decays, 1 - 2^(-5 - head); arguments and results as `simple_gla`'s."""
    heads = torch.arange(v.shape[2], device=v.device, dtype=torch.float64)
    gamma = torch.log1p(-torch.exp2(-5.0 - heads)).float()
    return simple_gla(q, k, v, None, gamma, scale, initial_state, output_final_state)


def mamba_chunk_scan_combined(
    x: Any,
    dt: Any,
    A: Any,  # noqa: N803 (mamba_ssm's names)
    B: Any,  # noqa: N803
    C: Any,  # noqa: N803
    chunk_size: int | None = None,
    D: Any = None,  # noqa: N803
    z: Any = None,
    dt_bias: Any = None,
    initial_states: Any = None,
    dt_softplus: bool = False,
    return_final_states: bool = False,
) -> Any:
    """Mamba-2's scan: x, z: [b, l, h, p], dt: [b, l, h], A, D, dt_bias: [h], B, C: [b, l, g, n].

    With z the result is y silu(z), by a kernel of its own behind the scan. States are [b, h, p, n]
    in fp32. Gives y like x, or (y, final states). Any `chunk_size` gives the same: the kernel's is
    64.
    """
    if dt_bias is not None and not dt_softplus:
        raise InputError("mamba_chunk_scan_combined takes dt_bias with dt_softplus=True")
    if dt_softplus and dt_bias is None:
        dt_bias = torch.zeros_like(A)
    start = None if initial_states is None else initial_states.transpose(-1, -2).contiguous()
    given = (C, B, x, None, dt, A, dt_bias, D, None, start)
    out, final = _call(given, 1.0, return_final_states)
    if z is not None:
        out = swiglu(z.flatten(2), out.flatten(2)).view_as(out)
    return (out, final.transpose(-1, -2)) if return_final_states else out


__all__ = [
    "based",
    "delta_rule",
    "gated_delta_rule",
    "gla",
    "kimi_delta_attention",
    "linear_attention",
    "mamba_chunk_scan_combined",
    "retention",
    "simple_gla",
]
