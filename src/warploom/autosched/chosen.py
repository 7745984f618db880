"""The solved schedule whose machine code replays fastest, out of several.

Schedules of one interval differ by some per cent on the machine: ptxas translates them differently,
and their groups disturb each other differently. `perf.replay` sees both. So the solver's answers
are compiled, replayed without a GPU, and the fastest is taken:

    both ends of the costs   high (with slack for a slower machine) and nominal
    shallow rings            two slots each, for the winner: kept if nothing is lost

An answer that compiles only with a serialised wgmma or a spill is dropped. The cache keeps the
choice under a hash of everything it was made from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace

from warploom.autosched.solve import VERSION, Search, solve_kernel
from warploom.codegen.compile.build import build
from warploom.codegen.ir.plan import KernelSchedule, LaunchPlan
from warploom.codegen.ir.text import block_text
from warploom.codegen.passes.lower import lower
from warploom.errors import CheckFailed, InputError, WarploomError
from warploom.files import cache_folder, keep, read_kept
from warploom.perf.replay import RULES, replay
from warploom.schedule.model.costs import costs
from warploom.tile import Program

SHALLOW = 2  # slots: one is filled while one is read
EQUAL = 0.002  # of the pace: less is no difference


def chosen_kernel(
    program: Program,
    launch: LaunchPlan | None = None,
    gpu: str = "h200",
    search: Search | None = None,
    registers: tuple[int, int] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> KernelSchedule:
    """The solved schedule that replays fastest; arguments as those of `solve.solve_kernel`.

    `say` hears of every answer, which take seconds each.

    Raises what the solver raises when it has no answer at all, and `CheckFailed` when none of its
    answers compiles.
    """
    asked = search or Search()
    table = costs(gpu)
    text = repr((VERSION, RULES, str(program), launch, table, asked, registers))
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    kept = cache_folder() / "chosen" / f"{key}.json"
    if (data := read_kept(kept)) is not None:
        return KernelSchedule.from_json(json.loads(data), str(kept))
    say(f"solving at the {asked.cost_end} end of the costs")
    first = solve_kernel(program, launch, gpu, asked, registers)
    best: tuple[float, KernelSchedule] | None = None
    refusals: list[str] = []
    seen: set[str] = set()
    for schedule in _answers(program, first, launch, gpu, asked, registers, say):
        steps = steps_of(program, schedule)
        if steps in seen:
            continue
        seen.add(steps)
        try:
            cycles = paced(program, schedule, gpu)
        except CheckFailed as error:
            refusals.append(str(error))
            say(f"an answer of no use: {error}")
            continue
        say(f"an answer of {cycles:.0f} cycles an iteration, replayed")
        if best is None or cycles < best[0] * (1 - EQUAL):
            best = cycles, schedule
    if best is None:
        raise CheckFailed(f"{program.name}: no solved schedule is of use: {refusals[0]}")
    result = _with_least_rings(program, best, gpu)
    keep(kept, json.dumps(result.to_json()).encode())
    return result


def paced(program: Program, schedule: KernelSchedule, gpu: str = "h200") -> float:
    """Cycles an iteration of all loops, by the replay of what the schedule compiles to."""
    built = build(program, schedule)
    return replay(program, schedule, built.cubin, gpu).cycles


def shallow(schedule: KernelSchedule) -> KernelSchedule:
    """The schedule with two slots a ring; lowering says whether its releases allow that."""
    loops = {
        name: replace(loop, ring_depth=dict.fromkeys(loop.ring_depth, SHALLOW))
        for name, loop in schedule.loops.items()
    }
    return replace(schedule, name=f"{schedule.name}-shallow", loops=loops)


def steps_of(program: Program, schedule: KernelSchedule) -> str:
    """What is emitted, as text: all but the schedule's name."""
    return block_text(replace(lower(program, schedule), name=""))


def _answers(
    program: Program,
    first: KernelSchedule,
    launch: LaunchPlan | None,
    gpu: str,
    asked: Search,
    registers: tuple[int, int] | None,
    say: Callable[[str], None],
) -> Iterator[KernelSchedule]:
    for end in dict.fromkeys((asked.cost_end, "nominal")):
        other = replace(asked, cost_end=end)
        try:
            answer = first
            if other != asked:
                say(f"solving at the {end} end of the costs")
                answer = solve_kernel(program, launch, gpu, other, registers)
        except WarploomError:
            continue  # not every variation of the search has an answer
        yield answer


def _with_least_rings(
    program: Program, best: tuple[float, KernelSchedule], gpu: str
) -> KernelSchedule:
    cycles, schedule = best
    less = shallow(schedule)
    try:
        same = paced(program, less, gpu) <= cycles * (1 + EQUAL)
    except (CheckFailed, InputError):
        return schedule
    return less if same else schedule
