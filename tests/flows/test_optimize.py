"""`warploom optimize`: files, verdicts, bad input, faults that are noticed."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.codegen.narrow_program import narrow_case
from tests.runtime.fake_device import FakeDevice
from typer.testing import CliRunner

from warploom import tile as t
from warploom.autosched.points import Point
from warploom.autosched.schedules import NAMES
from warploom.autosched.selected import Selected
from warploom.cli import app
from warploom.codegen.compile.build import Built, build
from warploom.codegen.simt.schedule import SimtSchedule
from warploom.engine.explored import Explored, Found
from warploom.engine.points import Space, described
from warploom.engine.store import PointStore, Row
from warploom.errors import CheckFailed, InputError, Interrupted, ToolMissing
from warploom.flows import choose as choosing
from warploom.flows import optimize as pipeline
from warploom.flows import optimize_measure
from warploom.flows.optimize import optimize
from warploom.flows.optimize_measure import Measured
from warploom.flows.optimized import OptimizeSettings
from warploom.flows.schedule import problem_of
from warploom.flows.static_verdict import static_verdict
from warploom.flows.targets import read_target
from warploom.kernels.check import CheckResult
from warploom.kernels.select import select
from warploom.objects import hold
from warploom.perf.replay import Prediction
from warploom.report.optimize_html import Line, Page, page_html
from warploom.sass.decode.cubin import Cubin, parse
from warploom.sass.decode.kernel import Kernel, decode
from warploom.sass.rules.lint import lint
from warploom.schedule import service

GEMM = OptimizeSettings("gemm", schedule="lcsf", measure="none")


def test_the_folder_holds_the_whole_path(tmp_path):
    said: list[str] = []
    found = optimize(GEMM, tmp_path, said.append)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "build.json", "gemm.cu", "gemm.cubin", "manifest.json", "report.html", "result.json",
        "schedule.json",
    }  # fmt: skip
    assert read_target(str(tmp_path), None, None).kernel == "gemm"  # what `tune` takes
    assert found.verdict.passed
    assert found.verdict.matrix_instructions > 0
    result = json.loads((tmp_path / "result.json").read_text())
    (trial,) = result["schedules"]
    assert trial["name"] == result["schedule"] == "lcsf" and trial["predicted"]["i"][1] == 1024
    assert result["measured"] is None and result["interpreted"]["passed"]
    text = (tmp_path / "report.html").read_text()
    for part in ("Nothing was measured", "program gemm", "wgmma", "serialised matrix"):
        assert part in text
    assert f"relative error {found.check.errors['c']:.2e}" in text and found.check.errors["c"] > 0
    assert "gemm on h200 in bf16" in text, "the derivation is of what was built"
    (time,) = re.findall(r"predicted: ([\d.]+) us \(m \d+, k \d+, n \d+\), ", result["headline"])
    assert f">{time}<" in text and "of the limit (" in result["headline"]
    assert said[0].endswith("gemm for h200")


def test_the_kernel_is_the_one_that_build_gives_and_the_derivation_is_its(tmp_path):
    """No other is compiled: the tuned table's entry was measured before. The derivation's scale
    follows the head size; a window without a causal mask has no formula."""
    small = {"rows": "512", "batch": "1", "heads": "2", "head_dim": "64"}
    settings = OptimizeSettings("attention", settings=small, measure="none")
    found, chosen = optimize(settings, tmp_path), select("attention", small)
    assert found.selected == chosen and len(found.trials) == 1
    assert (tmp_path / "attention.cubin").read_bytes() == chosen.build().cubin
    page = (tmp_path / "report.html").read_text()
    assert "contract * 0.125 " in page and "attention on h200 in bf16" in page
    given = {**small, "window": "64"}
    said = pipeline._derivation(replace(settings, settings=given), select("attention", given))
    assert said.startswith("None: attention with a window and no causal mask")


def test_a_wrong_reference_fails_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "checked", lambda *args: check_of(0.5))
    with pytest.raises(CheckFailed, match=r"c: relative error 5.00e-01, allowed"):
        optimize(GEMM, tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_spill_fails_the_static_verdict(tmp_path, monkeypatch):
    plain = Selected.build

    def spilling(chosen):
        built = plain(chosen)
        return replace(built, resources=replace(built.resources, spill_bytes=8))

    monkeypatch.setattr(Selected, "build", spilling)
    with pytest.raises(CheckFailed, match="lcsf: 8 B of registers spilled"):
        optimize(GEMM, tmp_path)
    assert not (tmp_path / "report.html").exists()


def check_of(error: float) -> CheckResult:
    """What a check says of an output that is so far off."""
    return CheckResult("gemm", "gpu", "float64", {}, {"c": error}, {"c": 4e-3})


def test_wrong_numbers_on_the_gpu_fail(tmp_path, monkeypatch):
    measured = (1.0, (1.0, 1.0, 1.0), 0.0, {"i": [1024.0, 1.5]})
    wrong = Measured("GPU", check_of(0.5), {"m": 1}, *measured)
    monkeypatch.setattr(pipeline, "wants_gpu", lambda settings: True)
    monkeypatch.setattr(pipeline, "measure_in_worker", lambda *args: wrong)
    with pytest.raises(CheckFailed, match="wrong numbers"):
        optimize(GEMM, tmp_path)
    monkeypatch.setattr(
        pipeline, "measure_in_worker", lambda *args: replace(wrong, check=check_of(0.0))
    )
    found = optimize(GEMM, tmp_path)
    rows = dict(found.measured.rows(found.chosen.predicted))
    assert "1024 counted at 1.50 GHz" in rows["cycles an iteration, loop i"]
    idle = dict(replace(wrong, counted={"i": [0.0, 0.0]}).rows(found.chosen.predicted))
    assert idle["cycles an iteration, loop i"] == "no iteration at these sizes"
    uncounted = replace(wrong, counted={}, uncounted="nvcc is needed")
    assert dict(uncounted.rows({}))["cycles an iteration"] == "not counted: nvcc is needed"


def test_a_time_that_cannot_be_is_refused(tmp_path, monkeypatch):
    """Planted fault: a clock that sees the launch and not the kernel."""
    flops = 2.0 * 4096**3
    there = Measured("GPU", check_of(1e-3), {"m": 4096}, 200.0, (1.0, 1.0, 1.0), flops)
    monkeypatch.setattr(pipeline, "wants_gpu", lambda settings: True)
    monkeypatch.setattr(pipeline, "measure_in_worker", lambda *args: there)
    assert optimize(GEMM, tmp_path).measured is there
    assert json.loads((tmp_path / "result.json").read_text())["measured"]["check"]["passed"]
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
    """In the text and in the data of the scripts."""
    page = Page("<b>", "s", cuda=[Line("1", "</script><b>")], steps=[("</script>", [0], "math")])
    text = page_html(page)
    assert "&lt;b&gt;" in text and "<b>" not in text.replace("<b>1</b>", "")
    assert text.count("</script>") == text.count("<script")


def test_a_kernel_is_timed_beside_a_copy_of_itself(monkeypatch):
    """Two loaded copies in turn, on the device's stream: its time, and the A/A control."""
    device, loaded = FakeDevice(), []
    device.stream = 7

    def kernel(built):
        def launch(memory, scalars=None, stream=0):
            assert set(memory) == {"a", "b", "c"} and stream == 7
            device.now_us += 20.0

        loaded.append(launch)
        return launch

    monkeypatch.setattr(optimize_measure, "CudaDevice", lambda: device)
    monkeypatch.setattr(Built, "kernel", kernel)
    monkeypatch.setattr(optimize_measure, "checked", lambda *args: check_of(0.0))
    sizes = {"m": "256", "n": "256", "k": "128"}
    found = optimize_measure.measure("gemm", sizes, select("gemm", sizes).build(), None, ())
    assert len(loaded) == 2
    assert found.microseconds == pytest.approx(20.0)
    assert found.control == pytest.approx((1.0, 1.0, 1.0))
    assert found.sizes == {"m": 256, "n": 256, "k": 128} and found.flops == 2 * 256 * 256 * 128


