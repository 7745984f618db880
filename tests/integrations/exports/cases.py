"""Launches of every kind, made by hand: what a launcher must get right, without a compiler."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from warploom.integrations.exports.manifest import launch_of, type_of
from warploom.runtime.interface import Interface
from warploom.tile.dtypes import DTYPES, dtype
from warploom.tile.index import cdiv, const, maximum_index, minimum_index, symbol
from warploom.tile.ir import Array

M, N, K = symbol("m"), symbol("n"), symbol("k")


@dataclass(frozen=True)
class Given:
    """An array of a call: where it lies, and pitches where it is no row after row."""

    shape: tuple[int, ...]
    address: int = 1 << 20
    strides: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """A kernel and calls of it."""

    interface: Interface
    calls: tuple[dict[str, Given], ...]
    scalars: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def name(self) -> str:
        return self.interface.name

    @property
    def cubin(self) -> bytes:
        """What the stub takes for one."""
        return b"\x7fELF\x02".ljust(64, b"\0") + self.name.encode().ljust(64, b"\0")

    @property
    def sizes(self) -> list[int]:
        """Bytes of the parameters."""
        bytes_of = {"map": 128, "dim": 4, "scalar": 4}
        return [bytes_of.get(p["kind"], 8) for p in self.interface.parameters]


def array(name: str, kind: str, *dims: str) -> Array:
    return Array(name, dtype(kind), dims)


def tiles(name: str, kind: str, box: list[int], swizzle: int = 128, **more: Any) -> dict[str, Any]:
    given = {"kind": "map", "array": name, "dtype": kind, "box": box, "swizzle": swizzle}
    return {**given, "written": False, "name": f"{name}_map", **more}


def pointer(name: str, kind: str, written: bool = False, **more: Any) -> dict[str, Any]:
    return {"kind": "pointer", "array": name, "dtype": kind, "written": written, **more}


def dim(name: str, **more: Any) -> dict[str, Any]:
    return {"kind": "dim", "name": name, **more}


MATMUL = Interface(
    name="matmul",
    parameters=(
        tiles("a", "bf16", [64, 128]),
        tiles("b", "bf16", [32, 64, 1], 64, promotion=128),
        tiles("c", "fp32", [8, 64], 32, written=True),
        dim("m"),
        dim("n"),
        {"kind": "counter"},
        {"kind": "scalar", "name": "alpha", "dtype": "fp32"},
        {"kind": "scalar", "name": "count", "dtype": "int32"},
    ),
    shared_bytes=200_000,
    threads=384,
    cluster=2,
    cluster_axis="rows",
    grid=(("rows", cdiv(M, 128)), ("cols", maximum_index(cdiv(N, 64) - K % 3, const(1)))),
    arrays=(
        array("a", "bf16", "m", "k"),
        array("b", "bf16", "h", "k", "n"),
        array("c", "fp32", "m", "n"),
    ),
    persistent=True,
    dependent=True,
    arch="sm_90a",
    registers=168,
)
ROWS = Interface(
    name="rows",
    parameters=(
        pointer("x", "e4m3", line=16),
        {"kind": "stride", "array": "x", "dim": 0},
        pointer("y", "int32", True),
        {"kind": "stride", "array": "y", "dim": 0},
        dim("m"),
        dim("n", multiple=8),
    ),
    shared_bytes=1024,
    threads=128,
    cluster=1,
    cluster_axis="",
    grid=(("r", minimum_index(M * 2, const(300)) - 1),),
    arrays=(array("x", "e4m3", "m", "n"), array("y", "int32", "m", "one")),
    persistent=False,
    dependent=False,
    arch="sm_90",
    registers=32,
)
CASES = (
    Case(
        MATMUL,
        (
            {"a": Given((300, 72)), "b": Given((2, 72, 64)), "c": Given((300, 64), 1 << 22)},
            {
                "a": Given((20_000, 72), 4096 + 16, (88, 1)),
                "b": Given((1, 72, 640), strides=(3, 648, 1)),
                "c": Given((20_000, 640), 1 << 22, (704, 1)),
            },
            {"a": Given((300, 0), 0), "b": Given((2, 0, 64), 0), "c": Given((300, 64))},
            {"a": Given((300, 72)), "b": Given((2, 72, 0), 0), "c": Given((300, 0), 0, (1, 1))},
            {"a": Given((0, 72)), "b": Given((2, 72, 64)), "c": Given((0, 64))},
        ),
        {"alpha": -0.1, "count": -7},
    ),
    Case(
        ROWS,
        (
            {"x": Given((40, 16)), "y": Given((40, 1), 4, (9, 1))},
            {"x": Given((900, 32), 1 << 12, (48, 1)), "y": Given((900, 1), 8)},
        ),
    ),
)
REFUSED = {
    "last stride": ("rows", {"x": Given((40, 16), 1 << 20, (16, 2)), "y": Given((40, 1))}),
    "no multiple of 8": ("rows", {"x": Given((40, 12), 1 << 20, (16, 1)), "y": Given((40, 1))}),
    "multiple": ("rows", {"x": Given((40, 16), 1 << 20, (24, 1)), "y": Given((40, 1))}),
    "overlaps itself": ("rows", {"x": Given((40, 16)), "y": Given((40, 1), 4, (0, 1))}),
    "m is": ("rows", {"x": Given((40, 16)), "y": Given((41, 1))}),
    "must be": (
        "matmul",
        {"a": Given((300, 72), 8), "b": Given((2, 72, 64)), "c": Given((300, 64))},
    ),
}


def manifest() -> dict[str, Any]:
    """What launchers read of the cases."""
    kernels = {
        one.name: {
            "cubin": f"{one.name}.cubin",
            "launch": launch_of(one.interface),
            "sha256": {"cubin": sha256(one.cubin).hexdigest()},
        }
        for one in CASES
    }
    return {"types": {name: type_of(name) for name in DTYPES}, "kernels": kernels}
