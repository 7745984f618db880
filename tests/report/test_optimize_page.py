"""The report of `optimize` without a browser: what it says, and what its parts refer to."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from warploom.flows.optimize_facts import Facts
from warploom.flows.optimized import Rival, Trial
from warploom.kernels.attention.program import AttentionConfig, attention
from warploom.kernels.gemm.program import GemmConfig, gemm
from warploom.perf.launch_time import LaunchTime
from warploom.perf.replay import Ends, Prediction, Replay
from warploom.perf.timeline import stamped, steps_of_lines
from warploom.perf.trace import Mark


class Elements(HTMLParser):
    """Tags with their attributes, the text of scripts, and what each link would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append(data)


@pytest.fixture(scope="module")
def page(report: Path) -> Elements:
    return Elements(report.read_text())


@pytest.fixture(scope="module")
def data(page: Elements) -> dict[str, list]:
    return json.loads(page.scripts[0])


def test_nothing_is_loaded_from_elsewhere(report: Path, page: Elements) -> None:
    for tag, found in page.tags:
        assert tag not in ("link", "img", "iframe")
        assert "src" not in found and not (found.get("href") or "#").startswith("http")
    assert "url(" not in report.read_text() and len(report.read_bytes()) < 2_000_000


def test_every_figure_says_where_it_is_from(report: Path) -> None:
    figures = re.findall(r'<div class="figure (\w+)">.*?<em>(\w+)</em>', report.read_text())
    assert len(figures) >= 3 and {kind for kind, _ in figures} <= {"predicted", "measured"}
    assert all(kind == word for kind, word in figures)


def test_bars_and_lines_refer_to_steps(page: Elements, data: dict[str, list]) -> None:
    """And each step of the steady loop has lines in the CUDA and in the machine code."""
    steps = data["steps"]
    lines = [int(found["data-s"] or 0) for _, found in page.tags if "data-s" in found]
    ops = {int(found["data-o"] or 0) for _, found in page.tags if "data-o" in found}
    bars = [bar for one in data["timelines"] for row in one["rows"] for bar in row["bars"]]
    assert max(lines) < len(steps) and all(-1 <= bar[2] < len(steps) for bar in bars)
    assert {op for _, own, _ in steps for op in own} <= ops
    drawn = {bar[2] for bar in bars} - {-1}
    assert drawn <= set(lines) and {steps[step][0].split()[0] for step in drawn} >= {
        "Wait", "Issue", "Release", "Fill",
    }  # fmt: skip


def test_rows_do_not_overlap_and_end_with_the_timeline(data: dict[str, list]) -> None:
    for one in data["timelines"]:
        names = [row["name"] for row in one["rows"]]
        assert "tensor core" in names and any(name.startswith("ring") for name in names)
        for row in one["rows"]:
            ends = [bar[1] for bar in row["bars"]]
            begins = [bar[0] for bar in row["bars"]]
            assert all(a <= b + 0.11 for a, b in zip(ends, begins[1:], strict=False)), row["name"]
            assert min(begins) >= 0 and max(ends) <= one["cycles"]


def test_a_group_is_always_somewhere(data: dict[str, list]) -> None:
    """Each bar of a group's code begins where the one before ends: no cycle is lost."""
    (one, *_) = data["timelines"]
    groups = [row for row in one["rows"] if row["name"].startswith("compute")]
    assert groups
    for row in groups:
        spent = sum(bar[1] - bar[0] for bar in row["bars"])
        assert spent == pytest.approx(one["cycles"], rel=0.01)


def test_the_points_are_those_of_the_tuned_table(report: Path, data: dict[str, list]) -> None:
    space = data["space"]
    assert sum(point["built"] for point in space) == 1 and len(space) > 1
    assert all(point["predicted"] > 0 and point["mhz"] > 0 for point in space)
    after = next(point["name"] for point in space if not point["built"])
    assert f"the next of {len(space)} kernels, {after}, takes" in report.read_text()


