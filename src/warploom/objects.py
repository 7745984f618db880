"""`FILE.py:OBJECT`: what a user names on the command line, loaded; the one way to a user's code.

An object of a running Python, such as a notebook's, gets a name of the form `python:NAME`.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from warploom.errors import InputError, WarploomError

T = TypeVar("T")
_PACKAGE = str(Path(__file__).parent)
# (path, time of its last change, bytes) -> what the file left when it was run
_modules: dict[tuple[Path, int, int], ModuleType] = {}
_held: dict[str, object] = {}
EXTRAS = ("torch", "triton")  # packages of users' files that an extra of the same name brings
PYTHON = "python:"  # begins the name of an object that this process holds


def hold(found: object, name: str) -> str:
    """A name by which `load_object` finds an object in this process, and in no other one; the last
    object held under a name has it."""
    text = PYTHON + name.removeprefix(PYTHON)
    _held[text] = found
    return text


def is_held(text: str) -> bool:
    """Whether `text` names an object of this process, which no other process can load."""
    return text.startswith(PYTHON)


def names_object(text: str) -> bool:
    """Whether `text` has the form FILE.py:OBJECT, or is a name that `hold` gave."""
    path, colon, name = text.rpartition(":")
    return is_held(text) or (bool(colon and name) and path.endswith(".py"))


def load_object(text: str) -> Any:
    """The object of that name in that file, or the one held under it.

    The file is run when a process first asks for it, and again only once it has changed; its folder
    is importable meanwhile. Raises `InputError` for a form that is not FILE.py:OBJECT, a missing
    file or object, or a file that does not run. Errors of this package pass through: they say what
    is wrong in the file.
    """
    path_text, _, name = text.rpartition(":")
    path = Path(path_text)
    if is_held(text):
        if text not in _held:
            raise InputError(f"{text}: this process holds no object of that name")
        return _held[text]
    if not names_object(text):
        raise InputError(f"{text}: expected FILE.py:OBJECT")
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    module = _module(path)
    found = getattr(module, name, None)
    if found is None:
        near = get_close_matches(name, [key for key in vars(module) if key[0] != "_"], n=3)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise InputError(f"{path} has no object called {name!r}{hint}")
    return found


def defined(path: Path) -> str:
    """What FILE.py:OBJECT may name in a file that is there, in words: the first few functions and
    values of its own; "" for none."""
    text = path.read_text(errors="replace") if path.is_file() else ""
    found = re.findall(r"^(?:def ([a-zA-Z]\w*)|([a-zA-Z]\w*) *= *[^=])", text, re.MULTILINE)
    names = [f"{path}:{first or second}" for first, second in found]
    return f"; {path} has {', '.join(names[-4:])}" if names else ""


def _module(path: Path) -> ModuleType:
    state = path.stat()
    key = (path.resolve(), state.st_mtime_ns, state.st_size)
    if key not in _modules:
        name = f"warploom_user_{path.stem}"
        _modules[key] = called(str(path), lambda: run_file(path, name))
    return _modules[key]


def run_file(path: Path, name: str) -> ModuleType:
    """Run a file as the module of that name, with its folder importable meanwhile.

    Raises `InputError` for a file that is not Python's, and what the file raises.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses of the file look their module up
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def called(where: str, function: Callable[[], T]) -> T:
    """What code of the user's gives; an error inside becomes `InputError`, one line with its place.

    Errors of this package pass through: they say what is wrong.
    """
    try:
        return function()
    except WarploomError:
        raise
    except SystemExit as error:
        raise InputError(f"{where} does not run: it leaves Python with code {error.code}") from None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [one for one in frames if not one.filename.startswith((_PACKAGE, "<frozen"))]
        place = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
        text = f"{where} does not run: {place}{type(error).__name__}: {error}{_hint(error)}"
        raise InputError(text) from error


def _hint(error: Exception) -> str:
    """What installs a package that is missing; what may have been meant by an attribute that is
    none: `sum_along` by `row_sum`, which shares a word with it, `silu` by `sillu`."""
    if isinstance(error, ImportError) and error.name in EXTRAS:
        return f"; install it with: pip install 'warploom[{error.name}]'"
    if not isinstance(error, AttributeError) or error.obj is None:
        return ""
    names, asked = dir(error.obj), str(error.name)
    near = [name for name in names if set(name.split("_")) & set(asked.split("_")) - {""}]
    near = near or get_close_matches(asked, names, n=1)
    return f"; nearest: {near[0]}" if near else ""
