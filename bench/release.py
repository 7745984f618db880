"""Is this tree ready to be released, and what would the release say?

    python -m bench.release            # a dry run: checks, and the notes
    python -m bench.release --date 2026-12-01 --write    # writes the date into CHANGELOG.md

It tags and uploads nothing: it prints the commands that do.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAD = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - (unreleased|\d{4}-\d\d-\d\d)$", re.MULTILINE)
MOST_BYTES = 20_000_000  # of a wheel


@dataclass(frozen=True)
class Release:
    """The version that the changelog begins with, its date or "unreleased", and its notes."""

    version: str
    date: str
    notes: str


def latest(changelog: str) -> Release:
    """The first release of a changelog; raises `ValueError` for one without any."""
    found = list(HEAD.finditer(changelog))
    if not found:
        raise ValueError("CHANGELOG.md has no heading such as ## [0.1.0] - unreleased")
    end = found[1].start() if len(found) > 1 else len(changelog)
    return Release(found[0][1], found[0][2], changelog[found[0].end() : end].strip())


def versions(root: Path) -> dict[str, str]:
    """Where a version stands, and which."""
    package = (root / "src/warploom/__init__.py").read_text()
    inside = re.search(r'^__version__ = "(.+)"$', package, re.MULTILINE)
    cited = re.search(r"^version: (.+)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    return {
        "pyproject.toml": tomllib.loads((root / "pyproject.toml").read_text())["project"][
            "version"
        ],
        "src/warploom/__init__.py": inside[1] if inside else "none",
        "CITATION.cff": cited[1].strip("\"'") if cited else "none",
        "CHANGELOG.md": latest((root / "CHANGELOG.md").read_text()).version,
    }


def faults(root: Path) -> list[str]:
    """Why the tree is not ready."""
    found = versions(root)
    said: list[str] = []
    if len(set(found.values())) > 1:
        said.append("versions differ: " + ", ".join(f"{x} has {y}" for x, y in found.items()))
    wheels = sorted((root / "dist").glob("*.whl"))
    version = found["pyproject.toml"]
    if not any(path.name.startswith(f"warploom-{version}-") for path in wheels):
        said.append(f"dist has no wheel of {version}: make wheels")
    said += [
        f"{path.name} has {path.stat().st_size:,} B, at most {MOST_BYTES:,}"
        for path in wheels
        if path.stat().st_size > MOST_BYTES
    ]
    if not latest((root / "CHANGELOG.md").read_text()).notes:
        said.append("CHANGELOG.md says nothing of this release")
    return said


def dated(changelog: str, date: str) -> str:
    """The changelog with the date of its first release, which must have none yet."""
    release = latest(changelog)
    if release.date != "unreleased":
        raise ValueError(f"{release.version} was released on {release.date}")
    return changelog.replace(
        f"## [{release.version}] - unreleased", f"## [{release.version}] - {date}", 1
    )


def main() -> None:
    """Print what is wrong, or the notes and the commands of the release."""
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    today = datetime.datetime.now(datetime.UTC).date()
    asked.add_argument("--date", type=datetime.date.fromisoformat, default=today)
    asked.add_argument("--write", action="store_true", help="write the date into CHANGELOG.md")
    args = asked.parse_args()
    if wrong := faults(ROOT):
        sys.exit("\n".join(f"not ready: {one}" for one in wrong))
    path = ROOT / "CHANGELOG.md"
    release = latest(path.read_text())
    if args.write:
        path.write_text(dated(path.read_text(), args.date.isoformat()))
    print(f"# warploom {release.version}, {args.date}\n\n{release.notes}\n")
    print("To release, once `make test` and `make gpu-test` pass:")
    print(f"  git tag -s v{release.version} && git push origin v{release.version}")
    print(f"  python -m twine upload dist/warploom*-{release.version}-*.whl")


if __name__ == "__main__":
    main()
