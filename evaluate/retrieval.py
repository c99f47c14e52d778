"""Retrieval: what stands somewhere in a long text, asked for at its end; the texts are made here, from a seed.

A passkey is a number among sentences that say nothing; a value is one of hundreds, each with a key. An answer is right
where greedy decoding would give all of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, product
from typing import Any

import numpy as np
import torch

from rewired.progress import Progress
from rewired.text.windows import added_before

from .metrics import Metric
from .results import TaskResult
from .statistics import delta, score

LENGTHS = (1024, 2048, 4096, 8192)  # tokens, with the answer
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of what is asked for: 0 is the beginning of the text
REPEATS = 5  # of each kind at each depth: at four lengths the fewest with which one point lost can be told from none
_KINDS = ("passkey", "value")
_NOTHING = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_METRIC = Metric("exact", "mean")


@dataclass(frozen=True)
class Item:
    length: int
    prompt: list[int]
    answer: list[int]


def items_of(tokenizer: Any, lengths: Sequence[int]) -> list[Item]:
    """All items of these lengths, the same for all models of a tokenizer. Raises ValueError for a length too short."""
    generator = random.Random(0)
    kinds = product(lengths, _KINDS, DEPTHS, range(REPEATS))
    return [_item(tokenizer, length, kind, depth, generator) for length, kind, depth, _ in kinds]


@torch.no_grad()
def answers(model: Any, items: Sequence[Item], what: str) -> np.ndarray:
    """Whether each answer is right: [n], zeros and ones."""
    found = []
    with Progress(f"{what}: retrieval", len(items)) as progress:
        for item in items:
            ids = torch.tensor([item.prompt + item.answer], device=model.device)
            # the last position predicts what would follow the answer
            logits = model(ids, use_cache=False, logits_to_keep=len(item.answer) + 1).logits[0, :-1]
            found.append(logits.argmax(-1).tolist() == item.answer)
            progress.advance()
    return np.array(found, dtype=float)


def compiled(items: Sequence[Item], right: dict[str, np.ndarray]) -> list[TaskResult]:
    """A result for each length, from what each model has right; the original is the first."""
    original, *others = right
    results = []
    for length in dict.fromkeys(item.length for item in items):
        asked = [item.length == length for item in items]
        parts = {model: np.stack([values[asked], np.ones(sum(asked))], axis=1) for model, values in right.items()}
        result = TaskResult(
            title=f"{length:,} tokens",
            task="retrieval",
            metric=_METRIC.name,
            scores={model: score(_METRIC, each) for model, each in parts.items()},
            deltas={model: delta(_METRIC, parts[original], parts[model]) for model in others},
        )
        results.append(result)
    return results


def _item(tokenizer: Any, length: int, kind: str, depth: float, generator: random.Random) -> Item:
    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    number = generator.randrange(10_000, 100_000)
    if kind == "passkey":
        needle = f" The pass key is {number}. Remember it. {number} is the pass key."
        question, filler = " What is the pass key? The pass key is", (tokens(_NOTHING) for _ in count())
    else:
        key = generator.randrange(10_000, 100_000)
        needle, question = f" The value of {key} is {number}.", f" The value of {key} is"
        filler = (tokens(line) for line in _other_values(generator, key))
    begin, asked, answer, told = added_before(tokenizer), tokens(question), tokens(f" {number}"), tokens(needle)
    room = length - len(begin) - len(told) - len(asked) - len(answer)
    if room < 0:
        raise ValueError(f"Retrieval in {length} tokens has no room for what is asked for: take more tokens.")
    around = list(islice((token for part in filler for token in part), room))
    before = round(depth * room)
    return Item(length, begin + around[:before] + told + around[before:] + asked, answer)


def _other_values(generator: random.Random, key: int) -> Iterator[str]:
    while True:
        other, value = generator.randrange(10_000, 100_000), generator.randrange(10_000, 100_000)
        if other != key:
            yield f" The value of {other} is {value}."
