"""Problems and launches that cannot be judged, tolerances, pages and exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.command import warploom

from warploom import machine
from warploom import tile as t
from warploom.errors import InputError
from warploom.judge import Problem, Referee, judge
from warploom.judge.candidate import arithmetic, load_candidate
from warploom.judge.tolerance import spreads_of
from warploom.judge.watch import Watch
from warploom.kernels.check import norm_bound, relative_error
from warploom.tile.rounding import limits

BENCH = Path(__file__).parents[2] / "bench" / "judged"
PROBLEMS = BENCH / "problems.py"
X = t.array(t.FP32, "rows n")


def problem(reference=lambda x: 2 * x, **fields):
    given = {"inputs": {"x": X}, "outputs": {"y": X}, "sizes": [{"rows": 2, "n": 8}], **fields}
    return Problem(reference, patterns=("randn",), **given)


def spread(reference, *inputs, kind=t.FP32, dims="rows n", **options):
    output = replace(t.array(kind, dims), name="y")
    return spreads_of(reference, inputs, [output], **options)["y"]


def wrong(found, given):
    with np.errstate(invalid="ignore"):
        return int((~(np.abs(given.double().numpy() - found.exact) <= limits(found, 8.0))).sum())


def test_the_tolerance_takes_other_orders_and_refuses_narrower_sums():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(24, 300, generator=generator).bfloat16()
    b = torch.randn(300, 16, generator=generator).bfloat16()
    found = spread(lambda a, b: a @ b, a, b, dims="m n")
    backwards = torch.zeros(24, 16)
    for k in reversed(range(300)):
        backwards += a[:, k : k + 1].float() * b[k : k + 1].float()
    narrow = (a @ b).float()
    for given, right in ((backwards, True), (narrow, False), (backwards * 1.00002, False)):
        error = relative_error(given.double().numpy(), found.exact)
        assert (wrong(found, given) == 0 and error <= norm_bound(found)) == right


def test_what_overflows_the_type_between_is_not_judged():
    x = torch.full((1, 4), 2.0**100)
    found = spread(lambda x: torch.sqrt(x * x), x)
    assert not found.known.any() and (found.exact == 2.0**100).all()
    wide = spread(lambda x: torch.sqrt(x * x), x, within=t.BF16)
    assert not wide.known.any()
    assert spread(lambda x: x + 1, x).known.all()


def test_a_conversion_in_the_reference_to_a_narrow_type_is_its_meaning():
    x = torch.tensor([[1.0 + 2.0**-9, 3.0]])
    assert spread(lambda x: x.to(torch.bfloat16).float(), x).exact.tolist() == [[1.0, 3.0]]
    assert spread(lambda x: x.float(), x).exact.tolist() == [[1.0 + 2.0**-9, 3.0]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sizes": []}, "needs inputs, outputs and sizes"),
        ({"sizes": [{"rows": 2}]}, "expected a length for each of n, rows"),
        ({"sizes": [{"rows": 2, "n": 0}]}, "expected a length for each"),
        ({"outputs": {"x": X}}, "array x is an input and an output"),
        ({"inputs": {"x": t.array(t.INT32, "rows n")}}, "need a dimension in spans"),
        ({"spans": {"x": "n"}}, "need a dimension in spans"),
    ],
)
def test_a_problem_that_makes_no_sense_is_refused(fields, words):
    with pytest.raises(InputError, match=words):
        problem(**fields)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (lambda x: x * 0, "accepts zeros"),
        (lambda x: x * 0 + 1, "accepts the results of other inputs"),
        (lambda x: (x, x), "2 results, expected 1: y"),
        (lambda x: x[:, 1:], r"y of shape \[2, 7\] for .*, expected \[2, 8\]"),
        (lambda x: 3, "the reference gives y as int"),
        (lambda x: x @ x, "the reference does not run: .*RuntimeError"),
    ],
)
def test_a_problem_that_judges_nothing_is_refused(reference, words):
    with pytest.raises(InputError, match=words):
        Referee(problem(reference), Path("p.py"), "p.py")


def test_the_limit_is_memory_or_work():
    gpu = machine.load("h200")
    sizes = {"rows": 1 << 14, "n": 1 << 14}
    copied = problem(sizes=[sizes]).limit_us(sizes, gpu)
    assert copied == pytest.approx(2 * 4 * 2**28 / gpu.value("dram.bandwidth") * 1e6)
    much = problem(sizes=[sizes], work=lambda sizes: 1e15).limit_us(sizes, gpu)
    assert much == pytest.approx(1e9 / gpu.value("peak.fp32"))


def test_arithmetic_of_a_launch():
    sizes = {"n": 37, "rows": 6}
    assert arithmetic("cdiv(n, 8) * 2 - n % 5 + max(1, rows // 4)", sizes) == 9
    for text in ("__import__('os')", "n ** 2", "m", "n / 2", "1 // 0", "", "cdiv(n)", True):
        with pytest.raises(InputError, match="expected whole numbers"):
            arithmetic(text, sizes)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('kernel = "row_sum"', 'kernel = "other"', "has no kernel called 'other'"),
        ("block = [128]", "", "'block' is missing; a launch has source"),
        ("block = [128]", "block = [128]\nwarps = 4", "'warps' is not known"),
        ("row_sum.cu", "nothing.cu", "cannot read .*nothing.cu"),
        ("row_sum.cu", "k.cubin", "machine code, which only a GPU runs"),
    ],
)
def test_a_launch_that_makes_no_sense_is_refused(before, after, words, tmp_path):
    text = (BENCH / "row_sum_0.toml").read_text()
    assert before in text
    (tmp_path / "row_sum.cu").write_text((BENCH / "row_sum.cu").read_text())
    (tmp_path / "k.toml").write_text(text.replace(before, after))
    with pytest.raises(InputError, match=words):
        load_candidate(str(tmp_path / "k.toml"), problem().signature, gpu=False)


def test_the_watch_sees_replaced_functions_and_code(monkeypatch):
    watch = Watch(Path("p.py"))
    assert watch.tampered() == []
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda *_: 0.0)
    monkeypatch.setattr(torch.testing.assert_close, "__code__", (lambda *a, **b: None).__code__)
    assert watch.tampered() == ["Event.elapsed_time", "torch.testing.assert_close"]


def test_exit_codes_json_and_page(tmp_path):
    page = tmp_path / "verdict.html"
    against = ("--against", f"{PROBLEMS}:add_norm")
    passed = warploom(
        "judge", f"{BENCH / 'add_norm.py'}:right", *against, "--json", "--html", str(page)
    )
    assert passed.returncode == 0
    data = json.loads(passed.stdout)
    assert data["passed"] and data["calls"] > 10 and data["notes"]
    text = page.read_text()
    assert "Pass" in text and "not timed" in text and "src=" not in text and "http" not in text
    refused = warploom("judge", f"{BENCH / 'add_norm.py'}:swapped", *against, "--html", str(page))
    assert refused.returncode == 1 and "REFUSED" in refused.stdout
    assert "values: y:" in refused.stdout, "the finding is told once"
    assert refused.stderr.count("\n") == 2 and "is refused: values" in refused.stderr
    assert "Refused: values" in page.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("none.py:f --against P", "none.py: no such file or folder"),
        ("P --against P:softmax", "expected FILE.py:FUNCTION, FILE.toml or a folder"),
        ("P:f --against none.py", "none.py: no such file"),
        ("P:f --against P:rows", "is a function, expected a warploom.judge.Problem"),
        ("P:f --against P:softmax --on tpu", "--on 'tpu': expected cpu or gpu"),
        ("P:f --against P:softmax --seed -1", "--seed -1, expected at least 0"),
        ("P:f --against P:softmax --gpu h100", "--gpu goes with --on gpu"),
        ("P:f --against P:softmax --on gpu", "torch finds no GPU here"),
    ],
)
def test_bad_input_is_one_line(words, said):
    if "--on gpu" in words and torch.cuda.is_available():
        pytest.skip("here is a GPU")
    done = warploom("judge", *words.replace("P", str(PROBLEMS)).split())
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


def test_a_candidate_that_does_not_load_is_refused():
    done = warploom("judge", f"{PROBLEMS}:nothing", "--against", f"{PROBLEMS}:softmax")
    assert done.returncode == 1 and "loads: " in done.stdout and "'nothing'" in done.stdout


def test_what_torch_replaces_of_its_own_is_no_tampering(tmp_path):
    (tmp_path / "problem.py").write_text(
        "from warploom import tile as t\nfrom warploom.judge import Problem\n"
        "x = t.array(t.FP32, 'n')\n"
        "problem = Problem(lambda x: 2 * x, inputs={'x': x}, outputs={'y': x}, sizes=[{'n': 8}])\n"
    )
    (tmp_path / "candidates.py").write_text(
        "import importlib, torch\n"
        "def late(x):\n    importlib.import_module('torch._dynamo')\n    return 2 * x\n"
        "def replaces(x):\n    torch.manual_seed = print\n    return 2 * x\n"
    )
    verdicts = [
        judge(f"{tmp_path / 'candidates.py'}:{name}", str(tmp_path / "problem.py"))
        for name in ("late", "replaces")
    ]
    assert [v.checks for v in verdicts] == [(), ("tampering",)]
