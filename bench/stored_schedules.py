"""Many legal schedules of one kernel in one small file: made by random walks, stored as orders.

A schedule is stored as the order of the original's instructions and their control fields, so that
a measured time can be set beside any later version of a model: the code comes back word for word.
"""

from __future__ import annotations

import io
import json
import lzma
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from warploom.errors import InputError
from warploom.files import write_bytes_atomically
from warploom.sass.decode import nvinfo
from warploom.sass.decode.control import CONTROL_MASK, CONTROL_SHIFT
from warploom.sass.decode.cubin import WORD_BYTES, Cubin, parse
from warploom.search.game import Candidate, Game

SCHEMA: Final = 1
LONGEST_WALK: Final = 400
FRUITLESS: Final = 400

Orders = npt.NDArray[np.uint16]
Fields = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class ScheduleSet:
    """Schedules of one kernel.

    `orders` [n, m]: which original instruction stands at each position; `fields` [n, m]: its
    control field (21 bits); `steps` [n]: how many legal actions the walk took. `about` is JSON
    data that travels along (the launch, the aliasing mode, the seed).
    """

    kernel: str
    cubin: bytes
    orders: Orders
    fields: Fields
    steps: npt.NDArray[np.int64]
    about: dict[str, Any]

    def __len__(self) -> int:
        return len(self.orders)

    def words(self, number: int) -> npt.NDArray[np.uint64]:
        """The instruction words [m, 2] (low, high) of one schedule."""
        base = _words(parse(self.cubin, self.kernel), self.kernel)
        return _placed(base, self.orders[number], self.fields[number])

    def images(self) -> Iterator[bytes]:
        """Every schedule as a whole cubin."""
        original = parse(self.cubin, self.kernel)
        code = original.kernel(self.kernel)
        base = _words(original, self.kernel)
        info = original.section_bytes(code.info) if code.info else b""
        for order, field in zip(self.orders, self.fields, strict=True):
            data = bytearray(self.cubin)
            text = _placed(base, order, field).astype("<u8").tobytes()
            data[code.text.offset : code.text.offset + code.text.size] = text
            if code.info is not None:
                place = np.empty(len(order), np.int64)
                place[order] = np.arange(len(order))
                moved = _follow(info, place)
                data[code.info.offset : code.info.offset + code.info.size] = moved
            yield bytes(data)

    def save(self, path: Path) -> None:
        """Write the set, compressed; what is as in the original takes next to no room."""
        identity = np.arange(self.orders.shape[1], dtype=np.int32)
        usual = _control(_words(parse(self.cubin, self.kernel), self.kernel)[:, 1])
        buffer = io.BytesIO()
        np.savez(
            buffer,
            cubin=np.frombuffer(self.cubin, np.uint8),
            orders=(self.orders.astype(np.int32) - identity).astype(np.int16),
            fields=self.fields ^ usual[self.orders],
            steps=self.steps,
            about=np.array(
                json.dumps({"schema": SCHEMA, "kernel": self.kernel, "about": self.about})
            ),
        )
        write_bytes_atomically(path, lzma.compress(buffer.getvalue(), preset=6))

    @classmethod
    def load(cls, path: Path) -> ScheduleSet:
        """Read a set; raises `InputError` for a file that holds none."""
        try:
            data = np.load(io.BytesIO(lzma.decompress(path.read_bytes())))
            head = json.loads(str(data["about"]))
            if head["schema"] != SCHEMA:
                raise ValueError(f"schema {head['schema']}, expected {SCHEMA}")
            cubin = data["cubin"].tobytes()
            kernel = str(head["kernel"])
            deltas = data["orders"].astype(np.int32)
            orders = (deltas + np.arange(deltas.shape[1], dtype=np.int32)).astype(np.uint16)
            usual = _control(_words(parse(cubin, kernel), kernel)[:, 1])
            fields = data["fields"] ^ usual[orders]
            return cls(kernel, cubin, orders, fields, data["steps"], dict(head["about"]))
        except (OSError, lzma.LZMAError, ValueError, KeyError, EOFError) as error:
            raise InputError(f"{path}: not a file of schedules ({error})") from None


def random_schedules(
    game: Game, count: int, seed: int, about: dict[str, Any], longest: int = LONGEST_WALK
) -> ScheduleSet:
    """`count` different legal schedules, each a random walk of its own from the original.

    The lengths of the walks are spread evenly over their logarithm, from 1 to `longest` steps, so
    that the set holds schedules near the original and far from it. Raises `InputError` when the
    game offers too few moves for so many different schedules.
    """
    rng = random.Random(f"schedules/{seed}")
    start = game.snapshot()
    seen: set[bytes] = set()
    orders: list[Orders] = []
    fields: list[Fields] = []
    steps: list[int] = []
    fruitless = 0
    while len(orders) < count:
        game.restore(start)
        aim = round(math.exp(rng.uniform(0.0, math.log(longest))))
        taken = _walk(game, rng, aim)
        order, field = snapshot_arrays(game)
        key = order.tobytes() + field.tobytes()
        if key in seen or not taken:
            fruitless += 1
            if fruitless > FRUITLESS:
                raise InputError(
                    f"{game.kernel.name}: only {len(orders)} different schedules found, "
                    f"{count} asked for"
                )
            continue
        seen.add(key)
        orders.append(order)
        fields.append(field)
        steps.append(taken)
    game.restore(start)
    return ScheduleSet(
        game.kernel.name,
        game.original.data,
        np.array(orders, np.uint16),
        np.array(fields, np.uint32),
        np.array(steps, np.int64),
        about,
    )


def _walk(game: Game, rng: random.Random, steps: int) -> int:
    """Take up to `steps` legal random actions; returns how many were found."""
    taken = fruitless = 0
    while taken < steps and fruitless < FRUITLESS:
        action = game.propose(rng)
        if action is not None and isinstance(game.apply(action), Candidate):
            taken += 1
        else:
            fruitless += 1
    return taken


def snapshot_arrays(game: Game) -> tuple[Orders, Fields]:
    """The game's state as arrays: the order [m] and the control field at each position [m]."""
    order = np.concatenate([np.array(state.order, np.uint16) for state in game.editor.states])
    high = game.editor.words()[:, 1]
    return order, _control(high)


def _words(cubin: Cubin, kernel: str) -> npt.NDArray[np.uint64]:
    section = cubin.kernel(kernel).text
    flat = np.frombuffer(cubin.data, "<u8", section.size // 8, section.offset)
    return flat.reshape(-1, 2).astype(np.uint64)


def _control(high: npt.NDArray[np.uint64]) -> Fields:
    return ((high & np.uint64(CONTROL_MASK)) >> np.uint64(CONTROL_SHIFT)).astype(np.uint32)


def _placed(
    base: npt.NDArray[np.uint64], order: Sequence[int] | Orders, field: Fields
) -> npt.NDArray[np.uint64]:
    words = base[np.asarray(order, np.int64)].copy()
    keep = np.uint64(~CONTROL_MASK & (1 << 64) - 1)
    words[:, 1] = words[:, 1] & keep | field.astype(np.uint64) << np.uint64(CONTROL_SHIFT)
    return words


def _follow(info: bytes, place: npt.NDArray[np.int64]) -> bytes:
    """The offset tables with every instruction's new place."""

    def moved(offset: int) -> int:
        index, rest = divmod(offset, WORD_BYTES)
        return offset if rest or index >= len(place) else int(place[index]) * WORD_BYTES

    return nvinfo.rewrite(info, moved)
