"""Conversations as a chat template writes them, on a day that is always the same."""

from __future__ import annotations

from typing import Any

from .conversations import Conversation

DAY = "26 Jul 2024"  # for templates that write a date: the same data gives the same tokens on every day


def dated(template: str) -> dict[str, str]:
    """What `apply_chat_template` is to be given so that `template` writes this day.

    Templates take a `date_string`, or ask the clock that transformers gives them as `strftime_now`: a macro of that
    name stands before it.
    """
    clock = f"{{% macro strftime_now(format) %}}{DAY}{{% endmacro %}}"
    return {"chat_template": clock + template, "date_string": DAY}


def templated(conversation: Conversation, tokenizer: Any) -> str:
    """As the tokenizer's own template writes it. Raises jinja2's TemplateError where it does not take it."""
    if not conversation:
        return ""
    return str(tokenizer.apply_chat_template(conversation, tokenize=False, **dated(tokenizer.get_chat_template())))
