"""Two runs in one output_dir: the second ends in a sentence, and harms nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rewired import run_lock
from tests.adapt.world import train

HOLD = """
import sys
from pathlib import Path
from rewired.adapt.trainer.run_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("resume", [False, True])
def test_while_a_run_is_alive_no_other_one_begins(resume: bool, keys: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", HOLD, str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        (out / "checkpoint-2").mkdir()
        with pytest.raises(ValueError, match=f"written by process {first.pid} on {socket.gethostname()}: wait"):
            train(tmp_path / "r.yaml", resume, **keys)
        assert {path.name for path in out.iterdir()} == {run_lock.FILE, "checkpoint-2"}
        first.kill()  # and what it leaves locks nobody out
    (out / "checkpoint-2").rmdir()
    assert train(tmp_path / "r.yaml", resume, **keys).is_dir()
    assert not (out / run_lock.FILE).exists()


def test_what_is_refused_leaves_nothing_behind(keys: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no folder"):
        train(tmp_path / "r.yaml", **keys | {"model": "nosuch", "output_dir": str(tmp_path / "a" / "b")})
    assert not (tmp_path / "a").exists()
