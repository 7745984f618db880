"""Uniform sub-tiles: every sub-tile runs the same program, only later.

*requires*  sub-tiles whose operations correspond (`subtiles`)
*before -> after*  times of all operations free -> time[image] = time[first] + shift of its sub-tile
*keeps*  every other constraint; a schedule found is legal without this one

It halves the decisions (two sub-tiles), and a kernel whose warp groups run one program needs its
code once. It may cost cycles: an interval proved by refutation is then proved among uniform
schedules only; one that meets an analytic bound is proved among all.
"""

from __future__ import annotations

from warploom.schedule.solve.encoding import Encoding
from warploom.schedule.solve.solver import IntVar
from warploom.schedule.solve.subtiles import corresponding


def add_uniform(it: Encoding) -> None:
    """Tie the times of every sub-tile to those of sub-tile 0."""
    shifts: dict[int, IntVar] = {}
    for images in corresponding(it.graph):
        first = images[0]
        for name in images[1:]:
            subtile = it.graph.by_id[name].subtile or 0
            if subtile not in shifts:
                shifts[subtile] = it.model.new_int_var(-it.horizon, it.horizon, f"shift[{subtile}]")
            it.model.add(it.time[name] == it.time[first] + shifts[subtile])
