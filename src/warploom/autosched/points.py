"""A kernel of a program as data: a point says all that is chosen of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from warploom.autosched.plans import ordered
from warploom.errors import InputError


@dataclass(frozen=True)
class Point:
    """One kernel of a space.

    settings   the values of the sizes that the program leaves open (`tile.tunable`), and of other
               fields of its configuration
    rules      the rewrites applied, in order (`rewrites.rules`)
    order      how its loops are pipelined, by the name of a schedule (`autosched.schedules`)
    plan       how the grid is laid over the GPU and the block made up (`autosched.plans`)
    allow      faults of the compiler that are accepted (`build.ALLOWED`)
    """

    settings: tuple[tuple[str, str], ...] = ()
    rules: tuple[str, ...] = ()
    order: str = ""
    plan: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = [f"{name}={value}" for name, value in self.settings]
        words = [*sizes, *self.rules, self.order, *self.plan]
        return " ".join(words)

    @cached_property
    def options(self) -> Mapping[str, str]:
        """The options of the plan."""
        return dict(word.split("=") for word in self.plan)

    def number(self, option: str, usual: int) -> int:
        """The number that the plan gives an option."""
        return int(self.options.get(option, usual))

    def sizes(self, name: str) -> tuple[int, ...]:
        """The numbers of a setting; raises `InputError` where the point has none."""
        text = dict(self.settings).get(name, "")
        try:
            return tuple(map(int, text.split(",")))
        except ValueError:
            raise InputError(f"{self}: {name}={text!r}, expected whole numbers") from None

    def having(self, *words: str) -> Point:
        """The point with other values of these options; `option=` alone takes one away."""
        known = {**self.options, **dict(word.split("=") for word in words)}
        plan = [f"{name}={value}" for name, value in known.items() if value]
        return replace(self, plan=ordered(plan))

    def to_json(self) -> dict[str, Any]:
        """The point as plain JSON data; what it has nothing of is left out."""
        found = {
            "settings": [list(pair) for pair in self.settings],
            "rules": list(self.rules),
            "order": self.order,
            "plan": list(self.plan),
        }
        return found | ({"allow": list(self.allow)} if self.allow else {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Point:
        """A point back from JSON data."""
        settings = tuple((str(name), str(value)) for name, value in data["settings"])
        rules, plan, allow = (tuple(data.get(name, ())) for name in ("rules", "plan", "allow"))
        return cls(settings, rules, str(data["order"]), plan, allow)
