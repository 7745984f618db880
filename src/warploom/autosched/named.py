"""Named schedules: the forms that people write by hand, as the same data that the solver gives.

Times are positions in an order, not cycles: the emitted code depends on their order, their stage
and their group only. Sources: ThunderKittens' load-compute-store-finish template
(arXiv 2410.20399, section 5), FlashAttention-3 (arXiv 2407.08608, sections 3.1 and 3.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from warploom.codegen.analysis.entry import WARP_GROUP, entry_registers
from warploom.codegen.ir.place import Placement
from warploom.codegen.passes.rings import local_rings, rings_of
from warploom.errors import InputError
from warploom.schedule.model.schedule import Group, Schedule
from warploom.tile import Loop, Op

# Registers a thread for (producer, consumers) by number of consumer groups: what fits in the pool
# that a launch reserves (registers at entry times threads) once setmaxnreg has moved it.
REGISTERS = {1: (40, 232), 2: (24, 240), 3: (32, 160), 4: (24, 112)}

LEAST = 24  # registers of a producer thread


def groups(
    compute: int, registers: tuple[int, int] | None = None, resident: int = 1, abreast: int = 1
) -> tuple[Group, ...]:
    """A producer warp group and `compute` consumers with the register split that fits them.

    `registers` is (producer, consumer) where the usual split does not fit; `resident` blocks share
    the registers of an SM. Of a block that does tasks `abreast` there are so many consumers a task.
    """
    every = compute * abreast
    if every not in REGISTERS:
        raise InputError(f"{every} compute groups: expected one of {sorted(REGISTERS)}")
    pool = register_pool(every, resident)
    producer, consumer = registers or REGISTERS[every]
    if registers is None and producer + every * consumer > pool:
        producer, consumer = LEAST, (pool - LEAST) // every // 8 * 8
    if producer + every * consumer > pool or producer % 8 or consumer % 8:
        raise InputError(
            f"registers {producer} and {every} x {consumer}: expected multiples of 8 that add up "
            f"to at most {pool} with {resident} block{'s' * (resident > 1)} on an SM"
        )
    return (
        Group("load", 4, producer),
        *(Group(f"compute{i}", 4, consumer) for i in range(compute)),
    )


def register_pool(compute: int, resident: int = 1) -> int:
    """Registers of a thread of the producer and one of each consumer together: what a block has at
    entry, in multiples of 8 a thread; asking for more waits for ever."""
    return (compute + 1) * entry_registers((compute + 1) * WARP_GROUP, resident=resident)


def write(
    placement: Placement,
    loop: Loop,
    own: tuple[Group, ...],
    depth: int,
    order: Sequence[tuple[str, int]],
    shift: int = 0,
    slots: Mapping[str, int] = MappingProxyType({}),
) -> Schedule:
    """A schedule of one loop from an order of (node label or "release RING", stage) pairs, for the
    warp groups `own`: the producer and the others.

    `shift` places group g's order g * shift positions later: that gives the groups their turns.
    `slots` are those of the rings of arrays by name, where they are not `depth`.
    """
    compute = len(own) - 1
    interval = len(order) + max(0, compute - 1) * shift
    time: dict[str, int] = {}
    group: dict[str, str] = {}
    release: dict[str, int] = {}
    loads = [
        op for op in loop.body if isinstance(op, Op) and op.dst and placement.is_shared(op.dst)
    ]
    for place_, op in enumerate(loads):
        if f"{op.label}" not in dict(order):
            time[op.label], group[op.label] = place_ % interval, own[0].name
    for part in range(compute):
        for place_, (label, stage) in enumerate(order):
            at = stage * interval + place_ + part * shift
            if label.startswith("release "):
                release[f"{label.removeprefix('release ')}/{part}"] = at
            else:
                time[f"{label}/{part}"], group[f"{label}/{part}"] = at, own[1 + part].name
    return Schedule(
        graph=f"{placement.program.name}.{loop.index}",
        target="h200",
        initiation_interval=interval,
        length=max([*time.values(), *release.values()]) + 1,
        time=time,
        group=group,
        ring_depth={op.label: _slots_of(op, depth, slots) for op in loads},
        groups=own,
        params={"release": release},
    )


def multistage(
    placement: Placement,
    own: tuple[Group, ...],
    depth: int,
    in_flight: bool = False,
    early_release: bool = False,
    last_behind: bool = False,
    first_ahead: bool = False,
    slots: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Schedule]:
    """Load-compute-finish, by loop: producers fill rings of `depth` slots, the consumers of `own`
    run the body in program order.

    With `in_flight` the last matmul stays unfinished across the back edge, where nothing after it
    touches its result (without it every iteration is drained, as in ThunderKittens' template): its
    slots go back behind the first matmul of the next iteration. `early_release`: a slot is given
    back before the first op that needs what was made of it, where the group waits anyway, not at
    the iteration's end. `last_behind`: what is done with the last matmul's result is done one
    iteration later, behind the first matmul there, so that the tensor core has that one meanwhile.
    `first_ahead`: the first matmuls of loaded operands alone start behind the last one of the
    iteration before, beside what is done with its result.
    """
    loops: dict[str, Schedule] = {}
    for loop in placement.program.loops():
        ops = _placed(loop, placement)
        order = [(op.label, 0) for op in ops]
        rings = _rings(placement, loop, slots)
        reader = {
            ring: max(op.id for op in _readers(placement, ops, names))
            for ring, names in rings.items()
        }
        last = max((op.id for op in ops if op.kind == "mma"), default=-1)
        sums = {op.dst for op in ops if op.id == last}
        rests = all(sums.isdisjoint((op.dst, *op.srcs)) for op in ops if op.id > last)
        position = 1 + next((n for n, op in enumerate(ops) if op.kind == "mma"), 0)
        by_label = {op.label: op for op in ops}
        for ring, op in sorted(reader.items()):
            stays = in_flight and op == last and rests
            if stays:
                order.insert(position, (f"release {ring}", 1))
            elif early_release:
                last_reader = next(other for other in ops if other.id == op)
                after = [label for label, _ in order].index(last_reader.label)
                place_ = after + 1
                if last_reader.kind == "mma":
                    place_ = _first_toucher(placement, order, by_label, last_reader, after)
                elif placement.abreast > 1 or (
                    [one.kind for one in ops if one.id > op][:1] not in ([], ["mma"])
                    and _rooms(loop, rings[ring], depth, slots) > 1
                ):
                    place_ = _behind_matmul(order, by_label, after)
                order.insert(place_, (f"release {ring}", 0))
            else:
                order.append((f"release {ring}", 0))
        if last_behind:
            order = _with_last_behind(placement, order, by_label)
        if first_ahead:
            order = _with_first_ahead(placement, order, by_label, rings)
        loops[loop.index] = write(placement, loop, own, depth, order, slots=slots)
        _check_slots(placement, loop, order, rings, loops[loop.index])
    return loops


def _behind_matmul(
    order: Sequence[tuple[str, int]], by_label: Mapping[str, Op], reader: int
) -> int:
    """The place behind the first matmul that takes what a reader made of a slot, or is next: by
    then lanes have what they asked of it. Right behind the reader the arrival that gives the slot
    back would wait for that, unless a matmul follows."""
    later = [
        (number, by_label[label])
        for number, (label, _) in enumerate(order)
        if number > reader and label in by_label and by_label[label].kind == "mma"
    ]
    made = by_label[order[reader][0]].dst
    takers = [number for number, op in later if made in op.srcs]
    return next(iter((*takers, *(number for number, _ in later))), reader) + 1


def _rooms(loop: Loop, tiles: Sequence[str], depth: int, slots: Mapping[str, int]) -> int:
    """Slots of the ring of some loaded tiles."""
    loads = [op for op in loop.body if isinstance(op, Op) and op.dst and op.dst.name in tiles]
    return min(_slots_of(op, depth, slots) for op in loads)


def _check_slots(
    placement: Placement,
    loop: Loop,
    order: Sequence[tuple[str, int]],
    rings: Mapping[str, Sequence[str]],
    schedule: Schedule,
) -> None:
    """Raise `InputError` where the kernel would hang: its groups wait for a slot that the producer,
    which fills the rings in the program's order, fills after one that they give back later."""
    interval, ops = len(order), _placed(loop, placement)
    at = {label: stage * interval + place_ for place_, (label, stage) in enumerate(order)}
    loads = {op.dst.name: op.label for op in loop.body if isinstance(op, Op) and op.dst}
    depth = {ring: schedule.ring_depth[loads[names[0]]] for ring, names in rings.items()}
    first = {n: min(at[op.label] for op in _readers(placement, ops, rings[n])) for n in rings}
    filled_first = list(loads)
    fills = sorted(rings, key=lambda ring: min(map(filled_first.index, rings[ring])))
    walked = max(depth.values(), default=0) + 2  # iterations: in so many every ring comes around
    steps = sorted(
        (iteration * interval + place_, given, ring)
        for iteration in range(walked)
        for ring in rings
        for given, place_ in ((False, first[ring]), (True, at[f"release {ring}"]))
    )
    filled, taken, freed = (Counter[str]() for _ in range(3))
    waiting = iter(fills * walked)
    ring = next(waiting, None)
    for _, given, wanted in steps:
        while not given and filled[wanted] == taken[wanted]:
            if ring is None or filled[ring] - freed[ring] == depth[ring]:
                raise InputError(
                    f"loop {loop.index} of {placement.program.name}: it would hang, as this order "
                    f"waits for {wanted} before it gives back a slot of {ring or wanted}, which "
                    f"has {depth[ring or wanted]}; give it more or take another order"
                )
            filled[ring] += 1
            ring = next(waiting, None)
        (freed if given else taken)[wanted] += 1


def _with_last_behind(
    placement: Placement, order: Sequence[tuple[str, int]], by_label: Mapping[str, Op]
) -> list[tuple[str, int]]:
    """What follows the last matmul's result one iteration later: its slots go back and its result
    is used right behind the first matmul, and what comes after that use begins the iteration."""
    matmuls = [n for n, (label, _) in enumerate(order) if label in by_label
               and by_label[label].kind == "mma"]  # fmt: skip
    first, last = matmuls[0], matmuls[-1]
    use = _first_toucher(placement, order, by_label, by_label[order[last][0]], last)
    begin = use
    while order[begin - 1][0].startswith("release "):
        begin -= 1
    late = [(label, 1) for label, _ in order]
    return [
        *late[use + 1 :],
        *order[: first + 1],
        *late[begin : use + 1],
        *order[first + 1 : begin],
    ]


def _with_first_ahead(
    placement: Placement,
    order: Sequence[tuple[str, int]],
    by_label: Mapping[str, Op],
    rings: Mapping[str, Sequence[str]],
) -> list[tuple[str, int]]:
    """The first matmuls of loaded operands alone, up to what reads their results, behind the last
    one of the iteration before. Slots that they read go back at an iteration's end."""
    first, made = dict[int, str](), set[str]()
    for op in by_label.values():
        if made & {var.name for var in placement.fusion.sources(op)}:
            break
        fresh = op.kind == "mma" and len(op.srcs) == 2 and all(map(placement.is_shared, op.srcs))
        if fresh and op.dst:
            first[op.id] = op.label
            made.add(op.dst.name)
    rest = [label for label, _ in order if label not in first.values()]
    products = [n for n, x in enumerate(rest) if x in by_label and by_label[x].kind == "mma"]
    if not first or not products:
        raise InputError(
            f"loop of {placement.program.name} with {len(first)} matmuls that take loaded operands "
            f"alone and {len(products)} others: lcsf-ahead starts some ahead of others"
        )
    given = dict[str, int]()
    for ring, names in rings.items():
        read = [op.id in first for op in _readers(placement, list(by_label.values()), names)]
        if any(read):
            given[f"release {ring}"] = 0 if all(read) else 1
    last = products[-1] + 1
    return [
        *((label, 1) for label in rest[:last] if label not in given),
        *((label, 0) for label in first.values()),
        *((label, 1) for label in rest[last:] if label not in given),
        *sorted(given.items(), key=lambda one: (-one[1], one[0])),
    ]


def _slots_of(op: Op, depth: int, slots: Mapping[str, int]) -> int:
    return depth if op.array is None else slots.get(op.array.name, depth)


def _rings(placement: Placement, loop: Loop, slots: Mapping[str, int]) -> dict[str, list[str]]:
    """The tiles in each ring of a loop that groups read, by the ring's name."""
    rings = rings_of(placement, lambda section, op: _slots_of(op, 1, slots))
    found = {
        name: [op.dst.name for op in loads if op.dst]
        for name, (_, loads) in local_rings(placement, rings, loop).items()
    }
    alone = placement.only_turned
    return {name: names for name, names in found.items() if alone.isdisjoint(names)}


def overlapped(
    placement: Placement,
    own: tuple[Group, ...],
    depth: int,
    pingpong: bool = False,
    early_rescale: bool = False,
    slots: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Schedule]:
    """FlashAttention-3's pipeline, by loop: the last matmul of the body runs one iteration behind
    the first, so that both are in flight while the ops between them run. With `pingpong` the groups
    take turns with the tensor core. `early_rescale`: what the loop does to the last matmul's result
    before that matmul (rescaling) comes right before it, beside the first matmul, and not at the
    end of the iteration, where the tensor core would wait for it.

    Raises `InputError` for a loop with fewer than two matmuls.
    """
    loops: dict[str, Schedule] = {}
    for loop in placement.program.loops():
        ops = _placed(loop, placement)
        matmuls = [op for op in ops if op.kind == "mma"]
        if len(matmuls) < 2:
            raise InputError(
                f"loop {loop.index} of {placement.program.name} has {len(matmuls)} matmuls; the "
                "overlapped schedule needs two, use multistage"
            )
        last = matmuls[-1]
        before = [op for op in ops if early_rescale and op.kind != "mma" and op.dst == last.dst]
        order = [(op.label, 0) for op in matmuls[:-1]]
        order += [(op.label, 1) for op in (*before, last)]
        order += [(op.label, 0) for op in ops if op.kind != "mma" and op not in before]
        by_label = {op.label: op for op in ops}
        for ring, names in _rings(placement, loop, slots).items():
            reader = _readers(placement, ops, names)[-1]
            after = [label for label, _ in order].index(reader.label) if before else 0
            place_ = _first_toucher(placement, order, by_label, reader, after)
            order.insert(place_, (f"release {ring}", 1 if reader is last else 0))
        shift = len(matmuls) if pingpong else 0
        loops[loop.index] = write(placement, loop, own, depth, order, shift, slots)
    return loops


def _placed(loop: Loop, placement: Placement) -> list[Op]:
    return [
        op
        for op in loop.body
        if isinstance(op, Op)
        and op.id in placement.fusion.kept
        and not (op.dst is not None and placement.is_shared(op.dst))
    ]


def _readers(placement: Placement, ops: Sequence[Op], names: Sequence[str]) -> list[Op]:
    """The ops that read one of the loaded tiles `names` in its slot."""
    return [op for op in ops if any(var.name in names for var in placement.slots_read(op))]


def _first_toucher(
    placement: Placement,
    order: Sequence[tuple[str, int]],
    by_label: Mapping[str, Op],
    reader: Op,
    after: int,
) -> int:
    """The place in the order, from `after` on, of the first op, not a matmul, that needs the
    reader's result or changes its register operand: where the reader is waited for anyway."""
    assert reader.dst is not None
    changed = {reader.dst, reader.srcs[0]} if after else {reader.dst}
    for number, (label, _) in enumerate(order):
        op = by_label.get(label)
        if op is None or op.kind == "mma" or number < after:
            continue
        if reader.dst in placement.fusion.sources(op) or op.dst in changed:
            return number
    return len(order)
