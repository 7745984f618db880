"""Stored cubins run in place of Triton's own: swapped, missed, refused; the cache stays clean."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import triton

from warploom.errors import InputError, ToolMissing
from warploom.integrations.deploy import CUBIN_FILE, FolderStore, content_key
from warploom.integrations.triton import KernelNotStored, events, install, swap, tuned, uninstall
from warploom.integrations.triton_access import triton_module

HERE = Path(__file__).parent


def load(name: str) -> Any:
    """A helper module of this folder."""
    spec = importlib.util.spec_from_file_location(f"warploom_tests_{name}", HERE / f"{name}.py")
    assert spec
    assert spec.loader
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


kernels = load("kernels")
helpers = load("conftest")


def launch(function: Any, block: int = 128, **options: Any) -> Any:
    """Launch on made-up tensors; returns the compiled kernel."""
    x, y = helpers.FakeTensor(), helpers.FakeTensor()
    return function[(8,)](x, y, 1024, block=block, **options)


def original_of(block: int = 128, **options: Any) -> bytes:
    """What Triton makes of the kernel by itself."""
    return launch(triton.jit(kernels.add_one), block, **options).asm["cubin"]


@pytest.fixture
def stored(driver: Any, store: FolderStore) -> bytes:
    """The tuned cubin, stored for the default launch."""
    original = original_of()
    cubin = helpers.edited(original)
    store.put(original, cubin, "add_one", "sm_90a")
    driver.loaded.clear()
    driver.launched.clear()
    return cubin


def test_a_tuned_function_runs_the_stored_cubin(
    driver: Any, store: FolderStore, stored: bytes
) -> None:
    function = tuned(store.root)(triton.jit(kernels.add_one))
    assert type(function) is triton.JITFunction
    compiled = launch(function)
    launch(function)
    assert driver.loaded == [stored]
    assert len(driver.launched) == 2
    assert compiled.asm["cubin"] == stored
    assert events()[-1].outcome == "swapped"


def test_the_cached_original_is_swapped_too_and_stays_in_the_cache(
    driver: Any, store: FolderStore, stored: bytes
) -> None:
    original = original_of()  # Triton's disk cache now answers
    launch(tuned(store)(triton.jit(kernels.add_one)))
    launch(triton.jit(kernels.add_one))
    assert driver.loaded == [original, stored, original]


def test_a_miss_runs_the_original(driver: Any, store: FolderStore, stored: bytes) -> None:
    launch(tuned(store)(triton.jit(kernels.add_one)), block=256)
    (loaded,) = driver.loaded
    assert loaded == original_of(block=256)
    assert events()[-1].outcome == "original"


def test_a_miss_raises_when_asked_and_again_next_time(
    driver: Any, store: FolderStore, stored: bytes
) -> None:
    function = tuned(store, on_miss="raise")(triton.jit(kernels.add_one))
    for _ in range(2):
        with pytest.raises(KernelNotStored, match="add_one: no tuned cubin is stored under key"):
            launch(function, block=256)
    assert driver.loaded == []
    launch(function)
    assert driver.loaded == [stored]


def test_install_covers_every_function_until_uninstalled(
    driver: Any, store: FolderStore, stored: bytes
) -> None:
    install(store.root)
    launch(triton.jit(kernels.add_one))
    uninstall()
    launch(triton.jit(kernels.add_one))
    first, second = driver.loaded
    assert (first, second) == (stored, original_of())


def test_a_functions_own_store_goes_before_the_installed_one(
    driver: Any, store: FolderStore, stored: bytes, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    install(tmp_path / "empty", on_miss="raise")
    launch(tuned(store)(triton.jit(kernels.add_one)))
    assert driver.loaded == [stored]


def test_corrupt_entry_warns_in_one_line_and_runs_the_original(
    driver: Any, store: FolderStore, stored: bytes
) -> None:
    original = original_of()
    driver.loaded.clear()
    (store.root / content_key(original) / CUBIN_FILE).write_bytes(stored[:-1])
    with pytest.warns(RuntimeWarning, match="runs the original add_one: .* is corrupt") as caught:
        launch(tuned(store)(triton.jit(kernels.add_one)))
    assert "\n" not in str(caught[0].message)
    assert driver.loaded == [original]
    with pytest.raises(InputError, match=r"stored cubin refused: .* is corrupt"):
        launch(tuned(store, on_miss="raise")(triton.jit(kernels.add_one)))
    assert driver.loaded == [original]


def test_entry_for_another_architecture_is_refused(driver: Any, store: FolderStore) -> None:
    class Wrong:
        def lookup(self, key: str) -> bytes | None:
            driver.arch = 80
            return original_of()

    with pytest.raises(InputError, match="another architecture"):
        launch(tuned(Wrong(), on_miss="raise")(triton.jit(kernels.add_one)))


def test_compiling_without_a_gpu_then_swapping(store: FolderStore) -> None:
    source = triton.compiler.ASTSource(
        triton.jit(kernels.add_one),
        {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32", "block": "constexpr"},
        {(3,): 64},
    )
    target = triton.backends.compiler.GPUTarget("cuda", 80, 32)
    compiled = triton.compile(source, target=target)
    original = compiled.asm["cubin"]
    assert swap(compiled, store).outcome == "original"
    store.put(original, helpers.edited(original), "add_one", "sm_80")
    assert swap(compiled, store).outcome == "swapped"
    assert compiled.kernel == compiled.asm["cubin"] == helpers.edited(original)
    assert swap(compiled, store).outcome == "swapped"


def test_a_loaded_kernel_is_not_swapped(driver: Any, store: FolderStore, stored: bytes) -> None:
    compiled = launch(triton.jit(kernels.add_one))
    with pytest.raises(InputError, match="already loaded"):
        swap(compiled, store)
    function = triton.jit(kernels.add_one)
    launch(function)
    with pytest.raises(InputError, match="decorate it before its first launch"):
        tuned(store)(function)


def test_autotuner_skips_what_is_not_stored(driver: Any, store: FolderStore, stored: bytes) -> None:
    configs = [triton.Config({"block": block}) for block in (256, 128, 512)]

    def bench(run: Any, quantiles: Any) -> list[float]:
        run()
        return [1.0, 1.0, 1.0]

    def build(folder: Path) -> Any:
        function = triton.autotune(configs, key=["n"], do_bench=bench)
        return tuned(folder, on_miss="raise")(function(triton.jit(kernels.add_one)))

    x, y = helpers.FakeTensor(), helpers.FakeTensor()
    function = build(store.root)
    function[(8,)](x, y, 1024)
    assert function.best_config.kwargs == {"block": 128}
    assert driver.loaded == [stored]
    (store.root / "empty").mkdir()
    with pytest.raises(KernelNotStored):
        build(store.root / "empty")[(8,)](x, y, 1024)


def test_background_compilation(driver: Any, store: FolderStore, stored: bytes) -> None:
    function = tuned(store)(triton.jit(kernels.add_one))
    x, y = helpers.FakeTensor(), helpers.FakeTensor()
    with ThreadPoolExecutor(1) as pool, triton.AsyncCompileMode(pool):
        for _ in range(2):
            function.run(x, y, 1024, block=128, grid=(8,), warmup=True)
    launch(function)
    assert driver.loaded == [stored]


def test_constants_that_json_cannot_hold(driver: Any, store: FolderStore) -> None:
    install(store)
    types = (triton.language.float16, triton.language.float32)
    triton.jit(kernels.typed)[(1,)](helpers.FakeTensor(), types)
    assert len(driver.launched) == 1
    assert events()[-1].kernel == "typed"


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="on_miss='sometimes', expected one of"):
        tuned(tmp_path, on_miss="sometimes")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no such folder"):
        install(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is not a Triton kernel"):
        tuned(tmp_path)(print)


def test_old_or_changed_triton_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(triton, "__version__", "3.4.0")
    with pytest.raises(ToolMissing, match=r"triton 3\.4\.0 is too old"):
        triton_module()
    monkeypatch.undo()
    monkeypatch.delattr(triton.JITFunction, "_do_compile")
    with pytest.raises(ToolMissing, match=r"has no JITFunction\._do_compile"):
        install(tmp_path)


def test_no_search_code_is_imported() -> None:
    code = (
        "import sys; from warploom.integrations.triton_swap import tuned;"
        "import warploom.integrations.triton_swap;"
        "bad = [name for name in sys.modules if name.split('.')[0] in ('ortools', 'numpy', 'torch')"
        " or name.startswith(('warploom.search', 'warploom.sass', 'warploom.runtime'))];"
        "print(bad); sys.exit(bool(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    facade = code.replace("triton_swap", "triton").replace("'numpy', 'torch'", "'torch'")
    facade = facade.replace(", 'warploom.runtime'", "")
    done = subprocess.run(
        [sys.executable, "-c", facade], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_kernels_that_are_not_looked_up_are_left_alone(driver: Any, store: FolderStore) -> None:
    tuned(store)(triton.jit(kernels.add_one))
    before = len(events())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        launch(triton.jit(kernels.add_one))
    assert len(events()) == before
