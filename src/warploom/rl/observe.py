"""What a learned player sees of a board.

`Listing` is CuAsmRL's matrix: one row a line in the current order with the control field (wait
slots, read and write scoreboard, yield, stall), the index of a memory opcode, and the operands as
places in a register table, -1 where there is none. `GraphView` is ours: one row a line in the order
as compiled, with control field, pipe, place, room to move and the cycles the timing model loses
before it, and for each line its partners in the
dependence graph with the distance each pair has to spare.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from warploom.rl.board import Board
from warploom.rl.offers import BlockNow
from warploom.rl.waits import waits
from warploom.sass.decode.control import NO_SCOREBOARD, SCOREBOARDS
from warploom.sass.decode.opcodes import Pipe
from warploom.sass.timing.slots import slot_of

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Observation = Floats | dict[str, Floats]
OPERANDS: Final = 8
MEMORY_OPCODES: Final = ("LDG", "LDGSTS", "STG", "LDS", "LDSM", "STS", "STSM", "LD", "ST")
CONTROL_COLUMNS: Final = SCOREBOARDS + 4
LISTING_COLUMNS: Final = CONTROL_COLUMNS + 1 + OPERANDS
PARTNERS: Final = 8
EDGE_COLUMNS: Final = 3
PIPES: Final = tuple(Pipe)
FIXED_COLUMNS: Final = len(PIPES) + 4
GRAPH_COLUMNS: Final = SCOREBOARDS + 12 + FIXED_COLUMNS
STALL_SCALE: Final = 15.0
CYCLES: Final = 32.0
DEEPEST: Final = 3.0


class Listing:
    """CuAsmRL's observation, [lines, LISTING_COLUMNS]."""

    def __init__(self, board: Board) -> None:
        self.board = board
        items = [board.kernel.instructions[int(index)] for index in board.lines]
        registers = sorted(
            {a.resource for item in items for a in (*item.effects.reads, *item.effects.writes)}
        )
        place = {register: number for number, register in enumerate(registers)}
        self._operands = np.full((len(items), OPERANDS), -1.0, np.float32)
        self._opcode = np.full(len(items), -1.0, np.float32)
        for line, item in enumerate(items):
            if item.base in MEMORY_OPCODES:
                self._opcode[line] = MEMORY_OPCODES.index(item.base)
            named = [a.resource for a in (*item.effects.writes, *item.effects.reads)]
            for slot, register in enumerate(dict.fromkeys(named)):
                if slot < OPERANDS:
                    self._operands[line, slot] = place[register] / len(registers)

    @staticmethod
    def space(lines: int) -> spaces.Space[Any]:
        """The Gymnasium space; rows past the kernel's lines are -1."""
        return spaces.Box(-1.0, 16.0, (lines, LISTING_COLUMNS), np.float32)

    def see(self) -> Floats:
        """The board as it stands."""
        board = self.board
        seen = np.full((board.profile.lines, LISTING_COLUMNS), -1.0, np.float32)
        row = 0
        for block in board.scope:
            batch, version = board.batches[block], board.now[block].version
            numbers = version.order[0]
            lines = np.array([board.line_of.get(int(n) + batch.start, -1) for n in numbers])
            inside = lines >= 0
            count = min(int(inside.sum()), board.profile.lines - row)
            numbers, lines = numbers[inside][:count], lines[inside][:count]
            wait = version.wait[0][inside][:count]
            for slot in range(SCOREBOARDS):
                seen[row : row + count, slot] = np.where(wait >> slot & 1 == 1, slot, -1)
            for column, numbered in enumerate((batch.read_sb, batch.write_sb), SCOREBOARDS):
                board_number = numbered[numbers]
                seen[row : row + count, column] = np.where(
                    board_number == NO_SCOREBOARD, -1, board_number
                )
            seen[row : row + count, SCOREBOARDS + 2] = 1 - version.stay[0][inside][:count]
            seen[row : row + count, SCOREBOARDS + 3] = version.stall[0][inside][:count]
            seen[row : row + count, CONTROL_COLUMNS] = self._opcode[lines]
            seen[row : row + count, CONTROL_COLUMNS + 1 :] = self._operands[lines]
            row += count
        return seen


