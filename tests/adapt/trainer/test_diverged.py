"""A training whose loss diverges: it ends with a sentence, and what was good before is kept and named."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.adapt.world import train, weights


def test_a_loss_that_diverges_stops_with_the_last_good_checkpoint(keys: dict[str, Any], tmp_path: Path) -> None:
    """The first step has a learning rate of 0, the second takes the weights beyond all numbers, the third sees it."""
    keys |= {"max_steps": 9, "save_steps": 1, "optim": "sgd", "learning_rate": 1e38, "warmup_steps": 2}
    with pytest.raises(
        ValueError, match=r"At step 3 the loss is nan.*good checkpoint is .*checkpoint-1\. .*learning_rate"
    ):
        train(tmp_path / "r.yaml", **keys)
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]
    assert not (tmp_path / "out" / "final").exists()


@pytest.mark.parametrize("limit", [1, 2])
def test_what_is_saved_while_a_loss_stays_far_above_does_not_crowd_out_the_last_good_checkpoint(
    limit: int, keys: dict[str, Any], tmp_path: Path
) -> None:
    """Finite all the time: it takes logs to tell. From step 1 to 2 the weights go far away, the learning rate of step 1
    is 0; logs 3 to 7 are above."""
    keys |= {"max_steps": 9, "save_steps": 1, "save_total_limit": limit, "warmup_steps": 2}
    with pytest.raises(ValueError, match=r"At step 7 the \w+ is \d.*good checkpoint is .*checkpoint-1\. "):
        train(tmp_path / "r.yaml", **keys | {"optim": "sgd", "learning_rate": 300.0})
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]


def test_nor_is_a_checkpoint_good_whose_loss_was_far_above_before_it_became_no_number(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    """As above, but the weights go on to be no numbers before so many logs are above that it stops."""
    keys |= {"max_steps": 9, "save_steps": 1, "warmup_steps": 2, "optim": "sgd", "learning_rate": 1e4}
    with pytest.raises(ValueError, match=r"the loss is nan.*good checkpoint is .*checkpoint-1\. "):
        train(tmp_path / "r.yaml", **keys)
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_loss_far_above_too_late_to_stop_is_told_with_the_last_good_checkpoint(
    keys: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As above, and the training ends before so many logs are above; also where it was killed at its end."""
    keys |= {"max_steps": 5, "save_steps": 1, "warmup_steps": 2, "optim": "sgd", "learning_rate": 300.0}
    for resume in (False, True):
        doubt = told_of_its_end(train(tmp_path / "r.yaml", resume=resume, **keys))
        assert doubt in capsys.readouterr().out
        assert doubt.endswith("before: checkpoint-1 is the last checkpoint known to be good.")
        shutil.rmtree(tmp_path / "out" / "final")
    unsaved = train(tmp_path / "r.yaml", **keys | {"save_strategy": "no", "output_dir": str(tmp_path / "unsaved")})
    assert told_of_its_end(unsaved).endswith("before: no checkpoint is from before.")


def told_of_its_end(made: Path) -> str:
    """In the model's card."""
    found = re.search(r"- (At the end the loss is \d.*)", (made / "README.md").read_text())
    assert found
    return found[1]


def test_weights_that_the_last_step_breaks_are_not_saved(keys: dict[str, Any], tmp_path: Path) -> None:
    """No loss tells of them any more."""
    keys |= {"max_steps": 2, "save_steps": 1, "optim": "sgd", "learning_rate": 1e38, "warmup_steps": 2}
    with pytest.raises(ValueError, match=r"After step 2 the loss is nan: .*checkpoint-1\. "):
        train(tmp_path / "r.yaml", **keys)
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]
    assert not (tmp_path / "out" / "final").exists()


def test_nor_are_those_of_a_training_that_was_killed_after_it(keys: dict[str, Any], tmp_path: Path) -> None:
    """Its checkpoint of the last step is there, and that is all there is to tell of it."""
    made = train(tmp_path / "r.yaml", **keys)
    shutil.rmtree(made)
    last = tmp_path / "out" / "checkpoint-4"
    broken = weights(last)
    broken["model.layers.2.mlp.up_proj.weight"].fill_(torch.nan)
    save_file(broken, last / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"After step 4 the loss is nan: .*checkpoint-2\. "):
        train(tmp_path / "r.yaml", resume=True, **keys)
    assert not made.exists() and not last.exists()
