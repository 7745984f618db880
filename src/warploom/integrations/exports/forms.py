"""The forms that kernels are shipped in: each a folder made of `templates/` and the manifest.

python   launch.py (ctypes), cubins
torch    the same as a package whose functions are operators of torch
hf-kernels  that package as a build of Hugging Face's `kernels`
c        launch.c with the cubins within kernels.c, CMakeLists.txt
tvm-ffi  those compiled into one shared library of apache-tvm-ffi
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import keyword
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from warploom.errors import CheckFailed, InputError, ToolMissing
from warploom.files import write_bytes_atomically, write_text_atomically
from warploom.integrations.exports.manifest import FILE, Shipped, as_text, manifest_of

TEMPLATES: Final = Path(__file__).with_name("templates")
CTYPES: Final = {"int32": "int32_t", "fp32": "float"}
POSTFIX: Final = {"//": "/", "min": "<", "max": ">"}
MOST_PARAMETERS, MOST_ARRAYS = 64, 16  # of a kernel: what the launcher in C has room for
BUILD: Final = "build/torch-cuda"
HUB_NAME: Final = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
CXX_FLAGS: Final = ("-O2", "-fPIC", "-fvisibility=hidden")


def write(form: str, shipped: Sequence[Shipped], folder: Path) -> list[Path]:
    """Write a form of kernels to a folder and give its files.

    Raises `InputError` for names that cannot be those of functions, `ToolMissing` where a form
    needs what is not here.
    """
    for one in shipped:
        if not one.name.isidentifier() or keyword.iskeyword(one.name):
            raise InputError(f"kernel {one.name!r}: expected a name of letters, digits and _")
        if len(one.built.source.parameters) > MOST_PARAMETERS:
            raise InputError(f"{one.name} has over {MOST_PARAMETERS} parameters")
        if len(one.built.source.arrays) > MOST_ARRAYS:
            raise InputError(f"{one.name} has over {MOST_ARRAYS} arrays")
    manifest = manifest_of(list(shipped))
    title = re.sub(r"\W", "_", folder.absolute().name)
    cubins = {f"{one.name}.cubin": one.built.cubin for one in shipped}
    files = FORMS[form](title, manifest, cubins)
    archs = sorted({one.built.arch for one in shipped})
    files["README.md"] = _rendered("README.md.j2", title, manifest, form=form, archs=archs).encode()
    if form != "hf-kernels":  # which has it beside the cubins
        files[FILE] = as_text(manifest).encode()
    if form == "torch" and title != folder.absolute().name:
        raise InputError(f"-o {folder}: the folder is a package: expected a name like {title}")
    # The loader refuses a build with files that its metadata does not name.
    present = [p for p in (folder / BUILD).rglob("*") if p.is_file() and p.suffix != ".pyc"]
    if other := [p for p in present if p.relative_to(folder).as_posix() not in files]:
        raise InputError(f"{other[0]} is not of this export: remove it or choose another folder")
    for name, data in files.items():
        write_bytes_atomically(folder / name, data)
    return [folder / name for name in files]


def _template(name: str) -> bytes:
    return (TEMPLATES / name).read_bytes()


def _rendered(template: str, title: str, manifest: Mapping[str, Any], **more: Any) -> str:
    # What is rendered is C, CMake and Markdown.
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    given = {"title": title, "types": manifest["types"], "kernels": manifest["kernels"], **more}
    return environment.get_template(template).render(ctype=CTYPES, **given)


def _python(title: str, manifest: Mapping[str, Any], cubins: dict[str, bytes]) -> dict[str, bytes]:
    return {**cubins, "launch.py": _template("launch.py.txt")}


def _torch(title: str, manifest: Mapping[str, Any], cubins: dict[str, bytes]) -> dict[str, bytes]:
    return {**_python(title, manifest, cubins), "__init__.py": _template("ops.py.txt")}


def _hub(title: str, manifest: Mapping[str, Any], cubins: dict[str, bytes]) -> dict[str, bytes]:
    """A noarch build of Hugging Face's `kernels`: Python, with the cubins as data."""
    name = title.replace("_", "-").lower()
    if not HUB_NAME.fullmatch(name):
        raise InputError(
            f"-o {title}: the folder's name is that of the kernel: expected letters, digits and -"
        )
    files = _torch(title, manifest, cubins) | {FILE: as_text(manifest).encode()}
    digests = {path: hashlib.sha256(data).digest() for path, data in sorted(files.items())}
    whole = hashlib.sha256(b"".join(digests.values())).hexdigest()
    archs = {one["launch"]["arch"].removeprefix("sm_") for one in manifest["kernels"].values()}
    about: dict[str, Any] = {
        "id": f"_{title}_cuda_{whole[:12]}",
        "name": name,
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {
            "type": "cuda",
            "archs": sorted(re.sub(r"(\d[a-z]?)$", r".\1", arch) for arch in archs),
        },
        "digest": {
            "algorithm": "sha256",
            "files": {path: base64.b64encode(one).decode() for path, one in digests.items()},
        },
    }
    files["metadata.json"] = (json.dumps(about, indent=2) + "\n").encode()
    return {f"{BUILD}/{path}": data for path, data in files.items()}


