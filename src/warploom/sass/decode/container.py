"""Files that hold cubins: objects, shared libraries and fat binaries of nvcc, or a cubin itself.

nvcc embeds a fat binary in the sections `.nv_fatbin` and `__nv_relfatbin` of a host ELF file: a
header, then entries of PTX and of cubins for several architectures. Plain entries are read here;
compressed ones (nvcc's default) are taken out by NVIDIA's own cuobjdump.
"""

from __future__ import annotations

import io
import struct
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from warploom import toolchain
from warploom.errors import InputError, WarploomWarning
from warploom.sass.decode.cubin import EM_CUDA, TEXT_PREFIX, Cubin, parse

FATBIN_MAGIC: Final = 0xBA55ED50
ELF_MAGIC: Final = b"\x7fELF"
SECTIONS: Final = (".nv_fatbin", "__nv_relfatbin")
# A fat binary: magic, version, bytes of this header, bytes of its entries.
HEADER: Final = struct.Struct("<IHHQ")
# An entry: kind, version, bytes of its header, bytes of its payload; its flags stand at byte 40.
ENTRY: Final = struct.Struct("<HHIQ")
FLAGS_AT: Final = 40
KIND_CUBIN: Final = 2
COMPRESSED: Final = 0x2000 | 0x8000  # by LZ4, by zstd


def cubins(path: Path | str, arch: str | None = None) -> list[Cubin]:
    """Every cubin of a file, or those for `arch`, such as "sm_90a".

    Raises `InputError` for a file that holds none, `ToolMissing` where its cubins are compressed
    and cuobjdump is not there.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    images = list(_images(data, Path(path)))
    found = [parse(data, str(path))] if images == [data] else _read(images, str(path))
    chosen = [one for one in found if arch in (None, one.arch)]
    if not chosen:
        there = ", ".join(dict.fromkeys(one.arch for one in found))
        raise InputError(f"{path} holds nothing for {arch}; it holds {there}")
    return chosen


def _read(images: list[bytes], path: str) -> list[Cubin]:
    """The cubins that have kernels; one for an architecture that is not read is said."""
    found: list[Cubin] = []
    refused: list[str] = []
    for number, image in enumerate(images, 1):
        if TEXT_PREFIX.encode() not in image:
            continue  # what nvlink leaves for a file without device code
        try:
            found.append(parse(image, f"{path} (cubin {number})"))
        except InputError as error:
            refused.append(str(error))
    if not found:
        raise InputError(
            refused[0] if refused else f"{path} holds no machine code for a GPU (only PTX, or none)"
        )
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        warnings.warn(f"left out: {refused[0]}{more}", WarploomWarning, stacklevel=1)
    return found


def load(path: Path | str, kernel: str | None = None, arch: str | None = None) -> Cubin:
    """The one cubin of a file for `arch` that has `kernel`; both may be left open.

    Raises what `cubins` raises, and `InputError` where several fit, or none.
    """
    every = cubins(path, arch)
    found = [one for one in every if kernel is None or kernel in one.kernels] or every[:1]
    if len(every) > 1 and (len(found) > 1 or kernel not in (None, *found[0].kernels)):
        there = "; ".join(f"{one.arch}: {', '.join(one.kernels)}" for one in every)
        raise InputError(
            f"{path} holds {len(every)} cubins; choose one with --arch and --kernel: {there}"
        )
    return found[0]


def _images(data: bytes, path: Path) -> Iterator[bytes]:
    """The bytes of every cubin in a file; of what is no container, the file's."""
    parts = list(_fat_binaries(data))
    if not parts:
        yield data
        return
    entries = [entry for part in parts for entry in _entries(part, path)]
    if any(flags & COMPRESSED for flags, _ in entries):
        yield from _extracted(path)
        return
    yield from (image for _, image in entries)


def _fat_binaries(data: bytes) -> Iterator[bytes]:
    """The parts of a file that hold fat binaries."""
    if len(data) >= HEADER.size and HEADER.unpack_from(data)[0] == FATBIN_MAGIC:
        yield data
    if data[:4] != ELF_MAGIC:
        return
    try:
        elf = ELFFile(io.BytesIO(data))
        if elf.header["e_machine"] in ("EM_CUDA", EM_CUDA):
            return
        yield from (
            bytes(part.data())
            for part in (elf.get_section_by_name(name) for name in SECTIONS)
            if part is not None
        )
    except (ELFError, struct.error, AssertionError, ValueError, OverflowError):
        return  # a damaged file is refused as what it begins like


def _entries(data: bytes, path: Path) -> Iterator[tuple[int, bytes]]:
    """The flags and bytes of every cubin in fat binaries that follow each other."""
    at = 0
    while at + HEADER.size <= len(data):
        magic, _, header, size = HEADER.unpack_from(data, at)
        if magic != FATBIN_MAGIC:
            at += 8  # the linker aligns what it puts together
            continue
        at, end = at + header, at + header + size
        if end > len(data):
            raise InputError(f"{path} is truncated: a fat binary ends at byte {end} of {len(data)}")
        while at + ENTRY.size <= end:
            kind, _, skip, length = ENTRY.unpack_from(data, at)
            if skip < FLAGS_AT + 8 or at + skip + length > end:
                raise InputError(f"{path} is damaged: an entry of a fat binary has wrong sizes")
            (flags,) = struct.unpack_from("<Q", data, at + FLAGS_AT)
            if kind == KIND_CUBIN:
                yield flags, data[at + skip : at + skip + length]
            at += skip + length
        at = end


def _extracted(path: Path) -> Iterator[bytes]:
    """The cubins of a file whose entries are compressed."""
    tool = toolchain.find("cuobjdump")
    with tempfile.TemporaryDirectory() as folder:
        done = tool.run("-xelf", "all", str(path.resolve()), folder=Path(folder))
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            raise InputError(f"cuobjdump {tool.version} does not read {path}: {said[0]}")
        yield from (made.read_bytes() for made in sorted(Path(folder).glob("*.cubin")))
