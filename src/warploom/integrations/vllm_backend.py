"""The classes that vLLM imports for the back end `integrations.vllm` registers."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from warploom.integrations.vllm import Batch, batch_of, cache_shape, layer_of
from warploom.kernels.attention.decode import HEADS, PAGES

HOPPER = 9  # compute capability
interface: Any = importlib.import_module("vllm.v1.attention.backend")


class WarploomImpl(interface.AttentionImpl):
    """One layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **more: Any,
    ) -> None:
        given = {key: value for key, value in locals().items() if key not in ("self", "more")}
        self.layer = layer_of(given | more)
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Batch | None,
        output: Any,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Any:
        """Attention of a step into `output`; without metadata vLLM only measures memory."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("warploom's vLLM back end gives 16-bit outputs")
        if attn_metadata is None:
            return output.zero_()
        return self.layer.run(query, key, value, kv_cache, attn_metadata, output)


class WarploomBuilder(interface.AttentionMetadataBuilder):
    """What the layers of a step share."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Batch:
        """From vLLM's metadata; a common prefix is not used."""
        return batch_of(common_attn_metadata)


class WarploomBackend(interface.AttentionBackend):
    """The back end."""

    accept_output_buffer: ClassVar[bool] = True

    @staticmethod
    def get_name() -> str:
        """The slot of vLLM's list that is open to others."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[WarploomImpl]:
        """Of layers."""
        return WarploomImpl

    @staticmethod
    def get_builder_cls() -> type[WarploomBuilder]:
        """Of metadata."""
        return WarploomBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Keys and values, each in pages: asked for before vLLM 0.33."""
        return cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Tokens of a page, whatever the cache is."""
        return list(PAGES)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Of keys and values."""
        return list(HEADS)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Hopper."""
        return bool(capability.major == HOPPER)
