"""Bad input: one line, exit code 2, the culprit named. And the files that come out."""

from __future__ import annotations

import html
import json
import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fixtures import graph_a, graph_b
from solutions import problem, solved
from tests.command import warploom

from bench.published import DATA, published
from warploom.autosched.solve import Search, solve_kernel
from warploom.errors import InputError
from warploom.kernels.select import written
from warploom.report.schedule_html import schedule_html
from warploom.schedule import Graph, Schedule, Target, check
from warploom.schedule.view.gantt import show
from warploom.schedule.view.picture import svg
from warploom.schedule.view.steady import steady_rows
from warploom.schedule.view.trace import chrome_trace

BACKWARD = str(DATA / "graphs" / "attention_backward@h100.json")


run = partial(warploom, "schedule")


def spoiled(**change: Any) -> dict[str, Any]:
    data = graph_a().to_json()
    for key, value in change.items():
        where, _, field = key.partition("_")
        data[where][0][field] = value
    return data


BAD = {
    "cycle S -> P -> O -> S has distance 0": {
        **graph_a().to_json(),
        "edges": [{"src": a, "dst": b, "delay": 1} for a, b in ("SP", "PO", "OS")],
    },
    "negative delay": spoiled(edges_delay=-1),
    "names node 'Q'": spoiled(edges_dst="Q"),
    "has kind 'maybe'": spoiled(edges_kind="maybe"),
    "latency is 'long', expected int": spoiled(nodes_latency="long"),
    "unknown field 'speed'": spoiled(nodes_speed=1),
    "appears twice": {**graph_a().to_json(), "nodes": graph_a().to_json()["nodes"] * 2},
    "schema 'x'": {"schema": "x"},
    "'nodes' is missing": {"schema": "warploom.graph", "version": 1},
    "no nodes": {"schema": "warploom.graph", "version": 1, "nodes": [], "edges": []},
    "expected a JSON object": [],
    "latency_range [3], expected [low, high]": spoiled(nodes_latency_range=[3]),
    "memory is {'smem': 'big'}": spoiled(nodes_memory={"smem": "big"}),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_graph_names_the_culprit(message: str) -> None:
    with pytest.raises(InputError) as caught:
        Graph.from_json(BAD[message], "g.json")
    assert message in str(caught.value) and "\n" not in str(caught.value)


COMMANDS = {
    "unknown unit 'EXP'": ("a.json",),
    "cannot read missing.json": ("missing.json",),
    "not JSON at line 1": ("broken.json",),
    "'atention'": ("atention",),
    "--time-limit": ("attention", "--time-limit", "0"),
    "one iteration needs": ("large.json",),
    "'rouws'": ("attention", "--set", "rouws=1"),
    "--set depth: a JSON graph has neither": ("large.json", "--set", "depth=1"),
    "no loop j with a matmul, expected one of i": ("attention", "--loop", "j"),
    "loops of kernels are scheduled for Hopper": ("attention", "--gpu", "a100"),
    "--groups and --registers are for a graph": ("attention", "--registers", "200"),
    "unknown cost 'speed'": ("attention", "--costs", "speed=1"),
    "expected one of low, nominal, high": ("attention", "--at", "worst"),
    "--groups -1": ("large.json", "--registers", "255", "--gpu", "h100", "--groups", "-1"),
    "is a directory": ("gemm", "--svg", "."),
}


@pytest.mark.parametrize("message", COMMANDS)
def test_the_command_says_so_in_one_line(message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(graph_a().to_json()))
    (tmp_path / "large.json").write_text(json.dumps(large()))
    (tmp_path / "broken.json").write_text("{")
    done = run(*COMMANDS[message], cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr


def large() -> dict[str, Any]:
    """A loop whose tiles are larger than shared memory."""
    data = published("gemm", "h200").to_json()
    for node, size in (("A", 131072), ("B", 262144)):
        next(one for one in data["nodes"] if one["id"] == node)["memory"] = {"smem": size}
    return data


def test_a_capacity_error_names_the_culprit(tmp_path: Path) -> None:
    (tmp_path / "large.json").write_text(json.dumps(large()))
    done = run("large.json", cwd=tmp_path)
    assert "A 131072" in done.stderr and "B 262144" in done.stderr


def test_every_command_schedules_the_same_loop(tmp_path: Path) -> None:
    """`schedule` solves what `build --schedule solve` and `optimize` solve: one interval."""
    program, launch = written("gemm", {"tile": "128,128,64"})
    built = solve_kernel(program, launch, search=Search(seconds=20))
    options = ("--set", "tile=128,128,64", "--time-limit", "20", "--json", "o.json")
    done = run("gemm", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "o.json").read_text())["schedule"]
    assert found["initiation_interval"] == built.any_loop.initiation_interval
    assert found["proof"]["lower_bound"] == built.any_loop.proof.lower_bound


def test_the_command_writes_what_it_is_asked_for(tmp_path: Path) -> None:
    done = run("gemm", "--json", "o.json", "--trace", "t.json", "--svg", "p.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "II 1024 cycles" in done.stdout and "no rule broken" in done.stdout
    data = json.loads((tmp_path / "o.json").read_text())
    schedule = Schedule.from_json(data["schedule"])
    assert Graph.from_json(data["graph"]).name == schedule.graph
    assert Target.from_json(data["target"]).name == "h200"
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
    quiet = run("gemm", "--json", "-", cwd=tmp_path)
    assert json.loads(quiet.stdout)["schedule"]["initiation_interval"] == 1024


def test_what_json_wrote_is_taken_back(tmp_path: Path) -> None:
    """Where a graph is expected it is solved again, on the target that it was solved for."""
    published_gemm = str(DATA / "graphs" / "gemm@h200.json")
    options = ("--gpu", "h200", "--registers", "240", "--json", "o.json")
    first = run(published_gemm, *options, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    data = json.loads((tmp_path / "o.json").read_text())
    (tmp_path / "printed.json").write_text(
        run("o.json", "--time-limit", "20", "--json", "-", cwd=tmp_path).stdout
    )
    again = json.loads((tmp_path / "printed.json").read_text())
    assert again["graph"] == data["graph"] and again["target"] == data["target"]
    assert (again["target"]["name"], again["target"]["registers_per_thread"]) == ("h200", 240)
    assert again["schedule"]["time"] == data["schedule"]["time"]
    assert again["schedule"]["proof"]["confirmed"] == "confirmed by a second search"
    path = tmp_path / "printed.json"
    schedule, graph = Schedule.read(path), Graph.read(path)
    where = Target.from_json(again)
    assert check(graph, where, schedule).passed
    assert (schedule.graph, schedule.target) == (graph.name, where.name)
    moved = run("o.json", "--gpu", "h100", "--json", "-", cwd=tmp_path)  # asked for, so honoured
    assert json.loads(moved.stdout)["target"]["name"] == "h100"


def test_a_damaged_file_of_json_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    for data, message in (
        ({"schema": "warploom.solved", "version": 1}, "o.json: expected a JSON object"),
        ({"schema": "warploom.solved", "graph": graph_a().to_json(), "target": {"schema": 1}},
         "o.json: schema 1"),
        ({"schema": "warploom.solved", "graph": graph_a().to_json(), "target": {
            "schema": "warploom.target", "version": 1, "units": [], "groups": []}},
         "o.json: incomplete target"),
    ):  # fmt: skip
        path.write_text(json.dumps(data))
        done = run("o.json", cwd=tmp_path)
        assert done.returncode == 2 and message in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1


def test_progress_says_the_step_and_how_long_it_may_take(tmp_path: Path) -> None:
    done = run(BACKWARD, "--time-limit", "4", "--svg", "a.svg", cwd=tmp_path)
    first = done.stderr.splitlines()[0]
    assert re.fullmatch(r" +1 s of at most 6: .+", first), done.stderr
    assert done.returncode == 0 and "II" in done.stdout


def test_outputs_are_tried_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for option in ("--json", "--svg", "--trace"):
        done = run(BACKWARD, option, "file/o.out", cwd=tmp_path)
        assert done.returncode == 2 and "file: is a file, expected a folder" in done.stderr
        assert done.stderr.count("\n") == 1 and not done.stdout


def test_json_round_trips() -> None:
    graph = graph_b()
    assert Graph.from_json(json.loads(json.dumps(graph.to_json()))) == graph
    schedule, where = solved("attention", "b200"), problem("attention", "b200").target
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule
    assert Target.from_json(json.loads(json.dumps(where.to_json()))) == where
    with pytest.raises(InputError, match="unknown field 'colour'"):
        Schedule.from_json({**schedule.to_json(), "colour": 1})


def test_pictures_show_every_operation() -> None:
    it, schedule = problem("attention", "b200"), solved("attention", "b200")
    rows = steady_rows(it.graph, it.target, schedule)
    drawn = {bar.node for row in rows if row.kind == "group" for bar in row.bars}
    assert drawn == set(it.graph.by_id)
    for row in rows:
        if row.kind == "unit":
            ordered = sorted(row.bars, key=lambda bar: bar.start)
            for first, second in pairwise(ordered):
                assert first.end <= second.start  # a unit serves one operation at a time
        assert all(0 <= b.start < b.end <= schedule.initiation_interval for b in row.bars)
    text = svg(it.graph, it.target, schedule)
    assert text.count("<title>") >= len(it.graph.nodes)
    events = chrome_trace(it.graph, it.target, schedule, 3)["traceEvents"]
    assert sum(e["ph"] == "X" and e["pid"] == 1 for e in events) == 3 * len(it.graph.nodes)


def test_the_page_has_the_proof_and_every_operation() -> None:
    it, schedule = problem("attention", "b200"), solved("attention", "b200")
    page = schedule_html(it.graph, it.target, schedule)
    assert f"<strong>{schedule.initiation_interval:,}</strong> cycles an iteration" in page
    assert schedule.proof.reason in html.unescape(page)
    (shown,) = re.findall(r'<script type="application/json" id="data">(.*)</script>', page)
    data = json.loads(shown)
    drawn = {bar[2] for row in data["timelines"][0]["rows"] for bar in row["bars"]}
    assert [data["steps"][number][0] for number in sorted(drawn)] == [n.id for n in it.graph.nodes]
    assert "Tile program" not in page and "Schedules</h2>" not in page


def test_the_terminal_picture_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    it, schedule = problem("attention", "h100"), solved("attention", "h100")
    show(it.graph, it.target, schedule)
    out = capsys.readouterr().out
    assert "II 2048 cycles" in out and "TC" in out and "100%" in out and "compute0" in out