class GraphView:
    """Our observation: `lines` [lines, GRAPH_COLUMNS], `partners` [lines, PARTNERS] (line numbers,
    `lines` where there is none) and `edges` [lines, PARTNERS, 3]."""

    def __init__(self, board: Board) -> None:
        self.board = board
        count, room = len(board.lines), board.profile.lines
        self._fixed = np.zeros((room, FIXED_COLUMNS), np.float32)
        for line, number in enumerate(board.lines):
            index = int(number)
            item = board.kernel.instructions[index]
            self._fixed[line, PIPES.index(item.effects.info.pipe)] = 1.0
            depth = board.depth[board.kernel.block_of[index]]
            self._fixed[line, len(PIPES) :] = (
                min(depth, DEEPEST) / DEEPEST,
                float(item.base in MEMORY_OPCODES),
                float(board.movable[line]),
                1.0,
            )
        self._partners = np.full((room, PARTNERS), room, np.int64)
        self._direction = np.zeros((room, PARTNERS), np.float32)
        self._need = np.zeros((room, PARTNERS), np.float32)
        self._pairs: list[tuple[int, Ints, Ints, Ints]] = []
        self._slots = [slot_of(item) for item in board.kernel.instructions]
        self._lost: dict[int, tuple[BlockNow, Floats]] = {}
        for block in board.scope:
            self._connect(block, count)

    def _connect(self, block: int, count: int) -> None:
        """The nearest partners of each line: before and after it in the dependence graph."""
        batch, board = self.board.batches[block], self.board
        needs: dict[tuple[int, int], int] = {(int(a), int(b)): 0 for a, b in batch.order_rows}
        for earlier, later, need in batch.gap_rows.tolist():
            needs[earlier, later] = max(needs.get((earlier, later), 0), need)
        of: dict[int, list[tuple[int, int, int]]] = {}
        for (earlier, later), need in needs.items():
            of.setdefault(earlier, []).append((later, need, 1))
            of.setdefault(later, []).append((earlier, need, -1))
        rows: list[tuple[int, int, int, int]] = []
        for number, found in of.items():
            line = board.line_of.get(number + batch.start, count)
            if line >= count:
                continue
            found.sort(key=lambda one, number=number: (abs(one[0] - number), one[0]))
            for slot, (partner, need, direction) in enumerate(found[:PARTNERS]):
                other = board.line_of.get(partner + batch.start)
                if other is None:
                    continue
                self._partners[line, slot] = other
                self._direction[line, slot] = direction
                self._need[line, slot] = need
                rows.append((line, slot, number, partner))
        pairs = np.array(rows, np.int64).reshape(len(rows), 4)
        self._pairs.append((block, pairs[:, 0] * PARTNERS + pairs[:, 1], pairs[:, 2], pairs[:, 3]))

    @staticmethod
    def space(lines: int) -> spaces.Space[Any]:
        """The Gymnasium space; rows past the kernel's lines are 0."""
        return spaces.Dict(
            {
                "lines": spaces.Box(-1.0, 1.0, (lines, GRAPH_COLUMNS), np.float32),
                "partners": spaces.Box(0.0, float(lines), (lines, PARTNERS), np.float32),
                "edges": spaces.Box(-1.0, 1.0, (lines, PARTNERS, EDGE_COLUMNS), np.float32),
            }
        )

    def see(self) -> dict[str, Floats]:
        """The board as it stands."""
        board = self.board
        room = board.profile.lines
        seen = np.zeros((room, GRAPH_COLUMNS), np.float32)
        slack = np.zeros(room * PARTNERS, np.float32)
        for block, flat, number, partner in self._pairs:
            issue = board.now[block].timed.issue[board.now[block].row]
            slack[flat] = np.abs(issue[partner] - issue[number])
            self._lines_of(block, seen)
        seen[:, -FIXED_COLUMNS:] = self._fixed
        spare = (slack.reshape(room, PARTNERS) - self._need) / CYCLES
        edges = np.stack([self._direction, self._need / CYCLES, spare], 2)
        edges[self._partners == room] = 0.0
        return {
            "lines": np.clip(seen, -1.0, 1.0),
            "partners": self._partners.astype(np.float32),
            "edges": np.clip(edges, -1.0, 1.0).astype(np.float32),
        }

    def _lines_of(self, block: int, seen: Floats) -> None:
        board = self.board
        batch, now = board.batches[block], board.now[block]
        lines = np.array([board.line_of.get(n + batch.start, -1) for n in range(batch.size)])
        here = np.flatnonzero(lines >= 0)
        rows = lines[here]
        place = batch.positions(now.version.order)[0]
        first, last = board.windows(block)
        for slot in range(SCOREBOARDS):
            seen[rows, slot] = now.version.wait[0][place][here] >> slot & 1
        seen[rows, SCOREBOARDS] = now.version.stall[0][place][here] / STALL_SCALE
        seen[rows, SCOREBOARDS + 1] = now.version.stay[0][place][here]
        for slot in range(3):
            seen[rows, SCOREBOARDS + 2 + slot] = now.version.reuse[0][place][here] >> slot & 1
        seen[rows, SCOREBOARDS + 5] = (batch.write_sb != NO_SCOREBOARD)[here]
        seen[rows, SCOREBOARDS + 6] = (batch.read_sb != NO_SCOREBOARD)[here]
        seen[rows, SCOREBOARDS + 7] = place[here] / batch.size
        seen[rows, SCOREBOARDS + 8] = (place - first)[here] / CYCLES
        seen[rows, SCOREBOARDS + 9] = (last - place)[here] / CYCLES
        seen[rows, SCOREBOARDS + 10] = (place - np.arange(batch.size))[here] / CYCLES
        seen[rows, SCOREBOARDS + 11] = self._lost_cycles(block)[place][here] / CYCLES

    def _lost_cycles(self, block: int) -> Floats:
        """Cycles the model loses before each line of a block as it stands, in issue order."""
        now = self.board.now[block]
        known = self._lost.get(block)
        if known is None or known[0] is not now:
            order, controls = self.board.controls(block)
            code = [(self._slots[line], field) for line, field in zip(order, controls, strict=True)]
            known = self._lost[block] = (now, waits(code, self.board.depth[block] > 0))
        return known[1]
