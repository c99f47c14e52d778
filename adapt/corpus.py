"""A recipe's data as rows of tokens, some held out, and what is to be known of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from trl import SFTConfig

from . import data
from .recipe.keys import Recipe
from .rows import decode, place, stamp
from .tally import FILTERED, NOTHING_LEFT, Tally, note_on_file, told_emptied
from .tokens import IGNORED, Encoder

_MEASURED = 512  # tokens at most, of each row that is held out
_SHUFFLED = 1_000  # rows of a stream, among which the next one is drawn
_LOOKED_AT = 1_000  # rows, to tell data from other data
_FORM = 4  # counts up when the same row gives other tokens: datasets keeps what this code has made
_FEATURES = Features(  # told, because the first rows may all be left out, and say nothing of the others
    input_ids=List(Value("int32")),
    labels=List(Value("int32")),
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
        by skipping what was read of it.

        A stream is one shard, of which accelerate deals each rank its rows; of several it gives each rank some, and
        files have different sizes.
        """
        if isinstance(self.train, Dataset):
            return self.train
        again = {"rows": self.train.repeat(None)}
        return IterableDataset.from_generator(_each, gen_kwargs=again, features=self.train.features)

    def streamed(self) -> list[str]:
        """Notes on what has been streamed so far."""
        return [tally.note() for tally in self.tallies]

    @property
    def fingerprint(self) -> str:
        """Of what is held out, and of rows here and there or, of streamed files, their ends: the same data in the same
        order."""
        held_out = self.held_out and self.held_out["input_ids"][:]
        files = (Path(tally.name) for tally in self.tallies)
        stamps = (stamp(file) for file in files if file.is_file())
        found = hashlib.sha256("".join([repr(held_out), *stamps]).encode())
        if isinstance(self.train, Dataset):
            places = range(0, len(self.train), max(1, len(self.train) // _LOOKED_AT))
            found.update(repr((len(self.train), self.train.select(places)["input_ids"][:])).encode())
        return found.hexdigest()

    def held_out_texts(self, longest: int) -> list[torch.Tensor]:
        """The beginnings of what is held out, each [T], that a divergence is measured on.

        Each is a text of its own, as in training: one that begins in the middle has another first token, which a model
        that has always seen the same one may have forgotten to attend to.
        """
        rows = self.held_out["input_ids"][:] if self.held_out else []
        beginnings = [torch.tensor(row[: min(longest, _MEASURED)]) for row in rows]
        return [ids for ids in beginnings if len(ids) > 1]


def load(recipe: Recipe, config: SFTConfig, tokenizer: Any) -> Corpus:
    """Raises ValueError for data that cannot be read or trained on; bad rows are named by file and number."""
    encoder = Encoder.of(tokenizer, config.assistant_only_loss)
    notes, tallies = list[str](), list[Tally]()
    parts = [_read(source, recipe, config, encoder, notes, tallies) for source in recipe.mix]
    held_out = _first_rows(recipe, parts)  # left out of what is trained on wherever they stand
    known = frozenset(tuple(row["input_ids"]) for row in held_out)
    is_new = partial(_is_new, known)
    workers: dict[str, Any] = {} if recipe.streaming else {"num_proc": config.dataset_num_proc}
    parts = [rows.filter(is_new, input_columns="input_ids", **workers) for rows in parts]
    if any(isinstance(rows, Dataset) and not len(rows) for rows in parts):
        raise ValueError("All rows of a dataset are the same as those that are held out: there is nothing to train on.")
    if recipe.streaming:
        _check_streams(parts, tallies)
    rows = data.mix(parts, [source.weight for source in recipe.mix], config.seed)
    if isinstance(rows, Dataset) and len(rows) < sum(map(len, parts)):
        notes.append(f"drawn by weight until one dataset is used up: {len(rows):,} of {sum(map(len, parts)):,} rows")
    if isinstance(rows, IterableDataset):
        rows = rows.shuffle(config.seed, buffer_size=_SHUFFLED)
    return Corpus(rows, Dataset.from_list(held_out) if held_out else None, notes, tallies)


def _read(
    source: data.Source,
    recipe: Recipe,
    config: SFTConfig,
    encoder: Encoder,
    notes: list[str],
    tallies: list[Tally],
) -> Dataset | IterableDataset:
    """The rows of a dataset as tokens and labels; what is to be known of its files goes to `notes` and `tallies`."""
    encoded = list[Any]()
    for name, rows in data.load(source, recipe.streaming):
        encode = partial(_encode_row, form=_FORM, name=name, source=source, encoder=encoder, skips=recipe.skip_bad)
        if isinstance(rows, IterableDataset):
            tallies.append(Tally(name, config.max_length))
            encoded.append(_streamed(rows, encode, tallies[-1], cuts=not config.packing))
        else:
            encoded.append(_encoded(rows, encode, name, config, notes))
    return data.mix(encoded, [None] * len(encoded), config.seed)


def _first_rows(recipe: Recipe, parts: Sequence[Dataset | IterableDataset]) -> list[Any]:
    """What is held out: of each dataset alike, and so many in all. Raises ValueError where no others are left."""
    found = list[Any]()
    for number, (source, rows) in enumerate(zip(recipe.mix, parts, strict=True)):
        share = (recipe.held_out + number) // len(parts)
        if isinstance(rows, Dataset) and len(rows) <= share:
            raise ValueError(
                f"{source.path} has only {len(rows)} rows, and the first {share} are held out to judge: give more "
                "data, or a smaller held_out."
            )
        found += list(rows.take(share))
    return found


def _check_streams(parts: Sequence[IterableDataset], tallies: Sequence[Tally]) -> None:
    """Raise ValueError for one that has nothing to train on: begun anew for ever, it would give nothing for ever."""
    if any(next(iter(rows), None) is None for rows in parts):
        told = "".join(f" {tally.note()}." for tally in tallies)
        raise ValueError(
            f"Beyond what is held out, no row of the stream of a dataset can be trained on: give more data.{told}"
        )


def _each(rows: IterableDataset) -> Iterator[dict[str, Any]]:
    yield from rows


def _streamed(
    rows: IterableDataset, encode: Callable[..., dict[str, Any]], tally: Tally, cuts: bool
) -> IterableDataset:
    """The rows of one file as tokens and labels, once they are read; counted then, and cut unless they are packed."""

    def encode_and_count(row: Mapping[str, Any], index: int) -> dict[str, Any]:
        found = encode(row, index)
        if not found["problem"] and not _teaches(found["first"], found["length"], tally.longest):
            found["problem"] = NOTHING_LEFT
        tally.count(index, found)
        longest = tally.longest if cuts else None
        return found | {name: found[name][:longest] for name in ("input_ids", "labels")}

    columns = list(rows.features or next(iter(rows), {}))
    found = rows.map(encode_and_count, with_indices=True, remove_columns=columns, features=_FEATURES)
    return found.filter(_is_good, input_columns="problem").select_columns(["input_ids", "labels"])


def _encoded(
    rows: Dataset, encode: Callable[..., dict[str, Any]], name: str, config: SFTConfig, notes: list[str]
) -> Dataset:
    """The rows of one file as tokens and labels. What was filtered, skipped and cut goes to `notes`."""
    found = rows.map(
        encode,
        with_indices=True,
        remove_columns=rows.column_names,
        features=_FEATURES,
        num_proc=config.dataset_num_proc,
        desc=f"Tokenising {name}",
    )
    # read before rows are selected: of a selection, datasets reads a column row by row
    problems = found["problem"][:]
    first, lengths = (np.asarray(found.with_format("numpy")[name][:]) for name in ("first", "length"))
    is_good = np.array([_is_good(problem) for problem in problems], dtype=bool)
    notes.append(note_on_file(name, problems, lengths[is_good], config.max_length))
    is_kept = is_good & _teaches(first, lengths, config.max_length)
    if is_kept.sum() < is_good.sum():
        notes[-1] += told_emptied(int(is_good.sum() - is_kept.sum()))
    kept = found.select(np.flatnonzero(is_kept))
    if not len(kept):
        raise ValueError(f"No row can be trained on: {notes[-1]}.")
    return kept.select_columns(["input_ids", "labels"])


def _encode_row(
    row: Mapping[str, Any], index: int, form: int, name: str, source: data.Source, encoder: Encoder, skips: bool
) -> dict[str, Any]:
    where = place(row, index, name)
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
    labels, length = encoded["labels"], len(encoded["input_ids"])
    learnt = (place for place in range(1, length) if labels[place] != IGNORED)  # nothing predicts the first token
    first = next(learnt, length)
    return encoded | {"length": length, "first": first, "problem": ""}


def _teaches(first: Any, length: Any, longest: int | None) -> Any:
    """Whether the `first` token to be learnt of so many is still there, cut to the `longest`; of numbers or arrays."""
    return first < np.minimum(length, longest or length)


def _is_new(known: frozenset[tuple[int, ...]], input_ids: Sequence[int]) -> bool:
    """By what is in the row: it may stand twice, or in two datasets, and a stream may be split over ranks."""
    return tuple(input_ids) not in known


def _is_good(problem: str) -> bool:
    return not problem
