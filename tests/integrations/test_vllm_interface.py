"""The back end under vLLM's own classes, where vLLM's Python files can be imported: its compiled
parts and a GPU are not needed. A wheel's files and their imports on the path are enough."""

import pytest

torch = pytest.importorskip("torch")
interface = pytest.importorskip("vllm.v1.attention.backend")

from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

from warploom.integrations import vllm  # noqa: E402

ASKED = {
    "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
    "use_mla": False, "has_sink": False, "use_sparse": False, "use_mm_prefix": False,
    "use_per_head_quant_scales": False, "device_capability": DeviceCapability(9, 0),
    "attn_type": "decoder",
}  # fmt: skip


@pytest.fixture
def backend():
    vllm.register()
    return AttentionBackendEnum.CUSTOM.get_class()


def test_its_registry_finds_classes_that_its_interface_lets_be_made(backend):
    assert issubclass(backend, interface.AttentionBackend)
    assert issubclass(backend.get_impl_cls(), interface.AttentionImpl)
    assert issubclass(backend.get_builder_cls(), interface.AttentionMetadataBuilder)
    backend()
    backend.get_impl_cls()(4, 64, 0.1, 2)


REFUSED = {
    "head_size": 96, "kv_cache_dtype": "fp8", "block_size": 8, "use_mla": True, "has_sink": True,
    "use_sparse": True, "device_capability": DeviceCapability(8, 0), "attn_type": "encoder",
    "dtype": torch.float32,
}  # fmt: skip


def test_it_says_before_an_engine_begins_what_has_no_kernel(backend):
    assert backend.validate_configuration(**ASKED) == []
    for name, value in REFUSED.items():
        assert len(backend.validate_configuration(**ASKED | {name: value})) == 1, name


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_step_in_its_own_words_reaches_the_kernel(backend, monkeypatch, layout):
    calls = []
    monkeypatch.setattr(vllm, "attention_mixed", lambda *args: calls.append(args) or args[0] + 1)
    monkeypatch.setattr(vllm, "get_scheduler_metadata", lambda *of: None)
    bounds = torch.tensor([0, 1, 4], dtype=torch.int32)
    common = interface.CommonAttentionMetadata(
        query_start_loc=bounds, query_start_loc_cpu=bounds,
        seq_lens=torch.tensor([20, 3], dtype=torch.int32), num_reqs=2, num_actual_tokens=4,
        max_query_len=3, max_seq_len=20,
        block_table_tensor=torch.arange(8, dtype=torch.int32).view(2, 4),
        slot_mapping=torch.arange(40, 44),
    )  # fmt: skip
    metadata = backend.get_builder_cls()(None, [], None, torch.device("cpu")).build(0, common)
    layer = backend.get_impl_cls()(num_heads=4, head_size=64, scale=0.1, num_kv_heads=2)
    pages, kv_heads, page, d = 9, 2, 16, 64
    if layout == "HND":
        caches = torch.zeros(pages, kv_heads, page, 2 * d)
    else:
        caches = torch.zeros(pages, page, kv_heads, 2 * d).transpose(1, 2)
    q, k, v = (torch.randn(4, heads, 64) for heads in (4, 2, 2))
    out = layer.forward(None, q, k, v, caches, metadata, torch.zeros(4, 4, 64))
    assert torch.equal(out, q + 1)
    # Slots 40 to 43: of the third page, from its ninth token on.
    assert torch.equal(caches[2, :, 8:12], torch.cat([k, v], -1).transpose(0, 1))
    assert not caches[[0, 1, *range(3, pages)]].any()
    ((_, k_cache, v_cache, lengths, table, starts, *_),) = calls
    assert k_cache.shape == v_cache.shape == (pages, page, kv_heads, d)
    assert torch.equal(v_cache[2, 8:12], v)
    assert (lengths.tolist(), table.shape, starts.tolist()) == ([20, 3], (2, 4), [0, 1, 4])
