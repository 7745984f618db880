"""The committed evidence and gallery are whole and say what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from bench.evidence import read_rows
from warploom.derive import build, derive, formula, softmax, tensor

ROOT = Path(__file__).resolve().parents[2]
ROWS = read_rows(ROOT / "bench" / "results" / "derive.json")


def test_rows_cover_the_claim_and_their_checks_passed() -> None:
    by_kernel = {row.kernel: row for row in ROWS if row.unit == "values"}
    assert len(by_kernel) >= 8
    assert all(row.claim == "derive" for row in ROWS)
    for row in by_kernel.values():
        assert row.checks["executed_equals_formula"] == "pass"
        assert row.checks["error"] < 1e-12
        assert 0 < row.checks["percent_of_bound"] <= 100
    searched, registered = [row for row in ROWS if row.unit == "s"]
    assert "--no-lemmas" in searched.shape and "--no-lemmas" not in registered.shape
    assert searched.ours < 2 and registered.ours < 2
    (integers,) = [row for row in ROWS if row.kernel == "integer tiles"]
    assert integers.ours <= 1.05 and integers.samples >= 200


@pytest.mark.parametrize("name", ["attention", "matmul", "linear_attention"])
def test_rows_are_what_the_code_derives_today(name: str) -> None:
    (row,) = [row for row in ROWS if row.kernel == name and row.unit == "values"]
    found = derive(formula(name), memory=116224)
    assert found.traffic == row.ours
    assert found.bound.value == pytest.approx(next(iter(row.baselines.values())))


def gallery() -> ModuleType:
    """The script that writes the gallery."""
    path = ROOT / "examples" / "derive_gallery.py"
    spec = importlib.util.spec_from_file_location("derive_gallery", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gallery_names_existing_drawings() -> None:
    text = (ROOT / "docs" / "gallery.md").read_text()
    pictures = [part.split(")")[0] for part in text.split("](img/")[1:]]
    assert pictures == ["derive_steps.svg", *(f"derive_{n}.svg" for n in gallery().ENTRIES)]
    for picture in pictures:
        assert (ROOT / "docs" / "img" / picture).read_text().startswith("<svg")


def test_the_committed_gallery_is_what_the_script_writes_today() -> None:
    """Entries that derive quickly, drawings included, and the hardware table."""
    made = gallery()
    page = (ROOT / "docs" / "gallery.md").read_text()
    for name in ("attention", "matmul", "linear_attention", "variance"):
        found = made.derived(name)
        assert "\n".join(made.section(name, found)) in page
        assert made.summary(name, found) in page
        picture = ROOT / "docs" / "img" / f"derive_{name}.svg"
        assert picture.read_text() == made.draw(found), f"{name}: run examples/derive_gallery.py"
    steps = made.draw_steps(made.derived("attention"))
    assert (ROOT / "docs" / "img" / "derive_steps.svg").read_text() == steps
    assert "\n".join(made.hardware_section()) in page
    assert made.section("matmul", made.derived("attention")) != made.section(
        "matmul", made.derived("matmul")
    )


def test_the_first_page_example_works() -> None:
    q, k, v = tensor("Q", "q d"), tensor("K", "x d"), tensor("V", "x e")
    found = derive(build("attention", softmax(q @ k.T) @ v), memory=4096)
    assert "softmax-contraction, unscaled" in found.lemmas
    assert found._repr_html_().startswith("<svg")
