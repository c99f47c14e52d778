"""Windows of a text and of documents against what they have to be, for tokenizers that add this or that."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rewired.text.windows import Cutter, added_before, windows_of

BOS, EOS, LANGUAGE, UNKNOWN = 1, 2, 3, 4
TOO_SHORT = "The text is too short: it needs at least two tokens."


class Tokenizer:
    """Its text is numbers and its tokens are these, between what it adds."""

    chat_template = None

    def __init__(self, before: tuple[int, ...] = (), after: tuple[int, ...] = ()) -> None:
        self.before, self.after = [*before], [*after]

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [int(word) if word.isdecimal() else UNKNOWN for word in text.split()]
        return {"input_ids": self.before + ids + self.after if add_special_tokens else ids}


TOKENIZERS = {
    "adds nothing": Tokenizer(),
    "adds a BOS": Tokenizer((BOS,)),
    "adds a BOS and an EOS": Tokenizer((BOS,), (EOS,)),
    "adds an EOS": Tokenizer((), (EOS,)),
    "adds two tokens and an EOS": Tokenizer((BOS, LANGUAGE), (EOS,)),
}
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


@each_tokenizer
@given(st.integers(2, 40), st.integers(2, 12), st.none() | st.integers(2, 50))
def test_windows_are_the_texts_tokens_once_and_in_order(
    tokenizer: Tokenizer, count: int, length: int, limit: int | None
) -> None:
    length = max(length, len(tokenizer.before) + 1)
    ids = list(range(100, 100 + count))  # each its own, so that one used twice would show
    windows = windows_of(" ".join(map(str, ids)), tokenizer, length, limit).tolist()
    start = tokenizer.before
    assert all(window[: len(start)] == start for window in windows)
    content = [window[len(start) :] for window in windows]
    wanted = ids[:limit]
    used = [token for window in content for token in window]
    assert used == wanted[: len(used)]
    assert {len(window) for window in windows} == {min(length, len(wanted) + len(start))}
    assert len(wanted) - len(used) < len(content[0]), "all that fills a window is used"


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [(Tokenizer(), ""), (Tokenizer(), "7"), (Tokenizer((BOS,)), "")],
    ids=["nothing", "one token", "nothing but the BOS"],
)
def test_a_text_that_predicts_no_token_is_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(ValueError) as refused:
        windows_of(text, tokenizer, 8, None)
    assert str(refused.value) == TOO_SHORT


def test_one_token_after_a_bos_is_a_prediction() -> None:
    assert windows_of("7", Tokenizer((BOS,)), 8, None).tolist() == [[BOS, 7]]


def test_a_window_spans_the_texts_ends_without_wrapping() -> None:
    windows = windows_of("3 4 5 6 7 8 9", Tokenizer((BOS,)), 4, None)
    assert windows.tolist() == [[BOS, 3, 4, 5], [BOS, 6, 7, 8]]
    assert windows.dtype == torch.long


@each_tokenizer
def test_documents_are_cut_by_the_same_rule_as_a_text(tokenizer: Tokenizer) -> None:
    text = " ".join(map(str, range(100, 140)))
    windows = windows_of(text, tokenizer, 8, None)
    for cut in (Cutter(tokenizer, 8).in_order, Cutter(tokenizer, 8).spread):
        assert torch.equal(torch.stack(cut([text], 99)), windows)


@each_tokenizer
def test_what_a_text_brings_itself_of_its_beginning_is_not_added_twice(tokenizer: Tokenizer) -> None:
    """A chat template writes a BOS of its own, and so does a text that was written by one."""
    begin = added_before(tokenizer)
    assert begin == tokenizer.before
    plain = " ".join(map(str, range(100, 114)))
    begun = " ".join(map(str, [*begin, *range(100, 114)]))
    for text in (plain, begun):
        assert torch.equal(windows_of(text, tokenizer, 9, None), windows_of(plain, tokenizer, 9, None))
        assert torch.equal(
            torch.stack(Cutter(tokenizer, 9).in_order([text], 99)), windows_of(plain, tokenizer, 9, None)
        )
