"""A recipe's data as rows of tokens, some held out, and what is to be known of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from trl import SFTConfig

from . import data
from .recipe import Recipe
from .tokens import IGNORED, Encoder

_WINDOW = 512  # tokens; of what is held out
_UNWANTED = "filtered"
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
    encoder = Encoder.of(tokenizer)
    parts, held_out = [], list[Any]()
    notes: list[str] = []
    for number, source in enumerate(recipe.mix):
        files = data.load(source, recipe.streaming)
        encoded = [_encoded(rows, name, source, encoder, recipe, config, notes) for name, rows in files]
        rows = data.mix(encoded, [None] * len(encoded), config.seed)
        share = (recipe.held_out + number) // len(recipe.mix)  # of each dataset alike, and all together
        if isinstance(rows, Dataset) and len(rows) <= share:
            raise ValueError(
                f"{source.path} has only {len(rows)} rows, and the first {share} are held out to judge: give more "
                "data, or a smaller held_out."
            )
        held_out += list(rows.take(share))
        parts.append(rows.skip(share))
    rows = data.mix(parts, [source.weight for source in recipe.mix], config.seed)
    if isinstance(rows, Dataset) and len(rows) < sum(map(len, parts)):
        notes.append(f"drawn by weight until one dataset is used up: {len(rows):,} of {sum(map(len, parts)):,} rows")
    return Corpus(rows, Dataset.from_list(held_out) if held_out else None, notes)


def _encoded(
    rows: Any,
    name: str,
    source: data.Source,
    encoder: Encoder,
    recipe: Recipe,
    config: SFTConfig,
    notes: list[str],
) -> Any:
    """The rows of one file as tokens and labels. What was filtered, skipped and cut goes to `notes`."""
    columns = list(rows.features or next(iter(rows), {}))
    encode = partial(_encode_row, name=name, source=source, encoder=encoder, skips=recipe.skip_bad)
    if isinstance(rows, IterableDataset):
        found = rows.map(encode, with_indices=True, remove_columns=columns, features=_FEATURES)
        return found.filter(_is_good).select_columns(["input_ids", "labels"])
    options = {"num_proc": config.dataset_num_proc, "desc": f"Tokenising {name}"}
    found = rows.map(encode, with_indices=True, remove_columns=columns, features=_FEATURES, **options)
    kept = found.filter(_is_good)
    notes += _notes(name, found["problem"], np.asarray(kept["length"], dtype=np.int64), config)
    if longest := config.max_length:
        kept, before = kept.filter(lambda first: first < longest, input_columns="first"), len(kept)
        if len(kept) < before:
            notes[-1] += f"; in {before - len(kept):,} of them nothing to learn is left, and they are left out"
    if not len(kept):
        raise ValueError(f"No row can be trained on: {notes[-1]}.")
    return kept.select_columns(["input_ids", "labels"])


def _encode_row(
    row: Mapping[str, Any], index: int, name: str, source: data.Source, encoder: Encoder, skips: bool
) -> dict[str, Any]:
    where = f"{name}, row {index + 1}"
    nothing: dict[str, Any] = {"input_ids": [], "labels": [], "length": 0, "first": 0}
    if not data.is_wanted(source, row):
        return nothing | {"problem": _UNWANTED}
    try:
        encoded = encoder.encode(data.checked(row, where), where)
    except ValueError as error:
        if not skips:
            raise ValueError(f"{error} Mend it, or leave such rows out by skip_bad: true.") from None
        return nothing | {"problem": str(error)}
    first = next((place for place, label in enumerate(encoded["labels"]) if label != IGNORED), 0)
    return encoded | {"length": len(encoded["input_ids"]), "first": first, "problem": ""}


def _is_good(row: Mapping[str, Any]) -> bool:
    return not row["problem"]


def _notes(name: str, problems: Sequence[str], lengths: np.ndarray, config: SFTConfig) -> list[str]:
    told = [f"{name}: {len(lengths):,} rows, {int(lengths.sum()):,} tokens"]
    if filtered := sum(problem == _UNWANTED for problem in problems):
        told[0] += f"; {filtered:,} rows filtered out"
    if bad := [problem for problem in problems if problem not in ("", _UNWANTED)]:
        told[0] += f"; {len(bad):,} bad rows left out, the first because {bad[0]}"
    if config.max_length and (longer := lengths[lengths > config.max_length]).size:
        lost = int(longer.sum()) - config.max_length * longer.size
        told[0] += (
            f"; {longer.size:,} rows are longer than {config.max_length} tokens and lose {lost:,} in all "
            f"({lost / lengths.sum():.1%})"
        )
    return told
