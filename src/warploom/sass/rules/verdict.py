"""The static verdict on a candidate: legal, or the rules it breaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from warploom.sass.decode.kernel import Instruction
from warploom.sass.flow.aliasing import AliasMode

# What makes an edit legal that breaks a rule, where that is the same for every instruction.
REMEDIES: Mapping[str, str] = {
    "CONTAINER": "every byte outside of the kernel's code and its .nv.info as it was",
    "MULTISET": "the same instructions in each block, control fields apart",
    "PINNED": "its own offset",
    "CONTROL_L1": "a stall of 1 to 11, or the yield bit",
    "CONTROL_L2": "no reuse bits, or no yield",
    "CONTROL_WAIT": "the wait mask it had",
    "OWN_STALL": "a longer stall on it",
    "SCOREBOARD": "the scoreboards that it set",
    "SCOREBOARD_VISIBLE": "a stall of 2 or more where the scoreboard is set, or the wait later",
    "REUSE": "no reuse bit for this operand",
    "NV_INFO": "offsets in .nv.info that follow their instructions",
    "WAIT": "the waits that it had",
    "LINEAGE": "the folder of steps that the search wrote with the result",
}


@dataclass(frozen=True)
class Finding:
    """One broken rule: which instruction (original offset), where it stands now, and why.

    other    the other instruction, where the rule is about two
    remedy   what would make the edit legal
    """

    rule: str
    offset: int
    instruction: str
    reason: str
    other: str = ""
    remedy: str = ""

    @classmethod
    def at(cls, rule: str, item: Instruction, reason: str) -> Finding:
        """A rule that an instruction breaks."""
        return cls(rule, item.offset, item.line.text, reason)

    def explained(self) -> str:
        """The rule, both instructions and what would make the edit legal, a line each."""
        lines = [f"{self.rule}: {self.reason}"]
        if self.other:
            lines.append(f"  first   {self.other}")
        lines.append(f"  {'then' if self.other else 'at':7} {self.offset:#06x} {self.instruction}")
        lines.append(
            f"  legal   with {self.remedy or REMEDIES.get(self.rule, 'the original order')}"
        )
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.rule}: {self.instruction} (offset {self.offset:#x}): {self.reason}"


@dataclass(frozen=True)
class Verdict:
    """The static verdict: legal, or the rules it breaks. `mode` is the alias assumption used.

    `moved` and `control_edits` are `flow.diff`'s, of a legal candidate (None: not counted; a search
    asks for thousands of verdicts, and counting takes longer than judging).
    """

    legal: bool
    mode: AliasMode
    findings: tuple[Finding, ...]
    moved: int | None = None
    control_edits: int | None = None

    def __str__(self) -> str:
        head = f"aliasing {self.mode.value}"
        if self.moved is not None:
            head += f", {self.moved} moved, {self.control_edits} control edits"
        if self.legal:
            return f"legal ({head})"
        return f"illegal ({head}): {self.findings[0]}" + (
            f" and {len(self.findings) - 1} more" if len(self.findings) > 1 else ""
        )
