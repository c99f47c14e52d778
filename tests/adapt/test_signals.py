"""A run that is asked to end does, with a status and at most a sentence, wherever the signal arrives."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rewired.adapt.trainer.trainer import AdaptTrainer

from .world import command, write_recipe

STARTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
module = sys.argv.pop()
class Interrupt:
    def find_spec(self, name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
from rewired.scripts import adapt
sys.meta_path.insert(0, Interrupt())
sys.argv.append("smollm2-135m-ladder-distill")
adapt()
"""


@pytest.fixture(autouse=True)
def _listens() -> Iterator[None]:
    """A shell lets what it starts in the background ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_that_garbage_collection_swallows_ends_a_training(
    number: int, status: int, keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in a callback of the collection goes nowhere."""
    plain, steps = AdaptTrainer.training_step, list[int]()

    def raise_signal(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            os.kill(os.getpid(), number)

    def training_step(self: AdaptTrainer, *args: Any, **kwargs: Any) -> Any:
        steps.append(1)
        gc.callbacks.append(raise_signal)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(raise_signal)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(AdaptTrainer, "training_step", training_step)
    assert command(monkeypatch, write_recipe(tmp_path / "r.yaml", **keys)) == status
    assert len(steps) == 1 and not (tmp_path / "out" / "final").exists()


@pytest.mark.parametrize("module", ["rewired.adapt.cli", "typer", "trl"])
def test_ctrl_c_while_importing_is_no_traceback(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", STARTED, module], capture_output=True, text=True)
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert done.stderr.startswith("adapt: interrupted")
