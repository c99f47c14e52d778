"""Rows of a local file, one by one as JSON, and what can go wrong with those of a dataset on the hub.

The reader is tolerant: rows of one file need not have the same keys or types, and of a broken row the others suffer
nothing.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rewired.extras import missing

ROWS = (".json", ".jsonl", ".csv", ".parquet")  # suffixes of files that hold rows
TEXTS = (".txt", ".md")  # and of those that hold plain text
FORMAT = 2  # increase it when the same file gives other rows: what is cached of files is then read anew

ARTICLE = 8_000  # characters: no long article shall be all that is read of a dump
_BATCH = 1_000  # rows of a Parquet file, of which a group may be larger than memory
_HEAD = 1 << 20  # characters of a text that show how long its lines are
_BOM = b"\xef\xbb\xbf"


class Row(NamedTuple):
    """One row of a file as JSON, or the `problem` that keeps it from being read."""

    number: int  # from 1: in a list or a Parquet file the place, else the line
    json: str
    problem: str = ""

    def parse(self, where: str) -> dict[str, Any]:
        """Its values by name; a string alone is a text. Raises ValueError, which says `where`, for anything else."""
        if self.problem:
            raise ValueError(f"{where} cannot be read ({self.problem}).")
        value = _parse(self.json, where)
        if isinstance(value, str):
            return {"text": value}
        if not isinstance(value, dict):
            raise ValueError(f"{where} is not a mapping of names to values.")
        return value


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a .parquet or .csv file, of a plain text, or of JSON: a list, or a value a line, whichever of its two
    suffixes the file has.

    Raises ValueError for a file that has no rows at all.
    """
    read = {".parquet": _parquet_rows, ".csv": _csv_rows} | dict.fromkeys(TEXTS, _text_rows)
    return read.get(path.suffix, _json_rows)(path)


def read_texts(path: Path, longest: int | None = None) -> Iterator[str]:
    """The documents of a text file: a line each, cut to its `longest`, where lines are long, as in dumps of articles;
    else as many lines as an article has. Raises ValueError for what is no UTF-8."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            lines = [line for line in file.read(_HEAD).split("\n") if line.strip()]
            is_dump = len(lines) > 1 and sum(map(len, lines)) / len(lines) > ARTICLE / 4
            file.seek(0)
            if is_dump:
                yield from (line.removesuffix("\n")[:longest] for line in file if line.strip())
            else:
                yield from _pieces(file)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text.") from None


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """Texts cut where lines end: books, or many short articles, are read from all over."""
    piece, size = list[str](), 0
    for line in lines:
        piece.append(line)
        size += len(line)
        if size >= ARTICLE:
            yield "".join(piece).removesuffix("\n")
            piece, size = [], 0
    yield "".join(piece)


def _text_rows(path: Path) -> Iterator[Row]:
    texts = (text for text in read_texts(path) if text.strip())
    return (Row(number, json.dumps(text)) for number, text in enumerate(texts, start=1))


def is_on_hub(name: str) -> bool:
    """Whether `name` can only be a dataset on the hub (owner/name), when there is no such file or folder."""
    is_file_name = Path(name).suffix in ROWS + TEXTS
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not is_file_name


@contextmanager
def dataset_errors(name: str) -> Iterator[None]:
    """Raises a ValueError of one sentence for anything that goes wrong while dataset `name` is read inside."""
    try:
        yield
    except Exception as error:  # whatever the hub, the network or a broken file makes of it
        if isinstance(error, ImportError) and error.name:
            raise ValueError(missing("adapt", f"Reading {name}", error.name)) from None
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise ValueError(f"The dataset {name} cannot be loaded ({reason}).") from None


def _json_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"").removeprefix(_BOM).strip()
        file.seek(0)
        if first.startswith(b"["):
            values = enumerate(_parse(file.read(), str(path)), start=1)
            yield from (Row(number, json.dumps(value)) for number, value in values)
            return
        if path.suffix == ".json" and not _is_json(first):  # it may go on in the next line
            raise ValueError(
                f"{path} cannot be read as JSON: it is not a list, and its first line is not a whole value."
            )
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _line_row(number, line.removeprefix(_BOM))


def _line_row(number: int, line: bytes) -> Row:
    try:
        return Row(number, line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Row(number, "", str(error))


def _parse(text: str | bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be read as JSON ({error}).") from None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _csv_rows(path: Path) -> Iterator[Row]:
    """By the names in the file's first line."""
    csv.field_size_limit(sys.maxsize)  # a text may be long
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        try:
            for number, row in enumerate(csv.DictReader(file, restkey=""), start=1):
                yield Row(number, json.dumps(row), "more cells than names" if "" in row else "")
        except csv.Error as error:
            raise ValueError(f"{path} cannot be read ({error}).") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    """Of a group that cannot be read to its end, the rest are as many bad rows as the file says that it has."""
    with dataset_errors(str(path)):  # where there is no pyarrow
        import pyarrow
        from pyarrow import parquet
    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}).") from None
    number = 0
    for group in range(file.num_row_groups):
        end = number + file.metadata.row_group(group).num_rows
        try:
            for batch in file.iter_batches(_BATCH, row_groups=[group]):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(number, json.dumps(value, default=str))
        except (pyarrow.ArrowException, OSError) as error:
            problem = str(error).splitlines()[0]
            yield from (Row(bad, "", problem) for bad in range(number + 1, end + 1))
        number = end
