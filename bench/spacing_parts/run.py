"""Launches patched kernels beside their originals: `python spacing.py DIR OUT.json [SECONDS]`.

Needs a GPU, cuda-bindings and numpy, nothing of the package. Every patch runs on several inputs,
with one warp a scheduler and with sixteen, alone and while another kernel keeps all units busy, and
every word stored must be the original's. A worker process does the launches: a patch that crashes
or hangs ends the worker, is written down as such, and a new worker goes on behind it.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver

INPUT_WORDS = 4096 + 64
SHARED_BYTES = (32 * 512 + 4096) * 4
ROUNDS = 12
INPUTS = 3
PLACES = ((132, 128), (264, 512))  # blocks, threads: one warp a scheduler; 8 to 16
NOISE = (66, 512)
PATIENCE = 3.0  # seconds a patch may take before it counts as hung
CRASHES = 40  # so many at most


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call; raises RuntimeError with the driver's name of an error."""
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(result[0].name)
    return result[1] if len(result) == 2 else result[1:]


class Gpu:
    """A context, its buffers, and launches of the kernels of one folder."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        check(driver.cuInit(0))
        device = check(driver.cuDeviceGet(0))
        self.context = check(driver.cuDevicePrimaryCtxRetain(device))
        check(driver.cuCtxSetCurrent(self.context))
        self.name = check(driver.cuDeviceGetName(80, device)).split(b"\0")[0].decode()
        none = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.stream, self.other = (check(driver.cuStreamCreate(none)) for _ in range(2))
        threads = max(blocks * width for blocks, width in PLACES)
        self.input = check(driver.cuMemAlloc(INPUT_WORDS * 4))
        self.out, self.noise_out = (check(driver.cuMemAlloc(threads * 8)) for _ in range(2))
        self.space, self.noise_space = (check(driver.cuMemAlloc(threads * 256)) for _ in range(2))
        self.images = [(folder / f"{name}.cubin").read_bytes() for name in names]
        self.noise = self.load(self.images[names.index("all-0")])[1]
        self.noise_input = check(driver.cuMemAlloc(INPUT_WORDS * 4))
        self.feed(self.noise_input, 99)
        self.known: dict[tuple[int, int, int], np.ndarray] = {}
        self.modules: dict[int, Any] = {}
        self.unsteady: set[int] = set()  # kernels that do not repeat themselves: they tell nothing

    def load(self, image: bytes) -> tuple[Any, Any]:
        """(module, kernel) of a cubin."""
        buffer = ctypes.create_string_buffer(image, len(image) + 1)
        module = check(driver.cuModuleLoadData(ctypes.addressof(buffer)))
        found = check(driver.cuModuleGetFunction(module, b"spacing"))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(found, limit, SHARED_BYTES))
        status, address, size = driver.cuModuleGetGlobal(module, b"table")
        if status == driver.CUresult.CUDA_SUCCESS:  # only where the kernel reads it
            words = np.random.default_rng(7).integers(0, 1 << 32, int(size) // 4, np.uint32)
            check(driver.cuMemcpyHtoD(address, words.ctypes.data, words.nbytes))
        return module, found

    def feed(self, address: Any, seed: int) -> None:
        """Random words for a kernel to read."""
        words = np.random.default_rng(seed).integers(0, 1 << 32, INPUT_WORDS, np.uint32)
        check(driver.cuMemcpyHtoD(address, words.ctypes.data, words.nbytes))

    def start(
        self, kernel: Any, place: tuple[int, int], buffers: tuple[Any, ...], stream: Any, salt: int
    ) -> None:
        """One launch."""
        values = [
            *(ctypes.c_uint64(int(buffer)) for buffer in buffers),
            ctypes.c_uint32(ROUNDS),
            ctypes.c_uint32(salt),
        ]
        parameters = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        shape = (place[0], 1, 1, place[1], 1, 1, SHARED_BYTES)
        check(driver.cuLaunchKernel(kernel, *shape, stream, ctypes.addressof(parameters), 0))

    def result(self, kernel: Any, place: int, seed: int, busy: bool) -> np.ndarray:
        """What a kernel stores."""
        blocks, threads = PLACES[place]
        size = blocks * threads * 2
        check(driver.cuMemsetD32Async(self.out, 0xFFFFFFFF, size, self.stream))
        check(driver.cuMemsetD32Async(self.space, 0, size * 32, self.stream))
        if busy:
            noise = (self.noise_input, self.noise_out, self.noise_space)
            for _ in range(2):
                self.start(self.noise, NOISE, noise, self.other, 5)
        buffers = (self.input, self.out, self.space)
        self.start(kernel, PLACES[place], buffers, self.stream, seed * 7919 + 1)
        check(driver.cuStreamSynchronize(self.stream))
        found = np.empty(size, np.uint32)
        check(driver.cuMemcpyDtoH(found.ctypes.data, self.out, found.nbytes))
        return found

    def wrong(self, number: int, kernel: Any, again: int = 1) -> tuple[int, int]:
        """(launches, launches that stored a wrong word) of a kernel made from `number`."""
        launches = bad = 0
        for seed in range(INPUTS):
            self.feed(self.input, seed)
            for place in range(len(PLACES)):
                key = (number, place, seed)
                if key not in self.known:
                    if number not in self.modules:
                        self.modules[number] = self.load(self.images[number])[1]
                    self.known[key] = self.result(self.modules[number], place, seed, False)
                    twice = self.result(self.modules[number], place, seed, True)
                    if not np.array_equal(self.known[key], twice):
                        self.unsteady.add(number)
                for busy in (False, True):
                    for _ in range(again):
                        launches += 1
                        found = self.result(kernel, place, seed, busy)
                        bad += not np.array_equal(found, self.known[key])
        return launches, bad


def patched(image: bytes, changes: list[list[Any]]) -> bytes:
    """An image with eight bytes replaced at some places."""
    data = bytearray(image)
    for offset, text in changes:
        data[offset : offset + 8] = bytes.fromhex(text)
    return bytes(data)


def work(folder: Path, todo: list[int], rows: list[Any], names: list[str], pipe: Any) -> None:
    """Run some rows; says what it does next and what came of it."""
    gpu = Gpu(folder, names)
    pipe.send(("device", gpu.name))
    for number in todo:
        row = rows[number]
        pipe.send(("begin", number))
        module, kernel = gpu.load(patched(gpu.images[row["kernel"]], row["bytes"]))
        launches, bad = gpu.wrong(row["kernel"], kernel)
        check(driver.cuStreamSynchronize(gpu.other))
        check(driver.cuModuleUnload(module))
        said = "unsteady" if row["kernel"] in gpu.unsteady else "wrong" if bad else "same"
        pipe.send(("end", (number, launches, bad, said)))
    pipe.send(("done", None))


def run(folder: Path, seconds: float) -> dict[str, Any]:
    """Every row that the time allows."""
    data = json.loads((folder / "patches.json").read_text())
    rows, names = data["rows"], data["kernels"]
    nothing = {"mined": 0, "distance": 0, "pairs": 0, "bytes": []}
    controls = [
        {"kernel": number, "kind": "control", "key": name, **nothing}
        for number, name in enumerate(names)
    ]
    rows = [*controls, *rows]
    began, device, crashes = time.monotonic(), "", 0
    left = list(range(len(rows)))
    outcome: dict[int, tuple[int, int, str]] = {}
    context = multiprocessing.get_context("spawn")
    while left and crashes < CRASHES and time.monotonic() - began < seconds:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(folder, left, rows, names, there), daemon=True)
        process.start()
        there.close()
        running = None
        while time.monotonic() - began < seconds:
            try:
                if not here.poll(PATIENCE + (30.0 if running is None else 0.0)):
                    outcome[running] = (0, 0, "hung")
                    break
                word, value = here.recv()
            except EOFError:
                if running is None:
                    raise SystemExit("the worker ends before its first launch") from None
                outcome[running] = (0, 0, "crashed")
                break
            if word == "device":
                device = value
            elif word == "begin":
                running = value
            elif word == "end":
                outcome[value[0]] = value[1:]
            else:
                break
        process.kill()
        process.join()
        crashes += sum(outcome.get(number, (0, 0, ""))[2] in ("hung", "crashed") for number in left)
        left = [number for number in left if number not in outcome]
    found = []
    for number, row in enumerate(rows):
        launches, bad, said = outcome.get(number, (0, 0, "not run"))
        kept = {name: row[name] for name in ("kind", "key", "mined", "distance", "pairs")}
        came = {"launches": launches, "wrong": bad, "outcome": said}
        found.append({**kept, "kernel": names[row["kernel"]], **came})
    return {
        "device": device,
        "seconds": round(time.monotonic() - began, 1),
        "inputs": INPUTS,
        "places": PLACES,
        "rounds": ROUNDS,
        "rows": found,
    }


def table(found: dict[str, Any]) -> None:
    """One line a row of the table: outcome by distance."""
    by: dict[tuple[str, str, int], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in found["rows"]:
        by[row["kind"], row["key"], row["mined"]][row["distance"]].append(row["outcome"])
    count: dict[str, int] = defaultdict(int)
    for row in found["rows"]:
        count[f"{row['kind']} {row['outcome']}"] += 1
    print(found["device"], found["seconds"], "s", dict(count))
    for (kind, key, mined), steps in by.items():
        if kind in ("spacing", "sync", "stall", "control"):
            said = "; ".join(
                f"{distance}: {'/'.join(sorted(set(outcomes)))} ({len(outcomes)})"
                for distance, outcomes in sorted(steps.items())
            )
            print(f"{kind:8} {key:40} mined {mined:3}  {said}")


def main() -> None:
    """Command line: the folder, the file to write, seconds."""
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    found = run(folder, float(sys.argv[3]) if len(sys.argv) > 3 else 85.0)
    out.write_text(json.dumps(found, indent=0))
    table(found)


if __name__ == "__main__":
    main()
