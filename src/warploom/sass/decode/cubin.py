"""The cubin container: an ELF file with one machine-code section a kernel.

Reading keeps the file's bytes; writing replaces only the bytes of one `.text` and one `.nv.info`
section, so an untouched round trip is byte-identical by construction.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection
from elftools.elf.sections import SymbolTableSection

from warploom.errors import InputError
from warploom.sass.decode import nvinfo

EM_CUDA: Final = 190
WORD_BYTES: Final = 16
TEXT_PREFIX: Final = ".text."
NEW_LAYOUT_ABI: Final = 8
OLD_LAYOUT_ACCELERATED_BIT: Final = 11
KNOWN_ARCHITECTURES: Final = frozenset(
    (80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
)  # 128-bit encodings whose control field is the one of `control.py`


@dataclass(frozen=True)
class Section:
    """A named byte range of the file."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class KernelCode:
    """One `.text.NAME` section: instruction words and what else in the file points into it."""

    name: str
    text: Section
    info: Section | None
    registers: int
    relocations: Mapping[int, str]
    words: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Cubin:
    """A cubin file in memory. `sm` is 80, 90, ...; `arch` spells it as the compiler does."""

    data: bytes
    sm: int
    accelerated: bool
    kernels: Mapping[str, KernelCode]
    origin: str
    compiler: str

    @property
    def arch(self) -> str:
        """The architecture, such as `sm_90a`."""
        return f"sm_{self.sm}{'a' if self.accelerated else ''}"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.data).hexdigest()

    def kernel(self, name: str | None = None) -> KernelCode:
        """The kernel called `name`, or the only one; raises `InputError` naming those there are."""
        names = list(self.kernels)
        if name is None:
            if len(names) == 1:
                return self.kernels[names[0]]
            raise InputError(
                f"{self.origin} holds {len(names)} kernels and none was named; "
                f"choose one with --kernel: {', '.join(names)}"
            )
        if name not in self.kernels:
            raise InputError(
                f"{self.origin} has no kernel {name!r}; it holds: {', '.join(names) or 'none'}"
            )
        return self.kernels[name]

    def section_bytes(self, section: Section) -> bytes:
        """The bytes of one section."""
        return self.data[section.offset : section.offset + section.size]

    def replace(
        self, kernel: KernelCode, words: Sequence[tuple[int, int]], info: bytes | None = None
    ) -> Cubin:
        """A new cubin with `kernel`'s code (and `.nv.info` bytes) replaced, all else untouched."""
        if len(words) != len(kernel.words):
            raise InputError(
                f"{kernel.name}: {len(words)} instruction words given, {len(kernel.words)} expected"
            )
        data = bytearray(self.data)
        flat = [half for word in words for half in word]
        struct.pack_into(f"<{len(flat)}Q", data, kernel.text.offset, *flat)
        if info is not None and kernel.info is not None:
            if len(info) != kernel.info.size:
                raise InputError(f"{kernel.name}: .nv.info would change its size")
            data[kernel.info.offset : kernel.info.offset + len(info)] = info
        return parse(bytes(data), self.origin)


