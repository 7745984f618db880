"""What an export holds: forms of a real kernel, what its manifest states, and losses that a new
build of it must not have."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.command import warploom as run
from tests.integrations.exports import cases

from warploom.errors import CheckFailed, InputError, ToolMissing
from warploom.flows import export as flow
from warploom.integrations.exports import forms
from warploom.integrations.exports.manifest import LIMITS, compared, read_manifest

SIZES = {"m": "512"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GEMM as a package of torch's."""
    made = tmp_path_factory.mktemp("exports") / "matmuls"
    flow.export(["product=gemm"], "torch", made, SIZES)
    return made


@pytest.fixture
def manifest(folder: Path) -> dict[str, Any]:
    return read_manifest(folder)


def test_a_manifest_states_the_machine_code(manifest: dict[str, Any]) -> None:
    code = manifest["kernels"]["product"]["machine_code"]
    assert set(LIMITS) <= set(code)
    assert list(code["roles"]) == ["load", "compute0", "compute1"]
    assert code["matrix_instructions"] > 0 and code["interval"]["i"] > 512
    assert sorted(code["register_moves"].values()) == [1, 1]
    assert manifest["kernels"]["product"]["bits"]["results"][0]["order"] == "fixed"


def test_a_build_of_the_same_compiler_loses_nothing(folder: Path) -> None:
    done = run("check", str(folder / "manifest.json"), "--json")
    assert done.returncode == 0
    (row,) = json.loads(done.stdout)
    assert row["lost"] == [] and all(row["same"].values())


LOSSES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "roles.load.warps": lambda code: code["roles"]["load"].update(warps=0),
    "roles.compute1": lambda code: code["roles"].pop("compute1"),
    "register_moves": lambda code: code["register_moves"].popitem(),
    "threads": lambda code: code.update(threads=256),
    "matrix_instructions": lambda code: code.update(matrix_instructions=4),
    "serialised_groups": lambda code: code.update(serialised_groups=3),
    "registers": lambda code: code.update(registers=200),
    "spill_bytes": lambda code: code.update(spill_bytes=8),
    "stack_bytes": lambda code: code.update(stack_bytes=16),
    "shared_bytes": lambda code: code.update(shared_bytes=232_000),
    "lint_errors": lambda code: code.update(lint_errors=1),
    "interval.i": lambda code: code["interval"].update(i=1.03 * code["interval"]["i"]),
    "interval": lambda code: code["interval"].clear(),
}


@pytest.mark.parametrize("field", LOSSES)
def test_a_planted_loss_is_named(manifest: dict[str, Any], field: str) -> None:
    stated = manifest["kernels"]["product"]["machine_code"]
    found = deepcopy(stated)
    LOSSES[field](found)
    lost = compared("product", stated, found)
    assert lost and all(line.startswith(f"product: {field}") for line in lost)
    assert {field.split(".")[0] for field in LOSSES} == set(LIMITS)


def test_what_gets_better_is_no_loss(manifest: dict[str, Any]) -> None:
    stated = manifest["kernels"]["product"]["machine_code"]
    better = {**stated, "registers": 100, "interval": {"i": 1.0}, "shared_bytes": 0}
    assert compared("product", stated, better) == []
    noise = {**stated, "interval": {"i": 1.01 * stated["interval"]["i"]}}
    assert compared("product", stated, noise) == []


