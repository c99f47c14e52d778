"""What models answered, kept on disk task by task: a run that is killed resumes, and an original is asked once."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import rewired.model
from rewired.cache import cache_folder

from .harness import Task
from .models import Model

Logs = list[dict[str, Any]]  # the harness's log of each item
_ASKING = ("harness.py", "benchmarks.py", "code_execution.py", "confinement.py", "metrics.py")


def kept(model: Model, task: Task, settings: dict[str, Any]) -> Path:
    """The file for a model's answers to a task, there or not: its name holds all that they depend on.

    `settings` are an evaluation's; their `answers` are what the answers depend on.
    """
    entry = task.entry
    key = {
        "model": model.sha256,
        "task": entry.task,
        "shots": task.shots,
        "chat": entry.chat,
        "limit": entry.limit,
        "task_versions": task.versions,
        **settings["answers"],
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "answers" / f"{entry.task}-{digest[:24]}.jsonl"


@cache
def code_sha256() -> str:
    """Of the code that makes the answers: with another model code, the answers of the old one do not count."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in answering_code())).hexdigest()


def answering_code() -> list[Path]:
    """The files of the model, and of this room all that prompts and scoring depend on."""
    room = Path(__file__).parent
    model = Path(rewired.model.__file__).parent
    return [*sorted(model.glob("*.py")), *(room / name for name in _ASKING), *sorted(room.glob("tasks/*"))]


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
    settings: dict[str, Any]

    def under_its_path(self) -> Earlier:
        """It stays what it was called, since its answers are found by it."""
        return self

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Raises ValueError where these answers depend on something else than an evaluation with `settings` does."""
        ours = settings["answers"]
        theirs = self.settings.get("answers", {})
        for name in ("dtype", "rows", "tokenizer", "seed", "versions"):
            if ours[name] != theirs.get(name) and ours["tokenizer"] is not None:
                raise ValueError(
                    f"The earlier results in {self.folder} were made with another {name} ({theirs.get(name)} and not "
                    f"{ours[name]}): evaluate both models anew."
                )

    def logs(self, title: str) -> Logs:
        file = sample_file(self.folder, self.name, title)
        if not file.is_file():
            raise ValueError(f"The results in {self.folder} have no {title} of {self.name}: leave the task out.")
        try:
            logs = read(file)
            if not all(log.keys() >= {"id", "filter", "metrics", "doc", "responses"} for log in logs):
                raise ValueError("something is missing")
        except (ValueError, AttributeError, RecursionError):
            raise ValueError(f"{file} does not hold a model's answers: it is damaged, or not ours.") from None
        return logs


def sample_file(results: Path, model: str, title: str) -> Path:
    """Where the per-item logs of a model and a task are, below a folder of results."""
    return results / "samples" / as_file_name(model) / f"{as_file_name(title)}.jsonl"


def write_samples(results: Path, logs: dict[str, dict[str, Logs]]) -> None:
    """All per-item logs, title -> model -> logs, in place of those of an earlier evaluation."""
    shutil.rmtree(results / "samples", ignore_errors=True)
    for title, of_task in logs.items():
        for model, of_model in of_task.items():
            write(sample_file(results, model, title), of_model)


def earlier(folder: Path) -> list[Earlier]:
    """The models of an earlier evaluation, its original first. Raises ValueError if the folder holds none."""
    try:
        results = json.loads((folder / "results.json").read_text())
        found = [
            Earlier(model["name"], folder, model["sha256"], model["step"], dict(results["settings"]))
            for model in results["models"]
        ]
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
