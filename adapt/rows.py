"""A local file's rows one by one: for files that are streamed, and for broken ones, to say which row is.

Rows come as JSON, because those of one file need not have the same keys or types.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from os import SEEK_END
from pathlib import Path
from typing import Any

import pyarrow
from datasets import Dataset, Features, IterableDataset, Value
from pyarrow import parquet

_FORMAT = 1  # counts up when the same file gives other rows
_END = 1 << 20  # bytes
_BATCH = 1_000  # rows of a parquet file, of which a group may be larger than memory
_BOM = b"\xef\xbb\xbf"
_ROW, _PROBLEM = "a row as JSON", "why it cannot be read"
_FEATURES = Features({_ROW: Value("string"), _PROBLEM: Value("string")})


def read(path: Path, streaming: bool) -> Dataset | IterableDataset:
    """Rows that `decode` takes. Raises ValueError for what is no file of rows at all."""
    kind: Any = IterableDataset if streaming else Dataset
    state = path.stat()
    # datasets keeps what it has read: a file that was mended, or other code of ours, is read anew
    options: dict[str, Any] = {"path": str(path), "stamp": (_FORMAT, state.st_mtime_ns, state.st_size)}
    if next(_rows(**options), None) is None:
        raise ValueError(f"{path} has no rows.")
    found: Dataset | IterableDataset = kind.from_generator(_rows, gen_kwargs=options, features=_FEATURES)
    return found


def stamp(path: Path) -> str:
    """Tells a file from others, by its size, its first and its last megabyte: it may be too big to read."""
    with path.open("rb") as file:
        size = file.seek(0, SEEK_END)
        found = hashlib.sha256(str(size).encode())
        for place in (0, max(0, size - _END)):
            file.seek(place)
            found.update(file.read(_END))
    return found.hexdigest()


def decode(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The row itself; one that comes from elsewhere is what it is. Raises ValueError, which says `where`."""
    if _PROBLEM not in row:
        return row
    if row[_PROBLEM]:
        raise ValueError(f"{where} cannot be read ({row[_PROBLEM]}).")
    decoded = json.loads(row[_ROW])
    if not isinstance(decoded, dict):
        raise ValueError(f"{where} is no mapping of names to values.")
    return decoded


def _rows(path: str, stamp: tuple[int, int, int]) -> Iterator[dict[str, str]]:
    reader = _parquet if path.endswith(".parquet") else _json
    for row, problem in reader(Path(path)):
        yield {_ROW: row, _PROBLEM: problem}


def _json(path: Path) -> Iterator[tuple[str, str]]:
    """A list, or a value on each line."""
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"").removeprefix(_BOM).strip()
        file.seek(0)
        if first.startswith(b"["):
            try:
                rows = json.loads(file.read().decode("utf-8-sig"))
            except ValueError as error:
                raise ValueError(f"{path} cannot be read ({error}).") from None
            yield from ((json.dumps(row), "") for row in rows)
            return
        if path.suffix == ".json" and _read_line(first)[1]:  # it may go on in the next line
            raise ValueError(f"{path} cannot be read: it is neither a list nor has it a whole value in its first line.")
        yield from (_read_line(line.removeprefix(_BOM)) for line in file if line.strip())


def _read_line(line: bytes) -> tuple[str, str]:
    try:
        text = line.decode("utf-8")
        json.loads(text)
    except ValueError as error:
        return "", str(error)
    return text, ""


def _parquet(path: Path) -> Iterator[tuple[str, str]]:
    """Of a group that cannot be read to its end, the rest are as many bad rows as the file says that it has."""
    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}).") from None
    for group in range(file.num_row_groups):
        left = file.metadata.row_group(group).num_rows
        try:
            for batch in file.iter_batches(_BATCH, row_groups=[group]):
                yield from ((json.dumps(row, default=str), "") for row in batch.to_pylist())
                left -= len(batch)
        except (pyarrow.ArrowException, OSError) as error:
            yield from [("", str(error).splitlines()[0])] * left
