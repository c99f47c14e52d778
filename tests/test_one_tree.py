"""Tools, installs and Python all see one tree: `src/rewired`, which links to the rooms at the top level."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIG = """
[tool.mypy]
mypy_path = "$MYPY_CONFIG_FILE_DIR/src"
[[tool.mypy.overrides]]
module = ["rewired.attic.*"]
ignore_missing_imports = true
"""


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """Two rooms, one of them a link, of which the cellar imports a class of the attic."""
    (tmp_path / "src" / "rewired" / "cellar").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(CONFIG)
    (tmp_path / "attic").mkdir()
    (tmp_path / "attic" / "boxes.py").write_text("class Box:\n    pass\n")
    (tmp_path / "src" / "rewired" / "cellar" / "shelf.py").write_text("from rewired.attic.boxes import Box\n")
    (tmp_path / "src" / "rewired" / "attic").symlink_to("../../attic")
    return tmp_path


def check_types(house: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / ".ci" / "types_between_rooms.py", house / "src"]
    return subprocess.run(command, cwd=house, capture_output=True, text=True)


class TestTypesBetweenRooms:
    def test_a_class_of_another_room_is_known(self, house: Path) -> None:
        done = check_types(house)
        assert (done.returncode, done.stderr) == (0, "")

    def test_one_that_mypy_cannot_find_is_named(self, house: Path) -> None:
        """As before there was one tree: mypy found no `rewired.attic`, and an override hid it."""
        (house / "src" / "rewired" / "attic").unlink()
        done = check_types(house)
        assert done.returncode == 1
        assert done.stderr.startswith("rewired.attic.boxes.Box is Any to mypy")

    def test_one_that_is_any_itself_is_named(self, house: Path) -> None:
        (house / "attic" / "boxes.py").write_text("from typing import Any\nBox: Any = object\n")
        assert check_types(house).returncode == 1


def test_import_works_in_the_folder_that_holds_the_clone(tmp_path: Path) -> None:
    """There the clone itself looks like a package called `rewired`."""
    (tmp_path / "rewired").symlink_to(ROOT)
    command = [sys.executable, "-c", "import rewired; print(rewired.__version__)"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not (ROOT / "convert").is_dir(), reason="an sdist holds the rooms in src/rewired, without links")
def test_rooms_at_the_top_level_are_what_is_imported() -> None:
    from rewired.convert import cli

    for room in ("adapt", "convert", "evaluate", "recipes", "serve"):
        assert (ROOT / "src" / "rewired" / room).resolve() == ROOT / room
    assert Path(cli.__file__).resolve() == ROOT / "convert" / "cli.py"
