"""Writing files so that nothing is ever half-written, and where what was compiled is kept."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any, cast

from warploom.errors import InputError, WarploomWarning


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` to a temporary sibling and rename it over `path`."""
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: Path, data: bytes) -> None:
    """Write `data` to a temporary sibling and rename it over `path`."""
    try:
        _put(path, data)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """Parsed JSON of a file; raises `InputError` naming the file and the place."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file, expected JSON") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not JSON at line {error.lineno}: {error.msg}") from None


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object of a file; `what` names it in errors."""
    data: Any = read_json(path)
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object, {what}")
    return cast("dict[str, Any]", data)


def check_folder(path: Path) -> None:
    """Raise `InputError` unless files can be written to the folder, which need not exist yet.

    For the beginning of long work; leaves nothing behind.
    """
    present = path.absolute()
    while not present.exists() and present != present.parent:
        present = present.parent
    if not present.is_dir():
        what = "is a file" if present == path.absolute() else f"cannot be made: {present} is a file"
        raise InputError(f"-o {path}: {what}, expected a folder")
    try:
        with tempfile.TemporaryFile(dir=present):
            return
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"-o {path}: cannot write to {present}: {reason}") from None


def cache_folder() -> Path:
    """Where compiled kernels are kept: `WARPLOOM_CACHE`, else the user's cache folder."""
    chosen = os.environ.get("WARPLOOM_CACHE")
    try:
        return Path(chosen) if chosen else Path.home() / ".cache" / "warploom"
    except RuntimeError:
        raise InputError(
            "the user has no home folder to keep compiled kernels in: set WARPLOOM_CACHE"
        ) from None


def read_kept(path: Path) -> bytes | None:
    """What the cache holds under that path; None where it has nothing or cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def keep(path: Path, data: bytes) -> None:
    """Put a file into the cache; where that cannot be written to, warn once and go on without."""
    try:
        _put(path, data)
    except OSError as error:
        warnings.warn(
            f"nothing is kept in the cache {path.parent.parent}: {error.strerror or error}; set "
            "WARPLOOM_CACHE to a folder that can be written to",
            WarploomWarning,
            stacklevel=1,  # said once, whoever wanted to keep something
        )
