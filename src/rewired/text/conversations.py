"""Rows of public datasets, in any of the shapes that they have, as text or as a conversation."""

from __future__ import annotations

from typing import Any

Conversation = list[dict[str, str]]  # turns with `role` and `content`
Document = str | Conversation

_ROLES = {"human": "user", "gpt": "assistant"}


def read_row(row: Any, where: str) -> Document:
    """A row with `messages`, `conversations` (as ShareGPT), `instruction` and `output` (as Alpaca), or `text`.

    A `system` beside turns is the first of them, and a `text` beside them is taken for a copy. Raises ValueError, which
    says `where`, for another shape.
    """
    try:
        if isinstance(row, str):
            return row
        turns = _turns(row)
        if turns is None:
            return _words(row["text"])
        if row.get("system") and [turn["role"] for turn in turns[:1]] != ["system"]:
            turns = [{"role": "system", "content": _words(row["system"])}, *turns]
        return turns
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{where} cannot be read as text ({error}): a row has `text`, `messages`, `conversations`, or "
            "`instruction` and `output`."
        ) from None


def _turns(row: Any) -> Conversation | None:
    """None where the row is a text, and no turns are beside."""
    has_turns = row.get("messages") or row.get("conversations") or (row.get("instruction") and row.get("output"))
    if row.get("text") is not None and not has_turns:
        return None
    if row.get("messages") is not None:
        return [{"role": turn["role"], "content": _words(turn["content"])} for turn in row["messages"]]
    if row.get("conversations") is not None:
        turns = [*row["conversations"], *([row["chosen"]] if row.get("chosen") is not None else [])]
        return [{"role": _ROLES.get(turn["from"], turn["from"]), "content": _words(turn["value"])} for turn in turns]
    question = "\n".join(filter(None, (_words(row["instruction"]), row.get("input"))))
    return [{"role": "user", "content": question}, {"role": "assistant", "content": _words(row["output"])}]


def _words(content: Any) -> str:
    """Of a turn: a string, or a list of parts of which some are text."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    if not isinstance(content, str):
        raise TypeError(f"{content!r} is no text")
    return content
