"""Rows as documents that can be trained on: a text, or a conversation in which the assistant says something."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from rewired.text.conversations import Document, prompt_and_completion, read_row

_ROLES = ("system", "user", "assistant")


def checked_document(row: Mapping[str, Any], where: str) -> Document:
    """The row as a text or a conversation. Raises ValueError, which says `where`, if it cannot be trained on."""
    document = read_row(row, where)
    _check_unicode(document, where)
    if (parts := prompt_and_completion(row)) and not (parts[1].strip() if isinstance(parts[1], str) else parts[1]):
        raise ValueError(f"{where} has an empty completion.")
    if isinstance(document, str):
        if not document.strip():
            raise ValueError(f"{where} is an empty text.")
        return document
    if not document:
        raise ValueError(f"{where} is an empty conversation.")
    roles = [turn["role"] for turn in document]
    for role in roles:
        if role not in _ROLES:
            raise ValueError(f"{where} has a turn of the unknown role '{role}': there are {', '.join(_ROLES)}.")
    if "assistant" not in roles:
        raise ValueError(f"{where} has no turn of the assistant, so nothing to learn.")
    if "system" in roles[1:] or any(one == other for one, other in pairwise(roles)):
        raise ValueError(f"{where} has turns out of order ({', '.join(roles)}): user and assistant take turns.")
    if not all(turn["content"].strip() for turn in document if turn["role"] != "system"):
        raise ValueError(f"{where} has an empty turn.")
    return document


def _check_unicode(document: Document, where: str) -> None:
    """Raise ValueError for half of a surrogate pair, which JSON may hold, and which no tokenizer takes."""
    texts = [document] if isinstance(document, str) else [turn["content"] for turn in document]
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where} holds half of a character ({error.reason}).") from None
