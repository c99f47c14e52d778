"""Windows of tokens, cut out of documents or out of one text: each begins as the tokenizer begins a text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from jinja2.exceptions import TemplateError

from .conversations import Document
from .tokenizer import templated

WINDOW = 512  # tokens
_LONGEST_TOKEN = 32  # characters: more than the tokens of any text have on average
_PART = 256  # tokens of a document, if there are enough of them


def windows_of(text: str, tokenizer: Any, length: int, tokens: int | None) -> torch.Tensor:
    """The text's tokens, the first `tokens` of them, in windows [W, length]; what is left over is not used.

    A text that fills none is one shorter window. Raises ValueError for a text without two tokens.
    """
    begin = added_before(tokenizer)
    text = text if tokens is None else text[: _LONGEST_TOKEN * tokens]  # the rest need not be tokenised
    ids = tokens_of(text, tokenizer, begin)[:tokens]
    content = min(length - len(begin), len(ids))
    if content < 1 or content + len(begin) < 2:
        raise ValueError("The text is too short: it needs at least two tokens.")
    return torch.stack(_cut(ids, begin, content))


@dataclass(frozen=True)
class Cutter:
    """Makes windows of `length` tokens of the `tokenizer`, out of documents."""

    tokenizer: Any
    length: int = WINDOW

    def spread(self, documents: Iterable[Document], most: int) -> list[torch.Tensor]:
        """At most so many windows, of the middles of documents: as many tokens from each, or all that it has.

        A fit learns one document by heart, whose text is alike; and code begins with a licence and with imports.
        """
        wanted = most * self._content
        taken = self._until(wanted, documents, _PART)
        share = _fair_share([len(ids) for ids in taken], wanted)
        return self._windows([_middle(ids, share) for ids in taken], most)

    def in_order(self, documents: Iterable[Document], most: int) -> list[torch.Tensor]:
        """At most so many windows of documents one after the other, whole."""
        return self._windows(self._until(most * self._content, documents), most)

    def _until(self, wanted: int, documents: Iterable[Document], part: int | None = None) -> list[list[int]]:
        """The first documents' tokens that are enough, if each gives all of them, or `part`."""
        taken, have = list[list[int]](), 0
        for ids in self._each(documents, wanted):
            taken.append(ids)
            have += len(ids[:part])
            if have >= wanted:
                break
        return taken

    def _windows(self, documents: Iterable[list[int]], most: int) -> list[torch.Tensor]:
        return _cut(list(chain.from_iterable(documents)), self._begin, self._content)[:most]

    @cached_property
    def _begin(self) -> list[int]:
        return added_before(self.tokenizer)

    @property
    def _content(self) -> int:
        """How many tokens of documents are in a window."""
        return self.length - len(self._begin)

    def _each(self, documents: Iterable[Document], most: int) -> Iterator[list[int]]:
        """The tokens of each document that the chat template takes, at most so many. Raises ValueError where it takes
        none of them."""
        refusal, some = None, False
        for document in documents:
            try:
                text = _plain(document, self.tokenizer)[: _LONGEST_TOKEN * most]  # a file may be one document
            except TemplateError as error:
                refusal = error
                continue
            ids = tokens_of(text, self.tokenizer, self._begin)
            some = some or bool(ids)
            yield ids
        if refusal and not some:
            raise ValueError(
                f"The tokenizer's chat template takes no conversation of a calibration text ({refusal}): mend it, or "
                "remove it."
            )


def added_before(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before any text: most put a BOS or nothing, and some put an EOS behind it."""
    plain, whole = (list[int](tokenizer("a", add_special_tokens=adds)["input_ids"]) for adds in (False, True))
    return next((whole[:start] for start in range(len(whole)) if whole[start : start + len(plain)] == plain), [])


def tokens_of(text: str, tokenizer: Any, begin: Sequence[int]) -> list[int]:
    """The text's tokens without what the tokenizer adds, and without the `begin` that the text may bring itself: a chat
    template often writes a BOS."""
    text = text.encode(errors="replace").decode()  # JSON may hold half an emoji
    ids = list[int](tokenizer(text, add_special_tokens=False)["input_ids"])
    return ids[len(begin) :] if begin and ids[: len(begin)] == list(begin) else ids


def _cut(ids: list[int], begin: list[int], content: int) -> list[torch.Tensor]:
    """Windows of `begin` and `content` tokens each; what is left over is not used."""
    return [torch.tensor(begin + ids[start : start + content]) for start in range(0, len(ids) - content + 1, content)]


def _fair_share(lengths: Sequence[int], wanted: int) -> int:
    """The least n, so that n tokens of each document, or all of a shorter one, make `wanted` together."""
    return bisect_left(range(max(lengths, default=0)), wanted, key=lambda n: sum(min(length, n) for length in lengths))


def _middle(ids: list[int], most: int) -> list[int]:
    start = max(0, len(ids) - most) // 2
    return ids[start : start + most]


def _plain(document: Document, tokenizer: Any) -> str:
    if isinstance(document, str):
        return document + "\n\n"
    if tokenizer.chat_template is None:
        return "".join(turn["content"] + "\n\n" for turn in document)
    try:
        return templated(document, tokenizer)
    except TemplateError:  # some take no system turn, or want a user first
        return templated([turn for turn in document if turn["role"] != "system"], tokenizer)
    except Exception as error:  # whatever a template's own code raises
        raise ValueError(f"The tokenizer's chat template cannot be used ({error!r}): mend it, or remove it.") from None
