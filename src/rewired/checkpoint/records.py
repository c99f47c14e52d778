"""What config.json records of a checkpoint's making, and how it places positions: checked before anything reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

KV_HEAD_COPIES = "kv_head_copies"  # how often each KV head of the original is there


def check_records(config: Mapping[str, Any]) -> None:
    """Raise ValueError where a record of a rotation, a fit or a training is not as `convert` and `adapt` write it."""
    for name, is_whole in _RECORDS.items():
        if name in config and not (isinstance(config[name], Mapping) and is_whole(config[name])):
            raise ValueError(
                f"config.json's record '{name}' is not as convert and adapt write it: take config.json as it was."
            )
    copies, heads = config.get(KV_HEAD_COPIES, 1), config.get("num_key_value_heads", 1)
    if type(copies) is not int or copies < 1 or heads % copies:
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
        if value is not None and not _are(int, value if isinstance(value, list) else [value]):
            raise ValueError(f"{file} has {name} {value!r}: it must be the number of a token, or a list of such.")


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


def _is_rotation(record: Mapping[str, Any]) -> bool:
    texts = [record.get("kind"), record.get("base"), record.get("text", "")]
    rows, tokens = record.get("shares", []), record.get("tokens", 0)
    are_shares = isinstance(rows, list) and all(isinstance(row, list) and len(row) == 3 for row in rows)
    is_found = "tokens" in record or not rows
    return are_shares and is_found and _are(str, texts) and _are(int, [record.get("untied_head"), tokens])


def _is_fit(record: Mapping[str, Any]) -> bool:
    return _has_base(record) and _are(list, [record.get("wiring"), record.get("notes")])


def _is_training(record: Mapping[str, Any]) -> bool:
    layers = record.get("layers")
    has_layers = isinstance(layers, list) and _are(int, layers)
    return _has_base(record) and has_layers and _are(bool, [record.get("ends")]) and _are(int, [record.get("tokens")])


def _is_rewiring(record: Mapping[str, Any]) -> bool:
    layers, before = record.get("layers"), record.get("before")
    are_lists = isinstance(layers, list) and _are(int, layers) and isinstance(before, list)
    return _has_base(record) and are_lists and _are(str, before or []) and _are(bool, [record.get("ends")])


def _has_base(record: Mapping[str, Any]) -> bool:
    base = record.get("base")
    return isinstance(base, Mapping) and isinstance(base.get("name"), str)


def _are(kind: type, values: list[Any]) -> bool:
    return all(type(value) is kind for value in values)


_RECORDS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "rotation": _is_rotation,
    "calibrated": _is_fit,
    "refit": _is_fit,
    "adapted": _is_training,
    "rewired_again": _is_rewiring,
}
