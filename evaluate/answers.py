"""What models answered, kept on disk task by task: a run that is killed resumes, and an original is asked once."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rewired
from rewired.cache import cache_folder

from .harness import HARNESS, SEED, Task
from .models import Model

Logs = list[dict[str, Any]]  # the harness's log of each item


def kept(model: Model, task: Task, settings: dict[str, Any]) -> Path:
    """The file for a model's answers to a task, there or not: its name holds all that they depend on.

    `settings` is what else they depend on: the weights' dtype, and where the rows come from.
    """
    entry = task.entry
    key = {
        "model": model.sha256,
        "task": entry.task,
        "shots": task.shots,
        "chat": entry.chat,
        "limit": entry.limit,
        "versions": task.versions,
        "harness": HARNESS,
        "rewired": rewired.__version__,
        "seed": SEED,
        **settings,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "answers" / f"{entry.task}-{digest[:24]}.jsonl"


def read(file: Path) -> Logs:
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write(file: Path, logs: Logs) -> None:
    """All or nothing: a reader never meets half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".writing-") as scratch:
        written = Path(scratch) / file.name
        with written.open("w", encoding="utf-8") as lines:
            for log in logs:
                lines.write(json.dumps(log, default=str, ensure_ascii=False) + "\n")
        written.replace(file)


@dataclass(frozen=True)
class Earlier:
    """A model of an earlier evaluation, by its results: no weights, the same name."""

    name: str
    folder: Path  # of the results
    sha256: str
    step: int | None

    def answers(self, title: str) -> Path:
        return sample_file(self.folder, self.name, title)


def sample_file(results: Path, model: str, title: str) -> Path:
    """Where the per-item logs of a model and a task are, below a folder of results."""
    return results / "samples" / as_file_name(model) / f"{as_file_name(title)}.jsonl"


def copy_to(results: Path, model: str, title: str, source: Path) -> None:
    target = sample_file(results, model, title)
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() or not target.samefile(source):
        shutil.copyfile(source, target)


def earlier(folder: Path) -> list[Earlier]:
    """The models of an earlier evaluation, its original first. Raises ValueError if the folder holds none."""
    try:
        models = json.loads((folder / "results.json").read_text())["models"]
        found = [Earlier(model["name"], folder, model["sha256"], model["step"]) for model in models]
        if not found or not all(isinstance(one.name, str) and isinstance(one.step, int | None) for one in found):
            raise TypeError("no such models")
        return found
    except (KeyError, TypeError, ValueError, OSError, RecursionError):
        raise ValueError(f"{folder / 'results.json'} is not what an evaluation writes.") from None


def paired(title: str, logs: Sequence[tuple[str, Logs]], filter_name: str) -> list[Logs]:
    """Each model's logs of the same items in the same order. Raises ValueError if they were not asked the same."""
    by_id = [{log["id"]: log for log in of_model if log["filter"] == filter_name} for _, of_model in logs]
    for (name, _), items in zip(logs, by_id, strict=True):
        if items.keys() != by_id[0].keys():
            raise ValueError(
                f"{logs[0][0]} and {name} were not asked the same in {title}: an earlier evaluation had other shots, "
                "another limit or other rows. Evaluate both anew with the same settings."
            )
    return [[items[key] for key in by_id[0]] for items in by_id]


def as_file_name(name: str) -> str:
    """A model's or a task's name, such as org/model, as that of one file or folder."""
    return name.replace("/", "--").replace("\\", "--") if name not in ("", ".", "..") else f"--{name}"