def test_an_interrupt_leaves_no_report(tmp_path, monkeypatch):
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(choosing, "static_verdict", stop)
    arguments = ["optimize", "gemm", "--schedule", "lcsf", "--measure", "none"]
    done = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "o")])
    assert isinstance(done.exception, Interrupted) and done.exception.exit_code == 130
    assert not (tmp_path / "o" / "report.html").exists()


CYCLES = {"slow": 2000.0, "fast": 2100.0, "wrong": 1900.0}
TIMES = {"slow": 30.0, "fast": 20.0, "wrong": 10.0}


@pytest.fixture
def stubbed(monkeypatch):
    """Compiling, replaying and measuring by the schedule's name; gives what was compiled."""
    names: list[str] = []
    passing = static_verdict(select("gemm", {}).build())

    def built(chosen):
        if chosen.name == "spills":
            raise CheckFailed("8 B of registers spilled")
        if chosen.name == "new":
            raise ToolMissing("nvcc 13.3 or newer is needed")
        names.append(chosen.name)
        return chosen.name

    def measured(name, settings, chosen, built, say):
        error = 0.5 if built == "wrong" else 0.0
        return Measured("GPU", check_of(error), {"m": 1}, TIMES[built], (1.0, 1.0, 1.0), 0.0)

    def replayed(chosen, built, gpu, rates):
        return {"predicted": {"i": Prediction("i", CYCLES.get(built, 3000.0), 1024, "TC", 1)}}

    monkeypatch.setattr(Selected, "build", built)
    monkeypatch.setattr(choosing, "measure_in_worker", measured)
    monkeypatch.setattr(choosing, "_replayed", replayed)
    monkeypatch.setattr(choosing, "static_verdict", lambda built, allow: passing)
    return names


