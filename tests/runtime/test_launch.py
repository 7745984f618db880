"""Launch specs: JSON both ways, parameters byte by byte, bad ones refused in one line."""

from __future__ import annotations

import ctypes
import json
import struct
from typing import Any

import pytest

from warploom.errors import InputError
from warploom.runtime import Buffer, LaunchSpec, Null, Pointer, Scalar, TensorMap
from warploom.runtime.launch import Params, pack_arguments

X = Buffer("x", (4, 64), "bf16", "in")
Y = Buffer("y", (4, 64), "fp32", "out")


def make(**changes: Any) -> LaunchSpec:
    values: dict[str, Any] = {
        "kernel": "k",
        "grid": (4, 1, 1),
        "block": (128, 1, 1),
        "buffers": (X, Y),
        "arguments": (
            Pointer("x"),
            Pointer("y", 16),
            Scalar("i32", -3),
            Scalar("fp32", 1.5),
            TensorMap("x", (64, 4), (128,), (64, 4), swizzle=128),
            Null(),
            Null(),
        ),
        "shared_bytes": 1024,
        "cluster": (2, 1, 1),
        "notes": {"source": "a test"},
    }
    return LaunchSpec(**{**values, **changes})


class Encoder:
    def tensor_map(self, spec: TensorMap, dtype: str, address: int) -> bytes:
        assert (spec.buffer, dtype) == ("x", "bf16")
        return struct.pack("<Q", address) + bytes(120)


def test_json_round_trip() -> None:
    spec = make()
    assert LaunchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_parameters_are_what_the_driver_reads() -> None:
    spec = make()
    params = pack_arguments(spec.arguments, {"x": 0x7000, "y": 0x9000}, spec.kinds, Encoder())
    assert params.slots[:4] == (
        struct.pack("<Q", 0x7000),
        struct.pack("<Q", 0x9010),
        struct.pack("<i", -3),
        struct.pack("<f", 1.5),
    )
    assert params.slots[5:] == (bytes(8), bytes(8))
    pointers = (ctypes.c_void_p * 7).from_address(params.address)
    for pointer, slot in zip(pointers, params.slots, strict=True):
        assert pointer is not None
        assert ctypes.string_at(pointer, len(slot)) == slot
        assert pointer % 64 == 0


def test_no_parameters_still_give_an_address() -> None:
    assert Params([]).address


@pytest.mark.parametrize(("ctype", "size"), [("i1", 1), ("bf16", 2), ("u16", 2), ("fp64", 8)])
def test_scalar_sizes(ctype: str, size: int) -> None:
    assert len(Scalar(ctype, 1).pack()) == size


def test_bf16_scalars_are_rounded() -> None:
    assert Scalar("bf16", 1.0).pack() == b"\x80\x3f"
    assert Scalar("fp16", -2.0).pack() == b"\x00\xc0"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Buffer("b", (2,), "half", "in"), "dtype 'half' is not known"),
        (lambda: Buffer("b", (2,), "bf16", "both"), "role 'both', expected in, out or inout"),
        (lambda: Buffer("b", (2, 0), "bf16", "in"), "has an empty axis"),
        (lambda: Buffer("b", (2,), "i32", "in", low=3, high=3), r"range \[3, 3\) is empty"),
        (lambda: Scalar("int", 1), "unknown scalar type 'int'"),
        (lambda: Scalar("i32", 2**31), "does not fit i32"),
        (lambda: Scalar("u8", -1), "does not fit u8"),
        (lambda: Scalar("i32", 1.5), "does not fit i32"),
        (lambda: Scalar("fp32", 1e300), "does not fit fp32"),
        (lambda: TensorMap("x", (64, 4), (), (64, 4)), "expected rank 1-5, rank - 1 strides"),
        (lambda: TensorMap("x", (64, 4), (128,), (512, 4)), "expected 1..256"),
        (lambda: TensorMap("x", (64, 4), (2002,), (64, 4)), "multiples of 16"),
        (lambda: TensorMap("x", (64, 4), (128,), (64, 4), swizzle=48), "swizzle 48"),
        (lambda: make(grid=(0, 1, 1)), "expected three >= 1"),
        (lambda: make(block=(2048, 1, 1)), "over 1024 threads"),
        (lambda: make(grid=(3, 1, 1)), "no multiple of the cluster"),
        (lambda: make(buffers=(X, X)), "buffer names repeat"),
        (lambda: make(arguments=(Pointer("z"),)), "names buffer 'z', expected one of"),
        (lambda: make(shared_bytes=-1), "shared_bytes -1"),
        (lambda: LaunchSpec.from_json({"schema": 3}), "schema 3, expected 1"),
        (lambda: LaunchSpec.from_json({"schema": 1, "grid": [1, 1, 1]}), "malformed"),
        (
            lambda: LaunchSpec.from_json({**make().to_json(), "arguments": [{"kind": "magic"}]}),
            "argument kind 'magic'",
        ),
    ],
)
def test_bad_launches_are_refused(build: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build()