def test_check_says_which_field_a_compiler_lost(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    data = json.loads((copy / "manifest.json").read_text())
    data["kernels"]["product"]["machine_code"]["matrix_instructions"] += 1
    data["kernels"]["product"]["launch"]["threads"] += 32
    data["kernels"]["product"]["bits"]["sums"] = ["in another order"]
    (copy / "manifest.json").write_text(json.dumps(data))
    done = run("check", str(copy))
    assert done.returncode == 1 and "product: LOST" in done.stdout
    assert "product: matrix_instructions is" in done.stderr and "product: launch" in done.stderr
    assert "product: bits.sums is" in done.stderr
    (copy / "product.cubin").write_bytes(b"other")
    with pytest.raises(CheckFailed, match=r"product.cubin is not the cubin that the manifest"):
        flow.check(copy)


def load(folder: Path, name: str) -> ModuleType:
    """A package from its folder."""
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_package_gives_operators_of_torch(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    fake = pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode
    package = load(folder, "matmuls")
    assert package.__all__ == ["product"]
    with fake():
        a, b = (torch.empty(*s, dtype=torch.bfloat16, device="cuda") for s in ((3, 8), (8, 16)))
        made = package.product(a, b)
        assert (tuple(made.shape), made.dtype, made.device.type) == ((3, 16), a.dtype, "cuda")
        with pytest.raises(ValueError, match="product, a: expected dimensions"):
            package.product(torch.empty(8, dtype=torch.bfloat16, device="cuda"), b)
    with pytest.raises(NotImplementedError, match="CPU"):
        package.product(torch.empty(3, 8).bfloat16(), torch.empty(8, 16).bfloat16())
    with pytest.raises(ValueError, match="array a: a tensor on cpu, expected one on a CUDA device"):
        package._KERNELS["product"](a=torch.empty(3, 8), b=None, c=None)


def test_a_changed_cubin_is_not_loaded(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "product.cubin").write_bytes(b"other")
    with pytest.raises(ValueError, match=r"product.cubin is not the one manifest.json"):
        load(copy, "changed")


def test_hugging_faces_loader_takes_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch, kernels = pytest.importorskip("torch"), pytest.importorskip("kernels")
    rust = importlib.import_module("kernels._rust")
    out = tmp_path / "Our_matmuls"
    flow.export(["gemm"], "hf-kernels", out, SIZES)
    build = out / "build" / "torch-cuda"
    about = rust.Metadata.read_from_file(build / "metadata.json")
    hashed = rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, build)
    about.digest.validate(hashed)
    assert (str(about.name), about.backend.archs) == ("our-matmuls", ["9.0a"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")  # as on a machine with a GPU
    module = kernels.get_local_kernel(out)
    assert callable(module.gemm)
    with pytest.raises(InputError, match=r"torch-cuda/gemm.cubin is not of this export"):
        flow.export(["other=gemm"], "hf-kernels", out, SIZES)
    (build / "gemm.cubin").write_bytes(b"other")
    with pytest.raises(rust.DigestValidationError):
        about.digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, build))


def test_without_a_compiler_one_line_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ToolMissing, match=r"finds no C\+\+ compiler .* export --to c") as caught:
        flow.export(["gemm"], "tvm-ffi", tmp_path / "out", SIZES)
    assert "\n" not in str(caught.value)


REFUSED = {
    "expected one of tvm-ffi, hf-kernels": (["gemm"], "wheel", {}, None),
    "two kernels are called gemm: give one as NAME=gemm": (["gemm", "gemm"], "c", SIZES, None),
    "two kernels are called a: give one as NAME=gemm": (["a=gemm", "a=gemm"], "c", SIZES, None),
    "--set: .* was built already": (["."], "c", SIZES, None),
    "--gpu: .* was built already": (["."], "c", {}, "h200"),
    "expected a name of letters": (["class=gemm"], "c", SIZES, None),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_exported_is_refused(tmp_path: Path, message: str) -> None:
    kernels, form, settings, gpu = REFUSED[message]
    with pytest.raises(InputError, match=message):
        flow.export(kernels, form, tmp_path / "out", settings, gpu)


def test_a_package_needs_a_name_that_python_imports(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is a package: expected a name like my_kernels"):
        flow.export(["gemm"], "torch", tmp_path / "my-kernels", SIZES)


def test_a_build_folder_is_shipped_as_it_is(tmp_path: Path) -> None:
    built = tmp_path / "built"
    assert run("build", "gemm", "--set", "m=512", "-o", str(built)).returncode == 0
    done = run("export", f"mine={built}", "--to", "python", "-o", str(tmp_path / "out"), "--json")
    assert done.returncode == 0
    names = sorted(Path(one).name for one in json.loads(done.stdout)["files"])
    assert names == ["README.md", "launch.py", "manifest.json", "mine.cubin"]
    assert (tmp_path / "out/mine.cubin").read_bytes() == (built / "gemm.cubin").read_bytes()
    about = read_manifest(tmp_path / "out")["kernels"]["mine"]
    assert about["built_from"] == {"kernel": "gemm", "settings": SIZES, "gpu": "h200"}
    assert forms.FORMS.keys() == {"tvm-ffi", "hf-kernels", "c", "python", "torch"}


def test_operators_take_scalars_free_sizes_and_arrays_that_they_change(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    fake = pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode
    manifest = cases.manifest()
    arrays = manifest["kernels"]["matmul"]["launch"]["arrays"]
    arrays[1]["role"] = "inout"
    cubins = {f"{one.name}.cubin": one.cubin for one in cases.CASES}
    files = forms.FORMS["torch"]("made", manifest, cubins)
    files["manifest.json"] = json.dumps(manifest).encode()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    package = load(tmp_path, "made")
    space = getattr(torch.ops, package.NAMESPACE)
    said = str(space.matmul.default._schema).split("::")[1]
    assert said == "matmul(Tensor a, Tensor(a!) b, float alpha, int count) -> Tensor"
    assert str(space.rows.default._schema).endswith("rows(Tensor x, SymInt one) -> Tensor")
    with fake():
        x = torch.empty(40, 16, dtype=torch.float8_e4m3fn, device="cuda")
        made = package.rows(x, 3)
        assert (tuple(made.shape), made.dtype) == ((40, 3), torch.int32)
