"""FlashInfer's attention over pages as a baseline: its kernels and its planner, by ctypes.

    python -m bench.flashinfer WHEEL OUT.so      needs no GPU

The wheel of flashinfer-python (py3-none-any, 101 MB) compiles its kernels where they run, with
headers and a compiler there. `flashinfer_attention.cu` is compiled here instead, with the wheel's
headers; benches load the result where the environment variable FLASHINFER names it. Its planner
reads lengths on the host and is not timed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from warploom.errors import InputError
from warploom.toolchain import find

SOURCE = Path(__file__).with_name("flashinfer_attention.cu")
NAME = "FlashInfer"
HEADERS = ("flashinfer/data/include/", "flashinfer/data/cutlass/include/")
OPTIONS = ("-O3", "-std=c++17", "-gencode", "arch=compute_90a,code=sm_90a", "-shared",
           "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC", "-cudart", "static", "-DNDEBUG",
           "-w", "-DFLASHINFER_ENABLE_BF16", "-DFLASHINFER_ENABLE_F16")  # fmt: skip
FLOATS, ROOM = 256 << 20, 8 << 20  # bytes of its work spaces
PLAN = 64  # numbers that a plan may have
Call = Callable[[], Any]


class Sizes(ctypes.Structure):
    """Tokens of all sequences, sequences, heads, key heads, tokens of a page."""

    _fields_ = [(n, ctypes.c_int64) for n in ("tokens", "batch", "heads", "kv_heads", "page")]


@cache
def library() -> ctypes.CDLL:
    """What FLASHINFER names; raises `InputError` where it names nothing."""
    path = os.environ.get("FLASHINFER", "")
    if not path:
        raise InputError("FLASHINFER is not set: `python -m bench.flashinfer` builds what it names")
    return ctypes.CDLL(path)


def build(wheel: Path, out: Path) -> None:
    """Compile the source with the headers of a wheel."""
    with tempfile.TemporaryDirectory() as room, zipfile.ZipFile(wheel) as packed:
        packed.extractall(room, [n for n in packed.namelist() if n.startswith(HEADERS)])
        paths = [f"-I{room}/{name}" for name in HEADERS]
        subprocess.run(
            [find("nvcc").path, *OPTIONS, *paths, str(SOURCE), "-o", str(out)], check=True
        )


class _Batch:
    """Sequences with so many tokens and keys each, on the device and for the planner."""

    def __init__(
        self, torch: Any, table: Any, page: int, counts: Sequence[int], lengths: Sequence[int]
    ) -> None:
        used = [-(-length // page) for length in lengths]
        numbers = [row[:n] for row, n in zip(table, used, strict=True)]
        whole = {"dtype": torch.int32, "device": "cuda"}
        self.numbers = torch.cat(numbers).int()
        self.host = [
            (ctypes.c_int32 * len(found))(*found)
            for found in ((0, *accumulate(counts)), (0, *accumulate(used)), lengths)
        ]
        self.rows, self.pages = (torch.tensor(list(one), **whole) for one in self.host[:2])
        self.last = torch.tensor([(n - 1) % page + 1 for n in lengths], **whole)
        self.floats = _floats(torch)
        self.room = torch.empty(ROOM, dtype=torch.uint8, device="cuda")
        self.pinned = torch.empty(ROOM, dtype=torch.uint8, pin_memory=True)
        self.plan = (ctypes.c_int64 * PLAN)()

    def spaces(self) -> tuple[Any, ...]:
        """The first arguments of the planner."""
        own = [_at(one) for one in (self.floats, self.room, self.pinned)]
        return own[0], ctypes.c_size_t(FLOATS), own[1], own[2], ctypes.c_size_t(ROOM)


@cache
def _floats(torch: Any) -> Any:
    """Room for partial results, which calls after one another share."""
    return torch.empty(FLOATS, dtype=torch.uint8, device="cuda")


def _at(tensor: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _stream(torch: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def _checked(status: int, what: str) -> None:
    if status:
        raise InputError(f"FlashInfer {what}: CUDA error {status}")


def paged(
    torch: Any, q: Any, k: Any, v: Any, table: Any, counts: Sequence[int], lengths: Sequence[int],
    causal: bool,
) -> Call:  # fmt: skip
    """Attention of `q: [tokens, heads, 128]`, of each sequence so many, over its first keys in
    `k, v: [pages, page, kv_heads, 128]`; planned once."""
    found, (tokens, heads, d) = library(), q.shape
    batch = _Batch(torch, table, k.shape[1], counts, lengths)
    sizes = Sizes(tokens, len(counts), heads, k.shape[2], k.shape[1])
    by = ctypes.byref(sizes)
    plan = found.flashinfer_plan(*batch.spaces(), *batch.host[:2], by, batch.plan, _stream(torch))
    _checked(plan, "plan")
    torch.cuda.synchronize()

    def call() -> Any:
        out = torch.empty_like(q)
        places = [
            _at(x) for x in (q, k, v, batch.rows, batch.pages, batch.numbers, batch.last, out)
        ]
        scale = ctypes.c_float(d**-0.5)
        spaces = _at(batch.floats), _at(batch.room), batch.plan
        _checked(
            found.flashinfer_run(*spaces, *places, by, scale, int(causal), _stream(torch)), "run"
        )
        return out

    return call


def latent(
    torch: Any, q: Any, entries: Any, table: Any, counts: Sequence[int], lengths: Sequence[int],
    causal: bool,
) -> Call:  # fmt: skip
    """Latent attention of `q: [tokens, heads, 576]` of bf16 over `entries: [pages, page, 576]` of
    bf16 or e4m3; planned once."""
    found, (tokens, heads, d) = library(), q.shape
    batch = _Batch(torch, table, entries.shape[1], counts, lengths)
    sizes = Sizes(tokens, len(counts), heads, 1, entries.shape[1])
    by = ctypes.byref(sizes)
    narrow = int(entries.element_size() == 1)
    count = found.flashinfer_latent_plan(
        *batch.spaces(), *batch.host, by, int(causal), batch.plan, _stream(torch)
    )
    _checked(-min(count, 0), "plan")
    torch.cuda.synchronize()

    def call() -> Any:
        out = q.new_empty(tokens, heads, 512)
        places = [_at(one) for one in (q, entries, batch.numbers, out)]
        spaces = _at(batch.floats), _at(batch.room), batch.plan, count
        scale = ctypes.c_float(d**-0.5)
        _checked(
            found.flashinfer_latent_run(
                *spaces, *places, by, scale, int(causal), narrow, _stream(torch)
            ),
            "run",
        )
        return out

    return call


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    build(args.wheel, args.out)


if __name__ == "__main__":
    main()
