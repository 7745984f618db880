"""Arrays in fragments: from the order of their indices to that in memory, and back.

The interpreter, references and checks have every array in the order of its indices. A kernel has an
array in fragments (`Array`) as registers hold it, so whoever runs one puts such arrays in place
before, and in order after: a kernel that takes them for arrays in rows is then wrong on every
machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.errors import InputError
from warploom.tile.ir import Array, Program

Values = dict[str, NDArray[Any]]
# Of 64 rows: warp, upper or lower half of its 16, row of 8; of 8 columns: pair, and which of it.
ROWS, COLUMNS = (4, 2, 8), (4, 2)
PLACES = (2, 4, 2)  # of 16 elements of a vector: upper or lower half, pair, and which of it


def in_memory(program: Program, values: Mapping[str, NDArray[Any]]) -> Values:
    """The arrays of a program as its kernels have them, from arrays in order."""
    return {name: _moved(program, name, x, False) for name, x in values.items()}


def in_order(program: Program, values: Mapping[str, NDArray[Any]]) -> Values:
    """What `in_memory` gives, in order again."""
    return {name: _moved(program, name, x, True) for name, x in values.items()}


def _moved(program: Program, name: str, values: NDArray[Any], back: bool) -> NDArray[Any]:
    array = next((one for one in program.arrays if one.name == name), None)
    if array is None or not array.fragments:
        return values
    if _has_vectors(program, array):
        lead, (parts, order) = values.ndim - 1, _vector(array, values.shape)
    else:
        lead, (parts, order) = values.ndim - 2, _tile(array, values.shape)
    kept, shape = range(lead), values.shape[:lead]
    if back:
        parts, order = [parts[axis] for axis in order], [int(axis) for axis in np.argsort(order)]
    split = values.reshape(*shape, *parts).transpose(*kept, *(lead + axis for axis in order))
    return np.ascontiguousarray(split).reshape(values.shape)


def _has_vectors(program: Program, array: Array) -> bool:
    """Whether tasks take vectors of its last dimension; raises `InputError` where tiles, too."""
    ops = [op for op in program.ops() if op.array is not None and op.array.name == array.name]
    taken = {len(op.spans) == 1 or op.spans[-2].size is None for op in ops}
    if len(taken) > 1:
        raise InputError(f"{array}: vectors and tiles lie in different orders, expected either")
    return True in taken


def _tile(array: Array, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    rows, columns = shape[-2:]
    high, wide = int(np.prod(ROWS)), int(np.prod(COLUMNS))
    _whole(array, rows, high)
    _whole(array, columns, wide)
    # Of 64 rows after 64 rows, 8 columns after 8 columns: a warp's thread is row and pair; it has
    # the pair of its upper row, then of the lower.
    return [rows // high, *ROWS, columns // wide, *COLUMNS], [0, 4, 1, 3, 5, 2, 6]


def _vector(array: Array, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    length = int(np.prod(PLACES))
    _whole(array, shape[-1], length)
    return [shape[-1] // length, *PLACES], [0, 2, 1, 3]


def _whole(array: Array, extent: int, part: int) -> None:
    if extent % part:
        raise InputError(f"{array}: a dimension of {extent}, expected a multiple of {part}")
