"""A disk that takes no more: a sentence, and the run goes on bit for bit once there is room."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from rewired.adapt import run
from rewired.adapt.trainer.checkpoints import disk_errors
from rewired.adapt.trainer.trainer import AdaptTrainer
from tests.adapt.world import command, train, weights, write_recipe


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """A write beyond `size` bytes of a file fails, as one beyond the end of a disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_is_no_disks_fault_is_not_blamed_on_it(tmp_path: Path) -> None:
    of_rank = {0: (RuntimeError("tensors share memory"), StackSummary())}
    with pytest.raises(CheckpointException), disk_errors("checkpoint-4", tmp_path):
        raise CheckpointException("", of_rank)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "size", "reason"),
    [
        ("checkpoint-4", 100_000, "File too large"),
        ("checkpoint-4", 200_000, "torch.save was cut short"),
        ("final", 100_000, "File too large"),
    ],
    ids=["weights", "moments", "final"],
)
def test_a_full_disk_is_a_sentence_and_no_loss(
    written: str,
    size: int,
    reason: str,
    keys: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys |= {"train": "all"}
    save_checkpoint, save = AdaptTrainer._save_checkpoint, run.save

    def save_checkpoint_on_a_full_disk(self: AdaptTrainer, *args: Any) -> None:
        with no_file_above(size if written == f"checkpoint-{self.state.global_step}" else 1 << 30):
            save_checkpoint(self, *args)

    def save_on_a_full_disk(*args: Any) -> None:
        with no_file_above(size if written == "final" else 1 << 30):
            save(*args)

    recipe, out = write_recipe(tmp_path / "r.yaml", **keys), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(AdaptTrainer, "_save_checkpoint", save_checkpoint_on_a_full_disk)
        patched.setattr(run, "save", save_on_a_full_disk)
        assert command(monkeypatch, recipe) == 2
    last = out / ("checkpoint-4" if written == "final" else "checkpoint-2")
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"adapt: {out / written} cannot be written (") and reason in told
    assert told.endswith(f"Once the disk has room, the same command with --resume goes on from {last}.")
    kept = {path.name for path in out.iterdir() if path.name != ".saving" or any(path.iterdir())}
    assert kept == {"start", "recipe.json", "checkpoint-2", last.name}
    assert command(monkeypatch, recipe, "--resume") == 0
    whole = weights(train(tmp_path / "whole.yaml", **keys | {"output_dir": str(tmp_path / "whole")}))
    found = weights(out / "final")
    assert all(torch.equal(found[name], whole[name]) for name in whole)
