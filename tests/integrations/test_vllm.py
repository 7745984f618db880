"""The back end for vLLM against stand-ins for the classes that it takes from there: how it is
registered, and what of a step reaches the kernel. The engine itself is not run."""

import importlib
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from warploom.errors import InputError  # noqa: E402
from warploom.integrations import vllm  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture
def registered(monkeypatch):
    """What is registered with a stand-in for vLLM, whose classes are plain ones."""
    found = {}
    names = ["vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"]
    backend, registry = (
        ModuleType(f"vllm.v1.attention.{name}") for name in ("backend", "backends.registry")
    )
    for name in ("AttentionBackend", "AttentionImpl", "AttentionMetadataBuilder"):
        setattr(backend, name, type(name, (), {}))
    registry.AttentionBackendEnum = SimpleNamespace(CUSTOM="custom")
    registry.register_backend = lambda slot, path: found.update({slot: path})
    for module in (*map(ModuleType, names), backend, registry):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "warploom.integrations.vllm_backend", raising=False)
    yield found
    sys.modules.pop("warploom.integrations.vllm_backend", None)


def backend_of(registered):
    vllm.register()
    module, _, name = registered["custom"].rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_the_entry_point_registers_a_class_that_is_there(registered):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (path,) = project["entry-points"]["vllm.general_plugins"].values()
    module, _, function = path.partition(":")
    assert getattr(importlib.import_module(module), function) is vllm.register
    backend = backend_of(registered)
    assert backend.get_name() == "CUSTOM"
    assert backend.get_kv_cache_shape(9, 16, 2, 64) == (2, 9, 16, 2, 64)
    with pytest.raises(InputError, match="pages of 48"):
        backend.get_kv_cache_shape(9, 48, 2, 64)


def step(tokens, **changes):
    common = {
        "num_reqs": 2, "num_actual_tokens": tokens, "causal": True,
        "query_start_loc": torch.tensor([0, 1, tokens, 99], dtype=torch.int32),
        "seq_lens": torch.tensor([20, tokens - 1, 7], dtype=torch.int32),
        "block_table_tensor": torch.arange(12, dtype=torch.int32).view(3, 4),
        "slot_mapping": torch.tensor([*range(40, 40 + tokens), -1, -1]),
    }  # fmt: skip
    return SimpleNamespace(**common | changes)


def test_a_step_stores_its_tokens_and_attends(registered, monkeypatch):
    backend, calls, lists, tokens = backend_of(registered), [], [], 4
    monkeypatch.setattr(vllm, "attention_mixed", lambda *args: calls.append(args) or args[0] + 1)
    monkeypatch.setattr(vllm, "get_scheduler_metadata", lambda *of: lists.append(of) or of[0] * 2)
    metadata = backend.get_builder_cls()(None, [], None, "cpu").build(0, step(tokens))
    layer = backend.get_impl_cls()(4, 64, 0.1, 2, sliding_window=50)
    caches = torch.zeros(backend.get_kv_cache_shape(9, 16, 2, 64))
    q, k, v = (torch.randn(6, heads, 64) for heads in (4, 2, 2))
    out = layer.forward(None, q, k, v, caches, metadata, torch.zeros(6, 4 * 64))
    assert torch.equal(caches[0].flatten(0, 1)[40:44], k[:4])
    assert torch.equal(caches[1].flatten(0, 1)[40:44], v[:4])
    assert torch.equal(out[:4], q[:4].flatten(1) + 1)
    assert not out[4:].any()
    assert not caches.flatten(1, 2)[:, 44:].any()
    ((queries, _, _, lengths, pages, starts, *options, tasks),) = calls
    assert [x.shape[0] for x in (queries, lengths, pages, starts)] == [4, 2, 2, 3]
    assert options == [0.1, 50, 0.0]
    # Another layer of as many heads takes the list that this one made.
    layer.forward(None, q, k, v, caches, metadata, torch.zeros(6, 4 * 64))
    assert calls[1][-1] is tasks
    assert torch.equal(tasks, starts * 2)
    assert [of[2:] for of in lists] == [(tokens, 4, 2)]


def test_what_there_is_no_kernel_for_is_refused(registered):
    backend = backend_of(registered)
    for name, value in (
        ("alibi_slopes", [1.0]), ("kv_cache_dtype", "fp8"), ("attn_type", "encoder"),
        ("sinks", torch.zeros(4)),
    ):  # fmt: skip
        with pytest.raises(InputError, match=name):
            backend.get_impl_cls()(4, 64, 0.1, 2, **{name: value})
    with pytest.raises(InputError, match="causal"):
        vllm.batch_of(step(4, causal=False))
