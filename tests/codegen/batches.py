"""One index of a dimension in two batches: the same elements of it beside other ones."""

from __future__ import annotations

import numpy as np

from warploom import tile as t


def other_batch(program, arrays, dim, index, random):
    """(arrays, place): index `index` of a dimension now stands at `place`, in another number of
    them, whose other indices hold values of some that there were, in another order."""
    sizes = {
        d: n for a in program.arrays for d, n in zip(a.dims, np.shape(arrays[a.name]), strict=True)
    }
    count = int(random.integers(1, sizes[dim] + 4))
    place = int(random.integers(count))
    order = random.integers(0, sizes[dim], count)
    order[place] = index
    found = dict(arrays)
    for array in program.arrays:
        if dim in array.dims:
            axis = array.dims.index(dim)
            found[array.name] = np.take(arrays[array.name], order, axis)
    return found, place


def resized(program, arrays, dim, random):
    """The arrays with a dimension that no result has of another size: longer, with other values at
    its end."""
    more = int(random.integers(1, 70))
    found = dict(arrays)
    for array in program.arrays:
        if dim in array.dims:
            axis = array.dims.index(dim)
            value = whole = np.asarray(arrays[array.name])
            if not value.shape[axis]:
                value = np.zeros((*value.shape[:axis], 1, *value.shape[axis + 1 :]), value.dtype)
            ends = np.take(value, random.integers(0, value.shape[axis], more), axis)
            found[array.name] = np.concatenate((whole, ends), axis)
    return found


def results(program):
    """The arrays that a program stores to, but conditions, of which none says that it was not."""
    stored = (op.array for op in program.ops() if op.array and op.dst is None)
    return {one.name: one for one in stored if one.dtype is not t.BOOL}


UNTOUCHED = 80.0  # in results before a run; exact in every element type


def changed(program, arrays, dim, random, run=t.interpret, scalars=None):
    """The results whose bits of one index of a dimension another batch changes; of a dimension that
    no result has, those that its size changes. Elements that a run does not write do not count."""
    stored = results(program)
    arrays = arrays | {name: np.full(np.shape(arrays[name]), UNTOUCHED) for name in stored}
    along = {name: one.dims.index(dim) for name, one in stored.items() if dim in one.dims}
    here = run(program, arrays, scalars)
    if not along:
        there = run(program, resized(program, arrays, dim, random), scalars)
        return {name for name in stored if differ(here[name], there[name])}
    name, axis = next(iter(along.items()))
    if not np.shape(arrays[name])[axis]:
        return set()
    index = int(random.integers(np.shape(arrays[name])[axis]))
    batch, place = other_batch(program, arrays, dim, index, random)
    there = run(program, batch, scalars)
    return {
        n
        for n, a in along.items()
        if differ(np.take(here[n], index, a), np.take(there[n], place, a))
    }


def differ(one, other):
    """Whether two results have different bits where both were written; all NaN are one."""
    one, other = (np.where(np.isnan(x), np.float32(np.nan), x) for x in (one, other))
    written = (one != UNTOUCHED) & (other != UNTOUCHED)
    return one[written].tobytes() != other[written].tobytes()
