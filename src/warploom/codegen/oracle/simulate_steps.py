"""What one step does to a simulated cluster: agents, rings, matmuls, and the faults they find.

Each `_do_*` is an action of a block program (`ir.block`); it gives False while it must wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from warploom.codegen.analysis.cluster_reduce import shares
from warploom.codegen.analysis.grid import inside
from warploom.codegen.analysis.multicast import is_multicast
from warploom.codegen.analysis.shared_layout import HANDED_SLOTS
from warploom.codegen.ir import steps
from warploom.codegen.ir.block import BlockProgram, Ring
from warploom.codegen.ir.place import Placement, contracted
from warploom.codegen.oracle.barriers import (
    TURNING,
    WARPS,
    Company,
    NamedBarrier,
    Push,
    arrivals_of,
)
from warploom.codegen.oracle.state import Agent, Matmul, Panels, Room, SharedRing, Slot, Sums
from warploom.errors import CheckFailed
from warploom.tile import Op, Program, Var
from warploom.tile.evaluate import Value, compute, read_tile, write_tile

OneStep = steps.RingStep | steps.OpStep | steps.GroupStep | steps.Meet | steps.Share | steps.Send


class Steps:
    """The actions of a cluster's agents; `oracle.simulate` decides who acts."""

    program: Program
    block: BlockProgram
    placement: Placement
    local: Callable[[Op, int], Op]  # an op as a group of that number runs it
    late: set[int]  # stores whose copies are a step of their own
    memory: dict[str, Value]
    source: dict[str, Value]
    cluster: int
    rings: list[dict[str, SharedRing]]
    sums: Sums
    turns: list[list[NamedBarrier]]
    copies: list[Any]
    company: list[list[Company]]
    met: list[list[int]]  # meetings that each group of each block has come to
    rooms: list[dict[tuple[str, int], Room]]

    def _step(self, agent: Agent, step: steps.Step, symbols: dict[str, int]) -> Iterator[bool]:
        if isinstance(step, steps.Ahead):
            yield from self._next(agent)
            return
        while not self._do(agent, step, symbols):
            yield False
        agent.waits_for = ""
        yield True

    def _do(self, agent: Agent, step: OneStep, symbols: dict[str, int]) -> bool:
        match step:
            case steps.Acquire():
                return self._acquire(agent, step, symbols)
            case steps.Fill():
                return self._fill(agent, step, symbols)
            case steps.Publish():
                return self._publish(agent, step)
            case steps.Wait():
                return self._wait(agent, step)
            case steps.Release():
                return self._release(agent, step)
            case steps.Issue():
                return self._issue(agent, step, symbols)
            case steps.Join():
                return self._join(agent, step)
            case steps.Run() | steps.Send():
                sent = isinstance(step, steps.Send)
                return self._send(agent, step) if sent else self._run(agent, step, symbols)
            case steps.Meet() | steps.Take():
                taken = isinstance(step, steps.Take)
                return self._take(agent, step.op) if taken else self._meet(agent, step)
            case steps.Share() | steps.GroupSync() | steps.FencedGroupSync() | steps.PanelSync():
                return self._together(agent, step)
            case steps.TurnWait():
                return self._turn_wait(agent)
            case steps.TurnPass():
                return self._turn_pass(agent)

    def _next(self, agent: Agent) -> Iterator[bool]:
        raise NotImplementedError  # `oracle.simulate` knows the tasks

    def _position(self, table: dict[str, int], ring: Ring) -> tuple[int, int]:
        count = table.get(ring.name, 0)
        return count % ring.depth, count // ring.depth & 1

    def _acquire(self, agent: Agent, step: steps.Acquire, symbols: dict[str, int]) -> bool:
        shared = self.rings[agent.block][step.ring]
        slot, parity = self._position(agent.taken, shared.ring)
        if not shared.empty[slot].passed(parity ^ 1):
            agent.waits_for = f"{shared.empty[slot].name} parity {parity ^ 1}"
            return False
        if not self.block.is_turned(shared.ring):
            index = next((one.index for one in self.program.loops() if one.index in symbols), "")
            shared.full[slot].expect(self.block.copied_bytes(shared.ring, index))
        return True

    def _turn(self, agent: Agent, op: Op, symbols: dict[str, int]) -> bool:
        """Warps turn a tile from its slot into the one acquired, which nobody may read meanwhile:
        it is whole when they publish it."""
        assert op.dst is not None
        ring, buffer = self.block.home(op.dst.name)
        number, _ = self._position(agent.taken, ring)
        into = self.rings[agent.block][ring.name].slots[number]
        if into.readers:
            raise CheckFailed(f"race: {agent.name} turns {op.dst.name} under a matmul")
        into.version += 1
        sources = [self._value(agent, src, symbols) for src in op.srcs]
        into.values[ring.buffers.index(buffer)] = compute(op, sources, symbols)
        return True

    def _fill(self, agent: Agent, step: steps.Fill, symbols: dict[str, int]) -> bool:
        op = step.op
        if agent.role.transposes:
            return self._turn(agent, op, symbols)
        assert op.dst is not None and op.array is not None
        ring, buffer = self.block.home(op.dst.name)
        layout = self.placement.shared[op.dst.name][1]
        slot, _ = self._position(agent.taken, ring)
        place = ring.buffers.index(buffer)
        tile = read_tile(op, self.source[op.array.name], symbols)
        crossing = is_multicast(self.program, self.block.launch, op)
        targets = range(self.cluster) if crossing else (agent.block,)
        blocks = self.cluster if crossing else 1
        along = tile.ndim - 1 if layout.panels % blocks == 0 else 0
        width = tile.shape[along] // blocks
        mine = slice(agent.block * width, (agent.block + 1) * width) if crossing else slice(None)
        index = (slice(None), mine) if along else (mine,)
        for target in targets:
            shared = self.rings[target][ring.name]
            into = shared.slots[slot]
            if into.readers:
                raise CheckFailed(
                    f"race: {agent.name} copies {op.dst.name} into {ring.name}[{slot}] of block "
                    f"{target} while a matmul may still read it"
                )
            into.landing += 1
            into.version += 1
            self.copies.append(
                (shared, slot, place, index, tile[index], tile.shape, layout.bytes // blocks)
            )
        return True

    def _land(self, number: int) -> bool:
        landed = self.copies.pop(number)
        if isinstance(landed, Push):
            return landed.land()
        shared, slot, place, index, part, shape, count = landed
        into = shared.slots[slot]
        if into.readers:
            raise CheckFailed(f"race: a copy lands in {shared.ring.name}[{slot}] under a matmul")
        whole = into.values[place]
        if whole is None or whole.shape != shape:
            missing = np.nan if part.dtype.kind == "f" else np.iinfo(part.dtype).min
            whole = np.full(shape, missing, part.dtype)
        whole = whole.copy()
        whole[index] = part
        into.values[place] = whole
        into.landing -= 1
        shared.full[slot].landed(count)
        return True

    def _publish(self, agent: Agent, step: steps.Publish) -> bool:
        shared = self.rings[agent.block][step.ring]
        if self.block.is_turned(shared.ring):
            shared.full[self._position(agent.taken, shared.ring)[0]].arrive(TURNING)
        agent.taken[step.ring] = agent.taken.get(step.ring, 0) + 1
        return True

    def _wait(self, agent: Agent, step: steps.Wait) -> bool:
        shared = self.rings[agent.block][step.ring]
        slot, parity = self._position(agent.taken, shared.ring)
        if not shared.full[slot].passed(parity):
            agent.waits_for = f"{shared.full[slot].name} parity {parity}"
            return False
        agent.taken[step.ring] = agent.taken.get(step.ring, 0) + 1
        agent.at[step.ring] = shared.slots[slot]
        return True

    def _release(self, agent: Agent, step: steps.Release) -> bool:
        ring = self.block.ring(step.ring)
        slot, _ = self._position(agent.released, ring)
        agent.released[step.ring] = agent.released.get(step.ring, 0) + 1
        if agent.released[step.ring] > agent.taken.get(step.ring, 0):
            raise CheckFailed(f"{agent.name} releases {ring.name}[{slot}], which it has not taken")
        own = self.rings[agent.block][ring.name]
        times = TURNING if agent.role.transposes else WARPS
        crossing = own.empty[slot].count > arrivals_of(self.block, ring)
        for target in range(self.cluster) if crossing else (agent.block,):
            self.rings[target][ring.name].empty[slot].arrive(times)
        return True

    def _issue(self, agent: Agent, step: steps.Issue, symbols: dict[str, int]) -> bool:
        op = step.op
        assert op.dst is not None
        slots: list[tuple[Slot, int, int]] = []
        registers, rooms = {op.dst.name}, dict[str, Room]()
        for number, src in enumerate(op.srcs[:2]):
            if self._in_room(op, number):
                rooms[src.name] = self._enter(agent, op, src.name)
                continue
            if not self.placement.is_shared(src):
                self._touch(agent, op, src.name)
                registers.add(src.name)
                continue
            ring, buffer = self.block.home(src.name)
            slot = self._slot_of(agent, ring, symbols)
            if slot.landing:
                raise CheckFailed(
                    f"race: {agent.name} {op.label} reads {ring.name} before it landed"
                )
            slot.readers += 1
            slots.append((slot, ring.buffers.index(buffer), slot.version))
        for flying in agent.flying:
            if op.dst.name in flying.registers and flying.op.dst != op.dst:
                raise CheckFailed(f"{agent.name} {op.label} writes {op.dst.name} under a matmul")
        agent.flying.append(Matmul(op, slots, registers, dict(symbols), rooms))
        return True

    def _slot_of(self, agent: Agent, ring: Ring, symbols: dict[str, int]) -> Slot:
        """The slot an iteration reads: the latest waited for, or in a loop that takes a slot each
        iteration the one with that number."""
        if ring.name not in agent.at:
            raise CheckFailed(f"race: {agent.name} reads {ring.name} before it waits for it")
        if ring.name not in agent.entered:
            return agent.at[ring.name]
        index, start, before = agent.entered[ring.name]
        number = before + symbols[index] - start
        if number >= agent.taken.get(ring.name, 0):
            raise CheckFailed(f"race: {agent.name} reads {ring.name} before it waits for it")
        return self.rings[agent.block][ring.name].slots[number % ring.depth]

    def _complete(self, agent: Agent) -> bool:
        matmul = agent.flying.popleft()
        op = matmul.op
        assert op.dst is not None
        if matmul.void:
            agent.state.pop(op.dst.name, None)
            return True
        shared = iter(matmul.slots)
        sources: list[Value] = []
        for number, src in enumerate(op.srcs):
            if self._in_room(op, number):
                whole = self._leave(matmul.rooms[src.name], src)
                sources.append(self._rows(op, number, whole, agent.role.part))
                continue
            if not self.placement.is_shared(src):
                sources.append(agent.state[src.name])
                continue
            slot, place, version = next(shared)
            value = slot.values[place]
            if slot.landing or slot.version != version or value is None:
                raise CheckFailed(f"race: {op.label} of {agent.name} reads an overwritten slot")
            slot.readers -= 1
            sources.append(self._rows(op, number, value, agent.role.part))
        local = self.local(op, agent.role.part)
        agent.state[op.dst.name] = compute(local, sources, matmul.symbols)
        return True

    def _rows(self, op: Op, number: int, value: Value, part: int) -> Value:
        """The rows of the first operand, or columns of the second, of a group's part of the
        result."""
        assert op.dst is not None
        if number > 1 or op.dst.type.names[number] not in self.placement.splits:
            return value
        axis = 1 - op.srcs[number].type.names.index(contracted(op))
        return np.split(value, self.placement.parts, axis=axis)[part]

    def _in_room(self, op: Op, number: int) -> bool:
        """Whether a matmul's operand is one that every group has written a part of."""
        if number > 1 or op.srcs[number].name not in self.placement.common:
            return False
        return number == 1 or not self.placement.from_registers(op)

    def _meet(self, agent: Agent, step: steps.Meet) -> bool:
        met, part = self.met[agent.block], agent.role.part
        if self.placement.read_in_turn(step.tile) and agent.iteration % len(met) != part:
            met[part] += 1  # the group whose turn it is waits for this one, and not the reverse
            agent.meetings = met[part]
            return True
        if not agent.waiting:
            met[agent.role.part] += 1
            agent.meetings, agent.waiting = met[agent.role.part], True
        agent.waits_for = "the other groups"
        agent.waiting = min(met) < agent.meetings
        return not agent.waiting

    def _room(self, agent: Agent, name: str) -> Room:
        """The slot that the agent wrote its part of last, or took what one has written for all."""
        handed = name in self.placement.handed
        parts = 1 if handed else self.placement.parts
        vector = handed and name not in self.placement.common
        slots = HANDED_SLOTS if vector else self.block.launch.staged_slots
        turn = agent.staged.get(name, 0) % slots
        return self.rooms[agent.block].setdefault((name, turn), Room([None] * parts, [0] * parts))

    def _enter(self, agent: Agent, op: Op, name: str) -> Room:
        room = self._room(agent, name)
        handed = name in self.placement.handed
        first = self.placement.leader(name) if handed else 0
        for part, (value, written) in enumerate(zip(room.parts, room.written, strict=True), first):
            if value is None or (written >= agent.meetings and part != agent.role.part):
                raise CheckFailed(
                    f"race: {agent.name} {op.label} reads group {part}'s part of {name} before "
                    "the groups have met"
                )
        room.readers += 1
        return room

    def _leave(self, room: Room, src: Var) -> Value:
        room.readers -= 1
        parts = [part for part in room.parts if part is not None]
        if src.name in self.placement.handed:
            return parts[0]
        (axis,) = [n for n, a in enumerate(src.type.names) if a in self.placement.splits]
        return np.concatenate(parts, axis=axis)

    def _stage(self, agent: Agent, op: Op, name: str) -> None:
        """A group writes its part of an operand of all."""
        agent.staged[name] = agent.staged.get(name, 0) + 1
        room = self._room(agent, name)
        if room.readers:
            raise CheckFailed(f"race: {agent.name} {op.label} writes {name} under a matmul")
        if late := [part for part, when in room.taken.items() if when >= agent.meetings]:
            raise CheckFailed(
                f"race: {agent.name} {op.label} writes {name}, which group {late[0]} may still take"
            )
        place = 0 if name in self.placement.handed else agent.role.part
        room.parts[place] = agent.state[name].copy()
        room.written[place] = agent.meetings

    def _take(self, agent: Agent, op: Op) -> bool:
        """A group takes what the first one has made for all, after they have met."""
        assert op.dst is not None
        name = op.dst.name
        self._touch(agent, op, name, write=True)
        agent.staged[name] = agent.staged.get(name, 0) + 1
        room = self._room(agent, name)
        value = room.parts[0]
        if value is None or room.written[0] >= agent.meetings:
            raise CheckFailed(
                f"race: {agent.name} takes {name} of {op.label} before the groups have met"
            )
        agent.state[name] = value.copy()
        room.taken[agent.role.part] = agent.meetings
        return True

    def _join(self, agent: Agent, step: steps.Join) -> bool:
        while len(agent.flying) > step.count:
            self._complete(agent)
        return True

    def _touch(self, agent: Agent, op: Op, name: str, write: bool = False) -> None:
        for matmul in agent.flying:
            assert matmul.op.dst is not None
            busy = matmul.registers if write else {matmul.op.dst.name}
            if name in busy:
                raise CheckFailed(
                    f"{agent.name} {op.label} touches {name} while {matmul.op.label} may use it"
                )

    def _run(self, agent: Agent, step: steps.Run, symbols: dict[str, int]) -> bool:
        op = step.op
        for var in self.placement.fusion.sources(op):
            self._touch(agent, op, var.name)
        part = agent.role.part
        local = self.local(op, part)
        if op.kind == "reduce_scatter":
            return self._cluster_reduce(agent, op)
        if op.kind in ("store", "store_add"):
            assert op.array is not None
            ours = part == 0 or self.placement.is_split(op.srcs[0].type)
            ours = ours or op.id in self.placement.in_turn
            self._take_panels(agent, op)
            if ours and inside(self.program, self.block.launch, symbols):
                value = self._value(agent, op.srcs[0], symbols)
                if op.id in self.late:
                    agent.panels = Panels(op, local, value.copy(), dict(symbols))
                else:
                    own = 0 if op.id in self.placement.in_turn else part
                    put = self.sums.store(local, own, self.memory, symbols)
                    write_tile(put, value, self.memory[op.array.name], symbols)
            return True
        assert op.dst is not None
        self._touch(agent, op, op.dst.name, write=True)
        if op.kind == "load":
            assert op.array is not None
            agent.state[op.dst.name] = read_tile(local, self.source[op.array.name], symbols)
        else:
            sources = [self._value(agent, src, symbols) for src in op.srcs]
            agent.state[op.dst.name] = compute(local, sources, symbols)
        if op.dst.name in self.placement.common | self.placement.handed:
            self._stage(agent, op, op.dst.name)
        return True

    def _together(self, agent: Agent, step: steps.Step) -> bool:
        """A group is one agent, which has the whole of a vector and waits for no other warp."""
        if isinstance(step, steps.PanelSync):
            agent.copying = False
        return True

    def _take_panels(self, agent: Agent, op: Op) -> None:
        """A store writes into the room for panels."""
        if agent.panels is not None:
            raise CheckFailed(f"{agent.name} {op.label} writes panels that are not copied yet")
        if agent.copying and op.id in self.late:
            raise CheckFailed(f"{agent.name} {op.label} writes panels that a copy may still read")

    def _send(self, agent: Agent, step: steps.Send) -> bool:
        """The copies of a store whose panels are written; of one that is another group's none."""
        own, agent.panels, agent.copying = agent.panels, None, True
        if own is not None:
            if own.op != step.op or own.op.array is None:
                raise CheckFailed(f"{agent.name} copies panels of {step.op.label}, not its own")
            write_tile(own.local, own.value, self.memory[own.op.array.name], own.symbols)
        return True

    def _landed(self, agent: Agent, var: Var, symbols: dict[str, int]) -> Value:
        """The group's part of a loaded tile, from its slot; all of it for warps that turn it."""
        ring, buffer = self.block.home(var.name)
        slot = self._slot_of(agent, ring, symbols)
        value = slot.values[ring.buffers.index(buffer)]
        if slot.landing or value is None:
            raise CheckFailed(f"race: {agent.name} reads {var} in {ring.name} before it landed")
        cut = self.placement.parts > 1 and agent.role.computes
        for number, axis in enumerate(var.type.names if cut else ()):
            if axis in self.placement.splits:
                value = np.split(value, self.placement.parts, axis=number)[agent.role.part]
        return value

    def _cluster_reduce(self, agent: Agent, op: Op) -> bool:
        """Push each block its part, then add up what all blocks pushed here."""
        part, parity = agent.role.part, agent.reductions & 1
        own = self.company[agent.block][part]
        assert op.dst is not None
        if not agent.pushed:
            if not own.free.passed(parity ^ 1):
                agent.waits_for = f"{own.free.name} parity {parity ^ 1}"
                return False
            axis = op.srcs[0].type.names.index(op.axis)
            pieces = np.split(agent.state[op.srcs[0].name], shares(op), axis=axis)
            if agent.block < shares(op):
                own.full.expect(self.cluster * pieces[0].nbytes)
            self.copies += [
                Push(self.company[block][part], agent.block, piece.copy())
                for block, piece in enumerate(pieces)
            ]
            agent.pushed = True
        if agent.block >= shares(op):
            like = self.placement.local(op.dst.type)
            agent.state[op.dst.name] = np.zeros(like.shape, np.float32)
        elif not own.full.passed(parity):
            agent.waits_for = f"{own.full.name} parity {parity}"
            return False
        else:
            agent.state[op.dst.name] = own.take()
            for block in range(self.cluster):
                self.company[block][part].free.arrive(WARPS)
        agent.reductions, agent.pushed = agent.reductions + 1, False
        return True

    def _value(self, agent: Agent, var: Var, symbols: dict[str, int]) -> Value:
        name = var.name
        inner = self.placement.fusion.inlined.get(name)
        if name in self.placement.shared:
            return self._landed(agent, var, symbols)
        if inner is None:
            return agent.state[name]
        local = self.local(inner, agent.role.part)
        if inner.kind == "load":
            assert inner.array is not None
            return read_tile(local, self.source[inner.array.name], symbols)
        sources = [self._value(agent, src, symbols) for src in inner.srcs]
        return compute(local, sources, symbols)

    def _turn_wait(self, agent: Agent) -> bool:
        agent.waits_for = f"the turn of group {agent.role.part}"
        return self.turns[agent.block][agent.role.part].take()

    def _turn_pass(self, agent: Agent) -> bool:
        following = (agent.role.part + 1) % self.placement.parts
        self.turns[agent.block][following].arrive()
        return True
