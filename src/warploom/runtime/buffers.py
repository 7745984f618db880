"""The memory a launch runs in: its buffers in one arena, guard bands between, outputs poisoned.

Three arenas of one layout make judging cheap. *pristine* holds the inputs, NaN in every output and
the guard bytes; *expected* is the same after the original kernel ran on it; *work* is where a
candidate runs, restored from pristine by one copy. One comparison of work with expected then covers
outputs, inputs that must not change and guard bands alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warploom.errors import InputError
from warploom.runtime.driver import CudaDevice
from warploom.runtime.helpers import NOWHERE, Difference, Helpers
from warploom.runtime.launch import Buffer, LaunchSpec

GUARD_BYTES = 4096
GUARD_VALUE = 0xA5
POISON = 0xFF  # all ones is NaN in every float type here, and -1 in the signed integers
ALIGNMENT = 512
WORD = 4


@dataclass(frozen=True)
class Region:
    """Where a buffer lies in the arena, in bytes."""

    buffer: Buffer
    offset: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.buffer.nbytes


@dataclass(frozen=True)
class Layout:
    """The arena of a launch: every buffer 512-byte aligned, a guard band on both sides of each."""

    regions: tuple[Region, ...]
    nbytes: int

    @classmethod
    def of(cls, spec: LaunchSpec) -> Layout:
        """The layout of a spec's buffers, in their order."""
        regions: list[Region] = []
        cursor = GUARD_BYTES
        for buffer in spec.buffers:
            regions.append(Region(buffer, cursor))
            cursor = _round_up(cursor + buffer.nbytes, ALIGNMENT) + GUARD_BYTES
        return cls(tuple(regions), _round_up(cursor, ALIGNMENT))

    def region(self, name: str) -> Region:
        """The region of the buffer called `name`."""
        for region in self.regions:
            if region.buffer.name == name:
                return region
        known = ", ".join(region.buffer.name for region in self.regions)
        raise InputError(f"no buffer {name!r} in this launch, expected one of {known}")

    def guards(self) -> list[tuple[int, int]]:
        """The guard bands as (offset, bytes)."""
        bands: list[tuple[int, int]] = []
        cursor = 0
        for region in self.regions:
            bands.append((cursor, region.offset - cursor))
            cursor = region.end
        return [*bands, (cursor, self.nbytes - cursor)]

    def describe(self, word: int) -> str:
        """What the 32-bit word number `word` of the arena is, for people."""
        at = word * WORD
        previous = "the start"
        for region in self.regions:
            name, role = region.buffer.name, region.buffer.role
            if at < region.offset:
                return f"the guard band after {previous}"
            if at < region.end:
                size = region.buffer.nbytes // region.buffer.count
                element = (at - region.offset) // size
                kind = "input" if role == "in" else "output"
                return f"{kind} {name}, element {element} of {list(region.buffer.shape)}"
            previous = name
        return f"the guard band after {previous}"


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


class Workspace:
    """The three arenas of a launch on one device, and the scratch that flushes the L2 cache.

    Raises `CudaError` when device memory does not suffice.
    """

    def __init__(self, device: CudaDevice, helpers: Helpers, spec: LaunchSpec) -> None:
        self.device = device
        self.helpers = helpers
        self.layout = Layout.of(spec)
        self.flush_bytes = _round_up(2 * device.info.l2_bytes + (1 << 20), ALIGNMENT)
        # One allocation, so that running out of memory leaves nothing behind.
        size = self.layout.nbytes
        self.pristine = device.allocate(3 * size + self.flush_bytes)
        self.expected = self.pristine + size
        self.work = self.expected + size
        self._flush = self.work + size
        device.memset(self.pristine, GUARD_VALUE, 3 * size)

    def close(self) -> None:
        """Give the memory back."""
        self.device.free(self.pristine)

    def addresses(self, arena: int) -> dict[str, int]:
        """Where each buffer lies when the launch runs in `arena`."""
        return {region.buffer.name: arena + region.offset for region in self.layout.regions}

    def fill(self, arena: int, seed: int, patterns: Sequence[str]) -> None:
        """Queue fresh inputs and poisoned outputs; guard bands are left alone."""
        for salt, region in enumerate(self.layout.regions):
            buffer, address = region.buffer, arena + region.offset
            if buffer.role == "out":
                self.device.memset(address, POISON, buffer.nbytes)
            elif buffer.zero:
                self.device.memset(address, 0, buffer.nbytes)
            else:
                self.helpers.fill(address, buffer, seed, salt, patterns)

    def restore(self) -> None:
        """Queue making the work arena pristine again, guard bands included."""
        self.device.copy(self.work, self.pristine, self.layout.nbytes)

    def compare(self) -> None:
        """Queue comparing the whole work arena with the expected one."""
        self.helpers.compare(self.work, self.expected, self.layout.nbytes)

    def difference(self) -> Difference | None:
        """What the comparisons since the last reset found; None when nothing differed."""
        found = self.helpers.result()
        return None if found.words == 0 else found

    def broken_guard(self, arena: int) -> str:
        """The first guard band of `arena` that was written, for people; empty when all hold."""
        for offset, nbytes in self.layout.guards():
            raw = self.device.download(arena + offset, nbytes)
            if raw.count(GUARD_VALUE) != nbytes:
                at = next(place for place, byte in enumerate(raw) if byte != GUARD_VALUE)
                return f"{self.layout.describe((offset + at) // WORD)}, byte {at}"
        return ""

    def flush_l2(self) -> None:
        """Queue writing more than twice the L2 cache, so that no line of ours is left in it."""
        self.device.memset(self._flush, 0x5A, self.flush_bytes)

    def read(self, arena: int, name: str) -> bytes:
        """The raw bytes of one buffer."""
        region = self.layout.region(name)
        return self.device.download(arena + region.offset, region.buffer.nbytes)


def describe_difference(layout: Layout, found: Difference) -> str:
    """A comparison's finding in one phrase."""
    where = layout.describe(found.first_word) if found.first_word != NOWHERE else "nowhere"
    return f"{found.words} words differ, first in {where}"