def test_the_fastest_measured_candidate_is_kept_and_refusals_are_told(stubbed, monkeypatch):
    """Five schedules: slow, fast, wrong on the GPU, refused by the compiler, and one that nobody
    compiled before, on a machine without a compiler."""
    settings = OptimizeSettings("gemm", compare=True)
    plain = select("gemm", {}, policy="multistage")
    names = ("slow", "fast", "wrong", "spills", "new")
    offered = [(name, replace(plain, name=name)) for name in names]
    monkeypatch.setattr(choosing, "_offers", lambda *args: offered)
    said: list[str] = []
    best, trials, _ = choosing.choose(settings, True, said.append)
    assert best.selected.name == best.built == "fast" and stubbed == ["slow", "fast", "wrong"]
    assert [bool(trial.refused) for trial in trials] == [False, False, True, True, True]
    assert "wrong numbers" in trials[2].refused
    assert any("spilled" in line for line in said) and any("nvcc" in line for line in said)
    best, trials, _ = choosing.choose(settings, False, said.append)
    # Without a GPU nothing is known to be wrong: what replays fastest.
    assert best.built == "wrong" and all(trial.microseconds is None for trial in trials)
    monkeypatch.setattr(choosing, "_offers", lambda *args: offered[3:])
    with pytest.raises(CheckFailed, match=r"spills: 8 B of registers spilled; new: nvcc"):
        choosing.choose(settings, False, said.append)


@pytest.mark.parametrize(
    ("cycles", "refused", "kept"),
    [
        ({"lcsf": 1378.0, "solve": 1323.0}, (), "solve"),
        ({"lcsf": 1323.0, "solve": 1378.0}, (), "lcsf"),
        ({"lcsf": 1323.0, "solve": 1378.0}, ("lcsf",), "solve"),
        ({"inflight": 1500.0}, ("lcsf", "solve", "unpipelined", "multistage"), "inflight"),
    ],
)
def test_what_is_predicted_slower_is_never_built(stubbed, monkeypatch, cycles, refused, kept):
    """Of the named and the solved schedule the faster; where neither compiles, another one."""
    for name, value in cycles.items():
        monkeypatch.setitem(CYCLES, name, value)
    stub = Selected.build

    def built(chosen):
        if chosen.name in refused:
            raise CheckFailed("spills 8 B of registers")
        return stub(chosen)

    monkeypatch.setattr(Selected, "build", built)
    monkeypatch.setattr(OptimizeSettings, "searches", False)  # as for a program that has no space
    settings = OptimizeSettings("examples/tile_rmsnorm_linear.py:kernel", seconds=1.0)
    best, trials, _ = choosing.choose(settings, False, lambda _: None)
    assert best.selected.name == kept
    assert {trial.name for trial in trials if trial.refused} == set(refused)
    assert not set(stubbed) - {"lcsf", "solve", kept}, "no schedule is compiled for the table only"


def test_compare_tries_every_name_and_keeps_what_was_measured(stubbed):
    """A replay, whose cycles are those of one tile, does not overrule the tuned table."""
    settings = OptimizeSettings("gemm", compare=True, seconds=2.0)
    best, trials, _ = choosing.choose(settings, False, lambda _: None)
    assert best.selected.tuned and len(trials) == 1 + len(NAMES)
    assert min(trials, key=lambda trial: trial.rank).tuned
    assert {trial.name for trial in trials} >= {"lcsf", "inflight", "multistage"}


def test_an_effort_is_for_what_is_searched_only() -> None:
    own = "examples/textbook_gemm.py:kernel"
    assert OptimizeSettings(own, effort="quick").searches
    for asked in (
        {"name": "gemm"},
        {"name": own, "schedule": "lcsf"},
        {"name": own, "compare": True},
    ):
        with pytest.raises(InputError, match="--effort is of the search for your own program"):
            OptimizeSettings(**asked, effort="quick")
    with pytest.raises(InputError, match="expected one of quick, normal, thorough"):
        OptimizeSettings(own, effort="fast")


