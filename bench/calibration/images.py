"""Compile the probes, check that each holds what it says, and plant the stall variants.

A *stall variant* is a probe whose expected instruction has a smaller stall than the compiler gave
it: the smallest stall with which the result stays right is the hardware's own latency, measured by
dependence and not by a clock. A *yield variant* clears the stay bit of the same instructions.
"""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from bench.calibration.matrix_probes import GROUP, matrix_probes, matrix_source
from bench.calibration.probes import PREFIX, Probe, probes, source
from warploom.errors import CheckFailed, InputError
from warploom.runtime.nvrtc import compile_source
from warploom.sass.decode.control import MAX_STALL_STAYING, Control
from warploom.sass.decode.cubin import Cubin, parse
from warploom.sass.decode.kernel import Instruction, Kernel, decode
from warploom.sass.flow.loops import natural_loops

MANIFEST: Final = "probes.json"
REPEATED: Final = 3  # a spelling the compiler uses this often in the loop is the probe's own
FIXED_CHAINS: Final = frozenset("ffma fadd fmul imad lop3 prmt shf hfma2 f2fp".split())


@dataclass(frozen=True)
class ProbeImage:
    """A compiled probe: its kernel, how many expected instructions a round runs, and its variant.

    `stall` is the planted stall (0: as compiled, which `usual` says), `stay` False when the yield
    variant. `shared` is dynamic shared memory in bytes.
    """

    name: str
    kernel: str
    opcode: str
    per_round: int
    stall: int
    usual: int
    stay: bool
    shared: int
    cubin: bytes

    def head(self) -> dict[str, Any]:
        """All but the image, as JSON data."""
        data = asdict(self)
        del data["cubin"]
        return data


def build_images(arch: str = "sm_90a") -> list[ProbeImage]:
    """Every probe compiled for `arch`, with its variants. Needs NVRTC and nvdisasm, no GPU.

    Raises `CheckFailed` when a probe's loop does not hold the instruction it names.
    """
    images: list[ProbeImage] = []
    for probe in probes():
        plain = _image(probe, compile_source(source(probe), arch))
        images.append(plain)
        images.extend(_variants(probe, plain))
    for matrix in matrix_probes() if arch == "sm_90a" else []:
        cubin = compile_source(matrix_source(matrix), arch)
        kernel = decode(parse(cubin, matrix.name))
        _expect(matrix.name, _in_loop(kernel, "HGMMA"), GROUP)
        images.append(
            ProbeImage(matrix.name, kernel.name, "HGMMA", GROUP, 0, 0, True, 49152, cubin)
        )
    return images


def _image(probe: Probe, cubin: bytes) -> ProbeImage:
    kernel = decode(parse(cubin, probe.name))
    wanted = probe.unroll * probe.per_step
    found = _in_loop(kernel, probe.opcode)
    _expect(probe.name, found, wanted)
    usual = Counter(item.control.stall for item in found).most_common(1)[0][0]
    return ProbeImage(
        probe.name, f"{PREFIX}{probe.name}", probe.opcode, wanted, 0, usual, True, 0, cubin
    )


def _expect(name: str, found: list[Instruction], wanted: int) -> None:
    if len(found) < wanted:
        raise CheckFailed(
            f"probe {name}: its loop holds {len(found)} of the {wanted} instructions it is to time"
        )


def _in_loop(kernel: Kernel, opcode: str) -> list[Instruction]:
    """The probe's own instructions: in the loop that holds most, those of repeated spellings.

    The loop's counter and the loop that fills the tile may use the same opcode; they are not ours.
    """
    best: list[Instruction] = []
    for loop in natural_loops(kernel):
        items = [
            item
            for block in loop.blocks
            for item in kernel.instructions[kernel.blocks[block].start : kernel.blocks[block].end]
            if item.base == opcode
        ]
        if items:
            spellings = Counter(item.line.opcode for item in items)
            alike = [item for item in items if spellings[item.line.opcode] >= REPEATED]
            best = max(best, alike, key=len)
    return best


def _variants(probe: Probe, plain: ProbeImage) -> Iterable[ProbeImage]:
    """The stall variants of chains and pairs, the yield variant of rates."""
    family = probe.name.split("_")[0]
    cubin = parse(plain.cubin, probe.name)
    kernel = decode(cubin)
    if probe.name.startswith("pair_") or (
        probe.name.endswith("_chain") and (family in FIXED_CHAINS or family == "isetp")
    ):
        for stall in range(1, plain.usual + 1):
            image = _with_controls(cubin, kernel, probe.opcode, stall=stall)
            yield _changed(plain, image, stall, stay=True)
    if probe.name.endswith("_rate") and family in ("ffma", "lop3", "imad", "hfma2", "mufu"):
        yield _changed(
            plain, _with_controls(cubin, kernel, probe.opcode, stay=False), 0, stay=False
        )


def _changed(plain: ProbeImage, cubin: bytes, stall: int, *, stay: bool) -> ProbeImage:
    return ProbeImage(
        plain.name,
        plain.kernel,
        plain.opcode,
        plain.per_round,
        stall,
        plain.usual,
        stay,
        plain.shared,
        cubin,
    )


def _with_controls(
    cubin: Cubin, kernel: Kernel, opcode: str, stall: int | None = None, stay: bool = True
) -> bytes:
    """The image with the stall or the stay bit of the probe's own instructions changed."""
    words = [(item.low, item.high) for item in kernel.instructions]
    for item in _in_loop(kernel, opcode):
        now = item.control
        chosen = now.stall if stall is None else min(stall, now.stall)
        may_stay = stay and 1 <= chosen <= MAX_STALL_STAYING
        new = Control(chosen, may_stay, now.write_sb, now.read_sb, now.wait, 0)
        words[item.index] = (item.low, new.encode(item.high))
    return cubin.replace(cubin.kernel(kernel.name), words).data


def write_images(path: Path, images: Iterable[ProbeImage]) -> None:
    """A compressed archive of compiled probes, to run where there is no compiler."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = list(images)
    with tarfile.open(path, "w:xz") as archive:
        _add(archive, MANIFEST, json.dumps([row.head() for row in rows]).encode())
        for number, row in enumerate(rows):
            _add(archive, f"{number}.cubin", row.cubin)


def read_images(path: Path) -> list[ProbeImage]:
    """The probes of an archive; raises `InputError` when it is none."""
    try:
        with tarfile.open(path, "r:xz") as archive:
            heads = json.loads(_content(archive, MANIFEST))
            return [
                ProbeImage(**head, cubin=_content(archive, f"{number}.cubin"))
                for number, head in enumerate(heads)
            ]
    except (OSError, tarfile.TarError, KeyError, ValueError, TypeError) as error:
        raise InputError(f"{path}: not an archive of probes ({error})") from None


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, BytesIO(data))


def _content(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(name)
    if member is None:
        raise KeyError(name)
    return member.read()
