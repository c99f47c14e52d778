"""The manifest of a run: what a training was begun with (`recipe.json`), so that nothing else resumes it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from rewired import run_lock
from rewired.cache import write_whole

from ..recipe.keys import Stage

_FILE = "recipe.json"
# which determine the start
_START_KEYS = ("model", "init", "tokenizer", "wiring", "tp_shards", "refit", "refit_tokens")
# beginnings of keys that change nothing of what is trained: a bad row stops a training or is left out
_FREE_KEYS = (
    *("skip_bad", "log_level", "logging_", "save_", "eval_steps", "report_to", "run_name", "project", "disable_tqdm"),
    *("dataloader_num_workers", "dataloader_p", "ddp_timeout"),
)
_LENGTH_KEYS = ("max_steps", "num_train_epochs")


def check_free(out: Path, resume: bool) -> None:
    """Raise ValueError if no training may begin in `out`, or go on there with `resume`."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: choose another output_dir.")
    if out.exists() and not resume and any(path.name not in (_FILE, run_lock.FILE) for path in out.iterdir()):
        raise ValueError(f"{out} exists: continue it with --resume, or choose another output_dir.")


def check(stage: Stage, folder: Path, stages: int, rows: str | None) -> None:
    """Raise ValueError if the training in `folder` was begun with another recipe than that of `stage`, one of `stages`.

    `rows` is the fingerprint of the data; None for a stage that is finished, of which only reporting and saving may
    change. Of a stage that has saved no step yet, all may change except what its start, if it exists, was made from.
    """
    has_steps = rows is None or any(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    if not (folder / _FILE).is_file():
        if folder.is_dir() and has_steps:
            raise ValueError(f"{folder} has no {_FILE}, so its content is unknown: choose another output_dir.")
        return
    before, now = _read(folder), _keys(stage, folder, stages, rows)
    may_change = _FREE_KEYS if rows is None else (*_FREE_KEYS, *_LENGTH_KEYS)
    has_start = has_steps or (folder / "start" / "config.json").is_file()
    for part in ["start"] * has_start + ["training"] * has_steps:
        for name in before[part] | now[part]:
            if name.startswith(may_change) or (name == "set of rows" and rows is None):
                continue
            if before[part].get(name) != now[part].get(name):
                raise ValueError(
                    f"{folder} was begun with another {name}: choose another output_dir{_way_on(name, rows)}."
                )


def _way_on(name: str, rows: str | None) -> str:
    """What else to do about another `name` in a stage that is finished."""
    if rows is None and name in _LENGTH_KEYS:
        return ", or change it in the last stage only: the later ones start from what this one made"
    return ""


def has_other_length(stage: Stage, folder: Path) -> bool:
    """Whether the finished training in `folder` was begun with other max_steps or num_train_epochs than `stage` has."""
    if not (folder / _FILE).is_file():
        return False
    before = _read(folder)["training"]
    return any(before.get(name) != stage.given.get(name) for name in _LENGTH_KEYS)


def check_layout(out: Path, stages: int) -> None:
    """Raise ValueError if `out` holds a single training and the recipe has several `stages`, or the other way round."""
    if (out / _FILE).is_file() if stages > 1 else any(out.glob("stage-*")):
        raise ValueError(f"{out} was begun with another number of stages: choose another output_dir.")


def begin(stage: Stage, folder: Path, stages: int, rows: str) -> None:
    """Write the manifest of `stage`. Raises ValueError if `folder` was begun with another recipe."""
    state = PartialState()
    check(stage, folder, stages, rows)
    state.wait_for_everyone()  # all have looked
    if state.is_main_process:
        write_whole(folder / _FILE, json.dumps(_keys(stage, folder, stages, rows), indent=1) + "\n")


def _keys(stage: Stage, folder: Path, stages: int, rows: str | None) -> dict[str, dict[str, Any]]:
    """All of our keys, the given ones of TRL's and transformers', and the number of ranks that share a step's rows."""
    given = {name: value for name, value in stage.given.items() if name != "output_dir"}
    training = given | asdict(stage.recipe)
    start = {name: training.pop(name) for name in _START_KEYS}
    start["seed"] = stage.config.seed if stage.recipe.from_scratch else None
    if stages > 1 and Path(start["model"]).is_relative_to(folder.parent):  # made by the stage before this one
        start["model"] = str(Path(start["model"]).relative_to(folder.parent))
    training |= {"number of ranks": PartialState().num_processes, "set of rows": rows}
    keys = {"start": start | {"number of stages": stages}, "training": training}
    as_read: dict[str, dict[str, Any]] = json.loads(json.dumps(keys, default=str))
    return as_read


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        keys: dict[str, dict[str, Any]] = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        if keys.keys() == {"start", "training"}:
            return keys
    except (ValueError, AttributeError):  # no JSON, or a list
        pass
    raise ValueError(f"{folder / _FILE} cannot be read: choose another output_dir.")
