"""The length of a training: its steps, rows and tokens, before anything is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from pyarrow import compute
from trl import SFTConfig
from trl.data_utils import pack_dataset

from rewired import quantities

from ..recipe.keys import Recipe


@dataclass(frozen=True)
class TrainingSteps:
    """The steps of a training; `rows` and `tokens` are those of one epoch, after packing, and None for a stream."""

    rows: int | None
    tokens: int | None
    batch: int  # rows a step
    ranks: int
    epoch: int  # steps of one
    count: int

    @classmethod
    def of(cls, recipe: Recipe, config: SFTConfig, train: Dataset | IterableDataset) -> TrainingSteps:
        """The steps of training on `train`. Raises ValueError if it has too few rows for one."""
        ranks = recipe.ranks if recipe.is_sharded else PartialState().num_processes
        rows_at_once = config.per_device_train_batch_size * ranks // recipe.tp_size
        batch = rows_at_once * config.gradient_accumulation_steps
        if isinstance(train, IterableDataset):
            return cls(None, None, batch, ranks, config.max_steps, config.max_steps)
        lengths = np.asarray(compute.list_value_length(train.with_format("arrow")["input_ids"][:]))
        rows, longest = len(lengths), config.max_length
        if config.packing and longest:
            rows = len(pack_dataset(train.select_columns("input_ids"), longest))
        batches = rows // rows_at_once if config.dataloader_drop_last else math.ceil(rows / rows_at_once)
        if not batches:
            raise ValueError(
                f"{quantities.count(rows, 'row')}: fewer than the {rows_at_once} that are read at once, and "
                "dataloader_drop_last leaves them out: give more data, or leave that key out."
            )
        epoch = math.ceil(batches / config.gradient_accumulation_steps)
        count = config.max_steps if config.max_steps > 0 else math.ceil(epoch * config.num_train_epochs)
        return cls(rows, int(np.minimum(lengths, longest or lengths).sum()), batch, ranks, epoch, count)

    def describe(self) -> str:
        """One sentence for a terminal."""
        steps, batch = quantities.count(self.count, "step"), quantities.count(self.batch, "row")
        devices = quantities.count(self.ranks, "device")
        if self.rows is None or self.tokens is None:
            return f"{steps} of {batch} on {devices}, streamed."
        whole, rest = divmod(self.count, self.epoch)
        rows_read = whole * min(self.rows, self.epoch * self.batch) + min(rest * self.batch, self.rows)
        seen = rows_read * self.tokens // self.rows
        return (
            f"{quantities.count(self.rows, 'row')} of {quantities.count(self.tokens, 'token')} to train on, "
            f"{batch} a step on {devices}: {steps}, about {quantities.count(seen, 'token')}."
        )
