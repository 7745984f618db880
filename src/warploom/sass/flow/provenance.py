"""Which pointer parameter a global address derives from, by dataflow over the whole kernel."""

from __future__ import annotations

import re
from typing import Final

from warploom.sass.decode import nvinfo
from warploom.sass.decode.kernel import Instruction, Kernel
from warploom.sass.decode.opcodes import Order
from warploom.sass.decode.operands import Kind

KERNEL_PARAMETER: Final = 0x17  # EIATTR_KPARAM_INFO
PARAMETER_BASE: Final = {80: 0x160, 86: 0x160, 87: 0x160, 89: 0x160, 90: 0x210}
POINTER_BYTES: Final = 8
_CONSTANT: Final = re.compile(r"c\[0x0\]\[(?:U?R\d+\+)?0x([0-9a-f]+)\]")
UNTRACKED: Final = frozenset((-1,))
NOTHING: Final[frozenset[int]] = frozenset()


def pointer_parameters(kernel: Kernel) -> dict[int, int]:
    """{constant-bank offset: ordinal} of the kernel's 8-byte parameters."""
    base = PARAMETER_BASE.get(kernel.sm)
    if base is None:
        return {}
    found: dict[int, int] = {}
    for record in nvinfo.records(kernel.info):
        if record.attribute == KERNEL_PARAMETER and len(record.payload) >= 12:
            ordinal = int.from_bytes(record.payload[4:6], "little")
            offset = int.from_bytes(record.payload[6:8], "little")
            size = int.from_bytes(record.payload[8:12], "little") >> 18
            if size == POINTER_BYTES:
                found[base + offset] = ordinal
    return found


def address_pointers(kernel: Kernel) -> dict[int, frozenset[int]]:
    """{instruction index: ordinals of the pointer parameters its global address derives from}.

    A set of one parameter is a proof; anything else (a value loaded from memory, two parameters
    mixed) yields a set that never proves two accesses distinct.
    """
    parameters = pointer_parameters(kernel)
    states: list[dict[int, frozenset[int]]] = [{} for _ in kernel.blocks]
    pending = list(range(len(kernel.blocks)))
    visited: set[int] = set()
    result: dict[int, frozenset[int]] = {}
    while pending:
        number = pending.pop(0)
        visited.add(number)
        block = kernel.blocks[number]
        state = dict(states[number])
        for item in kernel.items(block):
            _step(item, state, parameters, result)
        for successor in block.successors:
            target = states[successor]
            grown = successor not in visited
            for resource, pointers in state.items():
                before = target.get(resource, NOTHING)
                if not pointers <= before:
                    target[resource] = before | pointers
                    grown = True
            if grown and successor not in pending:
                pending.append(successor)
    return result


def _step(
    item: Instruction,
    state: dict[int, frozenset[int]],
    parameters: dict[int, int],
    result: dict[int, frozenset[int]],
) -> None:
    sources = NOTHING
    address = NOTHING
    for access in item.effects.reads:
        pointers = state.get(access.resource, NOTHING)
        if access.slot.startswith(("addr", "uaddr")):
            address |= pointers
        elif access.slot != "guard":
            sources |= pointers
    if item.effects.info.order in (Order.MEMORY, Order.SYNC):
        result[item.index] = result.get(item.index, NOTHING) | address
        sources = UNTRACKED  # a value from memory may be any pointer
    sources |= _constant_pointers(item, parameters)
    for access in item.effects.writes:
        kept = state.get(access.resource, NOTHING) if item.effects.partial else NOTHING
        state[access.resource] = kept | sources


def _constant_pointers(item: Instruction, parameters: dict[int, int]) -> frozenset[int]:
    """The pointer parameters an instruction reads from the constant bank.

    Either half of a pointer marks the value: address arithmetic keeps the halves together.
    """
    found = NOTHING
    suffix = item.line.opcode.rsplit(".", 1)[-1]
    width = {"64": 8, "128": 16}.get(suffix, 4)
    for operand in item.effects.operands:
        if operand.kind is not Kind.CONSTANT:
            continue
        match = _CONSTANT.search(operand.text)
        if match is None:
            return UNTRACKED
        offset = int(match.group(1), 16)
        found |= {
            ordinal
            for start, ordinal in parameters.items()
            if start < offset + width and offset < start + POINTER_BYTES
        }
    return found
