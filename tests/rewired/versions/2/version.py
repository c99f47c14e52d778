"""The version of the format: what a wiring in `config.json` computes, and what its tensors are called. Without torch.

A new one begins where either changes, and is a row of the table in docs/semantics.md.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from .payload import FULL

VERSION = 2  # what is written
FIRST = 1  # checkpoints without the field


def check_version(config: Mapping[str, Any]) -> None:
    """Raise ValueError unless a rewired `config` computes here what it computed where it was written."""
    version = config.get("wiring_version", FIRST)
    if type(version) is not int or version < FIRST:
        raise ValueError(f"config.json has wiring_version {version!r}: it must be an integer of at least {FIRST}.")
    if version > VERSION:
        raise ValueError(
            f"config.json has wiring_version {version}: this model was made by a newer rewired, and the one here knows "
            f"versions up to {VERSION}. Upgrade rewired."
        )
    if version == FIRST and _has_payload(config):
        raise ValueError(
            "config.json has a payload and no wiring_version, and what payloads compute has changed since it was "
            f"written: make this model anew, with `{_command(config)}`, where config.json is this one"
            f"{', and train that' if 'adapted' in config else ''}."
        )


def _has_payload(config: Mapping[str, Any]) -> bool:
    wiring = config.get("wiring")
    entries = wiring if isinstance(wiring, list) else []
    return any(isinstance(entry, Mapping) and entry.get("payload") not in (None, FULL) for entry in entries)


def _command(config: Mapping[str, Any]) -> str:
    """The conversion that makes a model of this `config`, from the original that its records name."""
    records = {name: config[name] for name in _FLAGS if isinstance(config.get(name), Mapping)}
    bases = [record.get("base") for record in records.values()]
    names = [base.get("name") if isinstance(base, Mapping) else base for base in bases]
    original = next((shlex.quote(name) for name in names if isinstance(name, str)), "ORIGINAL")
    flags = [_FLAGS[name].format(kind=record.get("kind")) for name, record in records.items()]
    return " ".join([f"convert {original} --wiring config.json --tp-shards {config.get('tp_shards')}", *flags]).strip()


_FLAGS = {"rotation": "--rotate {kind}", "calibrated": "--calibrate", "refit": "--refit", "adapted": ""}
