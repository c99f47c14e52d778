"""What a training was begun with, so that nothing else goes on with it."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .recipe import Stage

_FILE = "recipe.json"
# how long it takes, and what it tells
_MAY_CHANGE = (
    "max_steps",
    "num_train_epochs",
    "logging_steps",
    "save_steps",
    "save_total_limit",
    "eval_steps",
    "report_to",
    "disable_tqdm",
    "dataset_num_proc",
)


def check(stage: Stage, folder: Path, may_change: Collection[str] = _MAY_CHANGE) -> None:
    """Raise ValueError where what lies in `folder` was begun with another recipe."""
    if not (folder / _FILE).is_file():
        return
    before, now = json.loads((folder / _FILE).read_text(encoding="utf-8")), _keys(stage)
    for name in before | now:
        if before.get(name) != now.get(name) and name not in may_change:
            raise ValueError(f"{folder} was begun with another {name}: choose another output_dir.")


def write(stage: Stage, folder: Path) -> None:
    """Keep what is begun with `stage`, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".{_FILE}"
    scratch.write_text(json.dumps(_keys(stage), indent=1) + "\n", encoding="utf-8")
    scratch.replace(folder / _FILE)


def forget(folder: Path) -> None:
    """Nothing was begun, if no step was saved: what was asked for cannot be done."""
    if not any(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
        (folder / _FILE).unlink(missing_ok=True)


def _keys(stage: Stage) -> dict[str, Any]:
    """All of our keys, those of TRL's and transformers' that were given, and how many ranks share a step's rows."""
    given = {name: value for name, value in stage.given.items() if name != "output_dir"}
    ranks = {"number of ranks": PartialState().num_processes}
    found: dict[str, Any] = json.loads(json.dumps(given | asdict(stage.recipe) | ranks, default=str))
    return found
