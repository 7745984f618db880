"""`python -m warploom.flows.pack FOLDER`: the project of the wheel `warploom-kernels`.

It runs the calls of `integrations/exports/defaults.toml` on tensors without memory, builds what
they would launch, and writes cubins and index to `FOLDER/warploom_kernels`. What was compiled
before is in the cache: a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

from warploom import __version__
from warploom.codegen.compile.build import Built
from warploom.files import write_bytes_atomically, write_text_atomically
from warploom.integrations import torch_decode, torch_op, torch_rows
from warploom.integrations.exports import pack
from warploom.integrations.torch_program import RUNS, Collected, collecting, torch_module
from warploom.kernels.tuned.table import remember
from warploom.kernels.tuned.variant import Variant
from warploom.tables import read_toml
from warploom.tile import dtype

DEFAULTS: Final = Path(pack.__file__).with_name("defaults.toml")
ABSENT: Final = "absent"
OPERATORS: Final = (torch_decode, torch_op, torch_rows)  # which importing registers
PROJECT: Final = f"""[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "warploom-kernels"
version = "{__version__}"
description = "Machine code of warploom's default kernels for sm_90a: no compiler at the first call"
requires-python = ">=3.11"
license = "Apache-2.0"
dependencies = ["warploom=={__version__}"]

[tool.setuptools]
packages = ["{pack.PACKAGE}"]

[tool.setuptools.package-data]
{pack.PACKAGE} = ["*.cubin", "*.json"]
"""


class Choices:
    """What tuned tables choose while a pack is made."""

    def __init__(self) -> None:
        self.made: dict[str, Mapping[str, Any]] = {}

    def recall(self, table: str, config: Any, sizes: Any) -> None:
        """Nothing was chosen before."""

    def note(self, table: str, config: Any, sizes: Any, chosen: Variant) -> None:
        """Keep a choice, as a table has it."""
        point = {**chosen.point.to_json(), "settings": dict(chosen.point.settings)}
        self.made[pack.hashed((table, config, sizes))] = {chosen.name: point}


def calls(path: Path = DEFAULTS) -> Iterator[tuple[str, list[Any]]]:
    """(name of the operator, its arguments) of each call of a list; tensors are on "meta"."""
    for row in read_toml(path)["call"]:
        sizes: Mapping[str, Sequence[int]] = row["sizes"]
        for extents in product(*sizes.values()):
            known = dict(zip(sizes, extents, strict=True))
            tensors = [_tensor(text, known) for text in row["tensors"]]
            for options in product(*row.get("options", ())):
                given = [None if one == ABSENT else one for one in options]
                yield f"warploom::{row['operator']}", [*tensors, *given]


def _tensor(text: str, sizes: Mapping[str, int]) -> Any:
    if text == ABSENT:
        return None
    torch = torch_module()
    kind, *dims = text.split()
    shape = [sizes.get(dim) or int(dim) for dim in dims if dim != "T"]
    made = torch.empty(shape, dtype=getattr(torch, dtype(kind).library), device="meta")
    return made.transpose(-1, -2) if dims[-1] == "T" else made


def write_pack(folder: Path, path: Path = DEFAULTS) -> int:
    """Write the project of a list of calls; gives the bytes of its cubins."""
    asked, choices, began = list(calls(path)), Choices(), time.monotonic()
    remember(lambda: choices)
    try:
        with collecting() as found:
            for number, (name, args) in enumerate(asked, 1):
                RUNS[name](*args)
                passed = time.monotonic() - began
                left = passed / number * (len(asked) - number)
                _say(f"{number}/{len(asked)} calls, {len(found)} kernels, {left:.0f} s left")
    finally:
        remember(pack.installed)
    inside = folder / pack.PACKAGE
    for old in inside.glob("*.cubin"):
        old.unlink()
    kernels, size = _written(inside, found)
    write_text_atomically(inside / pack.INDEX, pack.index(kernels, choices.made))
    about = '"""Machine code of warploom\'s default kernels; warploom reads it by itself."""\n'
    write_text_atomically(inside / "__init__.py", about)
    write_text_atomically(folder / "pyproject.toml", PROJECT)
    return size


def _written(folder: Path, found: Collected) -> tuple[dict[str, Any], int]:
    """The kernels of an index, whose cubins are written, and the bytes of those."""
    kernels: dict[str, Any] = {}
    cubins: dict[str, bytes] = {}
    for key, built in found.items():
        digest = hashlib.sha256(built.cubin).hexdigest()
        file = f"{built.source.name}-{digest[:16]}.cubin"
        cubins[file] = built.cubin
        kernels[pack.hashed(key)] = {"cubin": file, "sha256": digest, "interface": _about(built)}
    for file, cubin in cubins.items():
        write_bytes_atomically(folder / file, cubin)
    return kernels, sum(map(len, cubins.values()))


def _about(built: Built) -> dict[str, Any]:
    own = built.interface
    return {**own.to_json(), "arch": own.arch, "registers": own.registers}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Write the project to the folder of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    size = write_pack(parser.parse_args().folder)
    _say(f"{size:,} B of cubins")


if __name__ == "__main__":
    main()
