"""What a candidate does besides computing: files it opens, functions it replaces, torch it calls.

All of this lives in the candidate's process and is set up before its file is run. An audit hook of
Python cannot be taken away again; replaced functions are found by comparison with what was there.
"""

from __future__ import annotations

import builtins
import hashlib
import re
import sys
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import numpy as np

from warploom.judge.problem import EVERYTHING, torch
from warploom.judge.tolerance import EagerMode
from warploom.runtime.buffers import POISON

FunctionMode: Any = import_module("torch.overrides").TorchFunctionMode
# Operations of torch that allocate, view or move elements and compute nothing.
MOVES = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like new_zeros ones "
    "ones_like full full_like new_full fill zero copy _to_copy clone view _unsafe_view reshape "
    "_reshape_alias as_strided slice select narrow t transpose permute expand unsqueeze squeeze "
    "detach alias lift_fresh unbind split chunk contiguous arange scalar_tensor resize "
    "_local_scalar_dense set pin_memory is_pinned record_stream view_as_real".split()
)
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
LEAVES_TORCH = ("numpy", "__array__", "__dlpack__", "tolist")
# Files of libraries and names of their kernels.
LIBRARIES = re.compile(
    r"cublas|cudnn|cusparse|cutlass|cusolver|nvjet|xmma|openblas|mkl_|dnnl|nvfuser|flash_fwd", re.I
)


class Watch:
    """Hears what a process does from now on, and knows which functions it had.

    `heard` has pairs (check, what happened).
    """

    def __init__(self, problem_file: Path) -> None:
        self.heard: list[tuple[str, str]] = []
        self.busy = False  # within a call of the candidate
        self._problem = problem_file
        self._own = {name: module for name, module in sys.modules.items() if _is_ours(name)}
        self._kept = _functions(list(self._own.values()))
        sys.addaudithook(self._hear)
        threading.settrace(self._hear_thread)

    def tampered(self) -> list[str]:
        """Functions that are others than before."""
        now = _functions(list(self._own.values()))
        return sorted(
            name
            for name, was in self._kept.items()
            if any(a is not b for a, b in zip(was, now.get(name, (None, None)), strict=True))
        )

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str):
            path = Path(args[0])
            source = path.name.startswith(f"{self._problem.stem}.")
            if source and path.parent.resolve() in (
                self._problem.parent, self._problem.parent / "__pycache__"
            ):  # fmt: skip
                self.heard.append(("reference", f"opens the problem's file {path}"))
        elif event == "ctypes.dlopen" and LIBRARIES.search(str(args[0])):
            self.heard.append(("library", f"loads {args[0]}"))
        elif event == "socket.connect":
            self.heard.append(("reference", f"connects to {args[-1]}"))

    def _hear_thread(self, *_: object) -> None:
        """Called in a thread that begins."""
        if self.busy:
            self.heard.append(("library", "starts a thread, whose calls of torch nobody sees"))
            self.busy = False


class Recorder(EagerMode):
    """Notes the operations of torch that a call runs, and fills with NaN what it allocates without
    a value, so that nothing old in memory is taken for a result."""

    def __init__(self) -> None:
        EagerMode.__init__(self)
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        self.names.add(name)
        given = func(*args, **(kwargs or {}))
        if name in ALLOCATIONS and given.numel() and given.is_contiguous():
            given.view(-1).view(torch.uint8).fill_(POISON)
        return given


class Exits(FunctionMode):
    """Notes tensors that become arrays of something else."""

    def __init__(self) -> None:
        FunctionMode.__init__(self)
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in LEAVES_TORCH:
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def refused_calls(forbidden: Sequence[str], ran: Recorder, left: Exits) -> list[str]:
    """What of a call the problem forbids."""
    if EVERYTHING not in forbidden:
        return sorted(ran.names & set(forbidden))
    return sorted((ran.names - MOVES) | left.names)


def _is_ours(name: str) -> bool:
    return name.startswith(("warploom.judge", "warploom.runtime"))


def _functions(ours: Sequence[Any]) -> dict[str, tuple[Any, Any]]:
    """Every function that a check or a time rests on, and its code."""
    holders: list[Any] = [
        *ours, builtins, time, hashlib, threading, np, torch, torch.Tensor, torch.cuda,
        torch.cuda.Event, torch.cuda.Stream, torch.testing, torch.linalg, torch.nn.functional,
    ]  # fmt: skip
    tables: list[dict[str, Any]] = [vars(module) for module in ours]
    holders += [
        one for table in tables for one in table.values()
        if isinstance(one, type) and _is_ours(one.__module__)
    ]  # fmt: skip
    found: dict[str, tuple[Any, Any]] = {}
    for holder in holders:
        label = getattr(holder, "__qualname__", getattr(holder, "__name__", "?"))
        for name, value in list(cast("dict[str, Any]", vars(holder)).items()):
            if callable(value):
                code = value.__code__ if isinstance(value, FunctionType) else None
                found.setdefault(f"{label}.{name}", (value, code))
    return found
