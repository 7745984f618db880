"""Cases of `bench.attention_backward` with the forward pass: what a step of training does.

The pair of each library is its own: its gradients are made of its own output and lse.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from warploom.codegen.compile.build import Built, build
from warploom.kernels.attention.backward_config import BackwardConfig
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.attention.variants import choose_attention

Call = Callable[[], Any]
Data = Mapping[str, Any]


def forward(config: BackwardConfig, rows: int, heads: int) -> Built:
    """The forward kernel that a user gets for gradients of `heads` heads of all sequences."""
    asked = AttentionConfig(
        dtype=config.dtype,
        head_dim=config.head_dim,
        causal=config.causal,
        window=config.window,
        group=config.group,
        lse=True,
    )
    choice = choose_attention(rows, asked, heads=heads)
    own = choice.config(asked)
    return build(attention(own), choice.schedule(own), allow=choice.allow)


def results(torch: Any, data: Data) -> dict[str, Any]:
    """The operands, with an output and lse of our own."""
    return {**data, **{name: torch.empty_like(data[name]) for name in ("o", "lse")}}


def own_call(torch: Any, built: Built, data: Data, back: Call) -> Call:
    """Our forward kernel on `results`, and the kernels behind it."""
    kernel = built.kernel()
    arrays = {name: data[name] for name in ("q", "k", "v", "o", "lse")}

    def call() -> Any:
        kernel(arrays, stream=torch.cuda.current_stream().cuda_stream)
        return back()

    return call


def flash_attention(config: BackwardConfig, data: Data) -> Call:
    """FlashAttention-4, both ways."""
    q, k, v, do = (data[name].transpose(1, 2).contiguous() for name in ("q", "k", "v", "do"))

    def call() -> Any:
        library = importlib.import_module("flash_attn.cute.interface")
        masks = {"softmax_scale": config.factor, "causal": config.causal}
        out, lse, *_ = library._flash_attn_fwd(q, k, v, return_lse=True, **masks)
        found = library._flash_attn_bwd(q, k, v, out, do, lse, **masks)
        return tuple(x.transpose(1, 2) for x in found[:3])

    return call


def cudnn(torch: Any, config: BackwardConfig, data: Data) -> Call:
    """cuDNN through torch, both ways."""
    q, k, v, do = (data[name] for name in ("q", "k", "v", "do"))
    ahead = torch.ops.aten._scaled_dot_product_cudnn_attention
    back = torch.ops.aten._scaled_dot_product_cudnn_attention_backward

    def call() -> Any:
        out, lse, cum_q, cum_k, most_q, most_k, seed, offset, _ = ahead(
            q, k, v, None, True, 0.0, config.causal, False
        )
        return back(
            do, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, most_q, most_k, 0.0,
            config.causal,
        )  # fmt: skip

    return call