def test_compare_goes_with_the_best_only():
    with pytest.raises(InputError, match="--compare goes with"):
        replace(GEMM, compare=True)


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


def test_what_was_measured_of_a_search_is_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))
    key = ("program", "point", "sizes", "h200", "nvcc")
    store = PointStore(tmp_path / choosing.POINTS)
    store.put(key, Row(5.0, None, "", {"limits": "its loops"}))
    trial = choosing.Trial("tile_m=128 lcsf", microseconds=6.5)
    one = SimpleNamespace(trial=trial)
    choosing._remember([one], {trial.name: key})
    assert store.find(key) == Row(5.0, 6.5, "", {"limits": "its loops"})


def test_what_may_be_faster_is_measured_one_by_one(monkeypatch) -> None:
    """After the fastest of every form: until none may be faster, or it was not of use."""
    name = "examples/textbook_gemm.py:kernel"
    first = Point((("tile_m", "128"), ("tile_n", "128")), (), "inflight")
    wrong, right = (replace(first, order=order) for order in ("lcsf", "inflight"))
    near, spoilt = (replace(right, plan=(word,)) for word in ("panels=3", "panels=4"))
    predicted = {wrong: 100.0, right: 103.0, near: 103.1, spoilt: 103.05}
    predicted[far := replace(wrong, plan=("panels=3",))] = 100.1
    explored = Explored([Found(point, Row(time)) for point, time in predicted.items()])
    times = {str(wrong): 125.0, str(right): 104.0, str(near): 102.0, str(spoilt): None}
    asked: list[str] = []

    def timed(one, *_):
        asked.append(one.trial.name)
        return replace(one, trial=replace(one.trial, microseconds=times[one.trial.name]))

    def tried(name, selected, *_):
        return choosing.Usable(selected, None, None, choosing.Trial(name))

    def selected(self, point, gpu):
        return SimpleNamespace(name=str(point), program=None, launch=None)

    monkeypatch.setattr(choosing, "_tried", tried)
    monkeypatch.setattr(choosing, "_timed", timed)
    monkeypatch.setattr(choosing, "Launch", lambda *_: SimpleNamespace(rates=dict))
    monkeypatch.setattr(choosing.Space, "selected", selected)
    monkeypatch.setattr(choosing.Space, "check", lambda *_: 0.0)
    settings = OptimizeSettings(name)
    known = [timed(tried(str(point), None)) for point in (wrong, right)]
    asked.clear()
    found = [*choosing._likely(known, explored, settings, print)]
    assert asked == [str(spoilt), str(near)] and str(far) not in asked
    assert [one.trial.name for one in found] == [str(near)]


def test_a_program_that_is_wrong_is_not_searched(tmp_path, monkeypatch) -> None:
    """A formula that its author's program does not compute: told at once, not after the search."""
    text = Path("examples/programs/batched_gemm.py").read_text()
    formula = 'np.asarray(arrays["a"], np.float64)'
    assert formula in text
    file = tmp_path / "wrong.py"
    file.write_text(text.replace(formula, f"2 * {formula}"))
    monkeypatch.setattr(choosing, "search", lambda *_: pytest.fail("it is searched"))
    settings = OptimizeSettings(f"{file}:kernel")
    with pytest.raises(CheckFailed, match="more than rounding explains"):
        choosing.choose(settings, False, lambda _: None)


def test_a_program_without_matmuls_is_not_searched(monkeypatch) -> None:
    """Nor are orders and plans told of it, nor a loop scheduled."""

    def double(x, y):
        (i,) = t.grid(m=t.size("m"))
        row = t.span(i, 1), t.span(0, 256)
        t.store(y, *row, tile=t.load(x, *row) * 2.0)

    rows = t.array(t.FP32, "m n")
    name, said = hold(t.trace(double, {"x": rows, "y": rows}, name="double"), "double"), list[str]()
    monkeypatch.setattr(choosing, "search", None)
    found = choosing.choose(OptimizeSettings(name), False, said.append)[0]
    assert isinstance(found.selected.schedule, SimtSchedule)
    assert "no search: without matmuls tiles lie over threads" in said
    assert described(Space(name, {})).endswith("without matmuls tiles lie over threads")
    with pytest.raises(InputError, match="has no loop with a matmul: there is nothing to schedule"):
        problem_of(name, {}, "", service.Request("h200"))
