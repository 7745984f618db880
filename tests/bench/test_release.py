"""What a release says and what it is refused for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench.release import ROOT, dated, faults, latest, versions

TEXT = "# Changelog\n\n## [0.2.0] - unreleased\n\n- new\n\n## [0.1.0] - 2026-01-02\n\n- old\n"


def test_the_notes_are_those_of_the_first_release() -> None:
    release = latest(TEXT)
    assert (release.version, release.date, release.notes) == ("0.2.0", "unreleased", "- new")
    assert "## [0.2.0] - 2026-12-01\n" in dated(TEXT, "2026-12-01")
    with pytest.raises(ValueError, match=r"0\.2\.0 was released on 2026-12-01"):
        dated(dated(TEXT, "2026-12-01"), "2026-12-02")
    with pytest.raises(ValueError, match="no heading"):
        latest("# Changelog\n")


def test_this_tree_has_one_version() -> None:
    assert len(set(versions(ROOT).values())) == 1, versions(ROOT)
    assert latest((ROOT / "CHANGELOG.md").read_text()).notes


def test_another_version_and_a_large_wheel_are_faults(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "CITATION.cff", "src/warploom/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(TEXT)
    (tmp_path / "dist").mkdir()
    said = faults(tmp_path)
    assert "CHANGELOG.md has 0.2.0" in said[0] and "make wheels" in said[1]
    (tmp_path / "CHANGELOG.md").write_text(TEXT.replace("0.2.0", versions(ROOT)["pyproject.toml"]))
    wheel = tmp_path / "dist" / f"warploom-{versions(ROOT)['pyproject.toml']}-py3-none-any.whl"
    wheel.write_bytes(b"")
    assert faults(tmp_path) == []
    with wheel.open("wb") as file:
        file.truncate(21_000_000)
    assert "at most 20,000,000" in faults(tmp_path)[0]
