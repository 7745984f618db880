"""The pack of prebuilt kernels: operators take what was built for them, and nothing else."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from warploom.errors import InputError, ToolMissing, WarploomWarning
from warploom.integrations.exports import pack
from warploom.tables import read_toml
from warploom.tile import BF16

torch = pytest.importorskip("torch")
torch_op = pytest.importorskip("warploom.integrations.torch_op")
torch_rows = pytest.importorskip("warploom.integrations.torch_rows")
torch_program = pytest.importorskip("warploom.integrations.torch_program")
maker = pytest.importorskip("warploom.flows.pack")

CALLS = """
[[call]]
operator = "gemm"
tensors = ["bf16 m k", "bf16 n k T", "absent", "absent"]
options = [["none"], [1.0]]
sizes = { m = [512], n = [4096], k = [4096, 4032] }

[[call]]
operator = "softmax"
tensors = ["bf16 m n"]
sizes = { m = [64], n = [256] }
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project of a pack of two kernels."""
    folder = tmp_path_factory.mktemp("pack")
    (folder / "calls.toml").write_text(CALLS)
    torch_op.choose_gemm.cache_clear()
    assert 0 < maker.write_pack(folder, folder / "calls.toml") < 1 << 20
    return folder


class Loaded:
    """A kernel whose image would be loaded next."""

    def __init__(self, interface: Any, cubin: bytes, device: int | None) -> None:
        self.interface, self.cubin = interface, cubin

    def __call__(self, *arrays: Any, **more: Any) -> None:
        """Launched."""

    def resident_tasks(self, tasks: int) -> int:
        """All."""
        return tasks


@pytest.fixture
def bare(made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process that has the pack and no compiler, and has called nothing yet."""

    def refuse(name: str) -> Any:
        raise ToolMissing(f"{name} is not here")

    monkeypatch.syspath_prepend(str(made))
    monkeypatch.setattr("warploom.toolchain.find", refuse)
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch_program, "Kernel", Loaded)
    monkeypatch.setattr(torch_program, "KERNELS", {})
    forget()
    yield made
    forget()
    sys.modules.pop(pack.PACKAGE, None)


def forget() -> None:
    importlib.invalidate_caches()
    for cached in (pack.installed, torch_op.choose_gemm, torch_rows._chosen):
        cached.cache_clear()


def product(rows: int = 512) -> Any:
    """A call of the list, on tensors that have shapes alone."""
    a, b = (
        torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((rows, 4096), (4096,) * 2)
    )
    return torch_program.RUNS["warploom::gemm"](a, b.T, None, None, "none", 1.0)


def test_the_first_call_needs_no_compiler_and_under_50_ms(bare: Path) -> None:
    torch.empty(1, 1, device="meta").transpose(0, 1)  # torch's own first call is not counted
    began = time.process_time()
    assert tuple(product().shape) == (512, 4096)
    assert time.process_time() - began < 0.05
    (kernel,) = torch_program.KERNELS.values()
    names = {path.name: path.read_bytes() for path in (bare / pack.PACKAGE).glob("gemm-*.cubin")}
    assert kernel.cubin in names.values() and kernel.interface.arch == "sm_90a"
    x = torch.empty(64, 256, dtype=torch.bfloat16, device="meta")
    assert torch_program.RUNS["warploom::softmax"](x).shape == x.shape
    assert len(torch_program.KERNELS) == 2


def test_calls_of_one_kernel_share_its_cubin(bare: Path) -> None:
    index = json.loads((bare / pack.PACKAGE / pack.INDEX).read_text())
    assert len(index["choices"]) == 2
    assert len(index["kernels"]) == len(list((bare / pack.PACKAGE).glob("*.cubin")))


def test_other_settings_are_compiled(bare: Path) -> None:
    with pytest.raises(ToolMissing, match="nvcc"):
        x = torch.empty(64, 512, dtype=torch.bfloat16, device="meta")
        torch_program.RUNS["warploom::softmax"](x)


def test_a_pack_of_other_sources_is_not_used(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "sources", lambda: "other")
    with (
        pytest.warns(WarploomWarning, match="built from other sources of warploom"),
        pytest.raises(ToolMissing, match="nvcc"),
    ):
        product()


def test_a_corrupt_cubin_is_refused(bare: Path) -> None:
    (cubin,) = (bare / pack.PACKAGE).glob("gemm-*.cubin")
    kept = cubin.read_bytes()
    cubin.write_bytes(kept[:-1] + b"x")
    try:
        with pytest.raises(InputError, match="is corrupt"):
            product()
    finally:
        cubin.write_bytes(kept)


def test_the_choice_is_that_of_the_table(bare: Path) -> None:
    config = torch_op.GemmConfig(dtype=BF16, out=BF16, b="nk")
    packed = torch_op.choose_gemm(512, 4096, 4096, config, 1, sliced=True)
    forget()
    torch_program.remember(None)
    try:
        assert torch_op.choose_gemm(512, 4096, 4096, config, 1, sliced=True) == packed
    finally:
        torch_program.remember(pack.installed)


def test_sources_follow_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "SOURCES", tmp_path)
    file = tmp_path / "codegen" / "emit.py"
    file.parent.mkdir()
    seen: set[str] = set()
    for text in ("a", "b"):
        file.write_text(text)
        seen.add(pack.sources())
    file.rename(file.with_name("other.py"))
    assert len(seen | {pack.sources()}) == 3
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "run.py").write_text("x")
    assert pack.sources() in seen | {pack.sources()}


def test_keys_say_every_setting() -> None:
    config = torch_op.GemmConfig(dtype=BF16, out=BF16)
    others = [
        torch_op.GemmConfig(dtype=BF16, out=BF16, **{k: v})
        for k, v in (("b", "nk"), ("bias", True))
    ]
    keys = {pack.hashed(("gemm", "128x128", one)) for one in (config, *others)}
    assert len(keys) == 3
    assert pack.hashed(frozenset("abc")) == pack.hashed(frozenset("cba"))
    assert pack.hashed({"m": 1, "n": 2}) == pack.hashed({"n": 2, "m": 1}) != pack.hashed({"m": 1})


def test_the_list_of_defaults_can_be_called() -> None:
    asked = list(maker.calls())
    assert {name for name, _ in asked} <= set(torch_program.RUNS)
    assert len(read_toml(maker.DEFAULTS)["call"]) >= 8
