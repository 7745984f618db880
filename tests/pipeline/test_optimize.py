"""`warploom optimize` and `warploom bench`: files, verdicts, bad input, faults that are noticed."""

import itertools
import json
from dataclasses import replace

import pytest
from tests.codegen.narrow_program import narrow_case
from typer.testing import CliRunner

from warploom.cli import app
from warploom.codegen.build import build
from warploom.codegen.portfolio import Candidate
from warploom.errors import CheckFailed, InputError, Interrupted, ToolMissing
from warploom.kernels.check import CheckResult
from warploom.pipeline import optimize as pipeline
from warploom.pipeline.optimize import optimize
from warploom.pipeline.optimize_measure import Measured
from warploom.pipeline.optimized import OptimizeSettings
from warploom.pipeline.static_verdict import static_verdict
from warploom.report.optimize_html import Page, page_html
from warploom.sass.cubin import Cubin, parse
from warploom.sass.kernel import Kernel, decode
from warploom.sass.lint import lint


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Kernels and schedules of these tests stay out of the user's cache."""
    root = tmp_path_factory.getbasetemp().parent / "warploom-optimize"
    monkeypatch.setenv("WARPLOOM_CACHE", str(root))


GEMM = OptimizeSettings("gemm", schedule="lcsf", measure="none")


def test_the_folder_holds_the_whole_path(tmp_path):
    found = optimize(GEMM, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "gemm.cu", "gemm.cubin", "manifest.json", "report.html", "result.json", "schedule.json",
        "schedule.svg",
    }  # fmt: skip
    assert found.verdict.passed
    assert found.verdict.matrix_instructions > 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["predicted"]["lcsf"]["i"][1] == 1024
    assert result["measured"] is None
    text = (tmp_path / "report.html").read_text()
    for part in ("Nothing was measured", "program gemm", "wgmma", "serialised matrix"):
        assert part in text
    assert "<script" not in text


def test_a_spill_fails_the_static_verdict(tmp_path, monkeypatch):
    plain = pipeline.build

    def spilling(*args, **options):
        built = plain(*args, **options)
        return replace(built, resources=replace(built.resources, spill_bytes=8))

    monkeypatch.setattr(pipeline, "build", spilling)
    with pytest.raises(CheckFailed, match="8 B of registers spilled"):
        optimize(GEMM, tmp_path)
    assert not (tmp_path / "report.html").exists()


def check_of(error: float) -> CheckResult:
    """What a check says of an output that is so far off."""
    return CheckResult("gemm", "gpu", "float64", {}, {"c": error}, {"c": 4e-3})


def test_wrong_numbers_on_the_gpu_fail(tmp_path, monkeypatch):
    wrong = Measured("GPU", check_of(0.5), {"m": 1}, 1.0, 1.0, 0.0, {"i": [1024.0, 1.5]})
    monkeypatch.setattr(pipeline, "_measuring", lambda settings: True)
    monkeypatch.setattr(pipeline, "measure_in_worker", lambda *args: wrong)
    with pytest.raises(CheckFailed, match="wrong numbers"):
        optimize(GEMM, tmp_path)
    monkeypatch.setattr(
        pipeline, "measure_in_worker", lambda *args: replace(wrong, check=check_of(0.0))
    )
    found = optimize(GEMM, tmp_path)
    rows = dict(found.measured.rows(found.chosen))
    assert "1024 counted at 1.50 GHz" in rows["cycles an iteration, loop i"]


def test_a_time_that_cannot_be_is_refused(tmp_path, monkeypatch):
    """Planted fault: a clock that sees the launch and not the kernel."""
    flops = 2.0 * 4096**3
    there = Measured("GPU", check_of(1e-3), {"m": 4096}, 200.0, 200.0, flops)
    monkeypatch.setattr(pipeline, "_measuring", lambda settings: True)
    monkeypatch.setattr(pipeline, "measure_in_worker", lambda *args: there)
    assert optimize(GEMM, tmp_path).measured is there
    fast = replace(there, microseconds=40.0)
    monkeypatch.setattr(pipeline, "measure_in_worker", lambda *args: fast)
    with pytest.raises(CheckFailed, match="above the 989 the h200 can do"):
        optimize(GEMM, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": "tpu"}, "code is emitted for"),
        ({"schedule": "fast"}, "expected one of"),
        ({"measure": "maybe"}, "expected auto, gpu or none"),
        ({"seconds": 0.0}, "above 0"),
    ],
)
def test_bad_settings_are_one_line(change, message):
    with pytest.raises(InputError, match=message):
        replace(GEMM, **change)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(InputError, match="is a file"):
        optimize(GEMM, tmp_path / "x")


def test_the_page_escapes_what_it_shows():
    page = Page("<b>", "s", "", "p", [], "", [], "", [], [], [], "")
    assert "&lt;b&gt;" in page_html(page)


def test_an_interrupt_leaves_no_report(tmp_path, monkeypatch):
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "static_verdict", stop)
    arguments = ["optimize", "gemm", "--schedule", "lcsf", "--measure", "none"]
    done = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "o")])
    assert isinstance(done.exception, Interrupted) and done.exception.exit_code == 130
    assert not (tmp_path / "o" / "report.html").exists()


