"""A recipe's datasets, loaded from files or from the hub, filtered and mixed.

Rows of local files are read while training, or cached between runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from os import SEEK_END
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, Features, IterableDataset, Value

from rewired.text.rows import FORMAT, ROWS, Row, dataset_errors, is_on_hub, read_rows

from ..recipe.dataset_entry import DatasetEntry
from . import instruct

_END = 1 << 20  # bytes
_FEATURES = Features({"row_number": Value("int64"), "row_json": Value("string"), "row_problem": Value("string")})
_TEXT = ".txt"
_UNSUPPORTED = "unsupported format; use .json, .jsonl, .csv, .txt or .parquet."


def load(source: DatasetEntry, streaming: bool) -> list[tuple[str, Dataset | IterableDataset]]:
    """The rows of each local file of `source`, or of the dataset on the hub, with their name.

    Raises ValueError for what cannot be read.
    """
    path = Path(source.path).expanduser()
    if path.exists():
        _check_local(source)
        return [(str(file), _read(file, streaming)) for file in _files(path)]
    if not is_on_hub(source.path):
        mend = "name a file, a folder, or a dataset on the hub (owner/name)."
        if path.suffix == ".jsonl" and path.stem in instruct.SETS:
            mend = f"`rewired data fetch instruct {path.parent}` makes it."
        raise ValueError(f"There is no {source.path}: {mend}")
    with dataset_errors(source.path):
        rows = datasets.load_dataset(source.path, source.name or None, split=source.split, streaming=streaming)
    return [(source.path, rows)]


def place(row: Mapping[str, Any], index: int, name: str) -> str:
    """The place of `row` in the file or dataset `name`, for messages."""
    return f"{name}, row {row['row_number'] if 'row_number' in row else index + 1}"


def decode(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The values of a row that `read` has read; rows from elsewhere are returned as they are.

    Raises ValueError, which says `where`, for a row that cannot be read.
    """
    if "row_json" not in row:
        return row
    return Row(row["row_number"], row["row_json"], row["row_problem"]).parse(where)


def stamp(path: Path) -> str:
    """A hash of a file's size and its first and last megabyte: files may be too big to be read for it."""
    with path.open("rb") as file:
        size = file.seek(0, SEEK_END)
        digest = hashlib.sha256(str(size).encode())
        for start in (0, max(0, size - _END)):
            file.seek(start)
            digest.update(file.read(_END))
    return digest.hexdigest()


def is_wanted(source: DatasetEntry, row: Mapping[str, Any]) -> bool:
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


def _read(path: Path, streaming: bool) -> Dataset | IterableDataset:
    """Rows of the file `path` for `decode`. Raises ValueError for what is no file of rows at all."""
    dataset_class: Any = IterableDataset if streaming else Dataset
    state = path.stat()
    # datasets caches what it has read: with another stamp, a file is read anew
    options: dict[str, Any] = {"path": str(path), "stamp": (FORMAT, state.st_mtime_ns, state.st_size)}
    if next(_encoded_rows(**options), None) is None:
        raise ValueError(f"{path} has no rows.")
    rows: Dataset | IterableDataset = dataset_class.from_generator(
        _encoded_rows, gen_kwargs=options, features=_FEATURES
    )
    return rows


def _encoded_rows(path: str, stamp: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    for row in read_rows(Path(path)):
        yield {"row_number": row.number, "row_json": row.json, "row_problem": row.problem}
