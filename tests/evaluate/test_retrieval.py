"""Retrieval: texts with something to find, and who finds it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rewired.evaluate.retrieval import DEPTHS, REPEATS, answers, compiled, items_of


class Words:
    """A tokenizer with a token for each word."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [self.ids.setdefault(word, len(self.ids) + 1) for word in text.split()]
        return {"input_ids": [0, *ids] if add_special_tokens else ids}


def read(words: Words, ids: list[int]) -> list[str]:
    names = {number: word for word, number in words.ids.items()} | {0: "<s>"}
    return [names[number] for number in ids]


def test_what_is_asked_for_stands_once_in_a_text_of_the_length_at_its_depth() -> None:
    words = Words()
    items = items_of(words, (100, 300))
    assert len(items) == 2 * 2 * len(DEPTHS) * REPEATS
    places = []
    for item in items:
        assert len(item.prompt) + len(item.answer) == item.length
        text, (number,) = read(words, item.prompt), read(words, item.answer)
        assert text[0] == "<s>"
        found = [place for place, word in enumerate(text) if word.rstrip(".") == number]
        if "pass" in text:
            assert (
                len(found) == 2 and text[-8:] == ["What", "is", "the", "pass", "key?", "The", "pass", "key", "is"][-8:]
            )
        else:
            assert [text[found[0] - 2], text[-2]] == [text[-2], text[-2]]  # its key, which is asked for
            assert len(found) == 1 and text[-5:-2] + text[-1:] == ["The", "value", "of", "is"]
        places.append(found[0] / item.length)
    for start in range(0, len(places), len(DEPTHS) * REPEATS):
        of_kind = places[start : start + len(DEPTHS) * REPEATS : REPEATS]
        assert of_kind == sorted(of_kind) and of_kind[0] < 0.15 and of_kind[-1] > 0.75
    assert items == items_of(words, (100, 300))


class Oracle:
    """Predicts, at each position, the token that really follows; or, where it is `lost`, another one."""

    device = torch.device("cpu")

    def __init__(self, lost: int | None = None) -> None:
        self.lost = lost  # the length of texts of which it misses the answer's end

    def __call__(self, ids: torch.Tensor, use_cache: bool, logits_to_keep: int) -> Any:
        following = torch.cat([ids[0, 1:], ids[0, :1]]).clone()
        if ids.shape[1] == self.lost:
            following[-2] += 1
        return SimpleNamespace(logits=torch.nn.functional.one_hot(following, 4000)[None, -logits_to_keep:].float())


def test_an_answer_is_right_where_all_of_its_tokens_are_predicted() -> None:
    items = items_of(Words(), (100, 300))
    right = {"dense": answers(Oracle(), items, "dense"), "hybrid": answers(Oracle(lost=300), items, "hybrid")}
    assert right["dense"].all()
    short, long = compiled(items, right)
    assert (short.title, short.scores["hybrid"].value, short.deltas["hybrid"].value) == ("100 tokens", 1, 0)
    assert (long.title, long.scores["dense"].value, long.deltas["hybrid"].value) == ("300 tokens", 1, -1)
    assert np.array_equal(right["hybrid"], [float(item.length == 100) for item in items])


def test_a_length_that_is_named_twice_is_asked_twice_as_much() -> None:
    items = items_of(Words(), (100, 100))
    (both,) = compiled(items, {"dense": answers(Oracle(), items, "dense")})
    assert both.scores["dense"].n == len(items) == 2 * len(items_of(Words(), (100,)))
    assert len({tuple(item.prompt) for item in items}) == len(items)


def test_a_text_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="Retrieval in 10 tokens has no room"):
        items_of(Words(), (10,))
