"""Every folder of modules is a package, or a wheel leaves it out."""

from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "warploom"


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []
