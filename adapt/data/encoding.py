"""The rows of a file encoded as tokens and labels; those that cannot be learnt from are left out and counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value
from trl import SFTConfig

from rewired.text.conversations import prompt_and_completion

from ..recipe.dataset_entry import DatasetEntry
from .documents import checked_document
from .files import decode, place
from .loading import is_wanted
from .row_stats import FILTERED, NOTHING_LEFT, StreamStats, note_emptied, note_on_file
from .tokens import IGNORED, Encoder

_VERSION = 5  # increase it when the same row gives other tokens: datasets caches what this code has made
_FEATURES = Features(  # given, because the first rows may all be left out and show nothing of the others' types
    input_ids=List(Value("int32")),
    labels=List(Value("int32")),
    length=Value("int64"),  # in tokens
    first=Value("int64"),  # the place of the first token that is learnt
    problem=Value("string"),
)

RowEncoder = Callable[[Mapping[str, Any], int], dict[str, Any]]  # of a row and its index, the columns of _FEATURES


def row_encoder(name: str, source: DatasetEntry, encoder: Encoder, skip_bad: bool) -> RowEncoder:
    """Encodes the rows of the file `name`. Raises ValueError for a bad row, or with `skip_bad`, gives its problem."""
    return partial(_encode_row, version=_VERSION, name=name, source=source, encoder=encoder, skip_bad=skip_bad)


def encode_file(rows: Dataset, encode: RowEncoder, name: str, config: SFTConfig) -> tuple[Dataset, str]:
    """`input_ids` and `labels` of the rows that can be learnt from, and a note on what was left out or will be cut.

    Raises ValueError if no row is left.
    """
    encoded = rows.map(
        encode,
        with_indices=True,
        remove_columns=rows.column_names,
        features=_FEATURES,
        num_proc=config.dataset_num_proc,
        desc=f"Tokenising {name}",
    )
    # read before rows are selected: of a selection, datasets reads a column row by row
    problems = encoded["problem"][:]
    first, lengths = (np.asarray(encoded.with_format("numpy")[column][:]) for column in ("first", "length"))
    is_good = np.array([_is_good(problem) for problem in problems], dtype=bool)
    note = note_on_file(name, problems, lengths[is_good], config.max_length)
    is_learnt = is_good & _is_learnt(first, lengths, config.max_length)
    if is_learnt.sum() < is_good.sum():
        note += note_emptied(int(is_good.sum() - is_learnt.sum()))
    learnt = encoded.select(np.flatnonzero(is_learnt))
    if not len(learnt):
        raise ValueError(f"No row can be trained on: {note}.")
    return learnt.select_columns(["input_ids", "labels"]), note


def encode_stream(rows: IterableDataset, encode: RowEncoder, stats: StreamStats, cuts: bool) -> IterableDataset:
    """`input_ids` and `labels` of the rows that can be learnt from, encoded and counted in `stats` as they are read.

    With `cuts`, to at most `stats.longest` tokens; packing cuts by itself.
    """

    def encode_and_count(row: Mapping[str, Any], index: int) -> dict[str, Any]:
        encoded = encode(row, index)
        if not encoded["problem"] and not _is_learnt(encoded["first"], encoded["length"], stats.longest):
            encoded["problem"] = NOTHING_LEFT
        stats.count(index, encoded)
        longest = stats.longest if cuts else None
        return encoded | {name: encoded[name][:longest] for name in ("input_ids", "labels")}

    columns = list(rows.features or next(iter(rows), {}))
    encoded = rows.map(encode_and_count, with_indices=True, remove_columns=columns, features=_FEATURES)
    return encoded.filter(_is_good, input_columns="problem").select_columns(["input_ids", "labels"])


def _encode_row(
    row: Mapping[str, Any], index: int, version: int, name: str, source: DatasetEntry, encoder: Encoder, skip_bad: bool
) -> dict[str, Any]:
    where = place(row, index, name)
    nothing: dict[str, Any] = {"input_ids": [], "labels": [], "length": 0, "first": 0}
    try:
        row = decode(row, where)
        if not is_wanted(source, row):
            return nothing | {"problem": FILTERED}
        document, parts = checked_document(row, where), prompt_and_completion(row)
        encoded = encoder.encode(document, where, parts and parts[0])
    except ValueError as error:
        if isinstance(error, UnicodeDecodeError):  # of a row that datasets decodes only now
            error = ValueError(f"{where} cannot be read ({error}).")
        if not skip_bad:
            raise ValueError(f"{error} Mend it, or leave such rows out by skip_bad: true.") from None
        return nothing | {"problem": str(error)}
    labels, length = encoded["labels"], len(encoded["input_ids"])
    learnt = (place for place in range(1, length) if labels[place] != IGNORED)  # nothing predicts the first token
    return encoded | {"length": length, "first": next(learnt, length), "problem": ""}


def _is_learnt(first: Any, length: Any, longest: int | None) -> Any:
    """Whether a row cut to `longest` tokens still has its first learnt token; of numbers or arrays."""
    return first < np.minimum(length, longest or length)


def _is_good(problem: str) -> bool:
    return not problem
