"""A recipe's datasets, loaded from files or from the hub, filtered and mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, IterableDataset

from rewired.text.rows import ROWS, dataset_errors, is_on_hub

from ..recipe.dataset_entry import DatasetEntry
from . import files, instruct

_TEXT = ".txt"
_UNSUPPORTED = "unsupported format; use .json, .jsonl, .csv, .txt or .parquet."


def load(source: DatasetEntry, streaming: bool) -> list[tuple[str, Dataset | IterableDataset]]:
    """The rows of each local file of `source`, or of the dataset on the hub, with their name.

    Raises ValueError for what cannot be read.
    """
    path = Path(source.path).expanduser()
    if path.exists():
        _check_local(source)
        return [(str(file), files.read(file, streaming)) for file in _files(path)]
    if not is_on_hub(source.path):
        mend = "name a file, a folder, or a dataset on the hub (owner/name)."
        if path.suffix == ".jsonl" and path.stem in instruct.SETS:
            mend = f"`rewired data fetch instruct {path.parent}` makes it."
        raise ValueError(f"There is no {source.path}: {mend}")
    with dataset_errors(source.path):
        rows = datasets.load_dataset(source.path, source.name, split=source.split, streaming=streaming)
    return [(source.path, rows)]


def is_wanted(source: DatasetEntry, row: Mapping[str, Any]) -> bool:
    """Whether `row` passes the filters of `source`."""
    return (not source.languages or row.get("langdetect") in source.languages) and (
        not source.sources or row.get("source") in source.sources
    )


def mix(parts: Sequence[Any], weights: Sequence[float | None], seed: int) -> Any:
    """All datasets as one: one after the other, or, if any has a weight, drawn by the weights.

    Rows are drawn until one dataset is used up; streams begin anew when they end, and are drawn from for ever. Streams
    without weights take turns once they are shuffled.
    """
    if len(parts) == 1:
        return parts[0]
    if weights.count(None) == len(weights):
        return datasets.concatenate_datasets(list(parts))
    known = [1.0 if weight is None else weight for weight in weights]
    shares = [weight / sum(known) for weight in known]
    if isinstance(parts[0], IterableDataset):
        parts = [rows.repeat(None) for rows in parts]
    return datasets.interleave_datasets(list(parts), shares, seed=seed, stopping_strategy="first_exhausted")


def _check_local(source: DatasetEntry) -> None:
    if source.name or source.split != "train":
        raise ValueError(
            f"In `datasets`, {source.path} is on disk, where all of a file is read: leave name and split out, or name "
            "the file of that split."
        )


def _files(path: Path) -> list[Path]:
    """The file itself, or all files of rows in the folder; if it has none, those of text. Raises ValueError if there
    are none."""
    if not path.is_dir():
        if path.suffix not in (*ROWS, _TEXT):
            raise ValueError(f"{path}: {_UNSUPPORTED}")
        return [path]
    for suffixes in (ROWS, (_TEXT,)):
        if files := sorted(file for file in path.iterdir() if file.suffix in suffixes):
            return files
    raise ValueError(f"{path}: {_UNSUPPORTED}")
