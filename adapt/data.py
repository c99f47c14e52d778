"""Training data: datasets on the hub or in files, filtered and mixed, as rows that are a text or a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, IterableDataset

from rewired.text.conversations import Document, read_row
from rewired.text.rows import ROWS, dataset_errors, is_on_hub

from . import instruct, rows
from .recipe.source import Source

ROLES = ("system", "user", "assistant")


def load(source: Source, streaming: bool) -> list[tuple[str, Dataset | IterableDataset]]:
    """The rows of each file, or of the dataset, with its name. Raises ValueError for what cannot be read."""
    path = Path(source.path).expanduser()
    if path.exists():
        _check_local(source)
        return [(str(file), rows.read(file, streaming)) for file in _files(path)]
    if not is_on_hub(source.path):
        mend = "name a file, a folder, or a dataset on the hub (owner/name)."
        if path.suffix == ".jsonl" and path.stem in instruct.SETS:
            mend = f"`rewired data fetch instruct {path.parent}` makes it."
        raise ValueError(f"There is no {source.path}: {mend}")
    with dataset_errors(source.path):
        found = datasets.load_dataset(source.path, source.name, split=source.split, streaming=streaming)
    return [(source.path, found)]


def _check_local(source: Source) -> None:
    if source.name or source.split != "train":
        raise ValueError(
            f"Of `datasets`, {source.path} is on disk, where all of a file is read: leave name and split out, or name "
            "the file of that split."
        )


def _files(path: Path) -> list[Path]:
    """The file itself, or all files of rows in the folder. Raises ValueError where there is none."""
    if not path.is_dir():
        if path.suffix not in ROWS:
            raise ValueError(f"{path} is no data that is read: {', '.join(ROWS)} files are.")
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in ROWS)
    if not files:
        raise ValueError(f"{path} holds no data: {', '.join(ROWS)} files are read.")
    return files


def is_wanted(source: Source, row: Mapping[str, Any]) -> bool:
    """Whether the row passes the source's filters."""
    return (not source.languages or row.get("langdetect") in source.languages) and (
        not source.sources or row.get("source") in source.sources
    )


def checked(row: Mapping[str, Any], where: str) -> Document:
    """The row as text or as a conversation that can be trained on. Raises ValueError, which says `where`, if not."""
    document = read_row(row, where)
    _check_unicode(document, where)
    if isinstance(document, str):
        if not document.strip():
            raise ValueError(f"{where} is an empty text.")
        return document
    if not document:
        raise ValueError(f"{where} is an empty conversation.")
    roles = [turn["role"] for turn in document]
    for role in roles:
        if role not in ROLES:
            raise ValueError(f"{where} has a turn of the unknown role '{role}': there are {', '.join(ROLES)}.")
    if "assistant" not in roles:
        raise ValueError(f"{where} has no turn of the assistant, so nothing to learn.")
    if "system" in roles[1:] or any(one == other for one, other in pairwise(roles)):
        raise ValueError(f"{where} has turns out of order ({', '.join(roles)}): user and assistant take turns.")
    if not all(turn["content"].strip() for turn in document if turn["role"] != "system"):
        raise ValueError(f"{where} has an empty turn.")
    return document


def _check_unicode(document: Document, where: str) -> None:
    """JSON may hold half of a character, which no tokenizer takes. Raises ValueError."""
    texts = [document] if isinstance(document, str) else [turn["content"] for turn in document]
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where} holds half of a character ({error.reason}).") from None


def mix(parts: Sequence[Any], weights: Sequence[float | None], seed: int) -> Any:
    """The datasets as one: all rows of all, or, where there are weights, drawn by them.

    They are drawn until one is used up, and streams for ever: each begins anew when it ends. Rows without weights come
    one dataset after the other, and of streams in turns once they are shuffled.
    """
    if len(parts) == 1:
        return parts[0]
    if weights.count(None) == len(weights):
        return datasets.concatenate_datasets(list(parts))
    given = [1.0 if weight is None else weight for weight in weights]
    shares = [weight / sum(given) for weight in given]
    if isinstance(parts[0], IterableDataset):
        parts = [rows.repeat(None) for rows in parts]
    return datasets.interleave_datasets(list(parts), shares, seed=seed, stopping_strategy="first_exhausted")
