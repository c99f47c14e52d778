"""Local files as rows of `datasets`, which are read while training or kept between runs."""

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
    """Rows that `decode` takes. Raises ValueError for what is no file of rows at all."""
    kind: Any = IterableDataset if streaming else Dataset
    state = path.stat()
    # datasets keeps what it has read: a file that was mended, or other code of ours, is read anew
    options: dict[str, Any] = {"path": str(path), "stamp": (FORMAT, state.st_mtime_ns, state.st_size)}
    if next(_encoded_rows(**options), None) is None:
        raise ValueError(f"{path} has no rows.")
    rows: Dataset | IterableDataset = kind.from_generator(_encoded_rows, gen_kwargs=options, features=_FEATURES)
    return rows


def place(row: Mapping[str, Any], index: int, name: str) -> str:
    """Which row of the file or dataset `name` it is, in words."""
    return f"{name}, row {row['row_number'] if 'row_number' in row else index + 1}"


def decode(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The row itself; one that comes from elsewhere is what it is. Raises ValueError, which says `where`, for one that
    cannot be read."""
    if "row_json" not in row:
        return row
    return Row(row["row_number"], row["row_json"], row["row_problem"]).parse(where)


def stamp(path: Path) -> str:
    """Tells a file from others, by its size, its first and its last megabyte: it may be too big to read."""
    with path.open("rb") as file:
        size = file.seek(0, SEEK_END)
        digest = hashlib.sha256(str(size).encode())
        for place in (0, max(0, size - _END)):
            file.seek(place)
            digest.update(file.read(_END))
    return digest.hexdigest()


def _encoded_rows(path: str, stamp: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    for row in read_rows(Path(path)):
        yield {"row_number": row.number, "row_json": row.json, "row_problem": row.problem}
