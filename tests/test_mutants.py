"""Faults planted in checkers are caught; and the harness that plants them says so when not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.mutants.__main__ import known, told
from tests.mutants.generate import faults, generated
from tests.mutants.model import PACKAGE, ROOT, Checker, Equivalent, Mutant, MutantError, load
from tests.mutants.runner import FAILED, Runner, Sandbox
from tests.mutants.table import BEGIN, END, write

CHECKERS = load()
SEMANTIC = [mutant for checker in CHECKERS for mutant in checker.mutants]
QUICK = [mutant for mutant in SEMANTIC if mutant.quick]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    return Sandbox.make(ROOT, tmp_path_factory.mktemp("mutants"), 0)


@pytest.mark.parametrize("mutant", QUICK, ids=lambda m: m.why)
def test_a_planted_fault_is_caught(copy, mutant):
    with copy.holding(mutant):
        status, said = copy.test((mutant.quick,), 120.0, set())
    assert status in FAILED, said


def test_their_tests_pass_without_a_fault(copy):
    assert len(QUICK) == 40
    status, said = copy.test(sorted({mutant.quick for mutant in QUICK}), 240.0, set())
    assert status == 0, said


def test_every_mutant_fits_its_file_and_is_python():
    assert len(SEMANTIC) >= 200
    for mutant in SEMANTIC:
        source = (ROOT / PACKAGE / mutant.file).read_text()
        changed = mutant.applied(source)
        if mutant.file.endswith(".py"):
            compile(changed, mutant.file, "exec")
        assert changed != source
        for test in mutant.tests:
            assert (ROOT / test.partition("::")[0]).exists(), test


def test_generated_faults_are_python_and_differ():
    found = generated(CHECKERS)
    assert len(found) >= 300
    sources = {m.file: (ROOT / PACKAGE / m.file).read_text() for m in found}
    for mutant in found[::7]:
        compile(mutant.applied(sources[mutant.file]), mutant.file, "exec")
    assert len({(m.file, m.at, m.after) for m in found}) == len(found)


def test_the_kinds_of_generated_faults():
    source = 'def f(a: int, b):\n    """Wait(1)."""\n    a += 1\n    send(f"fence({a})")\n'
    source += "    return 'é' and min(a, 2) <= b\n"
    texts = {(before, after) for _, before, after, _ in faults(source)}
    assert texts >= {
        ("a += 1", "pass"),
        ('send(f"fence({a})")', "pass"),
        ('f"fence({a})"', '""'),
        ("min", "max"),
        ("2", "3"),
        ("min(a, 2) <= b", "(min(a, 2) < b)"),
        ("'é' and min(a, 2) <= b", "('é' or min(a, 2) <= b)"),
    }
    for at, before, after, _ in faults(source):
        compile(source[:at] + after + source[at + len(before) :], "f", "exec")
        assert "Wait" not in before or "def" in before


def test_an_equivalent_fault_is_named_by_as_many_lines_as_tell_it(house, monkeypatch):
    monkeypatch.setattr("tests.mutants.generate.ROOT", house)
    (house / PACKAGE / "checker.py").write_text(
        "for n in a:\n    if n:\n        continue\n    if 0:\n        continue\n"
    )

    def faults_of(line):
        argued = Equivalent("checker.py", line, "continue", "pass", "why not")
        return generated([Checker("loop", (), ("checker.py",), (), (argued,))])

    for line, count in (("continue", 2), ("if m:\ncontinue", 0)):
        with pytest.raises(MutantError, match=f"{count} faults 'continue'"):
            faults_of(line)
    found = {mutant.place: mutant.equivalent for mutant in faults_of("if 0:\n  continue")}
    assert found == {"continue": "", "continue #2": "why not", "if 0:": ""}


def test_a_row_stays_that_of_its_fault_until_that_is_judged_anew(tmp_path):
    row = {
        "kind": "semantic", "checker": "sizes", "file": "a.py", "before": "n", "after": "m",
        "place": "", "outcome": "caught", "line": 3,
    }  # fmt: skip
    mutant = Mutant("semantic", "sizes", "a.py", "n", "m", "", ())
    store = tmp_path / "rows.json"
    for outcome, argued, knows in (
        ("caught", "", True),
        ("equivalent", "the same", True),
        ("equivalent", "", False),
        ("survived", "the same", False),
        ("broken", "", False),
    ):
        store.write_text(json.dumps([{**row, "outcome": outcome}]))
        assert (told(replace(mutant, equivalent=argued)) in known(store)) is knows


@pytest.fixture
def house(tmp_path):
    """A little project of one checker with one test."""
    package = tmp_path / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "checker.py").write_text("def small(n):\n    return n < 3\n")
    (package / "other.py").write_text("ANSWER = 42\n")
    (tmp_path / "test_it.py").write_text(
        "import sys, time\nfrom warploom.checker import small\n\n"
        "def test_it():\n"
        "    assert small(0)\n"
        "    for n in (5, 4):\n"
        "        while small(n):\n            time.sleep(1)\n"
    )
    return tmp_path


def fault(before, after, file="checker.py"):
    return Mutant("semantic", "sizes", file, before, after, "", ("test_it.py",))


def test_outcomes_are_told_apart_and_kept(house, monkeypatch):
    monkeypatch.setattr("tests.mutants.runner.LEAST_SECONDS", 3.0)
    monkeypatch.setattr("tests.mutants.runner.SLOWER", 0.5)
    mutants = [
        fault("n < 3", "n > 3"),
        fault("n < 3", "n <= 3"),
        fault("42", "43", "other.py"),
        fault("n < 3", "True"),
        fault("n < 4", "n < 5"),
        replace(fault("return n < 3", "return 3 > n"), equivalent="the same comparison"),
    ]
    said: list[str] = []
    store = house / "rows.json"
    rows = Runner(store, house, 2, said.append).run(mutants)
    outcomes = [row["outcome"] for row in rows]
    assert outcomes == ["caught", "survived", "survived", "timeout", "broken", "equivalent"]
    assert "occurs 0 times" in rows[4]["reason"]
    test = (house / "test_it.py").read_text()
    (house / "test_it.py").write_text(f"{test}\nassert small(2)\n")
    unloaded = Runner(None, house, 1, said.append).run([fault("n < 3", "n < 2")])
    assert unloaded[0]["outcome"] == "caught", "a module that cannot be imported"
    (house / "test_it.py").write_text(test)
    assert (house / PACKAGE / "checker.py").read_text().endswith("n < 3\n"), "the sources stay"
    assert len(json.loads(store.read_text())) == len(mutants)

    said.clear()
    again = Runner(store, house, 1, said.append).run(mutants[:4])
    assert again == rows[:4] and not said, "what is known is not run again"
    (house / "test_it.py").write_text(
        "from warploom.checker import small\n\ndef test_it():\n    assert not small(3)\n"
    )
    assert Runner(store, house, 1, said.append).run([mutants[1]])[0]["outcome"] == "caught"
    kept = json.loads(store.read_text())
    assert len(kept) == len(mutants), "a fault has one row, its last"


def test_tests_that_fail_without_a_fault_say_nothing(house):
    (house / "test_it.py").write_text("def test_it():\n    assert False\n")
    with pytest.raises(MutantError, match=r"without a fault test_it\.py ends with 1"):
        Runner(None, house, 1, lambda s: None).run([fault("n < 3", "n > 3")])


def test_the_table_counts_what_was_run(tmp_path):
    row = {
        "checker": "sizes", "kind": "semantic", "outcome": "caught", "file": "a.py", "line": 3,
        "before": "a | b", "after": "a", "why": "wrong", "reason": "", "seconds": 30.0,
        "date": "2026-01-02",
    }  # fmt: skip
    rows = [row, {**row, "outcome": "timeout"}, {**row, "outcome": "survived", "line": 7}]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(rows, page)
    text = page.read_text()
    assert "| sizes | semantic | 3 | 2 | 1 | 0 | 0.67 |" in text
    assert "a.py:7" in text and r"`a \| b`" in text and "a.py:3" not in text
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
