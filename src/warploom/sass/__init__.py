"""NVIDIA machine code (SASS): read it, understand it, edit it, prove an edit legal.

What other programs may import stands in `__all__`. A file that nvcc wrote (a cubin, an object, a
library, a fat binary) is loaded, a kernel decoded, its instructions walked:

>>> from warploom import sass
>>> cubin = sass.load("softmax.cubin")
>>> cubin.arch, list(cubin.kernels)
('sm_90a', ['softmax_kernel'])
>>> kernel = sass.decode_kernel(cubin)
>>> one = kernel.instructions[0]
>>> print(one, "|", one.control)
0x0000 LDC R1, c[0x0][0x28] | B------ W0 R-   S01
>>> one.control.stall, one.control.waits()
(1, ())

Control fields are tables of bits (`decode/control.py`); reading and writing are inverses:

>>> field = sass.Control.decode(0x000FCA0000000F00)
>>> field
Control(stall=5, stay=False, write_sb=7, read_sb=7, wait=0, reuse=0)
>>> hex(field.encode(0xF00))
'0xfca0000000f00'
>>> print(sass.Control(stall=2, stay=True, write_sb=0, read_sb=7, wait=0b11, reuse=0))
B01---- W0 R-   S02

A file with other control fields, or another order, is verified against the one that it came from. A
refusal has the rule, the instructions and what would make the edit legal:

>>> import dataclasses
>>> code = cubin.kernels[kernel.name]
>>> words, number = list(code.words), next(
...     item.index for item in kernel.instructions if item.control.wait)
>>> low, high = words[number]
>>> eager = dataclasses.replace(sass.Control.decode(high), wait=0)
>>> words[number] = (low, eager.encode(high))
>>> verdict = sass.verify(cubin, cubin.replace(code, words))
>>> verdict.legal
False
>>> print(verdict.findings[0].explained())
WAIT_BEFORE_EXIT: no wait for scoreboard 1 after 0x0010 S2R R6, SR_CTAID.X
  first   0x0010 S2R R6, SR_CTAID.X
  then    0x0050 ISETP.GT.AND P0, PT, R0, R7, PT
  legal   with a wait for scoreboard 1 on the second, or on an instruction between
>>> sass.verify(cubin, cubin).legal
True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warploom.sass.decode.container import cubins, load
    from warploom.sass.decode.control import Control
    from warploom.sass.decode.cubin import Cubin, parse
    from warploom.sass.decode.kernel import Instruction, Kernel
    from warploom.sass.decode.kernel import decode as decode_kernel
    from warploom.sass.decode.kernel import decode_all as decode_kernels
    from warploom.sass.flow.aliasing import AliasMode
    from warploom.sass.rules.verdict import Finding, Verdict
    from warploom.sass.rules.verify import Verifier, verify, verify_all

__all__ = [
    "AliasMode",
    "Control",
    "Cubin",
    "Finding",
    "Instruction",
    "Kernel",
    "Verdict",
    "Verifier",
    "cubins",
    "decode_kernel",
    "decode_kernels",
    "load",
    "parse",
    "verify",
    "verify_all",
]
_MODULES = {
    "decode.container": ("cubins", "load"),
    "decode.control": ("Control",),
    "decode.cubin": ("Cubin", "parse"),
    "decode.kernel": ("Instruction", "Kernel"),
    "flow.aliasing": ("AliasMode",),
    "rules.verdict": ("Finding", "Verdict"),
    "rules.verify": ("Verifier", "verify", "verify_all"),
}
_RENAMED = {"decode_kernel": "decode", "decode_kernels": "decode_all"}


def __getattr__(name: str) -> Any:
    """A name of `__all__`, loaded when it is first used."""
    if name in _RENAMED:
        return getattr(import_module("warploom.sass.decode.kernel"), _RENAMED[name])
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"warploom.sass.{module}"), name)
    raise AttributeError(f"module 'warploom.sass' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is offered."""
    return [*__all__]
