"""The corpus: a recipe's datasets as rows of tokens and labels, of which some are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from trl import SFTConfig

from rewired import quantities
from rewired.progress import announce

from ..recipe.dataset_entry import DatasetEntry
from ..recipe.keys import Recipe
from . import loading
from .encoding import encode_file, encode_stream, row_encoder
from .row_stats import RowStats
from .tokens import Encoder

_HELD_OUT_TOKENS = 512  # at most, of each row that is measured on
_SHUFFLE_BUFFER = 1_000  # rows of a stream, among which the next one is drawn
_FINGERPRINT_ROWS = 1_000


@dataclass(frozen=True)
class Corpus:
    """`train` and `held_out` have `input_ids` and `labels`; `notes` are for users and for the card."""

    train: Dataset | IterableDataset
    held_out: Dataset | None
    notes: list[str]
    stream_stats: Sequence[RowStats] = ()  # one for each file that is streamed

    def endless(self) -> Dataset | IterableDataset:
        """The rows to train on; a stream begins anew when it ends.

        To transformers that is still the same epoch, so that it resumes by skipping the rows that were read before. The
        stream is a single shard, whose rows accelerate deals out to the ranks: of several shards it would give some to
        each, and files have different sizes.
        """
        if isinstance(self.train, Dataset):
            return self.train
        repeated = {"rows": self.train.repeat(None)}
        return IterableDataset.from_generator(_each, gen_kwargs=repeated, features=self.train.features)

    def streamed(self) -> list[str]:
        return [stats.note() for stats in self.stream_stats]

    @property
    def fingerprint(self) -> str:
        """The same for the same data in the same order.

        A hash of what is held out, of some rows, and of the ends of files that are streamed.
        """
        held_out = self.held_out and self.held_out["input_ids"][:]
        files = (Path(stats.name) for stats in self.stream_stats)
        stamps = (loading.stamp(file) for file in files if file.is_file())
        digest = hashlib.sha256("".join([repr(held_out), *stamps]).encode())
        if isinstance(self.train, Dataset):
            places = range(0, len(self.train), max(1, len(self.train) // _FINGERPRINT_ROWS))
            digest.update(repr((len(self.train), self.train.select(places)["input_ids"][:])).encode())
        return digest.hexdigest()

    def held_out_texts(self, longest: int) -> list[torch.Tensor]:
        """The beginnings of the held-out rows, each [T] and at most `longest`, that a divergence is measured on.

        Each is a text of its own, as in training. One that began in the middle of a row would have another first token,
        and a model that has always seen the same one may have forgotten to attend to it.
        """
        rows = self.held_out["input_ids"][:] if self.held_out else []
        beginnings = [torch.tensor(row[: min(longest, _HELD_OUT_TOKENS)]) for row in rows]
        return [ids for ids in beginnings if len(ids) > 1]


def load(recipe: Recipe, config: SFTConfig, tokenizer: Any) -> Corpus:
    """The corpus of `recipe`.

    Raises ValueError for data that cannot be read or trained on; bad rows are named by file and number.
    """
    encoder = Encoder.of(tokenizer, config.assistant_only_loss)
    stats = list[RowStats]()
    parts = [_read(source, recipe, config, encoder, stats) for source in recipe.mix]
    held_out = _held_out_rows(recipe, parts)  # not trained on wherever they occur again
    known = frozenset(tuple(row["input_ids"]) for row in held_out)
    workers: dict[str, Any] = {} if recipe.streaming else {"num_proc": config.dataset_num_proc}
    parts = [rows.filter(partial(_is_new, known), input_columns="input_ids", **workers) for rows in parts]
    if any(isinstance(rows, Dataset) and not len(rows) for rows in parts):
        raise ValueError("All rows of a dataset are the same as those that are held out: there is nothing to train on.")
    if recipe.streaming:
        _check_streams(parts, stats)
    rows = loading.mix(parts, [source.weight for source in recipe.mix], config.seed)
    notes = [] if recipe.streaming else [each.note() for each in stats]
    if isinstance(rows, Dataset) and len(rows) < sum(map(len, parts)):
        notes.append(f"drawn by weight until one dataset is used up: {len(rows):,} of {sum(map(len, parts)):,} rows")
    if isinstance(rows, IterableDataset):
        rows = rows.shuffle(config.seed, buffer_size=_SHUFFLE_BUFFER)
    return Corpus(rows, Dataset.from_list(held_out) if held_out else None, notes, stats if recipe.streaming else ())


def _read(source: DatasetEntry, recipe: Recipe, config: SFTConfig, encoder: Encoder, stats: list[RowStats]) -> Any:
    """The rows of one dataset as tokens and labels. Appends what is counted of each file to `stats`."""
    encoded = list[Any]()
    announce(f"Reading {source.path}." if recipe.streaming else f"Reading and tokenising {source.path}.")
    for name, rows in loading.load(source, recipe.streaming):
        encode = row_encoder(name, source, encoder, recipe.skip_bad)
        stats.append(RowStats(name, config.max_length, recipe.streaming))
        if isinstance(rows, IterableDataset):
            encoded.append(encode_stream(rows, encode, stats[-1], cuts=not config.packing))
        else:
            encoded.append(encode_file(rows, encode, stats[-1], config.dataset_num_proc))
    return loading.mix(encoded, [None] * len(encoded), config.seed)


def _held_out_rows(recipe: Recipe, parts: Sequence[Dataset | IterableDataset]) -> list[Any]:
    """The first rows of each dataset, about as many of each. Raises ValueError if no others are left."""
    held_out = list[Any]()
    for number, (source, rows) in enumerate(zip(recipe.mix, parts, strict=True)):
        share = (recipe.held_out + number) // len(parts)
        if isinstance(rows, Dataset) and len(rows) <= share:
            raise ValueError(
                f"{source.path} has only {quantities.count(len(rows), 'row')}, and the first {share} are held out: "
                "give more data, or a smaller held_out."
            )
        held_out += list(rows.take(share))
    return held_out


def _check_streams(parts: Sequence[IterableDataset], stats: Sequence[RowStats]) -> None:
    """Raise ValueError for a stream without a row to train on: begun anew for ever, it would give nothing for ever."""
    if any(next(iter(rows), None) is None for rows in parts):
        notes = "".join(f" {each.note()}." for each in stats)
        raise ValueError(f"A streamed dataset has no row to train on beyond the held-out ones: give more data.{notes}")


def _each(rows: IterableDataset) -> Iterator[dict[str, Any]]:
    yield from rows


def _is_new(known: frozenset[tuple[int, ...]], input_ids: Sequence[int]) -> bool:
    """By a row's content: it may occur twice, or in two datasets, and a stream may be split over ranks."""
    return tuple(input_ids) not in known
