"""A user's kernel as the library has its own: what its points choose from, and a tuned table.

`FILE.py:OBJECT` has its table beside it, `FILE.OBJECT.tuned.toml`, once `optimize --record` has
written it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from warploom.autosched.points import Point
from warploom.codegen.compile.build import program_key
from warploom.codegen.ir.plan import LaunchPlan
from warploom.errors import InputError
from warploom.kernels.settings import parse
from warploom.kernels.tuned.table import Table
from warploom.kernels.tuned.variant import Template, Variant
from warploom.kernels.user import UserKernel, free_sizes, settings_kinds
from warploom.objects import is_held
from warploom.rewrites.rules import applied
from warploom.tile import Program

RESCALES = ("lazy_rescale", "optimistic_rescale")
Settings = Mapping[str, Any]


def template(kernel: UserKernel) -> Template:
    """What the points of a user's kernel choose from; a configuration is its settings by name."""
    kinds = settings_kinds(kernel)

    def configured(base: Settings, point: Point) -> dict[str, Any]:
        given = {
            name: parse(kernel.where, name, text, kinds[name]) for name, text in point.settings
        }
        return {**base, **given}

    return Template(
        kernel.trace,
        lambda config: {name: [*map(str, of)] for name, of in free_sizes(kernel).items()},
        configured,
        lambda config, point: applied(kernel.trace(config), point.rules),
        lambda config, point: _plan(kernel, point),
    )


def _plan(kernel: UserKernel, point: Point) -> LaunchPlan:
    """As its author has it, with the rows left out that the rules of a point leave alone."""
    return (kernel.launch or LaunchPlan()).with_options(
        skip_unit=any(rule in RESCALES for rule in point.rules),
        skip_voted="optimistic_rescale" in point.rules,
    )


def table(kernel: UserKernel, made: Template) -> Table | None:
    """Its tuned table, which may not have been written; None for an object without a file."""
    file, _, name = kernel.where.rpartition(":")
    if is_held(kernel.where) or not file:
        return None
    path = Path(file)
    beside = path.with_name(f"{path.stem}.{name}.tuned.toml")
    return Table(beside, made, partial(kinds, kernel), program=partial(_key, kernel))


def kinds(kernel: UserKernel, config: Settings) -> Sequence[str]:
    """By the settings that are no open sizes and not the usual ones."""
    if isinstance(kernel.program, Program):
        return ["usual"]
    usual = {x: one.default for x, one in inspect.signature(kernel.program).parameters.items()}
    fixed = [name for name in usual if name not in free_sizes(kernel)]
    told = [f"{x}={config[x]}" for x in fixed if config.get(x, usual[x]) != usual[x]]
    return [" ".join(told) or "usual"]


def _key(kernel: UserKernel, config: Settings) -> str:
    """Of the program as its author wrote it, by which a table knows that it is of this one."""
    fixed = {x: value for x, value in config.items() if x not in free_sizes(kernel)}
    return program_key(str(kernel.trace(fixed)))


def variant(
    kernel: UserKernel,
    known: Table | None,
    config: Settings,
    sizes: Mapping[str, int],
    given: frozenset[str],
) -> Variant | None:
    """What the table has for sizes, with the open sizes that were given; None where nothing was
    recorded. Raises `InputError` for a table of another program or model."""
    label = kinds(kernel, config)[0]
    if known is None or label not in known.known:
        return None
    if known.known[label].program != _key(kernel, config):
        raise InputError(
            f"{known.path}: {label}: recorded for another form of {kernel.where}: "
            f"`optimize {kernel.where} --record` writes it anew"
        )
    wanted = {name: str(config[name]) for name in free_sizes(kernel) if name in given}

    def fits(one: Variant) -> bool:
        return wanted.items() <= dict(one.point.settings).items()

    if not any(fits(known.variants[name]) for name in known.known[label].replays):
        return None
    return known.choose(config, sizes, fits)
