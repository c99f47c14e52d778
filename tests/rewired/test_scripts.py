"""The console scripts where the packages of their extra are not installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rewired.extras import missing

SCRIPTS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
EXTRAS = {"adapt": "adapt", "convert": "convert", "evaluate": "evaluate", "rewired": "convert"}
SCRIPT = "from importlib.metadata import EntryPoint; EntryPoint('', {!r}, '').load()()"
MODULE = "import runpy; runpy.run_module({!r}, run_name='__main__')"


def run_without(package: str, code: str) -> subprocess.CompletedProcess[str]:
    hidden = f"import sys; sys.modules[{package!r}] = None; sys.argv[1:] = ['--help']; {code}"
    return subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)


@pytest.mark.parametrize("package", ["typer", "rich"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_missing_package_is_one_sentence(script: str, package: str) -> None:
    done = run_without(package, SCRIPT.format(SCRIPTS[script]))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{missing(EXTRAS[script], script, package)}\n"


@pytest.mark.parametrize(("module", "script"), [("rewired", "rewired"), ("rewired.adapt", "adapt")])
def test_so_it_is_by_python_m(module: str, script: str) -> None:
    done = run_without("typer", MODULE.format(module))
    assert (done.returncode, done.stderr) == (2, f"{missing(EXTRAS[script], script, 'typer')}\n")
