"""Deploying a tuned cubin by key: what the key is, what an entry holds, what makes it acceptable.

A store maps the key of an *original* cubin to the cubin that replaces it. The key is a hash of all
that a launch can see of the original (code, constants, launch attributes, architecture), not of its
debug sections: those hold file names and line numbers, so that moving a source file, or building it
on another machine, would change a hash of the whole file though not one instruction changed.

This module is on the path of every first launch: it knows ELF section headers and JSON, no more.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from warploom.errors import InputError
from warploom.files import write_bytes_atomically, write_text_atomically

MANIFEST_SCHEMA = 1
CUBIN_FILE = "kernel.cubin"
MANIFEST_FILE = "manifest.json"

SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
SHT_NOBITS = 8
# Sections that say where code came from, not what it does; symbol and string tables go with them.
PROVENANCE_PREFIXES = (
    ".debug",
    ".nv_debug",
    ".rel.debug",
    ".rela.debug",
    ".rel.nv_debug",
    ".rela.nv_debug",
    ".note",
    ".symtab",
    ".strtab",
    ".shstrtab",
)


class Store(Protocol):
    """Anything that holds tuned cubins by key."""

    def lookup(self, key: str) -> bytes | None:
        """The tuned cubin for `key`, None when there is none.

        Raises `InputError` when there is one that cannot be trusted.
        """
        ...


@dataclass(frozen=True)
class Manifest:
    """What is recorded beside a deployed cubin.

    `sha256` is of the file called `cubin`; `result` and `launch` are what the search found and how
    the kernel is launched (JSON, not read here).
    """

    key: str
    kernel: str
    arch: str
    sha256: str
    cubin: str = CUBIN_FILE
    result: dict[str, Any] = field(default_factory=dict[str, Any])
    launch: dict[str, Any] = field(default_factory=dict[str, Any])
    schema: int = MANIFEST_SCHEMA


@dataclass(frozen=True)
class FolderStore:
    """A folder with one folder an entry: `KEY/kernel.cubin` and `KEY/manifest.json`."""

    root: Path

    def lookup(self, key: str) -> bytes | None:
        """The cubin stored under `key`, checked against its manifest."""
        folder = self.root / key
        if not folder.is_dir():
            return None
        manifest = read_manifest(folder / MANIFEST_FILE)
        if manifest.key != key:
            raise InputError(f"{folder}: the manifest is for key {manifest.key}, not {key}")
        path = folder / Path(manifest.cubin).name
        try:
            cubin = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}") from None
        if (found := sha256(cubin)) != manifest.sha256:
            raise InputError(
                f"{path} is corrupt: sha256 {found[:12]}, "
                f"the manifest says {manifest.sha256[:12]}; search or copy it again"
            )
        return cubin

    def put(
        self,
        original: bytes,
        tuned: bytes,
        kernel: str,
        arch: str,
        *,
        result: dict[str, Any] | None = None,
        launch: dict[str, Any] | None = None,
    ) -> str:
        """Store `tuned` as the replacement of `original`; returns the key. Never half-written.

        The manifest is written last and names the cubin's hash. Raises `InputError` when the two
        cubins cannot be of one kernel, or the folder cannot be written.
        """
        check_replaces(original, tuned, kernel)
        key = content_key(original)
        folder = self.root / key
        manifest = Manifest(
            key, kernel, arch, sha256(tuned), result=result or {}, launch=launch or {}
        )
        write_bytes_atomically(folder / CUBIN_FILE, tuned)
        write_text_atomically(folder / MANIFEST_FILE, json.dumps(asdict(manifest), indent=1) + "\n")
        return key


def read_manifest(path: Path) -> Manifest:
    """The manifest of one entry; raises `InputError` when it is missing, damaged or newer."""
    try:
        data = json.loads(path.read_text())
        manifest = Manifest(**data)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}, expected a manifest") from None
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: not a manifest ({error})") from None
    if manifest.schema != MANIFEST_SCHEMA:
        raise InputError(
            f"{path}: manifest schema {manifest.schema}, this version reads {MANIFEST_SCHEMA}"
        )
    return manifest


def content_key(cubin: bytes) -> str:
    """The deploy key of an original cubin: hexadecimal, 64 characters, the same on any machine."""
    mixed = hashlib.sha256(machine_of(cubin))
    for name, kind, flags, size, body in sorted(sections(cubin)):
        if name.startswith(PROVENANCE_PREFIXES):
            continue
        mixed.update(f"{name}\0{kind}\0{flags}\0{size}\0".encode())
        mixed.update(hashlib.sha256(body).digest())
    return mixed.hexdigest()


def check_replaces(original: bytes, tuned: bytes, kernel: str) -> None:
    """Raise `InputError` unless `tuned` is for the same machine and holds the same code sections.

    This is the cheap check of the deploy path, against mixed-up files; that the code means the same
    is what the verifier has shown before the entry was stored.
    """
    if machine_of(original) != machine_of(tuned):
        raise InputError(
            f"{kernel}: the stored cubin is for another architecture "
            f"(ELF flags {machine_of(tuned).hex()}, the kernel's are {machine_of(original).hex()})"
        )
    wanted, found = code_sizes(original), code_sizes(tuned)
    if wanted != found:
        raise InputError(
            f"{kernel}: the stored cubin holds code {found or 'of no kernel'}, expected {wanted}"
        )


def code_sizes(cubin: bytes) -> dict[str, int]:
    """Bytes of machine code by section name (`.text.NAME`)."""
    return {item[0]: item[3] for item in sections(cubin) if item[0].startswith(".text.")}


def machine_of(cubin: bytes) -> bytes:
    """The ELF bytes that name the machine: ABI, ABI version, machine and processor flags."""
    check_elf(cubin)
    return cubin[7:9] + cubin[0x12:0x14] + cubin[0x30:0x34]


def sections(cubin: bytes) -> Iterator[tuple[str, int, int, int, bytes]]:
    """Every section as (name, type, flags, size, bytes); raises `InputError` when cut short."""
    check_elf(cubin)
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    try:
        headers = [SECTION_HEADER.unpack_from(cubin, table + i * entry_size) for i in range(count)]
        names_start = headers[names_index][4]
    except (struct.error, IndexError):
        raise InputError("truncated cubin: its section table lies beyond its end") from None
    for name_at, kind, flags, _, start, size, *_ in headers:
        body = b"" if kind == SHT_NOBITS else cubin[start : start + size]
        if kind != SHT_NOBITS and len(body) != size:
            raise InputError("truncated cubin: a section lies beyond its end")
        end = cubin.find(b"\0", names_start + name_at)
        name = cubin[names_start + name_at : max(end, 0)].decode(errors="replace")
        yield name, kind, flags, size, body


def check_elf(cubin: bytes) -> None:
    """Raise `InputError` unless the bytes start as a 64-bit little-endian ELF file."""
    if len(cubin) < 64 or cubin[:6] != b"\x7fELF\x02\x01":
        raise InputError(f"not a cubin: it starts with {cubin[:4]!r}, expected an ELF file")


def sha256(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()
