"""What waves of tasks ask L2 for, and what of it is there no more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]
Asked = tuple[Numbers, Numbers, Numbers]


def largest(keys: Numbers, sizes: Numbers, wave: int) -> Asked:
    """(wave, key, largest of its sizes there) of tasks that run so many at a time, wave by wave and
    in the order of the keys' first places."""
    waves = np.arange(len(keys)) // wave
    span = 1 + int(keys.max(initial=0))
    found, first, place = np.unique(waves * span + keys, return_index=True, return_inverse=True)
    most = np.zeros(len(found))
    np.maximum.at(most, place, sizes)
    order = np.argsort(first)
    return waves[first[order]], found[order] % span, most[order]


def once(asked: Asked) -> Numbers:
    """Of every key the largest of its sizes."""
    _, keys, sizes = asked
    _, place = np.unique(keys, return_inverse=True)
    most = np.zeros(place.max(initial=-1) + 1)
    np.maximum.at(most, place, sizes)
    return most


def missed(asked: Sequence[Asked], cache: float) -> float:
    """Bytes that waves of tasks do not find in a cache that forgets what was longest not asked
    for, after each wave."""
    waves = np.concatenate([one for one, _, _ in asked])
    order = np.argsort(waves, kind="stable")
    keys = np.concatenate([key * len(asked) + number for number, (_, key, _) in enumerate(asked)])
    sizes = np.concatenate([size for _, _, size in asked])
    ends = np.diff(waves[order], append=-1) != 0
    kept: OrderedDict[int, float] = OrderedDict()
    missed = held = 0.0
    for key, most, end in zip(
        keys[order].tolist(), sizes[order].tolist(), ends.tolist(), strict=True
    ):
        old = kept.pop(key, 0.0)
        kept[key] = most if most > old else old
        if most > old:
            missed += most - old
            held += most - old
        while end and held > cache and kept:
            held -= kept.popitem(last=False)[1]
    return missed
