"""`optimize NAME --record`: the tuned table of a kernel, with more rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from warploom.engine.points import Space
from warploom.engine.search import EFFORTS, search
from warploom.engine.store import PointStore
from warploom.errors import InputError, WarploomError
from warploom.files import cache_folder, write_text_atomically
from warploom.flows.choose import POINTS
from warploom.flows.optimize import wants_gpu
from warploom.flows.optimize_measure import measure_in_worker
from warploom.flows.optimized import OptimizeSettings, Say
from warploom.kernels.library import Entry, configure, entry
from warploom.kernels.select import check_sizes, full_sizes
from warploom.kernels.tuned.table import GPU, Kind, Row, Table, as_toml, kept
from warploom.kernels.tuned.variant import Variant
from warploom.objects import names_object
from warploom.perf.replay import Replay, replay

AT_ONCE = 1e-9  # cycles in which a KiB is loaded
KEPT = 4  # variants of least predicted time that a shape's row tells, and that a GPU times


def record(
    settings: OptimizeSettings,
    shapes: Sequence[Mapping[str, str]],
    say: Say,
    where: Path | None = None,
    effort: str = "",
) -> Path:
    """Write the table of a kernel anew, into `where` or its own file, with a row for each of the
    shapes (`key=value` settings beside those of the configuration).

    A user's kernel is searched at each of them, and one of the library where an effort is given;
    the fastest points become variants. Those of the table that were not recorded for this kind of
    configuration are compiled and replayed. Those of least predicted time are measured, where a GPU
    is. Without rows none stays. Raises `InputError` for a kernel without a table or without
    matmuls, an unknown effort, and where a setting is none of the kernel's.
    """
    kernel = entry(settings.name)
    if kernel.table is None:
        raise InputError(f"--record: {settings.name} has no tuned table")
    if not shapes:
        raise InputError("--record: no shapes; expected a line of key=value each")
    if effort not in ("", *EFFORTS):
        raise InputError(f"--effort {effort!r}: expected one of {', '.join(EFFORTS)}")
    measuring = wants_gpu(settings)
    more: Mapping[str, Variant] = {}
    if effort or names_object(settings.name):
        more = _searched(settings, shapes, effort or "normal", say)
    table, config = replace(kernel.table, more=more), configure(settings.name, settings.settings)[0]
    label, before = table.kinds(config)[0], renewed(settings.name, say)
    kind = before.get(label)
    if kind is None or kind.program != table.program(config):
        kind = Kind(settings.settings, {}, (), table.program(config))
    replays = dict(kind.replays)
    for name, variant in table.variants.items():
        if name not in replays and variant.takes(config):
            try:
                replays[name] = recorded_replay(variant, config)
                say(f"{label}: {name}: {replays[name].cycles:.0f} cycles an iteration")
            except WarploomError as error:
                say(f"{label}: {name}: not of use: {error}")
    if not replays:
        raise InputError(
            f"--record: {settings.name}: nothing of it is predicted: the replay follows loops with "
            "matmuls; a table without them takes times measured on a GPU (bench/row_plans.py)"
        )
    kind = replace(kind, replays=replays)
    rows = [_row(settings, kernel, table, kind, shape, measuring, say) for shape in shapes]
    known = {**before, label: with_rows(kind, (*kind.rows, *rows))}
    told = {table.fallback, *(name for one in known.values() for name in one.replays)}
    variants = {name: one for name, one in table.variants.items() if name in told}
    write_text_atomically(where or table.path, as_toml(variants, known))
    return where or table.path


def _searched(
    settings: OptimizeSettings, shapes: Sequence[Mapping[str, str]], effort: str, say: Say
) -> Mapping[str, Variant]:
    """The fastest points that a search finds at each of the shapes, told by what they choose."""
    found: dict[str, Variant] = {}
    with closing(PointStore(cache_folder() / POINTS)) as store:
        for shape in shapes:
            given = {**settings.settings, **shape}
            space = Space(settings.name, given)
            fixed = tuple((name, given[name]) for name in space.free if name in given)
            sizes = full_sizes(settings.name, given)
            explored = search(space, sizes, settings.gpu, store, effort, say)
            say(f"{dict(shape)}: {explored}")
            for one in explored.useful[:KEPT]:
                space.check(one.point, check_sizes(settings.name, given))
                point = replace(one.point, settings=(*fixed, *one.point.settings))
                found[str(point)] = Variant(str(point), point, space.template)
    return found


def renewed(name: str, say: Say = lambda _: None) -> Mapping[str, Kind]:
    """What a kernel's table has by the model as it is: where another one made it, the rows are
    predicted again, and if its replays followed other rules, every variant is compiled and replayed
    again."""
    table = entry(name).table
    assert table is not None
    if table.current:
        return table.known
    return {label: _renewed(name, label, say) for label in table.stored}


def _renewed(name: str, label: str, say: Say) -> Kind:
    kernel = entry(name)
    assert kernel.table is not None
    table, kind = kernel.table, kernel.table.stored[label]
    config = configure(name, kind.settings)[0]
    replays = dict(kind.replays)
    for one in () if table.replayed else kind.replays:
        replays[one] = recorded_replay(table.variants[one], config)
        say(f"{label}: {one}: {replays[one].cycles:.0f} cycles an iteration")
    found = replace(kind, replays=replays)
    return replace(
        found,
        rows=tuple(
            replace(row, predicted=table.predicted(found, [*row.predicted], config, row.sizes))
            for row in kind.rows
        ),
    )


def with_rows(kind: Kind, rows: Sequence[Row]) -> Kind:
    """The kind with these rows, and of its variants those that were measured, or that are the
    fastest of a row."""
    kept = {name for row in rows for name in row.measured}
    kept |= {min(row.predicted, key=lambda one: row.predicted[one]) for row in rows}
    return replace(
        kind,
        replays={name: one for name, one in kind.replays.items() if name in kept},
        rows=tuple(
            replace(row, predicted={x: us for x, us in row.predicted.items() if x in kept})
            for row in rows
        ),
    )


def _row(
    settings: OptimizeSettings,
    kernel: Entry,
    table: Table,
    kind: Kind,
    shape: Mapping[str, str],
    measuring: bool,
    say: Say,
) -> Row:
    """What is predicted, and measured, at one shape."""
    given = {**settings.settings, **shape}
    config = configure(settings.name, given)[0]
    sizes = kernel.asked(config, full_sizes(settings.name, given))
    names = [name for name in kind.replays if table.variants[name].whole]
    best = table.fastest(replace(kind, rows=()), names, config, sizes, KEPT)
    predicted = table.predicted(kind, best, config, sizes)
    say(f"{dict(shape)}: {predicted}")
    measured: dict[str, float] = {}
    for name in best if measuring else ():
        selected = table.variants[name].selected(config)
        found = measure_in_worker(settings.name, given, selected, selected.build(), say)
        if found.correct:
            measured[name] = round(found.microseconds, 2)
    source = f"optimize --record, {date.today().isoformat()}" if measured else ""
    return Row(sizes, predicted, measured, source)


def recorded_replay(variant: Variant, base: Any) -> Replay:
    """What a table keeps of a variant's replay for a configuration; raises what building does."""
    return kept(_replayed(variant, base))


def _replayed(variant: Variant, base: Any) -> Replay:
    """What the variant's machine code takes where its loads come at once: `Launch` adds how fast
    they come."""
    selected = variant.selected(base)
    loads = [op.label for op in selected.program.ops() if op.kind == "load"]
    rates = dict.fromkeys(loads, AT_ONCE)
    schedule = variant.schedule(selected.config)
    return replay(selected.program, schedule, selected.build().cubin, GPU, rates=rates)
