"""Tuned tables: every entry has rows, rows are those measured, and the choice is what they say."""

import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import tuned
from bench.evidence import read_rows, write_rows
from warploom.errors import InputError
from warploom.kernels.attention.variants import ATTENTION
from warploom.kernels.gemm.program import GemmConfig
from warploom.kernels.gemm.variant import GEMM, choose_gemm
from warploom.kernels.library import configure
from warploom.kernels.tuned.table import Row, Table, as_toml
from warploom.perf.launch_time import MODEL

TABLES = {"attention": ATTENTION, "gemm": GEMM}
# Mean, second largest and largest loss at sizes that have no row of their own.
LOST = {"attention": (0.012, 0.1, 0.13), "gemm": (0.015, 0.1, 0.1)}
BOTH = pytest.mark.parametrize("name", TABLES)
SIZES = st.integers(1, 12000)


@BOTH
def test_every_entry_has_rows(name):
    table = TABLES[name]
    told = {one for kind in table.known.values() for row in kind.rows for one in row.predicted}
    assert told == table.variants.keys()
    for kind in table.known.values():
        assert kind.rows
        loops = [one for replay in kind.replays.values() for one in replay.loops.values()]
        # What a table does not keep claims nothing.
        assert {(one.bound, one.reason, one.flops) for one in loops} == {(0, "", 0)}
        for row in kind.rows:
            assert kind.replays.keys() >= row.predicted.keys() >= row.measured.keys()
            assert row.predicted and (row.source or not row.measured)


def test_an_entry_without_rows_is_refused(tmp_path):
    known = {"16-bit": replace(GEMM.known["16-bit"], rows=())}
    path = tmp_path / "gemm.toml"
    path.write_text(as_toml(GEMM.variants, known))
    table = Table(path, GEMM.template, GEMM.kinds, GEMM.fallback)
    with pytest.raises(InputError, match=r"16-bit: no row tells why \S+ is here"):
        table.known  # noqa: B018 (read when asked for)


@pytest.mark.parametrize("line", ["", 'model = "5.2"'])
def test_a_table_of_another_model_is_refused(line, tmp_path):
    """Replays of other rules are not chosen by; what is there can be read to make it anew."""
    path = tmp_path / "gemm.toml"
    path.write_text(GEMM.path.read_text().replace(f'model = "{MODEL}"', line))
    table = Table(path, GEMM.template, GEMM.kinds, GEMM.fallback)
    told = line[9:-1] or "None"
    with pytest.raises(InputError, match=f"made by model {told}, this is model {MODEL}"):
        table.choose(GemmConfig(), {"m": 512, "n": 512, "k": 512, "batch": 1})
    assert not table.current and table.stored == GEMM.stored


@BOTH
def test_a_table_is_what_its_file_says(name):
    table = TABLES[name]
    assert as_toml(table.variants, table.known) == table.path.read_text()


@BOTH
def test_measured_times_are_those_of_the_results(name):
    table, results = TABLES[name], tuned.measured(name)
    for label, kind in table.known.items():
        there = {(str(row.sizes), row.source): row.measured for row in results.get(label, ())}
        for row in (row for row in kind.rows if row.measured):
            assert row.measured.items() <= there[str(row.sizes), row.source].items()


@BOTH
def test_predicted_times_are_those_of_the_model_as_it_is(name):
    table = TABLES[name]
    for kind in table.known.values():
        config = configure(name, kind.settings)[0]
        for number, row in enumerate(kind.rows):
            one = sorted(row.predicted)[number % len(row.predicted)]
            found = table.predicted(kind, [one], config, row.sizes)
            assert found[one] == pytest.approx(row.predicted[one], rel=1e-3)


@BOTH
def test_what_is_left_out_of_a_choice_could_not_win(name):
    """Bounds of a launch are below its time, so that the variant chosen is the fastest of all."""
    table = TABLES[name]
    for kind in table.known.values():
        config, sizes = configure(name, kind.settings)[0], kind.rows[0].sizes
        names = [one for one in kind.replays if table.variants[one].takes(config)][::3]
        for one in names:
            launch, walked = table._launch(one, config, sizes), kind.replays[one]
            time = launch.time(walked).microseconds
            assert launch.least(walked) <= time * (1 + 1e-9) >= launch.floor(walked)


@BOTH
def test_what_was_measured_is_chosen_by_its_time(name):
    """By the last row, where sizes were measured again."""
    table = TABLES[name]
    for kind in table.known.values():
        config = configure(name, kind.settings)[0]
        last = {str(row.sizes): row for row in kind.rows if row.measured}
        for row in last.values():
            chosen = table.choose(config, row.sizes)
            assert row.measured[chosen.name] == min(row.measured.values())


@settings(max_examples=12, deadline=None)
@given(SIZES, SIZES, SIZES)
def test_other_sizes_get_the_variant_of_least_time(m, n, k):
    """Nothing is lost by leaving out what cannot be the fastest."""
    sizes = {"m": m, "n": n, "k": k, "batch": 1}
    kind = GEMM.known["16-bit"]
    names = [name for name in kind.replays if GEMM.variants[name].whole]
    times = GEMM.predicted(kind, names, GemmConfig(), sizes)
    times = {name: time * kind.error(name, sizes) for name, time in times.items()}
    chosen = choose_gemm(m, n, k)
    assert times[chosen.name] <= min(times.values()) * 1.001


@BOTH
def test_a_variant_is_found_by_its_name(name):
    table = TABLES[name]
    for one in table.variants:
        assert table.find(one).name == one
    with pytest.raises(InputError, match=f"{name} variant 'nobody': expected one of .*{one}"):
        table.find("nobody")


def test_sizes_are_as_far_apart_as_their_logarithms():
    """Nothing is as near as one of it, and lengths of packed sequences are their mean."""
    row = Row({"n": 1, "rows": [0, 0]}, {}, {})
    for n, rows, factor in ((2, 1, 2), (0, [2, 4], 3), (8, [0], 8), (1, [1, 1], 1)):
        assert row.away({"n": n, "rows": rows}) == pytest.approx(math.log(factor))


@BOTH
def test_sizes_are_chosen_for_without_their_own_rows(name):
    """What is lost against the best one measured there; times that the model has backwards lose
    more."""
    known = TABLES[name].known
    lost = [loss for _, loss in tuned.losses(name, known).values()]
    mean, second, most = LOST[name]
    assert statistics.mean(lost) < mean and sorted(lost)[-2] < second and max(lost) < most
    backwards = {
        label: replace(
            kind,
            rows=tuple(
                replace(row, predicted={one: 1.0 / time for one, time in row.predicted.items()})
                for row in kind.rows
            ),
        )
        for label, kind in known.items()
    }
    wrong = [loss for _, loss in tuned.losses(name, backwards).values()]
    assert statistics.mean(wrong) > 2 * statistics.mean(lost)


def test_a_row_of_a_point_that_the_table_has_not_makes_a_variant(tmp_path, monkeypatch):
    """And one of a point that it has, or of no point, makes none."""
    rows = [row for row in read_rows(tuned.RESULTS / tuned.BESIDE) if "point" in row.checks]
    known = rows[0]
    fresh = replace(known, kernel="gemm 8x64-mine", checks={"point": known.checks["point"]})
    write_rows(tmp_path / tuned.BESIDE, [known, fresh, replace(known, kernel="gemm b", checks={})])
    monkeypatch.setattr(tuned, "RESULTS", tmp_path)
    found = tuned.discovered.__wrapped__("gemm")
    assert list(found) == ["8x64-mine"]
    assert found["8x64-mine"].point.to_json() == known.checks["point"]
