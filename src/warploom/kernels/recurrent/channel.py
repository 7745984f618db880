"""A head under decays of its own for every channel of the keys: GLA (arXiv 2312.06635)."""

from __future__ import annotations

from warploom.derive.lower.channels import Channels
from warploom.kernels.recurrent.task import CHUNK, Task, rows
from warploom.tile import load, loop


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
