"""What `bench/attention.py` is measured beside: cuDNN through torch, FlashAttention-4 and -2.

A baseline is a function that takes the next operands and gives its output. Those that a library
does not support are left out with its reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from attention_cases import FA4
from warploom.kernels.attention import AttentionConfig

Pick = Callable[[], dict[str, Any]]
Calls = dict[str, Callable[[], Any]]
VARLEN = "torch varlen (FlashAttention-2)"


def usable(torch: Any, calls: Mapping[str, Callable[[], Any]]) -> tuple[Calls, dict[str, str]]:
    """The baselines that run, and why the others do not."""
    found: Calls = {}
    refused: dict[str, str] = {}
    for name, call in calls.items():
        try:
            call()
            torch.cuda.synchronize()
            found[name] = call
        except Exception as error:  # whatever a library raises for what it does not support
            refused[name] = f"{type(error).__name__}: {error}"[:200]
    return found, refused


def baselines_of(
    torch: Any, what: str, data: list[dict[str, Any]], pick: Pick, config: AttentionConfig
) -> Calls:
    """The libraries to try; for 8-bit elements, the 16-bit ones on the same values."""
    if what == "packed":
        return _packed(pick, config.causal)
    for v in data:
        if what == "fp8":
            wide = [v[x].to(torch.bfloat16) for x in "qkv"]
            v["wide"] = [wide[0], wide[1], wide[2].transpose(-1, -2).contiguous()]
        else:
            v["wide"] = [v[x] for x in "qkv"]
        v["theirs"] = [x.transpose(1, 2).contiguous() for x in v["wide"]]
    if config.window is not None:
        return _window(torch, data, pick, config.window)
    backends = torch.nn.attention

    def cudnn() -> Any:
        with backends.sdpa_kernel(backends.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                *pick()["wide"], is_causal=config.causal, enable_gqa=config.group > 1
            )

    return {"cuDNN": cudnn, **_four(pick, causal=config.causal)}


def _four(pick: Pick, **options: Any) -> Calls:
    try:
        function = importlib.import_module("flash_attn.cute").flash_attn_func
    except ImportError:
        return {}

    def four() -> Any:
        out = function(*pick()["theirs"], **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return {FA4: four}


def _window(torch: Any, data: list[dict[str, Any]], pick: Pick, window: int) -> Calls:
    varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    for v in data:
        batch, rows = v["theirs"][0].shape[:2]
        v["flat"] = [x.flatten(0, 1) for x in v["theirs"]]
        v["every"] = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device="cuda")

    def two() -> Any:
        v = pick()
        batch, rows, heads, d = v["theirs"][0].shape
        bounds = v["every"], v["every"]
        out = varlen(*v["flat"], *bounds, rows, rows, window_size=(window - 1, 0))
        return out.view(batch, rows, heads, d).transpose(1, 2)

    return {VARLEN: two, **_four(pick, causal=True, window_size=(window - 1, 0))}


def _packed(pick: Pick, causal: bool) -> Calls:
    varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn

    def two() -> Any:
        v = pick()
        bounds = v["row_bounds"], v["key_bounds"], v["longest"], v["longest"]
        return varlen(v["q"], v["k"], v["v"], *bounds, window_size=(-1, 0 if causal else -1))

    try:
        function = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    except ImportError:
        return {VARLEN: two}

    def four() -> Any:
        v = pick()
        out = function(
            v["q"],
            v["k"],
            v["v"],
            cu_seqlens_q=v["row_bounds"],
            cu_seqlens_k=v["key_bounds"],
            max_seqlen_q=v["longest"],
            max_seqlen_k=v["longest"],
            causal=causal,
        )
        return out[0] if isinstance(out, tuple) else out

    return {VARLEN: two, FA4: four}
