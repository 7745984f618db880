"""Every candidate of the corpus meets the check that is named for it; right ones meet none."""

from __future__ import annotations

import json
import math

import pytest
from tests.mutants.model import load

from bench.judge import KEPT, PAGE, cases, judged, referee, table, write_table
from warploom.judge import referee as module

# Right ones, the first that each check finds of each problem, and those that mutants of the judge
# need; `python -m bench.judge` runs all.
NAMED = {
    test.rpartition("-")[2].removesuffix("]")
    for checker in load()
    if checker.name == "judge"
    for mutant in checker.mutants
    for test in mutant.tests
}
FIRST = {(case.problem, case.check): case.name for case in reversed(cases())}
CORPUS = [
    case
    for case in cases()
    if not case.check or case.name in NAMED or FIRST[case.problem, case.check] == case.name
]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALL_LIMIT_S", 30.0)


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: f"{case.problem}-{case.name}")
def test_a_candidate_gets_its_verdict(case, monkeypatch):
    if case.name == "never_ends":
        monkeypatch.setattr(module, "CALL_LIMIT_S", 4.0)
    verdict = judged(case)
    assert verdict.passed == (not case.check), str(verdict)
    assert not case.check or case.check in verdict.checks, str(verdict)
    if verdict.passed:
        sizes = len(referee(case.problem).problem.sizes)
        assert verdict.calls >= 6 * sizes
        assert all(error <= bound for error, bound in verdict.errors.values())
        assert all(math.isfinite(bound) for _, bound in verdict.errors.values())


def test_the_page_has_the_table_of_what_was_found():
    kept = json.loads(KEPT.read_text())
    assert {case.key for case in cases()} == set(kept)
    assert PAGE.read_text() == write_table(kept)
    assert all(case.check in kept[case.key] for case in cases() if case.check)
    assert not any(kept[case.key] for case in cases() if not case.check)
    assert "**" not in "\n".join(table(kept))


def test_the_corpus_is_large_enough():
    assert sum(bool(case.check) for case in cases()) >= 50
    assert sum(bool(case.check) for case in CORPUS) >= 35
    assert sum(not case.check for case in CORPUS) >= 8
    assert {case.check for case in CORPUS} >= set(module.CHECKS) - {"loads"}
