"""Where a machine cannot confine a program, none runs."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rewired.evaluate.code_execution import CodeEval
from rewired.evaluate.sandbox import check_confinement, run_program


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    check_confinement.cache_clear()
    yield
    check_confinement.cache_clear()


def test_nothing_runs_but_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match=r"cannot confine the programs .* run this benchmark on Linux"):
        CodeEval().compute(references=["assert x"], predictions=[["x = 1"]], k=[1])


def test_nothing_runs_without_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"cannot confine the programs .* install bubblewrap"):
        run_program("")


def test_nothing_runs_where_bubblewrap_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container that may make no namespaces, or where it is too old."""
    a_bubblewrap(tmp_path, "echo 'bwrap: No permissions' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"make bubblewrap 0\.7 or newer work here \(it says 'bwrap: No permissions'"):
        run_program("")


def test_a_sandbox_that_does_not_start_is_no_failure_of_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a_bubblewrap(tmp_path, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    check_confinement()
    with pytest.raises(ValueError, match=r"did not start \(exit status 0\)"):
        run_program("")


def a_bubblewrap(folder: Path, script: str) -> None:
    """A stand-in, found before one that the machine may have."""
    file = folder / "bwrap"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