def test_a_step_ends_with_its_block() -> None:
    text = """
    if (ready) {
      // Wait k
      wait();
      // Run exp2.3  program.py:7
      x = exp2(x);
    }
    y = 0;
"""
    steps = {"Wait k": (1,), "Run exp2.3": (3,)}
    wait, run = ["Wait k"] * 2, ["Run exp2.3"] * 2
    assert steps_of_lines(text, steps) == ["", "", *wait, *run, "", ""]
    assert set(steps_of_lines(text.replace("Wait", "Await"), steps)) == {"", "Run exp2.3"}


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (
            (10.0, 11.0),
            "Measured, the next of 2 kernels, other, takes 10.0% longer. By the model its tasks",
        ),
        ((10.0, None), "takes 20.0% less; it was not measured at these sizes, this one was"),
        ((None, None), "By the model, the next of 2 kernels, other, takes 20.0% less."),
    ],
)
def test_why_this_one_is_told_by_what_is_known(measured, said) -> None:
    told = {"work": 100.0, "busy": 1.0, "mhz": 1500.0}
    points = (
        Rival("this", 10.0, measured[0], told),
        Rival("other", 8.0, measured[1], {**told, "work": 125.0}),
    )
    result = SimpleNamespace(space=points, chosen=Trial("this"), trials=())
    facts = Facts(result, None)
    vars(facts)["recorded"] = []
    assert said in facts.beats()


def test_points_that_tie_are_told_apart_by_what_is_plain() -> None:
    points = (Rival("plain", 10.0, None, {}), Rival("other", 9.97, None, {}))
    facts = Facts(SimpleNamespace(space=points, chosen=Trial("plain"), trials=()), None)
    vars(facts)["recorded"] = []
    assert "takes 0.3% less. It errs by more" in facts.beats()


def test_losses_are_named_the_largest_first_and_none_is_endless() -> None:
    """A launch whose tasks have no steady iteration spends all of its time around the loop."""
    settings = SimpleNamespace(name="gemm", gpu="h200")
    facts = Facts(SimpleNamespace(settings=settings, measured=None), None)
    plan = SimpleNamespace(overlap_next_task=False)
    known = {
        "launch": SimpleNamespace(plan=plan, places=132, program=gemm(GemmConfig())),
        "replay": Replay({"i": Prediction("i", 1100.0, 1000, "", 0)}, Ends()),
        "predicted": LaunchTime(10.0, 33, 0, 0.5, 0.25, 1.0, 1980.0),
    }
    vars(facts).update(known)
    assert [round(one.factor, 2) for one in facts.losses()] == [4.0, 2.0, 1.1]
    assert facts.tries()[0].startswith("SMs without a task: 33 tasks for 132")
    assert "This costs a factor of 4.00: try " in facts.tries()[0]
    vars(facts)["predicted"] = LaunchTime(10.0, 33, 0, 1.0, 1.0, 1.0, 990.0)
    first, second, *_ = facts.tries()
    assert first.startswith("Beginnings and ends of tasks: 100.0%") and "990 of 1,980 MHz" in second
    assert "larger tiles" in first  # a GEMM loads nothing once a task: it has no option `task`
    facts.launch.program = attention(AttentionConfig())
    assert "task=overlap" in facts.tries()[0]
    plan.overlap_next_task = True
    assert "larger tiles" in facts.tries()[0]


def test_a_trace_stands_predicted_under_measured() -> None:
    """A bar lasts from one step's stamp to the next one's, which names it; groups do not mix."""
    marks = [("Wait k", 0.0), ("Issue mma.3", 40.0), ("Release k (iteration -1)", 90.0)]
    trace = tuple(
        Mark("i", group, 0, step, cycle + 5 * group) for group in (0, 1) for step, cycle in marks
    )
    bars = stamped(trace, "i", "measured")
    assert [(bar.row, bar.step, bar.begin, bar.end) for bar in bars] == [
        (f"group {group}, measured", step, begin + 5 * group, end + 5 * group)
        for group in (0, 1)
        for step, begin, end in (("Issue mma.3", 0.0, 40.0), ("Release k", 40.0, 90.0))
    ]
    assert stamped(trace, "j", "measured") == []
