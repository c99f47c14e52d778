"""Suites: tasks, each with its number of shots and its metric. One YAML file a suite, under `suites/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from ..named_yaml import names_in, one_of, read_yaml, refuse_unknown
from ..names import as_file_name

FOLDER = Path(__file__).parent
PAPERS = FOLDER.parent / "papers"


@dataclass(frozen=True)
class Entry:
    """One task of a suite.

    `metric` is the harness's name of the metric, followed by a comma and the filter where the task has several filters,
    or `aggregate` for the mean of IFEval's four metrics; empty is the task's first. `shots` None is the task's default.
    """

    task: str
    metric: str = ""
    shots: int | None = None
    chat: bool = False  # whether prompts go through the tokenizer's chat template
    limit: int | None = None  # the number of items, from the first on; None for all
    column: str = ""  # its name in the paper's table

    @property
    def title(self) -> str:
        return self.column or self.task


@dataclass(frozen=True)
class Paper:
    """A table that a paper published, printed beside our measurements: a YAML file under `papers/`."""

    source: str
    model: str
    columns: Sequence[str]
    rows: dict[str, Sequence[float]]  # per cent, but for perplexities
    lower_is_better: Sequence[str] = ()

    def row(self, name: str) -> dict[str, float]:
        """The values of a row by column."""
        return dict(zip(self.columns, self.rows[name], strict=True))

    def average(self, values: Mapping[str, float]) -> float | None:
        """Over those of `values`, by column, that are shares in the table."""
        shares = [values[column] for column in self.columns if column in values and column not in self.lower_is_better]
        return sum(shares) / len(shares) if shares else None


@dataclass(frozen=True)
class Suite:
    name: str
    about: str
    entries: tuple[Entry, ...]
    paper: Paper | None = None


def load_suite(name: str) -> Suite:
    """A suite that comes with the package, by name, or any other, by the path of its YAML file. Raises ValueError."""
    path, content = read_yaml("suite", name, FOLDER)
    if not isinstance(content, dict) or not isinstance(content.get("tasks"), list) or not content["tasks"]:
        raise ValueError(f"The suite {path} needs a list 'tasks' with an entry for each task.")
    refuse_unknown(content, ("about", "paper", "tasks"), f"The suite {path}")
    entries = tuple(_entry(item, path) for item in content["tasks"])
    titles = [as_file_name(entry.title) for entry in entries]
    for title in titles:
        if titles.count(title) > 1:
            raise ValueError(f"The suite {path} has two tasks called {title}: give each a 'column' of its own.")
    return Suite(path.stem, str(content.get("about", "")).strip(), entries, _paper(content.get("paper"), path))


def choose(suite: Suite | None, tasks: Sequence[str], limit: int | None) -> tuple[Entry, ...]:
    """The suite's entries or, if `tasks` are given, an entry for each: the suite's, else with the harness's defaults.

    `limit` lowers the suite's limits and never raises them.
    """
    entries = suite.entries if suite else ()
    if tasks:
        by_name = {name: entry for entry in entries for name in (entry.task, entry.title)}
        entries = tuple(dict.fromkeys(by_name.get(task, Entry(task)) for task in tasks))
    if limit is None:
        return entries
    return tuple(replace(entry, limit=limit if entry.limit is None else min(limit, entry.limit)) for entry in entries)


def load_paper(name: str) -> Paper:
    return Paper(**yaml.safe_load((PAPERS / f"{name}.yaml").read_text()))


def _paper(name: Any, path: Path) -> Paper | None:
    known = names_in(PAPERS)
    if name is not None and name not in known:
        raise ValueError(f"The suite {path} names the paper '{name}', which is not known: there is {one_of(known)}.")
    return load_paper(name) if name else None


def _entry(item: Any, path: Path) -> Entry:
    if not isinstance(item, dict) or not isinstance(item.get("task"), str):
        raise ValueError(f"In the suite {path}, an entry has no 'task': {item}.")
    refuse_unknown(item, [field.name for field in fields(Entry)], f"Task {item['task']} of the suite {path}")
    for key, kind in {"metric": str, "column": str, "chat": bool, "shots": int, "limit": int}.items():
        value = item.get(key)
        too_small = isinstance(value, int) and value < (1 if key == "limit" else 0)
        if value is not None and (type(value) is not kind or too_small):
            raise ValueError(f"Task {item['task']} of the suite {path} has '{key}: {value}', which makes no sense.")
    return Entry(**item)
