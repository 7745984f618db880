"""Candidates that gave wrong results on an H200 stay rejected (see data/h200_wrong/README.md)."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from warploom.sass.decode.cubin import parse
from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verify import Verifier

ARCHIVES = sorted((Path(__file__).parent / "data" / "h200_wrong").glob("*.tar.xz"))


def members(path: Path) -> dict[str, bytes]:
    """The files of an archive."""
    with tarfile.open(path) as archive:
        parts = {member.name: archive.extractfile(member) for member in archive}
        return {name: part.read() for name, part in parts.items() if part}


@pytest.mark.parametrize("path", ARCHIVES, ids=lambda path: path.name.split(".")[0])
def test_rejects_what_was_wrong_on_the_machine(path: Path) -> None:
    files = members(path)
    original = parse(files.pop("original.cubin"))
    verifier = Verifier(original, mode=AliasMode.TRITON)
    assert verifier.check_file(original).legal
    wrong = [name for name in files if name.endswith("-wrong.cubin")]
    assert wrong
    accepted = [name for name in wrong if verifier.check_file(parse(files[name])).legal]
    assert not accepted


def test_there_are_enough_of_them() -> None:
    assert sum(name.endswith("-wrong.cubin") for path in ARCHIVES for name in members(path)) >= 40
