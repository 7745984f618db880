"""Scripts of bench are run by hand, some of them on a GPU alone: what they import must be there."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"warploom": ROOT / "src" / "warploom", "bench": ROOT / "bench"}


def tree(module: str) -> ast.Module | None:
    """The source of a module of ours, None where there is none."""
    package, *rest = module.split(".")
    path = PACKAGES[package].joinpath(*rest)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text()) if file.is_file() else None


def named(module: ast.Module) -> set[str]:
    """What a module defines, imports or hands out lazily at its top."""
    found: set[str] = set()
    for item in ast.walk(module):
        if isinstance(item, ast.FunctionDef | ast.ClassDef):
            found.add(item.name)
        elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            found.add(item.id)
        elif isinstance(item, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in item.names}
        elif isinstance(item, ast.Constant) and isinstance(item.value, str):
            found.add(item.value)  # names of a module's `__getattr__`
    return found


def missing(source: str) -> list[str]:
    """The imports of our own modules and names that are not there."""
    found: list[str] = []
    for item in ast.walk(ast.parse(source)):
        if not isinstance(item, ast.ImportFrom) or not item.module:
            continue
        if item.module.split(".")[0] not in PACKAGES:
            continue
        module = tree(item.module)
        known = named(module) if module is not None else set[str]()
        found += [
            f"{item.module}.{alias.name}"
            for alias in item.names
            if alias.name not in known and tree(f"{item.module}.{alias.name}") is None
        ]
    return found


@pytest.mark.parametrize("folder", ["bench", "examples"])
def test_what_scripts_import_is_there(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        assert missing(path.read_text()) == [], path.relative_to(ROOT)


def test_a_name_that_is_gone_is_told() -> None:
    gone = "from warploom.search.actions import OPTIONAL, STEPS\nfrom bench.nothing import some"
    assert missing(gone) == ["warploom.search.actions.OPTIONAL", "bench.nothing.some"]
