"""Packed cases of `bench.attention_backward`: gradients of the sequences of
`bench.attention_cases.PACKED`, with all that a call does from the bounds on.

Gradients are given as those of the first sequence, `[1, heads, rows, d]`, which are compared.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from warploom.codegen.compile.build import Built, build
from warploom.integrations.torch_attention_packed import lists, room_between
from warploom.kernels.attention.backward_config import BackwardConfig
from warploom.kernels.attention.tasks import TileListConfig, tile_list, tile_list_schedule
from warploom.runtime.kernel import Kernel

Call = Callable[[], Any]


def folder(into: Path, own: TileListConfig) -> Path:
    """Where the cubin of a list is."""
    return into / "tiles {}x{} {} {} {}".format(*own.tile, own.of, own.order, own.room)


def build_lists(into: Path, config: BackwardConfig, sequences: int) -> None:
    """Compile what makes the lists of so many sequences."""
    for own in lists(config, sequences):
        build(tile_list(own), tile_list_schedule(own)).write(folder(into, own))


def operands(torch: Any, tensors: Mapping[str, Any], lengths: Sequence[int]) -> dict[str, Any]:
    """q, k, v, dO, o: [tokens, heads, d] and lse: [heads, tokens] of tensors that are
    [1, heads, tokens, d], o and lse in fp32 of each sequence, causal."""
    parts = {name: x.split(list(lengths), 2) for name, x in tensors.items()}
    found = [_causal(torch, *(parts[name][s] for name in "qkv")) for s in range(len(lengths))]
    out, lse = (torch.cat(one, 2) for one in zip(*found, strict=True))
    flat = {name: x[0].transpose(0, 1).contiguous() for name, x in {**tensors, "o": out}.items()}
    ends = torch.tensor([0, *lengths]).cumsum(0)
    flat["lse"] = lse[0].float().contiguous()
    return flat | {"bounds": ends.int().to(out.device), "first": lengths[0], "most": max(lengths)}


def _causal(torch: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """o and lse of one sequence."""
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill_(unseen, -math.inf)
    return (torch.softmax(scores, -1) @ v.float()).to(q.dtype), torch.logsumexp(scores, -1)


def first_sequence(data: Mapping[str, Any]) -> dict[str, Any]:
    """q, k, v and dO of the first sequence, [1, heads, rows, d]."""
    return {name: _first(data, data[name]) for name in ("q", "k", "v", "do")}


def _first(data: Mapping[str, Any], x: Any) -> Any:
    return x[: data["first"]].transpose(0, 1)[None]


def own_call(
    torch: Any,
    cubins: Path,
    config: BackwardConfig,
    data: Mapping[str, Any],
    loaded: Mapping[str, Kernel],
) -> Call:
    """All kernels of one backward pass, and those that make the lists they take."""
    bounds, q, sequences = data["bounds"], data["q"], len(data["bounds"]) - 1
    made = [Built.read(folder(cubins, own)).kernel() for own in lists(config, sequences)]
    heads, keys = q.shape[1], len(data["k"])
    room = room_between(config, heads, len(q), keys, sequences)
    kept = room.views(room.made(q.device)) | {"row_ends": bounds, "key_ends": bounds}
    grads = {f"d{name}": torch.full_like(data[name], math.nan) for name in "qkv"}
    named = {name: data[name] for name in ("q", "k", "v", "o", "do", "lse")}

    def call() -> Any:
        stream = torch.cuda.current_stream().cuda_stream
        arrays = {**named, **grads, **kept}
        for kernel in (*made, *loaded.values()):
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
