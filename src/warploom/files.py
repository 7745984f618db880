"""Writing files so that nothing is ever half-written, and where what was compiled is kept."""

from __future__ import annotations

import contextlib
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


def check_folder(option: str, folder: Path) -> None:
    """Raise `InputError` naming the option unless files can be written into `folder`.

    For the beginning of long work. Leaves nothing behind: folders that were missing are missing.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{option} {folder}: is a file, expected a folder")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{option} {folder}: cannot write there ({error.strerror or error})"
        ) from None
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def cache_folder() -> Path:
    """Where compiled kernels are kept: `WARPLOOM_CACHE`, else the user's cache folder."""
    chosen = os.environ.get("WARPLOOM_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "warploom"
