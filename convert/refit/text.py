"""Calibration text as windows of tokens, some of which only judge."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from jinja2.exceptions import TemplateError

from rewired.conversations import Conversation, Document

from ..cost import FIRST, HELD_OUT
from ..request import MIX
from .documents import shuffled, sources

WINDOW = 512  # tokens
_DAY = "26 Jul 2024"
_LONGEST = 32  # characters a token: more than any text has on average
_PART = 256  # tokens of a document, if there are enough of them
_LEAST_SHARE = 4  # windows of a file; those that give fewer are read as one


@dataclass(frozen=True)
class Calibration:
    """Windows of tokens, and which of them only judge."""

    windows: torch.Tensor  # [W, T], int64
    held_out: tuple[bool, ...]  # of each window
    name: str  # as a model card says it

    @property
    def tokens(self) -> int:
        return self.windows.numel()

    @property
    def held_out_tokens(self) -> int:
        return sum(self.held_out) * self.windows.shape[1]

    def texts(self, held_out: bool) -> list[torch.Tensor]:
        """The windows that judge, or the others, [W, T]; and some of their tokens as texts of their own, [S, 1].

        A text's first token is what later ones attend to most, and a model makes of it a stream like no other. Windows
        have too few of them to fit that, unless all begin with the same one.
        """
        windows = self.windows[torch.tensor(self.held_out) == held_out]
        if bool((self.windows[:, 0] == self.windows[0, 0]).all()):
            return [windows]
        return [windows, windows.flatten()[::FIRST, None]]

    @property
    def sha256(self) -> str:
        """Of the tokens, and of which of them only judge."""
        return hashlib.sha256(self.windows.numpy().tobytes() + bytes(self.held_out)).hexdigest()


def load(text: str, tokenizer: Any, tokens: int) -> Calibration:
    """At most `tokens` tokens, but two windows, of `text`: a file, a folder, a dataset on the hub, or `mix`.

    Files share them equally, and what short ones lack the others give. One window in eight is held out, the last ones
    of each file, so that at most one of its documents is on both sides. Raises ValueError where there is no such text,
    or too little of it.
    """
    most = max(tokens // WINDOW, 2)
    found = _shared_out(_groups(sources(text), tokenizer, most), tokenizer, most)
    judges = _judges([len(windows) for windows in found])
    if not judges:
        raise ValueError(
            f"{text} is too short to calibrate on: it has to have {2 * WINDOW} tokens at least, in conversations that "
            "the model's chat template takes or in plain text."
        )
    held_out = [
        number >= len(windows) - held
        for windows, held in zip(found, judges, strict=True)
        for number in range(len(windows))
    ]
    name = "the packaged mix of prose and chat" if text == MIX else text
    return Calibration(torch.stack([window for windows in found for window in windows]), tuple(held_out), name)


@dataclass(frozen=True)
class _Group:
    """Files that are read as one."""

    documents: list[Document]
    files: int = 1


def _groups(files: list[list[Document]], tokenizer: Any, most: int) -> list[_Group]:
    """A file is a group, but for those whose share is short, and for those of one document each where they are many:
    of a group's documents the last ones judge."""
    if len(files) == 1:
        return [_Group(files[0])]
    share, joined = most // len(files), list[list[Document]]()
    are_many = sum(len(documents) == 1 for documents in files) >= HELD_OUT
    for documents in files:
        if (are_many and len(documents) == 1) or len(_spread(documents, tokenizer, share)) < _LEAST_SHARE:
            joined.append(documents)
    if len(joined) < 2:
        return [_Group(documents) for documents in files]
    in_turn = zip_longest(*shuffled(joined))
    together = [document for row in in_turn for document in row if document is not None]
    kept = [_Group(documents) for documents in files if all(documents is not one for one in joined)]
    return [*kept, _Group(together, len(joined))]


def _shared_out(groups: Sequence[_Group], tokenizer: Any, most: int) -> list[list[torch.Tensor]]:
    """The windows of each, `most` in all where they have so many."""
    share = most // sum(group.files for group in groups)
    wanted = [share * group.files for group in groups]
    found = [_spread(group.documents, tokenizer, count) for group, count in zip(groups, wanted, strict=True)]
    while missing := most - sum(map(len, found)):
        longer = [number for number, windows in enumerate(found) if len(windows) == wanted[number]]
        if not longer:
            break
        for place, number in enumerate(longer):
            wanted[number] += missing // len(longer) + (place < missing % len(longer))
            found[number] = _spread(groups[number].documents, tokenizer, wanted[number])
    return found


def _judges(counts: list[int]) -> list[int]:
    """How many windows of each file are held out, one in eight of all; empty where nothing would be left."""
    wanted, judges = max(sum(counts) // HELD_OUT, 1), [0] * len(counts)
    if sum(counts) < 2:
        return []
    while sum(judges) < wanted:
        # of the file that has most left for each that it has given
        number = max(range(len(counts)), key=lambda n: (counts[n] - judges[n]) / (judges[n] + 1))
        judges[number] += 1
    return judges


def _spread(documents: Iterable[Document], tokenizer: Any, most: int) -> list[torch.Tensor]:
    """Windows of the first tokens of documents, of each as many as it takes: text of one document is alike, and a fit
    learns it by heart."""
    begin = _bos(tokenizer)
    wanted = most * (WINDOW - len(begin))
    found, enough = list[list[int]](), 0
    for document in documents:
        found.append(_tokens(document, tokenizer, wanted))
        enough += min(len(found[-1]), _PART)
        if enough >= wanted:
            break
    lengths = [len(ids) for ids in found]
    longest = bisect_left(
        range(max(lengths, default=0)), wanted, key=lambda n: sum(min(length, n) for length in lengths)
    )
    return _cut([token for ids in found for token in ids[:longest]], begin, most)


def windows_of(documents: Iterable[Document], tokenizer: Any, most: int) -> list[torch.Tensor]:
    """Documents one after the other, cut into windows that each begin as the tokenizer begins a text."""
    begin = _bos(tokenizer)
    wanted, ids = most * (WINDOW - len(begin)), list[int]()
    for document in documents:
        ids += _tokens(document, tokenizer, wanted - len(ids))
        if len(ids) >= wanted:
            break
    return _cut(ids, begin, most)


def _tokens(document: Document, tokenizer: Any, most: int) -> list[int]:
    text = _plain(document, tokenizer)[: _LONGEST * most]  # a file may be one document
    text = text.encode(errors="replace").decode()  # JSON may hold half an emoji
    begin = _bos(tokenizer)  # a chat template may write one of its own
    return [token for token in tokenizer(text, add_special_tokens=False)["input_ids"] if token not in begin]


def _cut(ids: list[int], begin: list[int], most: int) -> list[torch.Tensor]:
    content = WINDOW - len(begin)
    count = min(most, len(ids) // content)
    return [torch.tensor(begin + ids[number * content : (number + 1) * content]) for number in range(count)]


def _bos(tokenizer: Any) -> list[int]:
    begin = tokenizer.bos_token_id
    return [begin] if begin is not None and tokenizer("a")["input_ids"][:1] == [begin] else []


def _plain(document: Document, tokenizer: Any) -> str:
    if isinstance(document, str):
        return document + "\n\n"
    if tokenizer.chat_template is None:
        return "".join(turn["content"] + "\n\n" for turn in document)
    try:
        return _templated(document, tokenizer)
    except TemplateError:  # some take no system turn, or want a user first
        try:
            return _templated([turn for turn in document if turn["role"] != "system"], tokenizer)
        except TemplateError:
            return ""
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
