"""A checkpoint's tokenizer, loaded without any code that the checkpoint brings; its chat template, on the same day."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rewired.loading import loading

from .conversations import Conversation

DAY = "26 Jul 2024"  # for templates that write a date: the same data gives the same tokens on every day


def load_tokenizer(folder: Path, because: str = "") -> Any:
    """Raises ValueError where there is none, it is broken or it needs code of its own; the sentence says `because`."""
    check_needs_no_code(folder)
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


def check_needs_no_code(folder: Path) -> None:
    """Raise ValueError if the tokenizer in `folder`, if there is one, is of a class that transformers does not have."""
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # transformers says what is wrong with it
        return
    auto_map = config.get("auto_map") if isinstance(config, dict) else None
    brings_code = "AutoTokenizer" in auto_map if isinstance(auto_map, dict) else bool(auto_map)
    name = config.get("tokenizer_class") if isinstance(config, dict) else None
    if brings_code and not _is_known(name):
        raise ValueError(
            f"The tokenizer of {folder} is of a class of its own ({name or json.dumps(auto_map)}), and code that a "
            "checkpoint brings is never run: save it as one of transformers' own classes, or remove auto_map from its "
            "tokenizer_config.json if its tokenizer.json is all that it takes."
        )


def _is_known(name: Any) -> bool:
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if not isinstance(name, str):
        return False
    return any(tokenizer_class_from_name(each) is not None for each in (name, f"{name}Fast"))
