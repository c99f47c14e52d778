"""The command `adapt`: its list of recipes, and what it says where packages are missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .world import command

RECIPES = Path(__file__).parents[2] / "recipes"
WITHOUT = """
import sys
sys.modules["{0}"] = None
sys.argv = ["adapt", *sys.argv[1:]]
from rewired.adapt.cli import main
main()
"""


@pytest.mark.parametrize("package", ["trl", "datasets"])
def test_a_missing_package_is_one_sentence(package: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("{model: some/model, datasets: [some/data]}")
    command = [sys.executable, "-c", WITHOUT.format(package), tmp_path / "r.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"adapt needs the package '{package}', which is not installed: pip install " in done.stderr
    assert "[adapt]" in done.stderr


def test_a_recipe_that_is_not_there_is_missed_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT.format("torch"), "nosuch"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("adapt: There is no recipe nosuch: `adapt --list` ")


def test_recipes_are_listed_with_a_line_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(path.stem for path in RECIPES.glob("*.yaml"))
    assert all(line.endswith(".") and len(line.split()) > 5 for line in lines)
