"""The front door: `rewired COMMAND`, by its own name and as `python -m rewired`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rewired

REWIRED, CONVERT = ([str(Path(sys.executable).with_name(name))] for name in ("rewired", "convert"))


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    wide = {**os.environ, "COLUMNS": "120", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=wide)


def test_the_version() -> None:
    assert run(*REWIRED, "--version").stdout == f"rewired {rewired.__version__}\n"


def test_python_m_is_the_same_command() -> None:
    assert run(sys.executable, "-m", "rewired", "--version").stdout == run(*REWIRED, "--version").stdout


def test_help_lists_every_rooms_commands() -> None:
    printed = run(*REWIRED, "--help").stdout
    for command in ("adapt", "convert", "data", "evaluate", "generate", "info", "select"):
        assert f" {command} " in printed


def test_only_the_room_that_is_asked_is_imported() -> None:
    code = (
        "import sys; from rewired.cli import main\ntry: main()\nfinally: print([m for m in sys.modules if '.cli' in m])"
    )
    done = run(sys.executable, "-c", code, "info", "--help")
    rooms = ("adapt", "evaluate", "select", "serve")
    assert "rewired.convert.cli" in done.stdout
    assert not any(f"rewired.{room}.cli" in done.stdout for room in rooms)


def test_a_misspelt_command_names_the_nearest() -> None:
    done = run(*REWIRED, "convrt")
    assert done.returncode == 2
    assert "convert" in done.stderr


def test_the_shell_completes_commands() -> None:
    done = run(*REWIRED, _REWIRED_COMPLETE="complete_bash", COMP_WORDS="rewired ev", COMP_CWORD="1")
    assert done.stdout.split() == ["evaluate"]


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("convert a b --ladder-l", ["--ladder-layers"]),
        ("evaluate a --run-m", ["--run-model-code"]),
        ("adapt smollm2-135m-ladder-s", ["smollm2-135m-ladder-sft"]),
    ],
)
def test_the_shell_completes_options_and_recipes(line: str, completed: list[str]) -> None:
    command, *words = line.split()
    environment = {f"_{command.upper()}_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    done = run(str(Path(sys.executable).with_name(command)), **environment)
    assert done.stdout.split() == completed


@pytest.mark.parametrize("command", ["info", "convert"])
def test_flags_are_shown_without_a_value(command: str) -> None:
    """`--json <bool>` made users write `--json true`, which converted to a folder of that name."""
    assert "<bool>" not in run(*REWIRED, command, "--help").stdout


def test_a_link_to_itself_and_a_name_that_is_not_utf_8_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    for out, sentence in (("loop", "Symlink loop from"), (b"\xff", "'\\udcff' is not UTF-8")):
        command = [*CONVERT, tmp_path / "source", out, "--ladder-layers", "0-1"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(f"convert: {sentence}") and done.stderr.count("\n") == 1
