"""Documents as tokens and labels: conversations are written by the chat template, and the assistant's turns learnt.

A training template marks what the assistant says. It has to write exactly the same text as the model's own template, so
it is chosen by what it writes: one of `templates/`, or one of TRL's.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from transformers import AutoTokenizer
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from rewired.text.conversations import Conversation, Document
from rewired.text.tokenizer import dated
from rewired.text.windows import added_before, tokens_of

IGNORED = -100  # a label that no loss counts
_PROBES: tuple[Conversation, ...] = (
    [{"role": "user", "content": " a \n"}, {"role": "assistant", "content": " b\n\nc "}],
    [
        {"role": "system", "content": "s "},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nt\n</think>\n\nb"}],
)

# datasets reads the streams of a mix in threads, and transformers' templates keep the marked turns in shared state
_one_at_a_time = Lock()
# a thread that a forked process lacks may have held it
os.register_at_fork(after_in_child=_one_at_a_time._at_fork_reinit)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Encoder:
    """Encodes documents as tokens and labels; `template` is None if the tokenizer has no chat template."""

    tokenizer: Any
    template: str | None
    assistant_only: bool  # of conversations; texts are learnt whole
    begin: tuple[int, ...]  # of a text: a BOS, if the tokenizer adds one

    @classmethod
    def of(cls, tokenizer: Any, assistant_only: bool = True) -> Encoder:
        """Raises ValueError if only the assistant is to be learnt, and no training template is known."""
        begin = tuple(added_before(tokenizer))
        if assistant_only and tokenizer.chat_template:
            return cls(tokenizer, training_template(tokenizer), True, begin)
        return cls(tokenizer, tokenizer.chat_template and tokenizer.get_chat_template(), assistant_only, begin)

    def encode(self, document: Document, where: str, prompt: Document | None = None) -> dict[str, list[int]]:
        """`input_ids` and `labels`; a `prompt` that the document begins with is not learnt.

        Raises ValueError, which says `where`, for what the template does not take.
        """
        ids, labels = self._text(document) if isinstance(document, str) else self._conversation(document, where)
        if prompt is not None:
            given, _ = (
                self._text(prompt) if isinstance(prompt, str) else self._conversation(prompt, where, is_open=True)
            )
            differing = (place for place, (one, other) in enumerate(zip(ids, given, strict=False)) if one != other)
            begin = next(differing, len(given))  # the last token of a prompt may reach into what follows
            labels = [IGNORED] * begin + labels[begin:]
        return {"input_ids": ids, "labels": labels}

    def _conversation(self, turns: Conversation, where: str, is_open: bool = False) -> tuple[list[int], list[int]]:
        """Tokens and labels; `is_open` where the assistant comes next."""
        if self.template is None:
            raise ValueError(
                f"{where} is a conversation, and the tokenizer has no template: give a chat_template_path."
            )
        try:
            with _one_at_a_time:
                encoded = self.tokenizer.apply_chat_template(
                    turns,
                    return_dict=True,
                    return_assistant_tokens_mask=self.assistant_only,
                    add_generation_prompt=is_open,
                    **dated(self.template),
                )
        except Exception as error:  # whatever a template's own code raises
            raise ValueError(f"{where} is a conversation that the chat template does not take ({error}).") from None
        ids = encoded["input_ids"]
        marks = encoded["assistant_masks"] if self.assistant_only else [1] * len(ids)
        return ids, [token if mark else IGNORED for token, mark in zip(ids, marks, strict=True)]

    def _text(self, text: str) -> tuple[list[int], list[int]]:
        """Tokens with one BOS, if the tokenizer adds one, and one EOS, whether the text has its own or not."""
        ids, end = [*self.begin, *tokens_of(text, self.tokenizer, self.begin)], self.tokenizer.eos_token_id
        ids = ids if end is None or ids[-1:] == [end] else [*ids, end]
        return ids, ids


def set_chat_template(tokenizer: Any, config: Any) -> None:
    """Give `tokenizer` the chat template in `config.chat_template_path`, a file or another tokenizer.

    Raises ValueError if it is neither, or has no template.
    """
    if config.chat_template_path is None:
        return
    path = Path(config.chat_template_path)
    try:
        tokenizer.chat_template = (
            path.read_text()
            if path.is_file()
            else AutoTokenizer.from_pretrained(str(path), trust_remote_code=False).get_chat_template()
        )
    except (OSError, ValueError):
        raise ValueError(f"chat_template_path: {path} is neither a file nor a tokenizer that has a template.") from None


def check_padding(tokenizer: Any, config: Any) -> None:
    """Raise ValueError if `tokenizer` has no token to pad rows with."""
    token = config.pad_token or tokenizer.pad_token or tokenizer.eos_token
    if token is None or token not in tokenizer.get_vocab():
        raise ValueError(f"pad_token is {token!r}, which the tokenizer does not have: give one of its own.")


def training_template(tokenizer: Any) -> str:
    """A template that writes what the tokenizer's own does, and marks the assistant's turns.

    Raises ValueError if none is known.
    """
    original = tokenizer.get_chat_template()
    if has_generation_markers(original):
        return str(original)
    candidates = [path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))]
    with suppress(ValueError):  # TRL knows none
        candidates.append(get_training_chat_template(tokenizer) or original)
    for candidate in candidates:
        if has_generation_markers(candidate) and all(
            _written(tokenizer, original, probe) == _written(tokenizer, candidate, probe) for probe in _PROBES
        ):
            return candidate
    raise ValueError(
        "No known training template writes what this tokenizer's chat template writes: give one that marks the "
        "assistant's turns with {% generation %} by chat_template_path, or learn all by assistant_only_loss: false."
    )


def _written(tokenizer: Any, template: str, conversation: Conversation) -> str | None:
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, **dated(template))
    except Exception:  # whatever a template's own code raises
        return None
    return str(text)