def load(path: Path | str) -> Cubin:
    """Read a cubin file; raises `InputError` for anything that is not one."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    return parse(data, str(path))


def parse(data: bytes, origin: str = "cubin") -> Cubin:
    """Parse cubin bytes; `origin` names them in messages."""
    if data[:4] != b"\x7fELF":
        raise InputError(
            f"{origin} is not a cubin: expected an ELF file, it starts with {data[:4]!r}"
        )
    try:
        return _parse(data, origin)
    except (ELFError, struct.error, AssertionError, ValueError, OverflowError) as error:
        raise InputError(f"{origin} is a truncated or damaged cubin: {error}") from None


def _parse(data: bytes, origin: str) -> Cubin:
    elf = ELFFile(io.BytesIO(data))
    machine = elf.header["e_machine"]
    if machine not in ("EM_CUDA", EM_CUDA):
        raise InputError(f"{origin} is an ELF file for {machine}, expected a CUDA cubin")
    flags = int(elf.header["e_flags"])
    sm = _sm_number(flags, int(elf.header["e_ident"]["EI_ABIVERSION"]))
    if sm not in KNOWN_ARCHITECTURES:
        known = ", ".join(f"sm_{number}" for number in sorted(KNOWN_ARCHITECTURES))
        raise InputError(f"{origin} is for sm_{sm} (flags {flags:#x}); architectures read: {known}")
    segments = elf.header["e_phoff"] + elf.header["e_phnum"] * elf.header["e_phentsize"]
    if segments > len(data):
        raise InputError(
            f"{origin} is truncated: its program headers end at byte {segments}, "
            f"the file has {len(data)}"
        )
    sections: dict[str, Section] = {}
    registers = _register_counts(elf)
    relocations: dict[str, dict[int, str]] = {}
    for index in range(elf.num_sections()):
        part = elf.get_section(index)
        offset, size = int(part["sh_offset"]), int(part["sh_size"])
        if part["sh_type"] != "SHT_NOBITS" and offset + size > len(data):
            raise InputError(
                f"{origin} is truncated: section {part.name} ends at byte {offset + size}, "
                f"the file has {len(data)}"
            )
        sections[part.name] = Section(part.name, offset, size)
        if isinstance(part, RelocationSection) and part.name.startswith((".rel.", ".rela.")):
            target = part.name.split(".rela" if part.name.startswith(".rela") else ".rel", 1)[1]
            table = relocations.setdefault(target, {})
            for entry in part.iter_relocations():
                table[int(entry["r_offset"])] = f"type {entry['r_info_type']}"
    kernels: dict[str, KernelCode] = {}
    for name, section in sections.items():
        if not name.startswith(TEXT_PREFIX):
            continue
        if section.size % WORD_BYTES:
            raise InputError(f"{origin}: {name} has {section.size} bytes, not whole instructions")
        kernel = name.removeprefix(TEXT_PREFIX)
        halves = struct.unpack_from(f"<{section.size // 8}Q", data, section.offset)
        kernels[kernel] = KernelCode(
            name=kernel,
            text=section,
            info=sections.get(f".nv.info.{kernel}"),
            registers=registers.get(kernel, 0),
            relocations=relocations.get(name, {}),
            words=tuple(zip(halves[::2], halves[1::2], strict=True)),
        )
    if not kernels:
        raise InputError(f"{origin} holds no machine code (no .text section)")
    note = _tool_note(elf)
    accelerated = bool(re.search(rf"-arch[= ]sm_{sm}a\b", note)) or bool(
        not note and flags >> OLD_LAYOUT_ACCELERATED_BIT & 1
    )
    version = re.search(r"V(\d+\.\d+\.\d+)", note)
    compiler = f"ptxas {version.group(1)}" if version else "ptxas (version not recorded)"
    return Cubin(data, sm, accelerated, kernels, origin, compiler)


def _register_counts(elf: ELFFile) -> dict[str, int]:
    """Registers a thread of each kernel, from the REGCOUNT records of the file-wide `.nv.info`."""
    section = elf.get_section_by_name(".nv.info")
    symbols = elf.get_section_by_name(".symtab")
    if section is None or not isinstance(symbols, SymbolTableSection):
        return {}
    counts: dict[str, int] = {}
    for record in nvinfo.records(section.data()):
        if record.attribute == nvinfo.REGISTER_COUNT:
            symbol, count = struct.unpack_from("<II", record.payload)
            counts[symbols.get_symbol(symbol).name] = count
    return counts


def _sm_number(flags: int, abi_version: int) -> int:
    """The architecture number in `e_flags`; its place changed with the ELF layout of CUDA 13."""
    return flags >> 8 & 0xFF if abi_version >= NEW_LAYOUT_ABI else flags & 0xFF


def _tool_note(elf: ELFFile) -> str:
    """The text the assembler left about itself (`.note.nv.tkinfo`), empty in older files."""
    note = elf.get_section_by_name(".note.nv.tkinfo")
    return note.data().decode("latin-1") if note else ""
