"""Local files as rows of `datasets`, read while training, or cached between runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from os import SEEK_END
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, IterableDataset, Value

from rewired.text.rows import FORMAT, Row, read_rows

_END = 1 << 20  # bytes
_FEATURES = Features({"row_number": Value("int64"), "row_json": Value("string"), "row_problem": Value("string")})


def read(path: Path, streaming: bool) -> Dataset | IterableDataset:
    """Rows of the file `path` that `decode` takes. Raises ValueError for what is no file of rows at all."""
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


def _encoded_rows(path: str, stamp: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    for row in read_rows(Path(path)):
        yield {"row_number": row.number, "row_json": row.json, "row_problem": row.problem}
