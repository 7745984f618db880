"""Every kind of wrong and of right edit on one kernel, judged in both alias modes."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.sass.facts import Code, Mutant, Mutator
from tests.sass.legal_edits import LEGAL
from tests.sass.mutators import MUTATORS

from warploom.sass.flow.aliasing import AliasMode
from warploom.sass.rules.verdict import Verdict
from warploom.sass.rules.verify import Verifier


@dataclass
class Tally:
    """Edits by kind, and what the rules said of them; an edit counts once for both modes."""

    edits: Counter[str] = field(default_factory=Counter[str])
    kernels: Counter[str] = field(default_factory=Counter[str])
    accepted: list[str] = field(default_factory=list[str])  # wrong, and called legal
    other: list[str] = field(default_factory=list[str])  # refused, not for what is wrong
    legal: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    refusals: list[str] = field(default_factory=list[str])


def drawn(mutator: Mutator, code: Code, each: int) -> list[Mutant]:
    """`each` of a kind's edits of one kernel at random, the same ones each time."""
    rows = list(mutator(code))
    if len(rows) <= each:
        return rows
    seed = zlib.crc32(f"{code.cubin.digest} {code.kernel.name} {mutator.__name__}".encode())
    return random.Random(seed).sample(rows, each)


def judge_wrong(
    tally: Tally, code: Code, verifiers: Mapping[AliasMode, Verifier], mutator: Mutator, each: int
) -> None:
    """Wrong edits of one kind: none may be legal in any mode that they are wrong in."""
    expected = MUTATORS[mutator]
    rows = drawn(mutator, code, each)
    tally.kernels[mutator.__name__] += bool(rows)
    for mutant in rows:
        tally.edits[mutator.__name__] += 1
        for mode, verdict in _verdicts(mutant, verifiers):
            if mutant.aliasing and mode is AliasMode.TRITON:
                continue
            said = f"{mutator.__name__} ({mode.value}): {Path(code.cubin.origin).name} {mutant.why}"
            if verdict.legal:
                tally.accepted.append(said)
            elif not expected & {finding.rule for finding in verdict.findings}:
                tally.other.append(f"{said}: {verdict}")


def judge_legal(
    tally: Tally, code: Code, verifiers: Mapping[AliasMode, Verifier], mutator: Mutator, each: int
) -> None:
    """Right edits of one kind, and the first rule that refuses one."""
    for mutant in drawn(mutator, code, each):
        tally.legal[mutator.__name__] += 1
        for mode, verdict in _verdicts(mutant, verifiers):
            if not verdict.legal:
                tally.refused[mutator.__name__, verdict.findings[0].rule] += 1
                where = f"{Path(code.cubin.origin).name} {mutant.why}"
                said = f"{mutator.__name__} ({mode.value}): {where}: {verdict.findings[0]}"
                tally.refusals.append(said)
                break


def judge(
    tally: Tally, code: Code, verifiers: Mapping[AliasMode, Verifier], each: int, legal: int
) -> None:
    """All kinds."""
    for mutator in MUTATORS:
        judge_wrong(tally, code, verifiers, mutator, each)
    for mutator in LEGAL:
        judge_legal(tally, code, verifiers, mutator, legal)


def _verdicts(
    mutant: Mutant, verifiers: Mapping[AliasMode, Verifier]
) -> Iterator[tuple[AliasMode, Verdict]]:
    data = mutant.data
    for mode, verifier in verifiers.items():
        assert data != verifier.original.data
        # Where the sections lie is the original's: the verdict looks at every byte between them.
        yield mode, verifier.check_file(replace(verifier.original, data=data))
