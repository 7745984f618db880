"""Build the kernels of GPU tests on a computer that has none, for a machine without a compiler.

    python tests/gpu/fill_cache.py FOLDER tests/gpu/test_torch_rows.py [-k NAME ...]
    WARPLOOM_CACHE=FOLDER python -m pytest tests/gpu/test_torch_rows.py     (there)

The tests run on tensors that have shapes alone (`pretending`) with operators that build and launch
nothing (`collecting`); what was never computed counts as 0 and compares as equal. What is compiled,
or found in the cache of tests, is copied to FOLDER. That a test passes means nothing here; one that
fails may have asked for kernels later that are missing.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warploom.autosched import chosen, solve
from warploom.codegen.compile import build
from warploom.integrations import torch_direct, torch_program, triton_pretend


class Recorder:
    """A plugin of pytest: pretends a GPU, and copies what is read from or kept in the cache."""

    def __init__(self, folder: Path) -> None:
        """Files go to `folder`."""
        self.folder = folder
        self.pretence = contextlib.ExitStack()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Before the tests are imported: most ask at once whether there is a GPU."""
        self.pretence.enter_context(triton_pretend.pretending(90))
        torch_direct._listened_to = lambda _: False
        torch_direct.DEVICES.add("meta")  # what tensors are on in a backward, where no mode is
        torch._C._cuda_getCurrentRawStream = lambda _: 0
        for name, value in (
            ("__bool__", True),
            ("__float__", 0.0),
            ("__int__", 0),
            ("__index__", 0),
        ):
            setattr(torch.Tensor, name, settled(getattr(torch.Tensor, name), lambda _, v=value: v))
        torch.Tensor.item = settled(torch.Tensor.item, lambda _: 0)
        torch.Tensor.cpu = settled(torch.Tensor.cpu, zeros)
        torch.Tensor.tolist = settled(torch.Tensor.tolist, lambda x: zeros(x).int().tolist())
        torch.equal = torch.allclose = lambda *_, **__: True
        torch.compile = lambda call=None, **_: call or (lambda call: call)
        torch.library.opcheck = lambda made, args, named=None, **_: ran(made, args, named or {})
        quiet = SimpleNamespace(wait_stream=lambda _: None, cuda_stream=0, replay=lambda: None)
        torch.cuda.Stream = torch.cuda.CUDAGraph = lambda *_: quiet
        torch.cuda.current_stream = lambda *_: quiet
        torch.cuda._sleep = lambda _: None
        torch.cuda.is_current_stream_capturing = lambda: False
        torch.cuda.graph = torch.cuda.stream = lambda *_, **__: contextlib.nullcontext()
        for module in (build, solve, chosen):
            for name in ("read_kept", "keep"):
                setattr(module, name, self._copying(getattr(module, name)))

    def _copying(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def copying(path: Path, *args: Any) -> Any:
            found = call(path, *args)
            if path.is_file():
                target = self.folder / path.parent.name / path.name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
            return found

        return copying

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Any:
        """One test: its operators build and launch nothing."""
        with torch_program.collecting():
            return (yield)


def ran(made: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """The operator run, where torch would check it."""
    schema = getattr(made, "default", made)._schema
    given = {a.name: a.default_value for a in schema.arguments} | named
    given |= dict(zip(given, args, strict=False))
    torch_program.RUNS[schema.name](*given.values())


def zeros(tensor: Any) -> Any:
    """What a tensor without values is taken to hold where somebody reads it."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def settled(method: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a tensor, and what is said instead of one without values."""

    def says(tensor: Any, *args: Any) -> Any:
        return instead(tensor) if tensor.is_cuda else method(tensor, *args)

    return says


def main() -> None:
    """Fill the folder and say what is in it."""
    folder = Path(sys.argv[1]).resolve()
    recorder = Recorder(folder)
    with recorder.pretence:
        pytest.main(["-q", "--tb=line", *sys.argv[2:]], plugins=[recorder])
    files = [path for path in folder.rglob("*") if path.is_file()]
    cubins = sum(path.suffix == ".cubin" for path in files)
    print(f"{cubins} cubins, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB: {folder}")


if __name__ == "__main__":
    main()
