"""A head under decays of its own for every channel of the keys: GLA (arXiv 2312.06635)."""

from __future__ import annotations

from warploom.derive.lower.channels import MIDDLE, Channels, first_row
from warploom.kernels.recurrent.task import CHUNK, Task, rows
from warploom.tile import FP32, INT32, Tile, coordinate, load, loop, where


class ChannelTask(Task):
    """Traces what one task does."""

    def run(self) -> None:
        """All of it."""
        state = self.state()
        channels = Channels(CHUNK, ("e", self.config.columns))
        for i in loop(self.chunks):
            # What has one slot comes last: copies are started in this order.
            g = load(self.arrays["g"], self.batch, rows(i, "w"), self.head, self.depth)
            q, k, v = self.keys("q", i, "m"), self.keys("k", i, "m"), self.value(i, "m")
            self.keep(i, state)
            out = channels.step(state, q, k, v, g)
            out *= self.scale
            self.put(i, out)
        self.end(state)


def seeing(past: str, now: str, half: int) -> Tile:
    """Where row `now` sees row `past`, [past, now], in blocks of twice `half` rows, from the later
    half the earlier one; 0: in the blocks that are taken whole."""
    n, m = coordinate(past, CHUNK), coordinate(now, CHUNK)
    row = n.cast(FP32)
    if half:
        later = first_row(row, half) + float(half)
        later = where(row < later, later, 2.0 * CHUNK).cast(INT32)
        return (later <= m) & (later + half > m)
    last = (first_row(row, MIDDLE) + 2.0 * MIDDLE).cast(INT32)
    return (n <= m) & (last > m)


def seen(now: str, past: str, half: int) -> Tile:
    """The same as [now, past]. What a row is compared with comes from the rows of the tile, of
    which a thread has few."""
    m, n = coordinate(now, CHUNK), coordinate(past, CHUNK)
    row = m.cast(FP32)
    first = first_row(row, half or MIDDLE)
    if half:
        first = where(row >= first + float(half), first, 2.0 * CHUNK).cast(INT32)
        return (first <= n) & (first + half > n)
    return (m >= n) & (first.cast(INT32) <= n)
