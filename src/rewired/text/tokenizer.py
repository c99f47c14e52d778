"""A checkpoint's tokenizer, loaded without any code that the checkpoint brings; its chat template, on the same day."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rewired.loading import loading

from .conversations import Conversation

DAY = "26 Jul 2024"  # for templates that write a date: the same data gives the same tokens on every day


def load_tokenizer(folder: Path, because: str = "") -> Any:
    """Raises ValueError where there is none, it is broken or it needs code of its own; the sentence says `because`."""
    from transformers import AutoTokenizer

    with loading(f"{folder} has no tokenizer that can be loaded{because}"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def templated(conversation: Conversation, tokenizer: Any) -> str:
    """As the tokenizer's own template writes it. Raises jinja2's TemplateError where it does not take it."""
    if not conversation:
        return ""
    return str(tokenizer.apply_chat_template(conversation, tokenize=False, **dated(tokenizer.get_chat_template())))


def dated(template: str) -> dict[str, str]:
    """What `apply_chat_template` is to be given so that `template` writes this day.

    Templates take a `date_string`, or ask the clock that transformers gives them as `strftime_now`: a macro of that
    name stands before it.
    """
    clock = f"{{% macro strftime_now(format) %}}{DAY}{{% endmacro %}}"
    return {"chat_template": clock + template, "date_string": DAY}
