"""Texts and conversations from a file, a folder, a dataset on the hub, or the packaged mix of prose and chat."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, TextIO, TypeVar

from rewired.cache import cache_folder, made_once
from rewired.packages import DataSet, Package, unpack
from rewired.text.conversations import Document, read_row

T = TypeVar("T")

MIX = "mix"  # what users call the packaged calibration text

_PACKAGE = Package(
    "llamafactory==0.9.5",
    "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
    5,
    "prose and chat to calibrate on",
    is_sdist=True,
)
_INSIDE = PurePosixPath("llamafactory-0.9.5/data")
_FILES = ("alpaca_en_demo.json", "c4_demo.jsonl", "dpo_en_demo.json", "wiki_demo.txt")

_MOST_DOCUMENTS = 10_000  # taken of a file or of a dataset, which may have no end
_MOST_CHARACTERS = 1 << 26  # of a text file or of a dataset, which may be books
KEPT_BACK = 5  # one document of so many of the packaged mix
_ARTICLE = 8_000  # characters: no long article shall be all that is read of a dump


def sources(text: str) -> list[list[Document]]:
    """The documents of every file that `text` names, or of the dataset. Raises ValueError for what cannot be read."""
    if text == MIX:
        return [documents[: len(documents) - len(documents) // KEPT_BACK] for documents in mix()]
    files = check(text)
    return [_read_dataset(text)] if files is None else [_read(file) for file in files]


def mix() -> list[list[Document]]:
    """All documents of the packaged mix: of each file, the last fifth is never fitted on, and may judge what was."""
    return [_read(file) for file in check(MIX) or ()]


def check(text: str) -> list[Path] | None:
    """The files that `text` names; None for a dataset on the hub. Raises ValueError for text that is nowhere."""
    if text == MIX:
        folder = made_once(cache_folder() / _PACKAGE.requirement, fetch)
        return [folder / name for name in _FILES]
    if not text.strip():
        raise ValueError(f"The calibration text has an empty name: name one, or {MIX}.")
    path = Path(text)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _READERS)
        if not files:
            raise ValueError(f"{text} holds no text: {', '.join(_READERS)} files are read.")
        return files
    if path.is_file():
        return [path]
    if text.count("/") == 1 and not text.startswith((".", "/", "~")) and path.suffix not in _READERS:
        return None
    raise ValueError(
        f"There is no calibration text {text}: name a file, a folder, a dataset on the hub (owner/name), or {MIX}."
    )


def fetch(folder: Path) -> None:
    """Put the packaged mix into `folder`; what is there already is kept. Raises ValueError."""
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {str(_INSIDE / name) for name in missing}
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:
        unpack(_PACKAGE, lambda name: name in wanted, Path(scratch))
        for name in missing:
            (Path(scratch) / _INSIDE / name).replace(folder / name)


DATA = DataSet(
    fetch,
    "5 MB of prose and chat to calibrate on",
    "convert ... --refit {folder}; --refit alone keeps a fifth of it back, to measure on",
)


def _read(path: Path) -> list[Document]:
    return _READERS.get(path.suffix, _read_text)(path)


def _read_text(path: Path) -> list[Document]:
    """A document a line where lines are long, as in dumps of articles; else lines as many as an article's length."""
    with _decoded(path) as file:
        text = file.read(_MOST_CHARACTERS)
    lines = [line for line in text.split("\n") if line.strip()]
    is_dump = len(lines) > 1 and len(text) / len(lines) > _ARTICLE / 4
    return shuffled((line[:_ARTICLE] for line in lines) if is_dump else _pieces(text))


def _pieces(text: str) -> Iterator[str]:
    """`text` cut where lines end: books, or many short articles, are read from all over."""
    piece, size = list[str](), 0
    for line in text.split("\n"):
        piece.append(line)
        size += len(line) + 1
        if size >= _ARTICLE:
            yield "\n".join(piece)
            piece, size = [], 0
    yield "\n".join(piece)


def _read_json(path: Path) -> list[Document]:
    with _decoded(path) as file:
        if path.suffix == ".jsonl":
            rows = [(number, _parsed(line, f"{path}, row {number},")) for number, line in _sample(file)]
        else:
            found = _parsed(file.read(), str(path))
            if not isinstance(found, list):
                raise ValueError(f"{path} is no list of rows.")
            rows = list(enumerate(found, start=1))
    return shuffled(read_row(row, f"{path}, row {number}") for number, row in rows)


def _sample(lines: Iterable[str]) -> list[tuple[int, str]]:
    """Lines with something in them, and their numbers; of very many some, drawn evenly from all."""
    found, draw = list[tuple[int, str]](), random.Random(0)
    written = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    for count, numbered in enumerate(written):
        if count < _MOST_DOCUMENTS:
            found.append(numbered)
        elif (place := draw.randrange(count + 1)) < _MOST_DOCUMENTS:
            found[place] = numbered
    return found


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} cannot be read as JSON ({error}).") from None


@contextmanager
def _decoded(path: Path) -> Iterator[TextIO]:
    """Raises ValueError where what is read of it is no UTF-8."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            yield file
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no UTF-8 text.") from None


def _read_parquet(path: Path) -> list[Document]:
    rows = _load_dataset("parquet", data_files=str(path))
    return shuffled(read_row(row, f"{path}, row {number}") for number, row in enumerate(rows, start=1))


def _read_dataset(name: str) -> list[Document]:
    repo, _, config = name.partition(":")
    return shuffled(read_row(row, name) for row in _load_dataset(repo, config or None))


def _load_dataset(name: str, config: str | None = None, **options: Any) -> list[Any]:
    """Its first rows, or of one in many files the first of several."""
    try:
        import datasets

        rows = datasets.load_dataset(name, config, split="train", streaming=True, **options)
        if rows.num_shards > 1:
            rows = rows.shuffle(seed=0, buffer_size=_MOST_DOCUMENTS)
        return list(_enough(islice(rows, _MOST_DOCUMENTS)))
    except ImportError:
        raise ValueError("Parquet files and datasets need the package 'datasets': pip install datasets.") from None
    except Exception as error:  # whatever the hub, the network or a broken file makes of it
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"The dataset {options.get('data_files', name)} cannot be loaded ({reason}).") from None


def _enough(rows: Iterable[T]) -> Iterator[T]:
    """The first rows, as many as are read of a text file."""
    read = 0
    for row in rows:
        yield row
        read += len(str(row))
        if read > _MOST_CHARACTERS:
            return


def shuffled(items: Iterable[T]) -> list[T]:
    """Always the same way."""
    found = list(items)
    random.Random(0).shuffle(found)
    return found


_READERS: dict[str, Callable[[Path], list[Document]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
}
