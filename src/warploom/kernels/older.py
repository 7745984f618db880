"""Default tiles of the library's kernels on GPUs before Hopper: the largest that the GPU holds.

The defaults are made for Hopper, where compute groups take registers from other groups. On older
GPUs all threads of a block have the same number, and some GPUs have less than half of Hopper's
shared memory. If the architecture's limits (`machine.architecture`) refuse a tile, or the compiler
spills it, the next smaller tile is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

from warploom.autosched.schedules import Policy, schedule_for
from warploom.autosched.selected import Selected
from warploom.errors import DoesNotFit, Spills, WarploomError
from warploom.kernels.library import Entry

LEAST = 16  # elements of a side: one mma of the tensor core
HALVINGS = 3  # of each side


def older_kernel(
    kernel: Entry,
    config: Any,
    arch: str,
    name: str = "lcsf",
    allow: tuple[str, ...] = (),
    fixed: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Selected:
    """A kernel for an architecture without TMA and wgmma.

    name, allow  the named schedule and the faults accepted (`compile.build`)
    fixed        keep the configuration's tile, even if it does not fit
    say          is called with the reason when a tile is not taken
    If no tile fits, the refusal of the first one is raised.
    """
    policy = Policy(name, kernel.policy(config).launch)

    def of(config: Any) -> Selected:
        program = kernel.program(config)
        schedule = schedule_for(program, policy, arch=arch)
        return Selected(name, config, program, schedule, arch, allow)

    if fixed or not hasattr(config, "tile"):
        return of(config)
    refusals: list[WarploomError] = []
    for tile in _tiles(config.tile):
        try:
            found = of(replace(config, tile=tile))
            found.build()
        except (DoesNotFit, Spills) as error:
            say(f"tile {','.join(map(str, tile))}: {error}: trying a smaller one")
            refusals.append(error)
        except WarploomError:
            if not refusals:
                raise  # not for its size
        else:
            return found
    raise refusals[0]


def _tiles(largest: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The tile and those with halved sides: the largest area first, then the squarest.

    The larger the area, the fewer elements are loaded for one of the result. A third number, the
    depth of a step, stays: rings hold as many steps as fit.
    """
    rows, cols = ([side >> n for n in range(HALVINGS + 1)] for side in largest[:2])
    areas = [(row, col) for row in rows for col in cols if min(row, col) >= LEAST]
    areas.sort(key=lambda tile: (prod(tile), min(tile)), reverse=True)
    yield from ((*area, *largest[2:]) for area in areas)
