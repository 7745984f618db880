"""On a GPU: the suite computes what it should, and stored cubins really run in Triton's place."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from warploom.integrations.deploy import FolderStore, content_key, sections

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "attention",
    "gemm_leaky_relu",
    "batched_gemm",
    "feed_forward",
    "softmax",
    "layernorm",
    "rmsnorm",
    "skinny_gemm",
)


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    """torch with a GPU."""
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return found


@pytest.fixture(scope="module")
def capability(torch: Any) -> int:
    """The GPU's compute capability as Triton writes it, such as 90."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No kernel of an earlier run."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def edited(cubin: bytes) -> bytes:
    """The cubin with one control bit of its last padding instruction changed."""
    _, _, _, size, body = next(item for item in sections(cubin) if item[0].startswith(".text."))
    at = cubin.index(body) + size - 3
    return cubin[:at] + bytes([cubin[at] ^ 0x20]) + cubin[at + 1 :]


@pytest.mark.parametrize("name", NAMES)
def test_suite_kernel_matches_its_reference_and_its_capture(
    torch: Any, capability: int, name: str
) -> None:
    on_gpu = import_module("bench.triton_suite.on_gpu")
    kernel = import_module("bench.triton_suite").SUITE[name]
    config = kernel.configs[0] if capability >= 90 else kernel.configs[-1]
    tensors = on_gpu.make_tensors(kernel, kernel.shape)
    compiled = on_gpu.launch(kernel, config, tensors, kernel.shape)
    assert on_gpu.worst_error(kernel, tensors) <= kernel.tolerance
    for item in kernel.reference(tensors):
        tensors[item].zero_()
    assert on_gpu.worst_error(kernel, tensors) > kernel.tolerance
    captured = import_module("bench.triton_suite.offline").compile_offline(
        kernel, config, capability
    )
    assert captured.key == content_key(compiled.asm["cubin"])


def test_a_tuned_function_runs_its_stored_cubin(
    torch: Any, capability: int, tmp_path: Path
) -> None:
    triton = pytest.importorskip("triton")
    integration = import_module("warploom.integrations.triton")
    on_gpu = import_module("bench.triton_suite.on_gpu")
    kernel = import_module("bench.triton_suite").SUITE["softmax"]
    config = kernel.configs[1]
    captured = import_module("bench.triton_suite.offline").compile_offline(
        kernel, config, capability
    )
    store = FolderStore(tmp_path)
    stored = edited(captured.cubin)
    key = store.put(captured.cubin, stored, captured.name, f"sm_{capability}")

    function = integration.tuned(store, on_miss="raise")(triton.jit(kernel.function.fn))
    tensors = on_gpu.make_tensors(kernel, kernel.shape)
    compiled = on_gpu.launch(kernel, config, tensors, kernel.shape, function)
    assert compiled.asm["cubin"] == stored
    assert integration.events()[-1] == integration.Swap("softmax_kernel", key, "swapped")
    assert on_gpu.worst_error(kernel, tensors) <= kernel.tolerance
    with pytest.raises(integration.KernelNotStored):
        on_gpu.launch(kernel, kernel.configs[0], tensors, kernel.shape, function)

    plain = on_gpu.launch(kernel, config, tensors, kernel.shape)
    assert plain.asm["cubin"] != stored


def test_an_autotuned_function_picks_among_the_stored(
    torch: Any, capability: int, tmp_path: Path
) -> None:
    triton = pytest.importorskip("triton")
    integration = import_module("warploom.integrations.triton")
    kernel = import_module("bench.triton_suite").SUITE["rmsnorm"]
    on_gpu = import_module("bench.triton_suite.on_gpu")
    offline = import_module("bench.triton_suite.offline")
    store = FolderStore(tmp_path)
    for config in kernel.configs[:2]:
        captured = offline.compile_offline(kernel, config, capability)
        store.put(captured.cubin, edited(captured.cubin), captured.name, f"sm_{capability}")
    configs = [
        triton.Config(kernel.constexprs(item), item.num_warps, item.num_stages)
        for item in kernel.configs[:3]
    ]
    function = integration.tuned(store, on_miss="raise")(
        triton.autotune(configs, key=["rows", "cols"])(triton.jit(kernel.function.fn))
    )
    tensors = on_gpu.make_tensors(kernel, kernel.shape)
    values = [
        tensors.get(item.name, getattr(item, "value", None))
        for item in kernel.arguments(kernel.shape)
    ]
    function[lambda meta: (triton.cdiv(kernel.shape["rows"], meta["block_rows"]),)](*values)
    assert function.best_config in configs[:2]
    assert on_gpu.worst_error(kernel, tensors) <= kernel.tolerance


def test_hidden_global_scratch_survives_the_swap(
    torch: Any, capability: int, tmp_path: Path
) -> None:
    if capability < 90:
        pytest.skip("TMA descriptors need sm_90")
    triton = pytest.importorskip("triton")
    integration = import_module("warploom.integrations.triton")
    extra = import_module("tests.corpus.triton_extra")
    captured = extra.tma_gemm(capability)
    store = FolderStore(tmp_path)
    stored = edited(captured.cubin)
    store.put(captured.cubin, stored, captured.name, f"sm_{capability}")
    triton.set_allocator(
        lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8)
    )
    function = integration.tuned(store, on_miss="raise")(triton.jit(extra.tma_gemm_kernel.fn))
    a, b = (torch.randn(2048, 2048, device="cuda").half() for _ in range(2))
    c = torch.full_like(a, torch.nan)
    compiled = function[captured.launch.grid](
        a, b, c, 2048, 2048, 2048, block=128, block_k=64, num_warps=8
    )
    assert compiled.asm["cubin"] == stored
    right = a.double() @ b.double().T
    assert float((c.double() - right).norm() / right.norm()) < 5e-3
