"""Documents as windows of tokens, each of which begins as the tokenizer begins a text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jinja2.exceptions import TemplateError

from rewired.text.conversations import Conversation, Document

WINDOW = 512  # tokens
_DAY = "26 Jul 2024"
_LONGEST = 32  # characters a token: more than any text has on average
_PART = 256  # tokens of a document, if there are enough of them


@dataclass(frozen=True)
class Cutter:
    """Makes windows of `length` tokens of the `tokenizer`."""

    tokenizer: Any
    length: int = WINDOW

    def spread(self, documents: Iterable[Document], most: int) -> list[torch.Tensor]:
        """At most so many windows of documents, of each as many tokens as it takes: text of one document is alike, and
        a fit learns it by heart. They are of its middle: code begins with a licence and with imports."""
        begin = self._bos()
        wanted = most * (self.length - len(begin))
        found, enough = list[list[int]](), 0
        for tokens in self._each(documents, wanted):
            found.append(tokens)
            enough += min(len(tokens), _PART)
            if enough >= wanted:
                break
        lengths = [len(ids) for ids in found]
        longest = bisect_left(
            range(max(lengths, default=0)), wanted, key=lambda n: sum(min(length, n) for length in lengths)
        )
        return self._cut([token for ids in found for token in _middle(ids, longest)], begin, most)

    def in_order(self, documents: Iterable[Document], most: int) -> list[torch.Tensor]:
        """At most so many windows of documents one after the other, whole."""
        begin = self._bos()
        wanted, ids = most * (self.length - len(begin)), list[int]()
        for tokens in self._each(documents, wanted):
            ids += tokens
            if len(ids) >= wanted:
                break
        return self._cut(ids, begin, most)

    def _each(self, documents: Iterable[Document], most: int) -> Iterator[list[int]]:
        """The tokens of each document that the chat template takes, at most so many. Raises ValueError where it takes
        none of them."""
        refusal, some = None, False
        for document in documents:
            try:
                tokens = self._tokens(document, most)
            except TemplateError as error:
                refusal = error
                continue
            some = some or bool(tokens)
            yield tokens
        if refusal and not some:
            raise ValueError(
                f"The tokenizer's chat template takes no conversation of a calibration text ({refusal}): mend it, or "
                "remove it."
            )

    def _tokens(self, document: Document, most: int) -> list[int]:
        text = _plain(document, self.tokenizer)[: _LONGEST * most]  # a file may be one document
        text = text.encode(errors="replace").decode()  # JSON may hold half an emoji
        found = list[int](self.tokenizer(text, add_special_tokens=False)["input_ids"])
        begin = self._bos()  # a chat template may write one of its own
        return found[len(begin) :] if begin and found[:1] == begin else found

    def _cut(self, ids: list[int], begin: list[int], most: int) -> list[torch.Tensor]:
        content = self.length - len(begin)
        count = min(most, len(ids) // content)
        return [torch.tensor(begin + ids[number * content : (number + 1) * content]) for number in range(count)]

    def _bos(self) -> list[int]:
        begin = self.tokenizer.bos_token_id
        return [begin] if begin is not None and self.tokenizer("a")["input_ids"][:1] == [begin] else []


def _middle(ids: list[int], most: int) -> list[int]:
    start = max(0, len(ids) - most) // 2
    return ids[start : start + most]


def _plain(document: Document, tokenizer: Any) -> str:
    if isinstance(document, str):
        return document + "\n\n"
    if tokenizer.chat_template is None:
        return "".join(turn["content"] + "\n\n" for turn in document)
    try:
        return _templated(document, tokenizer)
    except TemplateError:  # some take no system turn, or want a user first
        return _templated([turn for turn in document if turn["role"] != "system"], tokenizer)
    except Exception as error:  # whatever a template's own code raises
        raise ValueError(f"The tokenizer's chat template cannot be used ({error!r}): mend it, or remove it.") from None


def _templated(conversation: Conversation, tokenizer: Any) -> str:
    """As the model's chat template writes it, on a day that is always the same."""
    if not conversation:
        return ""
    # transformers gives templates a clock of that name; a macro stands before it
    template = f"{{% macro strftime_now(format) %}}{_DAY}{{% endmacro %}}" + tokenizer.get_chat_template()
    text = tokenizer.apply_chat_template(conversation, chat_template=template, tokenize=False, date_string=_DAY)
    return str(text)
