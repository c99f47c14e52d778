"""A recipe's data as rows of tokens, some held out, and what is to be known of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from trl import SFTConfig

from . import data
from .recipe import Recipe
from .rows import decode
from .tally import FILTERED, Tally, note_on_file
from .tokens import IGNORED, Encoder

_WINDOW = 512  # tokens; of what is held out
_SHUFFLED = 1_000  # rows of a stream, among which the next one is drawn
_FORM = 1  # counts up when the same row gives other tokens: datasets keeps what this code has made
_FEATURES = Features(  # told, because the first rows may all be left out, and say nothing of the others
    input_ids=List(Value("int32")),
    labels=List(Value("int64")),
    length=Value("int64"),
    first=Value("int64"),
    problem=Value("string"),
)


@dataclass(frozen=True)
class Corpus:
    """`train` and `held_out` have `input_ids` and `labels`; `notes` are for users and for the card."""

    train: Dataset | IterableDataset
    held_out: Dataset | None
    notes: list[str]
    tallies: Sequence[Tally] = ()  # of what is streamed

    def endless(self) -> Dataset | IterableDataset:
        """What is trained on; a stream begins anew when it ends, in the same epoch to transformers: it goes on with one
        by skipping what was read of it."""
        return self.train.repeat(None) if isinstance(self.train, IterableDataset) else self.train

    def streamed(self) -> list[str]:
        """Notes on what has been streamed so far."""
        return [tally.note() for tally in self.tallies]

    def windows(self, longest: int) -> torch.Tensor | None:
        """What is held out, as windows [W, T] that a divergence is measured on; None where it is too little."""
        if self.held_out is None:
            return None
        ids = [token for row in self.held_out["input_ids"] for token in row]
        length = min(longest, _WINDOW, len(ids))
        count = len(ids) // length if length > 1 else 0
        return torch.tensor(ids[: count * length]).view(count, length) if count else None


def load(recipe: Recipe, config: SFTConfig, tokenizer: Any) -> Corpus:
    """Raises ValueError for data that cannot be read or trained on; bad rows are named by file and number."""
    encoder = Encoder.of(tokenizer, config.assistant_only_loss)
    parts, held_out = [], list[Any]()
    notes, tallies = list[str](), list[Tally]()
    for number, source in enumerate(recipe.mix):
        files = data.load(source, recipe.streaming)
        encoded = []
        for name, rows in files:
            encode = partial(_encode_row, form=_FORM, name=name, source=source, encoder=encoder, skips=recipe.skip_bad)
            if isinstance(rows, IterableDataset):
                tallies.append(Tally(name, config.max_length))
                encoded.append(_streamed(rows, encode, tallies[-1], None if config.packing else config.max_length))
            else:
                encoded.append(_encoded(rows, encode, name, config, notes))
        rows = data.mix(encoded, [None] * len(encoded), config.seed)
        share = (recipe.held_out + number) // len(recipe.mix)  # of each dataset alike, and all together
        if isinstance(rows, Dataset) and len(rows) <= share:
            raise ValueError(
                f"{source.path} has only {len(rows)} rows, and the first {share} are held out to judge: give more "
                "data, or a smaller held_out."
            )
        held_out += list(rows.take(share))
        parts.append(rows)  # those that are held out are left out below, wherever they stand
    known = frozenset(tuple(row["input_ids"]) for row in held_out)
    parts = [rows.filter(partial(_is_new, known), input_columns="input_ids") for rows in parts]
    if any(isinstance(rows, Dataset) and not len(rows) for rows in parts):
        raise ValueError("All rows of a dataset are the same as those that are held out: there is nothing to train on.")
    rows = data.mix(parts, [source.weight for source in recipe.mix], config.seed)
    if isinstance(rows, Dataset) and len(rows) < sum(map(len, parts)):
        notes.append(f"drawn by weight until one dataset is used up: {len(rows):,} of {sum(map(len, parts)):,} rows")
    if isinstance(rows, IterableDataset):
        if next(iter(rows), None) is None:
            raise ValueError("Beyond what is held out, no row of the stream can be trained on: give more data.")
        rows = rows.shuffle(config.seed, buffer_size=_SHUFFLED)
    return Corpus(rows, Dataset.from_list(held_out) if held_out else None, notes, tallies)


def _streamed(
    rows: IterableDataset, encode: Callable[..., dict[str, Any]], tally: Tally, longest: int | None
) -> IterableDataset:
    """The rows of one file as tokens and labels, once they are read; counted then, and cut to `longest`."""

    def encode_and_count(row: Mapping[str, Any], index: int) -> dict[str, Any]:
        found = encode(row, index)
        tally.count(index, found)
        return found | {name: found[name][:longest] for name in ("input_ids", "labels")}

    columns = list(rows.features or next(iter(rows), {}))
    found = rows.map(encode_and_count, with_indices=True, remove_columns=columns, features=_FEATURES)
    return found.filter(_is_good).select_columns(["input_ids", "labels"])


def _encoded(
    rows: Dataset, encode: Callable[..., dict[str, Any]], name: str, config: SFTConfig, notes: list[str]
) -> Dataset:
    """The rows of one file as tokens and labels. What was filtered, skipped and cut goes to `notes`."""
    options = {"num_proc": config.dataset_num_proc, "desc": f"Tokenising {name}"}
    found = rows.map(encode, with_indices=True, remove_columns=rows.column_names, features=_FEATURES, **options)
    kept = found.filter(_is_good)
    notes.append(note_on_file(name, found["problem"], np.asarray(kept["length"], dtype=np.int64), config.max_length))
    if longest := config.max_length:
        kept, before = kept.filter(lambda first: first < longest, input_columns="first"), len(kept)
        if len(kept) < before:
            notes[-1] += f"; in {before - len(kept):,} of them nothing to learn is left, and they are left out"
    if not len(kept):
        raise ValueError(f"No row can be trained on: {notes[-1]}.")
    return kept.select_columns(["input_ids", "labels"])


def _encode_row(
    row: Mapping[str, Any], index: int, form: int, name: str, source: data.Source, encoder: Encoder, skips: bool
) -> dict[str, Any]:
    where = f"{name}, row {index + 1}"
    nothing: dict[str, Any] = {"input_ids": [], "labels": [], "length": 0, "first": 0}
    try:
        row = decode(row, where)
        if not data.is_wanted(source, row):
            return nothing | {"problem": FILTERED}
        encoded = encoder.encode(data.checked(row, where), where)
    except ValueError as error:
        if isinstance(error, UnicodeDecodeError):  # of a row that datasets decodes as late as here
            error = ValueError(f"{where} cannot be read ({error}).")
        if not skips:
            raise ValueError(f"{error} Mend it, or leave such rows out by skip_bad: true.") from None
        return nothing | {"problem": str(error)}
    first = next((place for place, label in enumerate(encoded["labels"]) if label != IGNORED), 0)
    return encoded | {"length": len(encoded["input_ids"]), "first": first, "problem": ""}


def _is_new(known: frozenset[tuple[int, ...]], input_ids: Sequence[int]) -> bool:
    """By what is in the row: it may stand twice, or in two datasets, and a stream may be split over ranks."""
    return tuple(input_ids) not in known


def _is_good(row: Mapping[str, Any]) -> bool:
    return not row["problem"]
