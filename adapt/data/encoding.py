"""The rows of a file encoded as tokens and labels; those that cannot be learnt from are left out and counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from operator import not_
from typing import Any

from datasets import Dataset, Features, IterableDataset, List, Value

from rewired.text.conversations import Document, prompt_and_completion, read_row

from ..recipe.dataset_entry import DatasetEntry
from .loading import decode, is_wanted, place
from .row_stats import FILTERED, RowStats
from .tokens import IGNORED, Encoder

_VERSION = 6  # increase it when the same row gives other tokens: datasets caches what this code has made
_FEATURES = Features(  # given, because the first rows may all be left out and show nothing of the others' types
    input_ids=List(Value("int32")),
    labels=List(Value("int32")),
    length=Value("int64"),  # in tokens
    first=Value("int64"),  # the place of the first token that is learnt
    problem=Value("string"),
)

_ROLES = ("system", "user", "assistant")
_UNREAD = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")  # parts of turns

RowEncoder = Callable[[Mapping[str, Any], int], dict[str, Any]]  # of a row and its index, the columns of _FEATURES


def row_encoder(name: str, source: DatasetEntry, encoder: Encoder, skip_bad: bool) -> RowEncoder:
    """Encodes the rows of the file `name`. Raises ValueError for a bad row, or with `skip_bad`, gives its problem."""
    return partial(_encode_row, version=_VERSION, name=name, source=source, encoder=encoder, skip_bad=skip_bad)


def encode_file(rows: Dataset, encode: RowEncoder, stats: RowStats, processes: int | None) -> Dataset:
    """`input_ids` and `labels` of the rows that can be learnt from, all of them counted in `stats`.

    Raises ValueError if no row is left.
    """
    encoded = rows.map(
        encode,
        with_indices=True,
        remove_columns=rows.column_names,
        features=_FEATURES,
        num_proc=processes,
        desc=f"Tokenising {stats.name}",
    )
    # read before rows are selected: of a selection, datasets reads a column row by row
    columns = (encoded[column][:] for column in ("problem", "first", "length"))
    learnt = [index for index, row in enumerate(zip(*columns, strict=True)) if stats.count(index, *row)]
    if not learnt:
        raise ValueError(f"No row can be trained on: {stats.note()}.")
    return encoded.select(learnt).select_columns(["input_ids", "labels"])


def encode_stream(rows: IterableDataset, encode: RowEncoder, stats: RowStats, cuts: bool) -> IterableDataset:
    """`input_ids` and `labels` of the rows that can be learnt from, encoded and counted in `stats` as they are read.

    With `cuts`, to at most `stats.longest` tokens; packing cuts by itself.
    """

    def encode_and_count(row: Mapping[str, Any], index: int) -> dict[str, Any]:
        encoded = encode(row, index)
        if not stats.count(index, encoded["problem"], encoded["first"], encoded["length"]):
            encoded["problem"] = encoded["problem"] or "nothing to learn is left"
        longest = stats.longest if cuts else None
        return encoded | {name: encoded[name][:longest] for name in ("input_ids", "labels")}

    columns = list(rows.features or next(iter(rows), {}))
    encoded = rows.map(encode_and_count, with_indices=True, remove_columns=columns, features=_FEATURES)
    return encoded.filter(not_, input_columns="problem").select_columns(["input_ids", "labels"])


def _encode_row(
    row: Mapping[str, Any], index: int, version: int, name: str, source: DatasetEntry, encoder: Encoder, skip_bad: bool
) -> dict[str, Any]:
    where = place(row, index, name)
    nothing: dict[str, Any] = {"input_ids": [], "labels": [], "length": 0, "first": 0}
    try:
        row = decode(row, where)
        if not is_wanted(source, row):
            return nothing | {"problem": FILTERED}
        document, parts = _checked_document(row, where), prompt_and_completion(row)
        encoded = encoder.encode(document, where, parts and parts[0])
    except ValueError as error:
        if isinstance(error, UnicodeDecodeError):  # of a row that datasets decodes only now
            error = ValueError(f"{where} cannot be read ({error}).")
        if not skip_bad:
            raise ValueError(f"{error} Mend it, or leave such rows out by skip_bad: true.") from None
        return nothing | {"problem": str(error)}
    labels, length = encoded["labels"], len(encoded["input_ids"])
    learnt = (place for place in range(1, length) if labels[place] != IGNORED)  # nothing predicts the first token
    return encoded | {"length": length, "first": next(learnt, length), "problem": ""}


def _checked_document(row: Mapping[str, Any], where: str) -> Document:
    """The row as a text or a conversation. Raises ValueError, which says `where`, if it cannot be trained on."""
    document = read_row(row, where)
    _check_is_read(row, document, where)
    _check_unicode(document, where)
    if parts := prompt_and_completion(row):
        for name, part in zip(("prompt", "completion"), parts, strict=True):
            if not (part.strip() if isinstance(part, str) else part):
                raise ValueError(f"{where} has an empty {name}.")
        if row.get("system") and isinstance(document, str):
            raise ValueError(f"{where} has a system turn beside a prompt that is a text.")
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


def _check_is_read(row: Mapping[str, Any], document: Document, where: str) -> None:
    """Raise ValueError for parts of the row that `read_row` drops, and that its answers depend on."""
    if isinstance(document, str):
        return
    completion = row.get("completion")
    turns = row.get("messages") or row.get("conversations") or completion
    if turns is None and not _is_empty(row.get("history")):
        raise ValueError(f"{where} has a history, which adapt does not read.")
    for turn in turns or ():
        for name in _UNREAD:
            if not _is_empty(turn.get(name)):
                raise ValueError(f"{where} has {name}, which adapt does not read.")
        if turn.get("role", turn.get("from")) in ("assistant", "gpt") and turn.get("weight") == 0:
            raise ValueError(f"{where} has an answer of weight 0, and adapt learns all answers.")
    for turn in (*(turns or ()), *(row["prompt"] if turns and turns is completion else ())):
        content = turn.get("content", turn.get("value"))
        kinds = [piece.get("type") for piece in content] if isinstance(content, list) else []
        if others := [kind for kind in kinds if kind != "text"]:
            raise ValueError(f"{where} has a turn with a part of type {others[0]}, and adapt reads text only.")


def _is_empty(value: Any) -> bool:
    """Whether it says nothing, however a table of rows writes that."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return not any(inside) or value in ("[]", "{}", "null")


def _check_unicode(document: Document, where: str) -> None:
    """Raise ValueError for half of a surrogate pair, which JSON may hold, and which no tokenizer takes."""
    texts = [document] if isinstance(document, str) else [turn["content"] for turn in document]
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where} holds half of a character ({error.reason}).") from None
