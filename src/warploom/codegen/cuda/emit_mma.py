"""Code for wgmma: descriptors from ring slots, one instruction a K step and block of rows."""

from __future__ import annotations

from warploom.codegen.analysis.matmuls import instruction_columns
from warploom.codegen.cuda.emit_staged import at_use, held_name, takes_turns
from warploom.codegen.cuda.names import c_name
from warploom.codegen.cuda.prelude import wgmma
from warploom.codegen.cuda.values import Values
from warploom.codegen.ir.block import BlockProgram
from warploom.codegen.ir.layout import Operand
from warploom.codegen.ir.place import ROWS_PER_GROUP
from warploom.tile import Op
from warploom.tile.ops import TAKEN_OFF


def issue_lines(
    block: BlockProgram, values: Values, op: Op, helpers: dict[str, str], lazy: bool
) -> list[str]:
    """Start one matmul: pin, fence, the instructions, commit.

    `lazy`: the accumulator is known to be zero until `<acc>_live` is set, so that the first
    instruction overwrites it. Adds the instructions it uses to `helpers`.
    """
    placement = block.placement
    assert op.dst is not None
    a_var, b_var = op.srcs[:2]
    from_registers = placement.from_registers(op)
    right = placement.operand(op, 1)
    left = None if from_registers else placement.operand(op, 0)
    transposed = (left is not None and not left.k_major, not right.k_major)
    kind, off = a_var.type.dtype.name, op.value == TAKEN_OFF

    def called(columns: int, registers: bool) -> str:
        name, text = wgmma(columns, kind, registers, transposed, off)
        helpers[name] = text
        return name

    into, steps = c_name(op.dst.name), right.steps
    own, in_registers = c_name(a_var.name), tuple(range(steps)) if from_registers else ()
    if not from_registers and (held := block.launch.held_steps.get(a_var.name)):
        own, in_registers = held_name(a_var), held
    lines = [f"pin({into});", *([f"pin({own});"] if in_registers else []), "wgmma_fence();"]
    fresh, pieces = len(op.srcs) == 2, instruction_columns(placement, op)
    for step in range(steps):
        for t in range(values.blocks(op.dst.type)):
            if left is None or step in in_registers:
                a = f"&{own}[{t}][{4 * in_registers.index(step)}]"
            else:
                a = _descriptor(block, op, a_var.name, left, step, t)
            accumulate = "1"
            if step == 0:
                accumulate = "0" if fresh else (f"{op.dst.name}_live" if lazy else "1")
            for first, columns in pieces:
                b = _slot_descriptor(block, b_var.name, right, right.offset(step, first))
                b = _of_part(block, op, 1, right, b)
                sums = f"{into}[{t}]"
                if len(pieces) > 1:
                    sums = f"some<{columns // 2}>({sums} + {first // 2})"
                name = called(columns, step in in_registers)
                lines.append(f"{name}({sums}, {a}, {b}, {accumulate});")
    lines.append("wgmma_commit();")
    if lazy:
        lines.append(f"{op.dst.name}_live = 1;")
    return lines


def _slot_descriptor(block: BlockProgram, name: str, operand: Operand, offset: int) -> str:
    # Everything known now is in the low word; the address field cannot carry into the next one.
    low, high = operand.words()
    if name in block.placement.staged:
        turn = f" + {name}_turn" if takes_turns(block, name) else ""
        staged = at_use(block.placement, f"{name}_staged{turn}")
        return f"descriptor({low + offset // 16:#x}, {high:#x}, {staged})"
    ring, buffer = block.home(name)
    return f"descriptor({low + (buffer.offset + offset) // 16:#x}, {high:#x}, {ring.name}_at)"


def _descriptor(block: BlockProgram, op: Op, name: str, operand: Operand, step: int, t: int) -> str:
    # Operand A: this group's part of the rows, then block t of it.
    text = _slot_descriptor(block, name, operand, operand.offset(step, t * ROWS_PER_GROUP))
    return _of_part(block, op, 0, operand, text)


def _of_part(block: BlockProgram, op: Op, which: int, operand: Operand, text: str) -> str:
    """The descriptor of this group's part of an operand: its rows of the first, its columns of the
    second."""
    placement = block.placement
    assert op.dst is not None
    axis = op.dst.type.names[which]
    name = op.srcs[which].name
    own = name in placement.staged and name not in placement.common
    if placement.parts == 1 or axis not in placement.splits or own:
        return text
    size = op.dst.type.size(axis) // placement.parts
    return f"{text[:-1]} + part * {operand.offset(0, size)})"
