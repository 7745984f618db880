"""Writing files so that nothing is ever half-written, and where what was compiled is kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from warploom.errors import InputError


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` to a temporary sibling and rename it over `path`."""
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: Path, data: bytes) -> None:
    """Write `data` to a temporary sibling and rename it over `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None


def check_folder(path: Path, option: str = "-o") -> None:
    """Whether results can be written to the folder, asked before any long work; makes nothing.

    Raises `InputError` where it is a file, or it (or where it is to be made) cannot be written.
    """
    if path.exists() and not path.is_dir():
        raise InputError(f"{option} {path}: is a file, expected a folder")
    there = next(
        folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists()
    )
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise InputError(
            f"{option} {path}: {there} cannot be written: {error.strerror or error}"
        ) from None


def cache_folder() -> Path:
    """Where compiled kernels are kept: `WARPLOOM_CACHE`, else the user's cache folder."""
    chosen = os.environ.get("WARPLOOM_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "warploom"
