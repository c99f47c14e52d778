"""What config.json records of a checkpoint's making, checked before anything reads it; and single entries of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KV_HEAD_COPIES = "kv_head_copies"  # how often each KV head of the original is there

# what each record has, as convert and adapt write it
_FIT: dict[str, type] = {"base": dict, "wiring": list, "notes": list}
_RECORDS: dict[str, dict[str, type]] = {
    "rotation": {"kind": str, "base": str, "untied_head": int},
    "calibrated": _FIT,
    "refit": _FIT,
    "adapted": {"base": dict, "layers": list, "ends": bool, "tokens": int},
    "rewired_again": {"base": dict, "layers": list, "ends": bool, "before": list},
}


def check_records(config: Mapping[str, Any]) -> None:
    """Raise ValueError where a record of a rotation, a fit or a training is not as `convert` and `adapt` write it."""
    for name, kinds in _RECORDS.items():
        if name in config and not _has(config[name], kinds):
            raise ValueError(
                f"config.json's record '{name}' is not as convert and adapt write it: take config.json as it was."
            )
    copies, heads = config.get(KV_HEAD_COPIES, 1), config.get("num_key_value_heads", 1)
    if type(copies) is not int or copies < 1 or heads % copies:
        raise ValueError(
            f"config.json has {KV_HEAD_COPIES} {copies!r}: it must be an integer that divides its KV heads."
        )


def _has(record: Any, kinds: Mapping[str, type]) -> bool:
    return isinstance(record, dict) and all(type(record.get(entry)) is kind for entry, kind in kinds.items())


def switch(config: Mapping[str, Any], name: str) -> bool:
    """Whether the entry `name` is switched on. Raises ValueError where it is neither true nor false."""
    value = config.get(name)
    if value is not None and type(value) is not bool:
        raise ValueError(f"config.json has {name} {value!r}: it must be true or false.")
    return bool(value)


def check_tokens(config: Mapping[str, Any], file: str) -> None:
    """Raise ValueError where a special token that `file` names is no number."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(name)
        tokens = value if isinstance(value, list) else [value]
        if value is not None and not all(type(token) is int for token in tokens):
            raise ValueError(f"{file} has {name} {value!r}: it must be the number of a token, or a list of such.")
