"""The static verdict on a candidate: legal, or the rules it breaks."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.sass.decode.kernel import Instruction
from warploom.sass.flow.aliasing import AliasMode


@dataclass(frozen=True)
class Finding:
    """One broken rule: which instruction (original offset), where it stands now, and why."""

    rule: str
    offset: int
    instruction: str
    reason: str

    @classmethod
    def at(cls, rule: str, item: Instruction, reason: str) -> Finding:
        """A rule that an instruction breaks."""
        return cls(rule, item.offset, item.line.text, reason)

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
