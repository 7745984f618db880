"""Where in a line of L2 the rows of a tile begin: elsewhere than at its first byte, copies take
longer and more energy (`load.per_kib_sector` and its neighbours, `energy.copy_sector` and its)."""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

LINE, SECTOR, UNIT = 128, 32, 16  # bytes; a copy begins at a multiple of the last
# Ends of the names of costs: at a line, at a sector that begins none, 16 B beside a line, inside of
# another sector.
PLACES = ("", "_sector", "_beside", "_inside")


def shares(pitch: int, first: NDArray[Any]) -> NDArray[Any]:
    """[tiles, places]: shares of rows that begin there, of tiles whose first row begins at `first`
    and rows `pitch` bytes apart."""
    step = gcd(pitch, LINE)
    rows = (first[:, None] + step * np.arange(LINE // step)) % LINE
    line, sector = rows == 0, rows % SECTOR == 0
    beside = (rows == UNIT) | (rows == LINE - UNIT)
    each = (line, sector & ~line, beside, ~sector & ~beside)
    return np.stack([one.mean(axis=1) for one in each], axis=1)
