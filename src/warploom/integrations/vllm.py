"""vLLM's attention by our kernels: a back end that registers itself through vLLM's plug-ins.

vLLM calls `register` of every installed package with an entry point of `vllm.general_plugins`, in
each of its processes; `--attention-backend CUSTOM` then takes the back end. Written for
`vllm.v1.attention.backend` of vLLM 0.33; what it has no kernel for (8-bit caches, other masks than
causal ones, ALiBi, sinks, latent attention) it refuses in vLLM's own way.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from warploom.errors import InputError
from warploom.integrations.torch_mixed import attention_mixed, get_scheduler_metadata
from warploom.kernels.attention.decode import HEADS, PAGES

OLDER = ("k and v", "pages", "page", "kv_heads", "d")  # dimensions of a cache before vLLM 0.33
BACKEND = "warploom.integrations.vllm_backend.WarploomBackend"


def register() -> None:
    """Tell vLLM of the back end, by name: the class is imported where it is used."""
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, BACKEND)


@dataclass(frozen=True)
class Batch:
    """What a step's layers share: of `tokens` new ones, `starts: [requests + 1]` those of each
    request, `lengths: [requests]` its keys, `pages: [requests, columns]` where they are and
    `slots: [tokens]` where the new ones go."""

    tokens: int
    starts: Any
    lengths: Any
    pages: Any
    slots: Any
    lists: dict[tuple[int, int], Any] = field(default_factory=dict[tuple[int, int], Any])

    def tasks(self, heads: int, kv_heads: int) -> Any:
        """The list of tasks, which the first layer of so many heads makes for the others."""
        if (heads, kv_heads) not in self.lists:
            of = self.starts, self.lengths, self.tokens, heads, kv_heads
            self.lists[heads, kv_heads] = get_scheduler_metadata(*of)
        return self.lists[heads, kv_heads]


def batch_of(common: Any) -> Batch:
    """From vLLM's metadata of a step; raises `InputError` for a batch that is not causal."""
    if common.causal is not True:
        raise InputError("warploom's vLLM back end: causal attention only")
    requests, tokens = common.num_reqs, common.num_actual_tokens
    return Batch(
        tokens,
        common.query_start_loc[: requests + 1],
        common.seq_lens[:requests],
        common.block_table_tensor[:requests],
        common.slot_mapping[:tokens],
    )


@dataclass(frozen=True)
class Layer:
    """One attention layer."""

    scale: float
    window: int | None
    softcap: float

    def run(self, q: Any, k: Any, v: Any, caches: Any, batch: Batch, out: Any) -> Any:
        """Store k and v, `[tokens, kv_heads, d]`, and attend from q into `out: [tokens, ...]`.

        `caches` is `[pages, kv_heads, page, 2 d]` with keys before values, in any order of memory,
        or, as before vLLM 0.33, what `cache_shape` says."""
        if caches.dim() == len(OLDER):
            k_cache, v_cache = caches.unbind(0)
        else:
            k_cache, v_cache = caches.transpose(1, 2).chunk(2, -1)
        places = batch.slots // k_cache.shape[1], batch.slots % k_cache.shape[1]
        for new, into in ((k, k_cache), (v, v_cache)):
            into[places] = new[: batch.tokens]
        made = attention_mixed(
            q[: batch.tokens].contiguous(),
            k_cache,
            v_cache,
            batch.lengths,
            batch.pages,
            batch.starts,
            self.scale,
            self.window,
            self.softcap,
            batch.tasks(q.shape[1], k.shape[1]),
        )
        out[: batch.tokens] = made.view(out[: batch.tokens].shape)
        return out


def layer_of(options: dict[str, Any]) -> Layer:
    """A layer from the arguments of vLLM's `AttentionImpl`; raises `InputError` for what there is
    no kernel for."""
    wanted = {
        "alibi_slopes": None,
        "kv_cache_dtype": ("auto", "bfloat16", "float16"),
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "sinks": None,
    }
    for name, allowed in wanted.items():
        given = options.get(name)
        fits = given in allowed if isinstance(allowed, tuple) else given in (None, allowed)
        if not fits:
            raise InputError(f"warploom's vLLM back end: {name}={given!r}, expected {allowed}")
    return Layer(
        float(options["scale"]),
        options.get("sliding_window"),
        options.get("logits_soft_cap") or 0.0,
    )


@cache
def cache_shape(pages: int, page: int, kv_heads: int, d: int) -> tuple[int, ...]:
    """`OLDER` of a layer's cache; raises `InputError` for pages and heads without a kernel."""
    if page not in PAGES or d not in HEADS:
        raise InputError(
            f"warploom's vLLM back end: pages of {page} tokens, heads of {d}: expected "
            f"{PAGES} and {HEADS}"
        )
    return (2, pages, page, kv_heads, d)
