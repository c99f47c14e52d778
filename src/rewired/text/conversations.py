"""Rows of public datasets, in any of the shapes that they have, as text or as a conversation."""

from __future__ import annotations

from typing import Any

Conversation = list[dict[str, str]]  # turns with `role` and `content`
Document = str | Conversation

_ROLES = {"human": "user", "gpt": "assistant"}


def read_row(row: Any, where: str) -> Document:
    """A row with `messages`, `conversations` (as ShareGPT), `instruction` and `output` (as Alpaca), `prompt` and
    `completion` (as TRL: two texts, or two lists of turns), or `text`.

    A `system` beside turns is the first of them, and a `text` beside them is taken for a copy. Raises ValueError, which
    says `where`, for another shape.
    """
    try:
        if isinstance(row, str):
            return row
        if parts := prompt_and_completion(row):
            return parts[0] + parts[1]  # type: ignore[operator]  # two of a kind
        turns = _turns(row)
        if turns is None:
            return _words(row["text"])
        return _after_system(row, turns)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{where} cannot be read as text ({error}): a row has `text`, `messages`, `conversations`, "
            "`instruction` and `output`, or `prompt` and `completion`."
        ) from None


def prompt_and_completion(row: Any) -> tuple[Document, Document] | None:
    """The two parts of a row that has them and no turns beside, both texts or both turns. Raises TypeError."""
    if isinstance(row, str) or _has_turns(row) or row.get("prompt") is None or row.get("completion") is None:
        return None
    prompt, completion = (part if isinstance(part, str) else _read(part) for part in (row["prompt"], row["completion"]))
    if type(prompt) is not type(completion):
        raise TypeError("prompt and completion are not both texts")
    return prompt if isinstance(prompt, str) else _after_system(row, prompt), completion


def _after_system(row: Any, turns: Conversation) -> Conversation:
    if row.get("system") and [turn["role"] for turn in turns[:1]] != ["system"]:
        return [{"role": "system", "content": _words(row["system"])}, *turns]
    return turns


def _has_turns(row: Any) -> bool:
    return bool(row.get("messages") or row.get("conversations") or (row.get("instruction") and row.get("output")))


def _read(messages: Any) -> Conversation:
    return [{"role": turn["role"], "content": _words(turn["content"])} for turn in messages]


def _turns(row: Any) -> Conversation | None:
    """None where the row is a text, and no turns are beside."""
    if row.get("text") is not None and not _has_turns(row):
        return None
    forms = [name for name in ("messages", "conversations") if row.get(name) is not None]
    form = next((name for name in forms if row[name] or not _has_turns(row)), None)
    if form == "messages":
        return _read(row["messages"])
    if form == "conversations":
        turns = [*row["conversations"], *([row["chosen"]] if row.get("chosen") is not None else [])]
        return [{"role": _ROLES.get(turn["from"], turn["from"]), "content": _words(turn["value"])} for turn in turns]
    question = "\n".join(filter(None, (_words(row["instruction"]), row.get("input"))))
    return [{"role": "user", "content": question}, {"role": "assistant", "content": _words(row["output"])}]


def _words(content: Any) -> str:
    """Of a turn: a string, or a list of parts of which some are text."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    if not isinstance(content, str):
        raise TypeError(f"{content!r} is not text")
    return content
