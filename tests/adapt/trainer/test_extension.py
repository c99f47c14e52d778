"""A training that is finished can be extended: as the longer one had been, where the schedule allows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapt.world import distillation, logged, train, weights


@pytest.fixture(scope="module")
def trained(dense: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `keys` make: four steps at a constant rate."""
    folder = tmp_path_factory.mktemp("trained")
    keys = distillation(dense, rows, folder / "out") | {"lr_scheduler_type": "constant"}
    return train(folder / "r.yaml", **keys).parent


@pytest.fixture
def out(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "out")


@pytest.fixture
def keys(keys: dict[str, Any]) -> dict[str, Any]:
    return keys | {"lr_scheduler_type": "constant"}


@pytest.mark.parametrize(
    "schedule",
    [
        {"lr_scheduler_type": "constant"},
        {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": {"num_decay_steps": 1},
            "warmup_steps": 2,
            "save_steps": 1,
        },
    ],
    ids=lambda schedule: schedule["lr_scheduler_type"],
)
def test_it_becomes_what_the_longer_one_is(schedule: dict[str, Any], keys: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit: the losses and the weights, from before a decay of the rate on."""
    keys |= schedule
    whole = train(tmp_path / "r.yaml", **keys | {"output_dir": str(tmp_path / "whole"), "max_steps": 6})
    made = train(tmp_path / "r.yaml", **keys)
    short = weights(made)
    if "decay" in schedule["lr_scheduler_type"]:
        shutil.rmtree(tmp_path / "out" / "checkpoint-4")  # which has the rate of the decayed end
    longer = keys | {"max_steps": 6, "save_steps": 3, "logging_steps": 1, "save_total_limit": 4}
    assert train(tmp_path / "r.yaml", resume=True, **longer) == made
    found, expected = weights(made), weights(whole)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert logged(made, "kd") == logged(whole, "kd")
    assert json.loads((made / "config.json").read_text())["adapted"]["steps"] == 6
    aside = weights(tmp_path / "out" / "final-4")
    assert all(torch.equal(aside[name], short[name]) for name in short), "the shorter one's model is kept"
    assert "the learning rate jumps" not in (made / "README.md").read_text()


def test_a_rate_that_has_decayed_jumps_and_that_is_said(
    keys: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the first step on it is what the longer schedule has there."""
    keys |= {"lr_scheduler_type": "linear", "learning_rate": 1e-3}
    train(tmp_path / "r.yaml", **keys)
    made = train(tmp_path / "r.yaml", resume=True, **keys | {"max_steps": 8})
    sentence = (
        "After 4 steps the learning rate jumps from 0 to 0.0005: from there on it is what the schedule (linear) of"
    )
    assert sentence in capsys.readouterr().out and sentence in (made / "README.md").read_text()
    history = json.loads((made / "training.json").read_text())
    rates = {entry["step"]: entry["learning_rate"] for entry in history if "learning_rate" in entry}
    assert [rates[step] for step in (5, 6, 7, 8)] == pytest.approx([5e-4, 3.75e-4, 2.5e-4, 1.25e-4])


@pytest.mark.usefixtures("out")
def test_one_that_was_killed_while_it_was_extended_goes_on(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    longer = keys | {"max_steps": 6}
    with monkeypatch.context() as patched:
        patched.setattr("rewired.adapt.run.save", kill)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "r.yaml", resume=True, **longer)
    assert not (tmp_path / "out" / "final").exists()
    made = train(tmp_path / "r.yaml", resume=True, **longer)
    assert json.loads((made / "config.json").read_text())["adapted"]["steps"] == 6


def test_more_epochs_extend_it_too(keys: dict[str, Any], tmp_path: Path) -> None:
    keys |= {"max_steps": -1, "num_train_epochs": 0.5}
    train(tmp_path / "r.yaml", **keys)
    again = train(tmp_path / "r.yaml", resume=True, **keys | {"num_train_epochs": 1.0})
    assert json.loads((again / "config.json").read_text())["adapted"]["steps"] == 18


@pytest.mark.usefixtures("out")
def test_one_that_has_taken_as_many_steps_is_not_shortened(keys: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trained for 4 steps, and 3 are asked for: .*--model .*final goes on"):
        train(tmp_path / "r.yaml", resume=True, **keys | {"max_steps": 3})
    assert (tmp_path / "out" / "final").is_dir()


def test_one_without_checkpoints_is_not_extended(out: Path, keys: dict[str, Any], tmp_path: Path) -> None:
    """It would be trained from its beginning, with whatever the recipe says now."""
    for checkpoint in out.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    with pytest.raises(ValueError, match=r"no checkpoint from which .*--model .*final goes on"):
        train(tmp_path / "r.yaml", resume=True, **keys | {"max_steps": 6})
    assert (out / "final").is_dir()


@pytest.mark.usefixtures("out")
def test_nothing_else_may_change(keys: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="begun with another learning_rate: choose another output_dir"):
        train(tmp_path / "r.yaml", resume=True, **keys | {"max_steps": 6, "learning_rate": 1e-6})
    assert (tmp_path / "out" / "final").is_dir()


def test_only_the_last_stage_is_extended(keys: dict[str, Any], tmp_path: Path) -> None:
    stages: list[dict[str, Any]] = [{"max_steps": 1}, {"max_steps": 2}]
    train(tmp_path / "r.yaml", **keys, stages=stages)
    with pytest.raises(ValueError, match=r"begun with another max_steps: .* change it in the last stage only"):
        train(tmp_path / "r.yaml", resume=True, **keys, stages=[{"max_steps": 2}, {"max_steps": 2}])
    made = train(tmp_path / "r.yaml", resume=True, **keys, stages=[{"max_steps": 1}, {"max_steps": 3}])
    assert json.loads((made / "config.json").read_text())["adapted"]["steps"] == 3
