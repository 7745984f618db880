"""Packed cases of `bench.attention_backward`: gradients of the sequences of
`bench.attention_cases.PACKED`, with all that a call does from the bounds on: ours makes its tables.

Gradients are given as those of the first sequence, `[1, heads, rows, d]`, which are compared.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from warploom.integrations.torch_attention_packed import arrays_between, tables
from warploom.kernels.attention.backward_config import BackwardConfig
from warploom.runtime.kernel import Kernel

Call = Callable[[], Any]


def operands(torch: Any, tensors: Mapping[str, Any], lengths: Sequence[int]) -> dict[str, Any]:
    """q, k, v, dO, o: [tokens, heads, d] and lse: [heads, tokens] of tensors that are
    [1, heads, tokens, d], o and lse as the forward pass gives them of each sequence, causal."""
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention
    parts = {name: x.split(list(lengths), 2) for name, x in tensors.items()}
    found = [
        forward(*(parts[name][s] for name in "qkv"), None, True, 0.0, True, False)
        for s in range(len(lengths))
    ]
    out = torch.cat([x[0] for x in found], 2)
    lse = torch.cat([x[1].reshape(x[0].shape[:3]) for x in found], 2)
    flat = {name: x[0].transpose(0, 1).contiguous() for name, x in {**tensors, "o": out}.items()}
    ends = torch.tensor([0, *lengths]).cumsum(0)
    flat["lse"] = lse[0].float().contiguous()
    return flat | {"bounds": ends.int().to(out.device), "first": lengths[0], "most": max(lengths)}


def first_sequence(data: Mapping[str, Any]) -> dict[str, Any]:
    """q, k, v and dO of the first sequence, [1, heads, rows, d]."""
    return {name: _first(data, data[name]) for name in ("q", "k", "v", "do")}


def _first(data: Mapping[str, Any], x: Any) -> Any:
    return x[: data["first"]].transpose(0, 1)[None]


def own_call(
    torch: Any, config: BackwardConfig, data: Mapping[str, Any], loaded: Mapping[str, Kernel]
) -> Call:
    """All kernels of one backward pass, and the tables they take."""
    bounds, q = data["bounds"], data["q"]
    kept = arrays_between(config, q, len(bounds) - 1)
    grads = {f"d{name}": torch.full_like(data[name], math.nan) for name in "qkv"}
    named = {name: data[name] for name in ("q", "k", "v", "o", "do", "lse")}

    def call() -> Any:
        stream = torch.cuda.current_stream().cuda_stream
        if "turns" in kept:
            kept["turns"].zero_()
        made = tables(config, bounds, bounds, len(q), len(data["k"]))
        arrays = {**named, **grads, **kept, **made}
        for kernel in loaded.values():
            names = (spec.name for spec in kernel.interface.arrays)
            kernel({name: arrays[name] for name in names}, stream=stream)
        return tuple(_first(data, grads[f"d{name}"]) for name in "qkv")

    return call


def flash_attention(config: BackwardConfig, data: Mapping[str, Any]) -> Call:
    """FlashAttention-4 on the same tensors."""
    tensors = [data[name] for name in ("q", "k", "v", "o", "do")]
    where = {
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), data["bounds"]),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), data["most"]),
    }

    def four() -> Any:
        function = importlib.import_module("flash_attn.cute.interface")._flash_attn_bwd
        found = function(*tensors, data["lse"], config.factor, config.causal, **where)
        return tuple(_first(data, x) for x in found[:3])

    return four
