"""Instruction words and their control fields as arrays, for checks over a whole kernel at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from warploom.sass.decode.control import CONTROL_SHIFT
from warploom.sass.decode.cubin import Cubin

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class ControlFields:
    """Control fields of every word, one array each."""

    stall: Ints
    stay: Ints
    write_sb: Ints
    read_sb: Ints
    wait: Ints
    reuse: Ints


def control_fields(high: Words) -> ControlFields:
    """The control fields of an array of high words."""
    control = (high >> np.uint64(CONTROL_SHIFT)).astype(np.int64)
    return ControlFields(
        stall=control & 0xF,
        stay=control >> 4 & 1,
        write_sb=control >> 5 & 7,
        read_sb=control >> 8 & 7,
        wait=control >> 11 & 0x3F,
        reuse=control >> 17 & 0xF,
    )


def instruction_words(cubin: Cubin, kernel: str) -> Words:
    """The instruction words of a kernel, [n, 2] (low, high), straight from the file's bytes."""
    section = cubin.kernels[kernel].text
    return np.frombuffer(cubin.data, "<u8", section.size // 8, section.offset).reshape(-1, 2)