def test_bench_lists_and_says_that_no_gpu_is_here(monkeypatch):
    runner = CliRunner()
    assert "ablation" in runner.invoke(app, ["bench", "list"]).output
    with pytest.raises(InputError, match="expected one of"):
        runner.invoke(app, ["bench", "nothing"], catch_exceptions=False)
    monkeypatch.setattr("warploom.runtime.driver.device_count", lambda: 0)
    with pytest.raises(InputError, match="no GPU here"):
        runner.invoke(app, ["bench", "gemm"], catch_exceptions=False)


def test_the_fastest_measured_candidate_is_kept_and_refusals_are_told(tmp_path, monkeypatch):
    """Five candidates: slow, fast, wrong on the GPU, refused by the compiler, and one that nobody
    compiled before, on a machine without a compiler."""
    settings = replace(GEMM, schedule="solve", candidates=5)
    config = pipeline.configure("gemm", {})[0]
    program = pipeline.entry("gemm").program(config)
    plan = pipeline.entry("gemm").schedule(config).launch
    offered = [
        Candidate(name, pipeline.schedule_named(program, "multistage", plan), cycles)
        for name, cycles in (
            ("slow", 1.0),
            ("fast", 2.0),
            ("wrong", 3.0),
            ("spills", 4.0),
            ("new", 5.0),
        )
    ]
    offered = [replace(c, schedule=replace(c.schedule, name=c.name)) for c in offered]
    times = {"slow": 30.0, "fast": 20.0, "wrong": 10.0}
    names: list[str] = []

    def built(program, schedule, arch):
        if schedule.name == "spills":
            raise CheckFailed("8 B of registers spilled")
        if schedule.name == "new":
            raise ToolMissing("nvcc 13.3 or newer is needed")
        names.append(schedule.name)
        return schedule.name

    def measured(name, settings, built, say):
        error = 0.5 if built == "wrong" else 0.0
        return Measured("GPU", check_of(error), {"m": 1}, times[built], 1.0, 0.0)

    paces = {"slow": 2000.0, "fast": 2100.0, "wrong": 1900.0}
    monkeypatch.setattr(pipeline, "build", built)
    monkeypatch.setattr(pipeline, "measure_in_worker", measured)
    monkeypatch.setattr(pipeline, "replayed", lambda _p, _s, built, _g: paces[built])
    said: list[str] = []
    schedule, kept, trials = pipeline.choose(program, offered, settings, True, said.append)
    assert schedule.name == kept == "fast" and names == ["slow", "fast", "wrong"]
    assert [bool(trial.refused) for trial in trials] == [False, False, True, True, True]
    assert "wrong numbers" in trials[2].refused and "spilled" in said[3] and "nvcc" in said[4]
    schedule, _, trials = pipeline.choose(program, offered, settings, False, said.append)
    # Without a GPU nothing is known to be wrong: what replays fastest.
    assert schedule.name == "wrong" and all(trial.microseconds is None for trial in trials)
    assert [trial.cycles for trial in trials[:3]] == [2000.0, 2100.0, 1900.0]
    with pytest.raises(CheckFailed, match=r"none of 2.*spilled"):
        pipeline.choose(program, offered[3:], settings, False, said.append)


def test_candidates_go_with_solving_only():
    with pytest.raises(InputError, match="--candidates goes with"):
        replace(GEMM, candidates=2)
    with pytest.raises(InputError, match="expected 1 to 32"):
        replace(GEMM, schedule="solve", candidates=0)


def test_no_rule_of_the_lint_is_excused(monkeypatch) -> None:
    """Compiler output breaks none of them; a wait, a hint or a distance spoilt afterwards fails."""
    program, schedule, _ = narrow_case()
    built = build(program, schedule)
    verdict = static_verdict(built)
    assert verdict.passed and verdict.warnings == len(lint(decode(parse(built.cubin))))
    for rule, cubin in spoilt(built.cubin).items():
        verdict = static_verdict(replace(built, cubin=cubin))
        assert any(f" {rule}:" in fault for fault in verdict.faults), rule


def spoilt(image: bytes) -> dict[str, bytes]:
    """The cubin with one fault each: a result read a cycle after its write, a hint at a register
    that is none."""
    cubin = parse(image)
    kernel = decode(cubin)
    found: dict[str, bytes] = {}
    for first, second in itertools.pairwise(kernel.instructions):
        made = {access.resource for access in first.effects.writes}
        read = {access.resource for access in second.effects.reads if access.slot != "old"}
        if first.base == second.base == "FFMA" and made & read:
            found.setdefault("LATENCY", with_control(cubin, kernel, first.index, stall=1))
        if first.base == "STS" and first.control.stall in range(1, 12):
            edited = with_control(cubin, kernel, first.index, stay=True, reuse=1)
            found.setdefault("REUSE_OPERAND", edited)
    assert len(found) == 2
    return found


def with_control(cubin: Cubin, kernel: Kernel, index: int, **fields: int) -> bytes:
    """The file with control fields of one instruction replaced."""
    words = list(kernel.code.words)
    item = kernel.instructions[index]
    words[index] = (item.low, replace(item.control, **fields).encode(item.high))
    return cubin.replace(kernel.code, words).data
