"""Tuned tables: kernels recorded for a program, and which of them the sizes of its arrays get.

A table is the file that `warploom optimize NAME --record` writes: variants of a program, and for
each kind of configuration (`Table.kinds`)

    replays   what the model of a launch needs of each variant's machine code (`perf.replay`)
    rows      sizes with the microseconds of each variant, predicted and measured

and `model`, the version of the model that replays and predictions are of: those of another one are
refused. At sizes of a row the fastest of the variants measured there is chosen. At others every
variant has its predicted time (`perf.launch_time`), times its error where it was measured: measured
over predicted, over the median of the variants measured beside it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, cast

from warploom.autosched.points import Point
from warploom.errors import InputError
from warploom.kernels.tuned.variant import Sizes, Template, Variant
from warploom.perf.launch_time import MODEL, Launch, LaunchTime
from warploom.perf.replay import Ends, Prediction, Replay
from warploom.tables import read_toml

GPU = "h200"  # where the rows were measured
# Logarithms of sizes over which an error loses its weight. Of 1, 2, 4 and 8 this one lost least at
# sizes left out (`python -m bench.tuned`).
FADES = 4.0


@dataclass(frozen=True)
class Row:
    """Microseconds of variants at some sizes; `source` says where those measured come from."""

    sizes: Sizes
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    source: str = ""

    def error(self, name: str) -> float:
        """Measured over predicted, beside the other variants measured here."""
        ratios = {one: time / self.predicted[one] for one, time in self.measured.items()}
        return ratios[name] / median(ratios.values())

    def away(self, sizes: Sizes) -> float:
        """How many times as large sizes are, or as small, all factors added up as logarithms."""
        return sum(
            abs(math.log(_mean(size) / _mean(self.sizes[name]))) for name, size in sizes.items()
        )


def _mean(size: int | Sequence[int]) -> float:
    """Of lengths; at least 1, since a sum of nothing takes about as long as one of one."""
    return max(1.0, float(size) if isinstance(size, int) else sum(size) / len(size))


@dataclass(frozen=True)
class Kind:
    """What is known of the variants for one kind of configuration: that of these settings.

    `program` tells the form of the program that it was recorded for (`Table.program`).
    """

    settings: Mapping[str, str]
    replays: Mapping[str, Replay]
    rows: tuple[Row, ...]
    program: str = ""

    def error(self, name: str, sizes: Sizes) -> float:
        """What a variant's prediction is multiplied by: its error at the nearest sizes where it was
        measured, of which less counts the farther they are; 1 where it was never measured."""
        compared = (row for row in self.rows if name in row.measured and len(row.measured) > 1)
        rows = [(row.away(sizes), row.error(name)) for row in compared]
        away, error = min(rows, default=(0.0, 1.0))
        return error ** math.exp(-away / FADES)

    def measured(self, names: Sequence[str], sizes: Sizes) -> Mapping[str, float]:
        """The times of those that were measured at these sizes, in the last row that has any."""
        for row in (row for row in reversed(self.rows) if row.sizes == sizes):
            if found := {name: row.measured[name] for name in names if name in row.measured}:
                return found
        return {}


@dataclass(frozen=True)
class Table:
    """A tuned table.

    template  what its points choose from
    kinds     the names under which a configuration may have been recorded, the best first
    fallback  the variant of configurations that none of those recorded takes; "" for a table that
              may not have been written yet
    program   what tells the program of a configuration from other forms of it, where it may change
    more      variants beside those of the file
    """

    path: Path
    template: Template
    kinds: Callable[[Any], Sequence[str]]
    fallback: str = ""
    program: Callable[[Any], str] = lambda config: ""
    more: Mapping[str, Variant] = field(default_factory=dict[str, Variant])

    @cached_property
    def _data(self) -> dict[str, Any]:
        if not self.fallback and not self.path.exists():
            return {"model": MODEL, "variants": {}, "kinds": {}}
        return read_toml(self.path)

    @cached_property
    def variants(self) -> dict[str, Variant]:
        """By name."""
        own = {
            name: Variant(name, _point(f"{self.path}: {name}", data), self.template)
            for name, data in self._data["variants"].items()
        }
        return {**own, **self.more}

    @property
    def current(self) -> bool:
        """Whether replays and predictions are those of the model as it is."""
        return self._data.get("model") == MODEL

    @property
    def known(self) -> Mapping[str, Kind]:
        """By kind; raises `InputError` where another model said what is there."""
        if not self.current:
            raise InputError(
                f"{self.path}: made by model {self._data.get('model')}, this is model {MODEL}: "
                "`optimize NAME --record` writes it anew"
            )
        return self.stored

    @cached_property
    def stored(self) -> Mapping[str, Kind]:
        """By kind, whichever model it is of."""
        kinds = self._data["kinds"].items()
        return {name: _kind(f"{self.path}: {name}", data) for name, data in kinds}

    def kind(self, config: Any) -> Kind:
        """What was recorded for configurations like this one, or nearest to it."""
        return next(self.known[name] for name in self.kinds(config) if name in self.known)

    def find(self, name: str) -> Variant:
        """The variant of that name; raises `InputError` listing those there are."""
        if name not in self.variants:
            names = ", ".join(self.variants)
            raise InputError(f"{self.path.parent.name} variant {name!r}: expected one of {names}")
        return self.variants[name]

    def choose(
        self, config: Any, sizes: Sizes, fits: Callable[[Variant], bool] = lambda _: True
    ) -> Variant:
        """The variant for a configuration and sizes, of those that `fits`."""
        kind = self.kind(config)
        names = [
            name
            for name in kind.replays
            if self.variants[name].takes(config) and fits(self.variants[name])
        ]
        if not names:
            return self.variants[self.fallback]
        if measured := kind.measured(names, sizes):
            return self.variants[min(measured, key=lambda name: measured[name])]
        return self.variants[self.fastest(kind, names, config, sizes)[0]]

    def predicted(
        self, kind: Kind, names: Sequence[str], config: Any, sizes: Sizes
    ) -> dict[str, float]:
        """Microseconds of variants by the model alone."""
        return {name: round(self.time(kind, name, config, sizes).microseconds, 2) for name in names}

    def time(self, kind: Kind, name: str, config: Any, sizes: Sizes) -> LaunchTime:
        """What the model says of a variant, from its stored replay."""
        return self._launch(name, config, sizes).time(kind.replays[name])

    def _launch(self, name: str, config: Any, sizes: Sizes) -> Launch:
        variant = self.variants[name]
        return variant.launch(variant.config(config), sizes, GPU)

    def fastest(
        self, kind: Kind, names: Sequence[str], config: Any, sizes: Sizes, count: int = 1
    ) -> list[str]:
        """So many variants of least time, the fastest first; what cannot be one of them is left out
        before what L2 loses is counted."""
        launches = {name: self._launch(name, config, sizes) for name in names}
        errors = {name: kind.error(name, sizes) for name in names}
        least = {name: launches[name].least(kind.replays[name]) * errors[name] for name in names}
        found: list[tuple[float, str]] = []
        for name in sorted(names, key=lambda name: least[name]):
            if len(found) == count and least[name] >= found[-1][0]:
                break
            floor = launches[name].floor(kind.replays[name]) * errors[name]
            if len(found) == count and floor >= found[-1][0]:
                continue
            time = launches[name].time(kind.replays[name]).microseconds * errors[name]
            found = sorted([*found, (time, name)])[:count]
        return [name for _, name in found]


def _point(where: str, data: Mapping[str, Any]) -> Point:
    if unknown := data.keys() - {one.name for one in fields(Point)}:
        raise InputError(
            f"{where}: no {min(unknown)!r}: expected {', '.join(one.name for one in fields(Point))}"
        )
    try:
        return Point.from_json({**data, "settings": data["settings"].items()})
    except (KeyError, AttributeError, TypeError):
        raise InputError(
            f"{where}: {dict(data)}, expected settings, order, and maybe rules, plan and allow"
        ) from None


def _kind(where: str, data: Mapping[str, Any]) -> Kind:
    replays = {name: _replay(one) for name, one in data["replays"].items()}
    rows = tuple(Row(**row) for row in data.get("rows", ()))
    without = replays.keys() - {name for row in rows for name in row.predicted}
    if without:
        raise InputError(f"{where}: no row tells why {min(without)} is here")
    return Kind(data["settings"], replays, rows, data.get("program", ""))


def _replay(data: Mapping[str, Any]) -> Replay:
    loops = {
        name: Prediction(name, one["cycles"], 0, "", 0, one["ahead"], one["events"])
        for name, one in data["loops"].items()
    }
    return Replay(loops, Ends(*data["ends"]))


def kept(replay: Replay) -> Replay:
    """What a table keeps of a replay: predictions are by what can be read again."""
    return _replay(_replay_data(replay))


def _replay_data(replay: Replay) -> dict[str, Any]:
    loops = {
        name: {
            "cycles": round(one.cycles, 1),
            "ahead": one.ahead,
            "events": {event: round(count) for event, count in one.events.items()},
        }
        for name, one in replay.loops.items()
    }
    return {"loops": loops, "ends": [round(one, 1) for one in astuple(replay.ends)]}


def as_toml(variants: Mapping[str, Variant], known: Mapping[str, Kind]) -> str:
    """A table as the text of its file."""
    lines = [
        "# Written by `optimize NAME --record`, not by hand.",
        f"model = {_toml(MODEL)}",
        "",
        "[variants]",
    ]
    for name, variant in variants.items():
        told = variant.point.to_json()
        told = {**told, "settings": dict(variant.point.settings)}
        told = {field: value for field, value in told.items() if value or field == "settings"}
        lines.append(f"{_toml(name)} = {_toml(told)}")
    for name, kind in known.items():
        head = f"kinds.{_toml(name)}"
        lines += ["", f"[{head}]", f"settings = {_toml(kind.settings)}"]
        lines += [f"program = {_toml(kind.program)}"] * bool(kind.program)
        lines += ["", f"[{head}.replays]"]
        lines += [f"{_toml(one)} = {_toml(_replay_data(r))}" for one, r in kind.replays.items()]
        for row in kind.rows:
            lines += ["", f"[[{head}.rows]]"]
            lines += [f"{field} = {_toml(value)}" for field, value in vars(row).items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value).items()
        told = ", ".join(f"{_toml(name)} = {_toml(one)}" for name, one in pairs)
        return f"{{ {told} }}" if told else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, cast('Sequence[Any]', value)))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return "inf"
    return json.dumps(value)
