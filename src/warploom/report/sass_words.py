"""Reasons and control fields in words a person can read, shared by the text and the HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from warploom.sass.decode.control import NO_SCOREBOARD, SCOREBOARDS, Control
from warploom.sass.decode.kernel import GROUP_SLOT, Instruction, Kernel
from warploom.sass.decode.resources import resource_name
from warploom.sass.show.explain import Explanation, Setter, StallReason, WaitReason
from warploom.sass.show.stats import PADDING

SHOWN_SETTERS = 2


def control_columns(control: Control) -> str:
    """`waits  W R  Y stall`, one column a field: scoreboards awaited, set for the result, set for
    the sources, `Y` where the scheduler may switch warps, cycles."""
    waits = "".join(str(k) if control.wait >> k & 1 else "·" for k in range(SCOREBOARDS))
    write = "·" if control.write_sb == NO_SCOREBOARD else str(control.write_sb)
    read = "·" if control.read_sb == NO_SCOREBOARD else str(control.read_sb)
    return f"{waits} {write} {read} {'·' if control.stay else 'Y'} {control.stall:>2}"


CONTROL_HEADING = "awaits W R Y st"


def control_sentence(control: Control) -> str:
    """The same as a sentence, for a tooltip."""
    parts = [f"stall {control.stall}", "stay on this warp" if control.stay else "yield"]
    if control.write_sb != NO_SCOREBOARD:
        parts.append(f"sets SB{control.write_sb} until its result is written")
    if control.read_sb != NO_SCOREBOARD:
        parts.append(f"sets SB{control.read_sb} until its sources are read")
    if control.waits():
        parts.append("awaits " + ", ".join(f"SB{number}" for number in control.waits()))
    slots = "".join(name for bit, name in enumerate("abc") if control.reuse >> bit & 1)
    if slots and control.stay:
        parts.append(f"keeps operand {', '.join(slots)} for reuse")
    return "; ".join(parts)


def at(kernel: Kernel, index: int) -> str:
    """`0x0120 IADD3`: an instruction named shortly."""
    item = kernel.instructions[index]
    return f"{item.offset:#06x} {item.base}"


def stall_words(kernel: Kernel, reason: StallReason) -> str:
    """One reason for a stall."""
    spare = f", {reason.spare} to spare" if reason.spare else ""
    if reason.producer is None or reason.consumer is None:
        if reason.consumer is not None:
            return f"{reason.register} shows a cycle late to {at(kernel, reason.consumer)}{spare}"
        if reason.spare:
            return f"{reason.spare} of {reason.stall} cycles that no known rule asks for"
        return f"{reason.rule} is {reason.needed}"
    pair = f"{at(kernel, reason.producer)} -> {at(kernel, reason.consumer)}"
    value = f" {reason.register}" if reason.register else ""
    kind = {"read after write": "", "write after read": " WAR", "write after write": " WAW"}.get(
        reason.rule, f" ({reason.rule})"
    )
    return f"{pair}{value}{kind} needs {reason.needed}, has {reason.actual}{spare}"


def wait_words(kernel: Kernel, reason: WaitReason) -> str:
    """One awaited scoreboard: who set it, and the first instruction that relies on the wait."""
    name = "groups" if reason.scoreboard is None else f"SB{reason.scoreboard}"
    shown = "; ".join(_setter(kernel, setter) for setter in reason.setters[:SHOWN_SETTERS])
    more = len(reason.setters) - SHOWN_SETTERS
    by = f"{shown}{f' and {more} more' if more > 0 else ''}" if shown else "nothing outstanding"
    if not reason.consumers:
        return f"{name}: {by}"
    rest = len(reason.consumers) - 1
    inherited = f" and {rest} more" if rest else ""
    return f"{name}: {by}, for {at(kernel, reason.consumers[0])}{inherited}"


def _setter(kernel: Kernel, setter: Setter) -> str:
    registers = f" {register_ranges(setter.registers)}" if setter.registers else ""
    return f"{at(kernel, setter.instruction)} {setter.action}{registers}"


def register_ranges(names: Sequence[str]) -> str:
    """`R4-R7,R9`: runs of registers of one file joined."""
    parts: list[list[str]] = []
    for name in names:
        if parts and _follows(parts[-1][-1], name):
            parts[-1].append(name)
        else:
            parts.append([name])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in parts)


def _follows(first: str, second: str) -> bool:
    file, number = first.rstrip("0123456789"), first.lstrip("URP")
    return second == f"{file}{int(number) + 1}"


def reasons(kernel: Kernel, explanation: Explanation, index: int) -> list[str]:
    """Every reason of one instruction, waits first, for they happen first."""
    found = [f"wait {wait_words(kernel, wait)}" for wait in explanation.waits.get(index, ())]
    if (stall := explanation.stalls.get(index)) is not None:
        found.append(f"stall {stall.stall}: {stall_words(kernel, stall)}")
    return found


def defs_and_uses(item: Instruction) -> tuple[str, str]:
    """(registers written, registers read), without the accesses that model a group's wait."""

    def names(accesses: Iterable[tuple[int, str]]) -> str:
        numbers = sorted({number for number, slot in accesses if slot not in (GROUP_SLOT, "old")})
        return register_ranges([resource_name(number) for number in numbers])

    return (
        names((access.resource, access.slot) for access in item.effects.writes),
        names((access.resource, access.slot) for access in item.effects.reads),
    )


def block_list(numbers: Sequence[int]) -> str:
    """`1, 4-7`: block numbers with runs joined; `-` for none."""
    if not numbers:
        return "-"
    ordered = sorted(numbers)
    starts = [0, *(place + 1 for place, (a, b) in enumerate(pairwise(ordered)) if b != a + 1)]
    ends = [*starts[1:], len(ordered)]
    runs = [ordered[start:end] for start, end in zip(starts, ends, strict=True)]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def size_words(kernel: Kernel) -> str:
    """`866 instructions and 14 NOPs`."""
    nops = sum(item.base == PADDING for item in kernel.instructions)
    rest = f" and {count(nops, PADDING)}" if nops else ""
    return f"{count(len(kernel.instructions) - nops, 'instruction')}{rest}"


def count(number: int, noun: str) -> str:
    """`1 loop`, `2 loops`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
