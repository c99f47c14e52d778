"""What a training was begun with, so that nothing else goes on with it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .recipe.keys import Stage

_FILE = "recipe.json"
_START = ("model", "wiring", "tp_shards", "refit", "refit_tokens")  # what a start is made by
_TELLS = (  # nothing of what is trained; what is bad stops a training, or is left out
    "skip_bad",
    "logging_dir",
    "logging_first_step",
    "logging_steps",
    "logging_strategy",
    "log_level",
    "log_level_replica",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "eval_steps",
    "report_to",
    "run_name",
    "project",
    "disable_tqdm",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "ddp_timeout",
)
_LASTS = ("max_steps", "num_train_epochs")


def check_free(out: Path, resume: bool) -> None:
    """Raise ValueError where no training may begin in `out`, or with `resume` go on."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: choose another output_dir.")
    if out.exists() and not resume and any(path.name != _FILE for path in out.iterdir()):
        raise ValueError(f"{out} exists: go on with it by --resume, or choose another output_dir.")


def check(stage: Stage, folder: Path, stages: int, rows: str | None) -> None:
    """Raise ValueError where what lies in `folder` was begun with another recipe, of so many `stages`.

    `rows` is the fingerprint of the data. It is None for a stage that is finished: only what it told may change then.
    Of one that saved no step anything may, but what a start that is there was made by.
    """
    has_steps = rows is None or any(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    if not (folder / _FILE).is_file():
        if folder.is_dir() and has_steps:
            raise ValueError(f"{folder} has no {_FILE}, so nobody knows what it holds: choose another output_dir.")
        return
    before, now = _read(folder), _keys(stage, folder, stages, rows)
    may_change = _TELLS if rows is None else (*_TELLS, *_LASTS)
    has_start = has_steps or (folder / "start" / "config.json").is_file()
    for part in ["start"] * has_start + ["training"] * has_steps:
        for name in before[part] | now[part]:
            if name in may_change or (name == "set of rows" and rows is None):
                continue
            if before[part].get(name) != now[part].get(name):
                raise ValueError(f"{folder} was begun with another {name}: choose another output_dir.")


def check_layout(out: Path, stages: int) -> None:
    """Raise ValueError where `out` holds one training of several stages, or stages of one."""
    if (out / _FILE).is_file() if stages > 1 else any(out.glob("stage-*")):
        raise ValueError(f"{out} was begun with another number of stages: choose another output_dir.")


def begin(stage: Stage, folder: Path, stages: int, rows: str) -> None:
    """Keep what `stage` is begun with. Raises ValueError where `folder` was begun with another recipe."""
    state = PartialState()
    check(stage, folder, stages, rows)
    state.wait_for_everyone()  # all have looked
    if state.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        _write(_keys(stage, folder, stages, rows), folder)


def _keys(stage: Stage, folder: Path, stages: int, rows: str | None) -> dict[str, dict[str, Any]]:
    """All of our keys, those of TRL's and transformers' that were given, and how many ranks share a step's rows."""
    given = {name: value for name, value in stage.given.items() if name != "output_dir"}
    training = given | asdict(stage.recipe)
    start = {name: training.pop(name) for name in _START}
    if stages > 1 and Path(start["model"]).is_relative_to(folder.parent):  # what the stage before this one made
        start["model"] = str(Path(start["model"]).relative_to(folder.parent))
    training |= {"number of ranks": PartialState().num_processes, "set of rows": rows}
    keys = {"start": start | {"number of stages": stages}, "training": training}
    found: dict[str, dict[str, Any]] = json.loads(json.dumps(keys, default=str))
    return found


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        found: dict[str, dict[str, Any]] = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        if found.keys() == {"start", "training"}:
            return found
    except ValueError:
        pass
    raise ValueError(f"{folder / _FILE} cannot be read: choose another output_dir.")


def _write(keys: dict[str, dict[str, Any]], folder: Path) -> None:
    """Whole or not at all."""
    scratch = folder / f".{_FILE}"
    scratch.write_text(json.dumps(keys, indent=1) + "\n", encoding="utf-8")
    scratch.replace(folder / _FILE)
