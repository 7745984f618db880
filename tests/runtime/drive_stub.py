"""Drives the real driver wrapper over the stub libcuda; test_driver.py runs it as a process.

Prints one JSON object. Everything here also runs on a GPU (tests/gpu/test_runtime.py): the stub
shows that every call reaches the driver with the right arguments and that the CUDA source of the
helper kernels computes what `patterns.generate` says.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from warploom.runtime import Buffer, LaunchSpec, Null, Pointer, Scalar, TensorMap, Workload
from warploom.runtime.correctness import CheckSettings
from warploom.runtime.device import CudaError, Shape
from warploom.runtime.driver import CudaDevice, device_count
from warploom.runtime.helpers import Helpers
from warploom.runtime.launch import pack_arguments
from warploom.runtime.patterns import PATTERNS, generate
from warploom.runtime.session import MeasureSettings, Session
from warploom.runtime.timing import TimingSettings
from warploom.tile.dtypes import MEMORY


def image(text: str) -> bytes:
    """An ELF header with no tables, then what the stub reads."""
    return b"\x7fELF\x02".ljust(64, b"\0") + text.encode() + b"\0"


def spec(cluster: int = 1) -> LaunchSpec:
    buffers = (Buffer("x", (8, 50), "bf16", "in"), Buffer("y", (400,), "bf16", "out"))
    arguments = (
        Pointer("x"), Pointer("y"), Scalar("i32", 800), Scalar("fp32", 1.5), Null(), Null(),
    )  # fmt: skip
    return LaunchSpec("flip", (4, 1, 1), (32, 1, 1), buffers, arguments, 60_000, (cluster, 1, 1))


def fills_that_differ(device: CudaDevice, helpers: Helpers) -> list[str]:
    wrong: list[str] = []
    address = device.allocate(1 << 16)
    for pattern in PATTERNS:
        for dtype in MEMORY.values():
            helpers.reset(5)
            buffer = Buffer("b", (7, 61), dtype.name, "in", low=-3 if dtype.kind == "int" else 0)
            helpers.fill(address, buffer, 9, 2, (pattern,))
            got = device.download(address, buffer.nbytes)
            made = generate(dtype, 427, pattern, 9 + 5, 2, 61, (buffer.low, buffer.high))
            if got != made.tobytes():
                wrong.append(f"{pattern}/{dtype.name}")
    device.free(address)
    return wrong


def failure(action: Any) -> str:
    try:
        action()
    except CudaError as error:
        return f"{error} fatal={error.fatal}"
    return "nothing failed"


def main() -> None:
    device = CudaDevice()
    session = Session(device)
    seen: dict[str, Any] = {"count": device_count(), "info": device.info.to_json()}
    seen["fills"] = fills_that_differ(device, session.helpers)
    baseline = session.prepare(Workload(image("flip 20.0"), spec()))
    seen["rough_us"] = baseline.rough_us
    settings = MeasureSettings()
    images = (image("flip 10.0"), image("junk"))
    seen["measured"] = [session.measure(one, settings).to_json() for one in images]
    check = CheckSettings(samples=50, patterns=("randn", "special"), warm=2)
    report = session.check(image("flip 10.0"), check, lambda _: None)
    seen["check"] = report.to_json()
    timing = session.compare(
        {"a": image("flip 10.0"), "b": image("flip 20.0")}, TimingSettings(rounds=2, reloads=2)
    )
    seen["ratio"] = timing.ratios["b"].median
    cold = TimingSettings(mode="cold", rounds=2, reloads=1)
    seen["cold_us"] = session.compare({"a": image("flip 10.0")}, cold).median_us["a"]
    session.prepare(Workload(image("flip 20.0"), spec(cluster=2)))
    seen["cluster"] = session.measure(image("flip 20.0"), settings).outcome

    module = device.load(image("flip 1.0"))
    device.function(module, "flip", cluster_blocks=16)
    tensor = TensorMap("x", (50, 8), (112,), (32, 8), swizzle=64, fill="nan")
    seen["tensor_map"] = list(struct.unpack("<14I", device.tensor_map(tensor, "bf16", 4096)[:56]))
    seen["errors"] = {
        "image": failure(lambda: device.load(image("junk"))),
        "text": failure(lambda: device.load(b"junk")),
        "cut": failure(lambda: device.load(session.helpers.cubin[:-2000])),
        "name": failure(lambda: device.function(module, "other")),
        "shared": failure(lambda: device.function(module, "flip", 300_000)),
        "memory": failure(lambda: device.allocate(1 << 40)),
        "copy": failure(lambda: device.download(64, 8)),
        "launch": failure(
            lambda: device.launch(
                device.function(module, "flip"),
                Shape((1, 1, 1), (1, 1, 1), 300_000),
                pack_arguments(spec().arguments, {"x": 0, "y": 0}, spec().kinds, device),
            )
        ),
    }
    session.close()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