def _c(title: str, manifest: Mapping[str, Any], cubins: dict[str, bytes]) -> dict[str, bytes]:
    kernels = {
        name: {
            **about,
            "bytes": _byte_lines(cubins[about["cubin"]]),
            "dims": list(dict.fromkeys(d for a in about["launch"]["arrays"] for d in a["dims"])),
            "arch": about["launch"]["arch"].removeprefix("sm_").rstrip("abcdef"),
            "exact": not about["launch"]["arch"][-1].isdigit(),
        }
        for name, about in manifest["kernels"].items()
    }
    found = {**manifest, "kernels": kernels}
    text = _rendered("kernels.c.j2", title, found, postfix=postfix, index=_index)
    return {
        "launch.h": _template("launch.h"),
        "launch.c": _template("launch.c"),
        "kernels.h": _rendered("kernels.h.j2", title, found).encode(),
        "kernels.c": text.encode(),
        "CMakeLists.txt": _rendered("CMakeLists.txt.j2", title, found).encode(),
    }


def _byte_lines(data: bytes) -> str:
    rows = (data[at : at + 32] for at in range(0, len(data), 32))
    return "\n".join(",".join(map(str, row)) + "," for row in rows)


def postfix(expression: Any, dims: Sequence[str]) -> list[tuple[str, int]]:
    """An index expression of a manifest as the launcher in C reads it."""
    if isinstance(expression, int):
        return [("c", expression)]
    if isinstance(expression, str):
        return [("d", dims.index(expression))]
    op, left, right = cast("tuple[str, Any, Any]", expression)
    return [*postfix(left, dims), *postfix(right, dims), (POSTFIX.get(op, op), 0)]


def _index(kernel: Mapping[str, Any], parameter: Mapping[str, Any]) -> int:
    """The place of the array, dimension or scalar that a parameter stands for."""
    if parameter["kind"] == "counter":
        return 0
    if parameter["kind"] == "dim":
        return kernel["dims"].index(parameter["name"])
    where, name = ("scalars", "name") if parameter["kind"] == "scalar" else ("arrays", "array")
    return [one["name"] for one in kernel["launch"][where]].index(parameter[name])


def tvm_ffi_tools() -> tuple[str, Path]:
    """The C++ compiler and the folder of apache-tvm-ffi; raises `ToolMissing` without them."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise ToolMissing(
            "export --to tvm-ffi compiles a library and finds no C++ compiler (c++, g++, clang++) "
            "on PATH; install one, or export --to c and compile that elsewhere"
        )
    found = importlib.util.find_spec("tvm_ffi")
    if found is None or found.origin is None:
        raise ToolMissing("export --to tvm-ffi needs its headers: pip install 'warploom[export]'")
    return compiler, Path(found.origin).parent


def _tvm_ffi(title: str, manifest: Mapping[str, Any], cubins: dict[str, bytes]) -> dict[str, bytes]:
    """One shared library, compiled here: it runs where apache-tvm-ffi is."""
    compiler, package = tvm_ffi_tools()
    with tempfile.TemporaryDirectory() as text:
        folder, library = Path(text), f"{title}.so"
        for name, data in _c(title, manifest, cubins).items():
            (folder / name).write_bytes(data)
        write_text_atomically(folder / "ffi.cc", _rendered("tvm_ffi.cc.j2", title, manifest))
        c = (compiler, "-x", "c", "-std=gnu99", *CXX_FLAGS, "-c")
        cxx = (compiler, "-std=c++17", *CXX_FLAGS, f"-I{package / 'include'}", "-c")
        for command in (
            (*c, "launch.c"),
            (*c, "kernels.c"),
            (*cxx, "ffi.cc"),
            (compiler, "-shared", "-o", library, "ffi.o", "launch.o", "kernels.o",
             f"-L{package / 'lib'}", "-ltvm_ffi", "-ldl", "-lpthread"),
        ):  # fmt: skip
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = [one for one in done.stderr.splitlines() if "error" in one] or [done.stderr]
                raise CheckFailed(f"{compiler} refused {command[-1]}: {lines[0]}")
        return {library: (folder / library).read_bytes()}


Form = Callable[[str, Mapping[str, Any], dict[str, bytes]], dict[str, bytes]]
FORMS: Final[Mapping[str, Form]] = {
    "tvm-ffi": _tvm_ffi,
    "hf-kernels": _hub,
    "c": _c,
    "python": _python,
    "torch": _torch,
}
