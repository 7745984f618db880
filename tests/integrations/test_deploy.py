"""The deploy key and the folder store: what a key sees, what is refused and in which words."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from warploom.errors import InputError
from warploom.integrations.deploy import (
    CUBIN_FILE,
    MANIFEST_FILE,
    FolderStore,
    check_replaces,
    code_sizes,
    content_key,
)


def make_elf(sections: dict[str, bytes], flags: int = 0x5A0055A) -> bytes:
    """A small ELF file with these sections, for tests that need no compiler."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*sections, ".shstrtab"))
    bodies = [*sections.values(), names]
    offset, starts = 64, []
    for body in bodies:
        starts.append(offset)
        offset += len(body)
    table = [struct.pack("<IIQQQQIIQQ", *[0] * 10)]
    at = 1
    for name, body, start in zip((*sections, ".shstrtab"), bodies, starts, strict=True):
        table.append(struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, start, len(body), 0, 0, 1, 0))
        at += len(name) + 1
    header = b"\x7fELF\x02\x01\x01\x33\x07" + bytes(7)
    header += struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, offset, flags, 64, 0, 0, 64, 0, 0)
    header = header[:0x3A] + struct.pack("<HHH", 64, len(table), len(table) - 1)
    return header + b"".join(bodies) + b"".join(table)


CODE = {".text.k": b"\x11" * 32, ".nv.info.k": b"ab", ".debug_line": b"/home/a/k.py"}


def test_key_sees_code_not_provenance() -> None:
    key = content_key(make_elf(CODE))
    assert len(key) == 64
    assert content_key(make_elf({**CODE, ".debug_line": b"/other/place.py"})) == key
    assert content_key(make_elf({**CODE, ".text.k": b"\x12" * 32})) != key
    assert content_key(make_elf({**CODE, ".nv.info.k": b"ac"})) != key
    assert content_key(make_elf(CODE, flags=0x500550)) != key


def test_key_sees_the_machine_and_nothing_else_of_the_header() -> None:
    """By the ELF specification: the ABI and its version, e_machine and e_flags."""
    machine = {7, 8, 18, 19, *range(48, 52)}
    elf = make_elf(CODE)
    table = {*range(40, 48), *range(58, 64)}  # where sections are, and which has their names
    for place in sorted(set(range(6, 64)) - table):
        changed = elf[:place] + bytes([elf[place] ^ 1]) + elf[place + 1 :]
        assert (content_key(changed) != content_key(elf)) == (place in machine), place


def test_a_section_without_bits_takes_no_room_in_the_file() -> None:
    elf = bytearray(make_elf(CODE))
    (table,) = struct.unpack_from("<Q", elf, 40)
    struct.pack_into("<Q", elf, table + 64 + 32, 1 << 20)  # its size: the first one's, .text.k
    for kind, right in ((8, True), (1, False), (9, False)):  # SHT_NOBITS, SHT_PROGBITS, SHT_REL
        struct.pack_into("<I", elf, table + 64 + 4, kind)
        if right:
            assert code_sizes(bytes(elf)) == {".text.k": 1 << 20}
        else:
            with pytest.raises(InputError, match="lies beyond its end"):
                content_key(bytes(elf))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a cubin"),
        (b"// PTX text, not a cubin" * 8, "not a cubin"),
        (make_elf(CODE)[:-40], "truncated"),
        (make_elf(CODE)[:100], "truncated"),
        # The table is whole, the code that it names is not.
        (
            make_elf(CODE).replace(struct.pack("<QQ", 64, 32), struct.pack("<QQ", 64, 1 << 20)),
            "a section lies beyond its end",
        ),
    ],
)
def test_what_is_no_cubin_is_named(data: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words):
        content_key(data)


def test_store_gives_back_what_was_put(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    original, tuned = make_elf(CODE), make_elf({**CODE, ".text.k": b"\x13" * 32})
    key = store.put(original, tuned, "k", "sm_90a", result={"speedup": 1.02})
    assert store.lookup(key) == tuned
    assert store.lookup("0" * 64) is None
    manifest = json.loads((tmp_path / key / MANIFEST_FILE).read_text())
    assert manifest["arch"] == "sm_90a"
    assert manifest["result"] == {"speedup": 1.02}


def test_corrupt_entries_are_refused(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    original = make_elf(CODE)
    key = store.put(original, original, "k", "sm_90a")
    cubin, manifest = tmp_path / key / CUBIN_FILE, tmp_path / key / MANIFEST_FILE
    good_cubin, good_manifest = cubin.read_bytes(), manifest.read_text()

    cubin.write_bytes(good_cubin[:-1] + b"\xff")
    with pytest.raises(InputError, match="is corrupt: sha256"):
        store.lookup(key)
    cubin.unlink()
    with pytest.raises(InputError, match="No such file"):
        store.lookup(key)
    cubin.write_bytes(good_cubin)

    manifest.write_text("{")
    with pytest.raises(InputError, match="not a manifest"):
        store.lookup(key)
    manifest.write_text(good_manifest.replace('"schema": 1', '"schema": 9'))
    with pytest.raises(InputError, match="schema 9"):
        store.lookup(key)
    manifest.write_text(good_manifest.replace(key, "f" * 64))
    with pytest.raises(InputError, match="the manifest is for key f"):
        store.lookup(key)
    manifest.unlink()
    with pytest.raises(InputError, match="expected a manifest"):
        store.lookup(key)


def test_a_replacement_must_be_for_the_same_machine_and_code() -> None:
    original = make_elf(CODE)
    check_replaces(original, make_elf({**CODE, ".text.k": b"\x14" * 32}), "k")
    with pytest.raises(InputError, match="another architecture"):
        check_replaces(original, make_elf(CODE, flags=0x500550), "k")
    with pytest.raises(InputError, match="expected"):
        check_replaces(original, make_elf({**CODE, ".text.k": b"\x14" * 48}), "k")
    with pytest.raises(InputError, match="expected"):
        check_replaces(original, make_elf({".text.other": b"\x14" * 32}), "k")


def test_put_refuses_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="another architecture"):
        FolderStore(tmp_path).put(make_elf(CODE), make_elf(CODE, flags=1), "k", "sm_90a")
    assert list(tmp_path.iterdir()) == []
