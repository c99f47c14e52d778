"""What config.json records of a checkpoint's making, and how it places positions: checked before anything reads it."""

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


def check_records(config: Mapping[str, Any], kv_heads: int) -> None:
    """Raise ValueError where a record of a rotation, a fit or a training is not as `convert` and `adapt` write it."""
    for name, kinds in _RECORDS.items():
        if name in config and not _has(config[name], kinds):
            raise ValueError(
                f"config.json's record '{name}' is not as convert and adapt write it: take config.json as it was."
            )
    copies = config.get(KV_HEAD_COPIES, 1)
    if type(copies) is not int or copies < 1 or kv_heads % copies:
        raise ValueError(
            f"config.json has {KV_HEAD_COPIES} {copies!r}: it must be an integer that divides its KV heads."
        )


def check_rope(config: Mapping[str, Any]) -> None:
    """Raise ValueError where positions are embedded in a way that transformers' models of our families do not have."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name) or {}
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else None
        if not isinstance(kind, str) or kind not in _ROPE_NUMBERS:
            raise ValueError(f"config.json has {name} {rope!r}: it takes a rope_type, {', '.join(_ROPE_NUMBERS)}.")
        numbers = {"rope_theta": config.get("rope_theta", 10000.0), **rope}
        for number in ("rope_theta", *_ROPE_NUMBERS[kind]):
            if type(numbers.get(number)) not in (int, float):
                raise ValueError(f"config.json has {name} {rope!r}: rope_type '{kind}' takes a number as {number}.")


def check_windows(config: Mapping[str, Any], num_layers: int) -> None:
    """Raise ValueError where it is not clear which tokens attention sees."""
    for name, least in (("sliding_window", 1), ("max_window_layers", 0)):
        value = config.get(name)
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(f"config.json has {name} {value!r}: it must be null or an integer of at least {least}.")
    has_windows = switch(config, "use_sliding_window", default=True) and config.get("sliding_window", 1) is not None
    kinds = config.get("layer_types")
    if kinds is not None and not (
        isinstance(kinds, list) and len(kinds) == num_layers and all(kind in _KINDS_OF_ATTENTION for kind in kinds)
    ):
        raise ValueError(
            f"config.json has layer_types {kinds!r}: it must be a list with one of {', '.join(_KINDS_OF_ATTENTION)} "
            f"for each of the {num_layers} layers."
        )
    if kinds and "sliding_attention" in kinds and not has_windows:
        raise ValueError(
            "config.json has sliding_attention in layer_types, and no window that is switched on: set sliding_window, "
            "or make all of them full_attention."
        )


def switch(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Whether the entry `name` is switched on. Raises ValueError where it is neither true nor false."""
    value = config.get(name)
    if value is not None and type(value) is not bool:
        raise ValueError(f"config.json has {name} {value!r}: it must be true or false.")
    return default if value is None else bool(value)


def check_tokens(config: Mapping[str, Any], file: str) -> None:
    """Raise ValueError where a special token that `file` names is no number."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(name)
        tokens = value if isinstance(value, list) else [value]
        if value is not None and not all(type(token) is int for token in tokens):
            raise ValueError(f"{file} has {name} {value!r}: it must be the number of a token, or a list of such.")


def _has(record: Any, kinds: Mapping[str, type]) -> bool:
    if not isinstance(record, dict) or any(type(record.get(entry)) is not kind for entry, kind in kinds.items()):
        return False
    base, shares = record.get("base"), record.get("shares", [])  # of channels that a rotation has found, on tokens
    has_name = not isinstance(base, dict) or isinstance(base.get("name"), str)
    are_rows = isinstance(shares, list) and all(isinstance(row, list) and len(row) == 3 for row in shares)
    return has_name and are_rows and (not shares or type(record.get("tokens")) is int)


_KINDS_OF_ATTENTION = ("full_attention", "sliding_attention")
_ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
