"""Checking a candidate cubin against the original: bit for bit, many inputs, cold and warm.

A reordered kernel performs the same floating-point operations, so equality of bits is the right
test. Outputs start as NaN, guard bands lie around every buffer, and before a candidate is believed
the check itself is checked: a zeroed output and one flipped bit must both be found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from warploom.errors import CheckFailed, InputError
from warploom.runtime.buffers import Region, describe_difference
from warploom.runtime.patterns import DEFAULT_PATTERNS, check_patterns
from warploom.runtime.workbench import Loaded, Workbench

MAX_SAMPLES = 10_000_000
Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class CheckSettings:
    """What to run: every pattern cold once and warm `warm` times, then `samples` random inputs.

    Sampling goes on from the file `state` when it exists and belongs to the same check; the file is
    written after every batch (about a second's work, `batch` samples at most).
    """

    patterns: tuple[str, ...] = DEFAULT_PATTERNS
    warm: int = 8
    samples: int = 0
    batch: int = 20_000
    seed: int = 1
    state: str = ""

    def __post_init__(self) -> None:
        """Refuse unknown patterns and counts out of range."""
        check_patterns(self.patterns)
        if not 0 <= self.samples <= MAX_SAMPLES:
            raise InputError(f"samples {self.samples}, expected 0 to {MAX_SAMPLES:,}")
        if self.warm < 1 or self.batch < 1:
            raise InputError(f"warm {self.warm} and batch {self.batch}: both must be at least 1")


@dataclass(frozen=True)
class Finding:
    """One phase of one pattern: how many 32-bit words differed, and where first."""

    pattern: str
    phase: str
    words: int
    where: str = ""


@dataclass(frozen=True)
class CheckReport:
    """The tested verdict on a candidate. `failed_sample` is -1 when no sample failed.

    Failing sample n is replayed with `patterns.generate(dtype, count, names[n % len(names)], seed +
    n, salt)` for the buffer at place `salt` of the launch, `names` being the settings' patterns.
    """

    passed: bool
    findings: tuple[Finding, ...]
    self_test: dict[str, str]
    samples: int = 0
    failed_sample: int = -1
    samples_per_second: float = 0.0
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)

    def __str__(self) -> str:
        verdict = "passed" if self.passed else f"FAILED: {self.detail}"
        sampled = f", {self.samples:,} samples at {self.samples_per_second:,.0f}/s"
        return f"{verdict}; {len(self.findings)} pattern runs{sampled if self.samples else ''}"


def self_test(bench: Workbench) -> str:
    """Plant two faults in every expected output and see both found.

    *requires* the expected arena filled. *keeps* it. Returns 'found', or 'skipped: ...' when every
    output is all zero bits, so that zeroing it changes nothing. Raises `CheckFailed` when a planted
    fault goes unnoticed: then no verdict of this check means anything.
    """
    space = bench.workspace
    outputs = [region for region in space.layout.regions if region.buffer.role != "in"]
    zeroed = 0
    for region in outputs:
        if any(space.read(space.expected, region.buffer.name)):
            _plant(bench, region, "a zeroed output")
            zeroed += 1
        _plant(bench, region, "one flipped bit")
    return "found" if zeroed else "skipped: every output is zero"


def _plant(bench: Workbench, region: Region, fault: str) -> None:
    space, device = bench.workspace, bench.device
    device.copy(space.work, space.expected, space.layout.nbytes)
    start = space.work + region.offset
    if fault == "a zeroed output":
        device.memset(start, 0, region.buffer.nbytes)
    else:
        middle = start + region.buffer.nbytes // 2
        device.upload(middle, bytes([device.download(middle, 1)[0] ^ 1]))
    bench.helpers.reset()
    space.compare()
    found = space.difference()
    if found is None or (fault == "one flipped bit" and found.words != 1):
        raise CheckFailed(
            f"the check of {bench.spec.kernel} did not find {fault} in {region.buffer.name}: "
            "its verdicts cannot be trusted"
        )


def check_candidate(
    bench: Workbench, original: bytes, candidate: bytes, settings: CheckSettings, progress: Progress
) -> CheckReport:
    """Compare `candidate` with `original` on one launch; stops at the first failing phase.

    Samples (`settings.samples`) are `sampling.Sampler`'s work, not done here. Raises `CheckFailed`
    when the original is no reference (not deterministic, writes out of bounds) or the self-test
    fails, `CudaError` when an image does not load or faults.
    """
    reference = bench.load(original)
    findings: list[Finding] = []
    checked: dict[str, str] = {}
    for pattern in settings.patterns:
        bench.expect(reference, settings.seed, (pattern,))
        bench.check_original(reference)
        checked[pattern] = self_test(bench)
        findings.extend(_phases(bench, candidate, pattern, settings.warm))
        progress({"phase": "patterns", "done": len(checked), "total": len(settings.patterns)})
        if findings[-1].words:
            break
    bench.unload(reference)
    last = findings[-1]
    if last.words:
        detail = f"{last.pattern} inputs, {last.phase}: {last.where}"
        return CheckReport(False, tuple(findings), checked, detail=detail)
    if "found" not in checked.values():
        raise CheckFailed(
            f"the self-test of {bench.spec.kernel} could not plant a zeroed output: the original "
            "writes only zeros on every pattern; give inputs that make it write something"
        )
    return CheckReport(True, tuple(findings), checked)


def _phases(bench: Workbench, candidate: bytes, pattern: str, warm: int) -> list[Finding]:
    """Run a freshly loaded candidate cold, warm and back to back; ends at the first difference."""
    loaded = bench.load(candidate)
    findings: list[Finding] = []
    accumulates = any(buffer.role == "inout" for buffer in bench.spec.buffers)
    phases: list[tuple[str, Callable[[], None]]] = [
        ("cold", lambda: _run_cold(bench, loaded)),
        ("warm", lambda: _run_warm(bench, loaded, warm)),
    ]
    if not accumulates:
        phases.append(("back to back", lambda: _run_back_to_back(bench, loaded, warm)))
    for phase, run in phases:
        bench.helpers.reset()
        run()
        found = bench.workspace.difference()
        words = found.words if found else 0
        where = describe_difference(bench.workspace.layout, found) if found else ""
        findings.append(Finding(pattern, phase, words, where))
        if found:
            break
    bench.unload(loaded)
    return findings


def _run_cold(bench: Workbench, loaded: Loaded) -> None:
    """The first launch of a fresh module, with none of its data in the L2 cache."""
    bench.workspace.restore()
    bench.workspace.flush_l2()
    bench.launch(loaded)
    bench.workspace.compare()


def _run_warm(bench: Workbench, loaded: Loaded, count: int) -> None:
    for _ in range(count):
        bench.workspace.restore()
        bench.launch(loaded)
        bench.workspace.compare()


def _run_back_to_back(bench: Workbench, loaded: Loaded, count: int) -> None:
    """Launches with nothing between them, compared at the end."""
    bench.workspace.restore()
    for _ in range(count):
        bench.launch(loaded)
    bench.workspace.compare()
