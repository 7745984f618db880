"""What a kernel's machine code says without being run."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.codegen.compile.build import Built
from warploom.sass.decode.cubin import parse
from warploom.sass.decode.kernel import decode
from warploom.sass.rules.lint import ERROR, lint
from warploom.sass.show.stats import stats


@dataclass(frozen=True)
class StaticVerdict:
    """What the machine code says without being run; `faults` is empty when it passes."""

    faults: tuple[str, ...]
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    instructions: int
    matrix_instructions: int
    serialised_groups: int
    warnings: int
    compiler: str

    @property
    def passed(self) -> bool:
        """No rule is broken."""
        return not self.faults

    def __str__(self) -> str:
        head = "pass" if self.passed else f"FAIL: {self.faults[0]}"
        return (
            f"{head}; {self.matrix_instructions} matrix instructions, "
            f"{self.serialised_groups} serialised, {self.spill_bytes} B spilled, "
            f"{self.registers} registers at entry, {self.shared_bytes} B of shared memory"
        )


def static_verdict(built: Built, allow: tuple[str, ...] = ()) -> StaticVerdict:
    """Judge machine code: no serialised matmul, no spill, no stack frame, no lint error.

    Spills and a stack frame may be allowed by name (`build.ALLOWED`).
    """
    cubin = parse(built.cubin, built.source.name)
    kernel = decode(cubin, None)
    findings = lint(kernel)
    counted = stats(cubin, kernel, findings)
    errors = [finding for finding in findings if finding.severity == ERROR]
    resources = built.resources
    faults: list[str] = []
    if counted.serialised_groups:
        faults.append(f"{counted.serialised_groups} matrix instructions wait for the one before")
    if resources.spill_bytes and "spills" not in allow:
        faults.append(f"{resources.spill_bytes} B of registers spilled")
    if resources.stack_bytes and "stack" not in allow:
        faults.append(f"a stack frame of {resources.stack_bytes} B")
    faults += [str(error) for error in errors[:4]]
    faults += list(resources.notes)
    if built.after is not None:
        faults += static_verdict(built.after, allow).faults
    return StaticVerdict(
        tuple(faults),
        resources.registers,
        resources.spill_bytes,
        resources.stack_bytes,
        built.source.shared_bytes,
        counted.instructions,
        counted.matrix_instructions,
        counted.serialised_groups,
        len(findings) - len(errors),
        resources.compiler,
    )
