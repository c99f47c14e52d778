"""Recipes read from files: YAML with the keys of TRL's SFTConfig and of `Recipe`, and values put over them."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import torch
import yaml
from huggingface_hub.dataclasses import type_validator
from trl import SFTConfig, TrlParser

from rewired.grid.size import TpSize

from . import checks, packaged
from .companions import announced
from .keys import NO_REFIT, Recipe, Stage
from .unsupported import UNSUPPORTED

_STAGES = "stages"  # a list of what each stage changes of the recipe
_EXTENDS = "extends"  # another recipe, from which this one inherits
_YAML_KEYS = ("wiring", "datasets")  # whose values are YAML on the command line, too


def read(path: Path, overrides: Sequence[str]) -> list[Stage]:
    """The stages of the recipe in `path`, with `--key value` from the command line in place of its values.

    `path` may also be the name of a recipe that comes with the package.

    Raises ValueError for a file that is not a recipe, for unknown keys, and for values that make no sense.
    """
    checks.check_launcher()
    path = packaged.find(path)
    content = _read(path, ())
    stages = content.pop(_STAGES, None) or [{}]
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise ValueError(f"{path}: `stages` is a list of what each stage changes.")
    for key in ("output_dir", "model"):
        if any(key in stage for stage in stages):
            raise ValueError(f"{path}: all stages have one {key}: name it beside `stages`.")
    parsed = [_parse(path, content | stage, overrides) for stage in stages]
    if any(stage.get("refit") not in (None, False, *NO_REFIT) for stage in stages[1:]):
        raise ValueError(f"{path}: a refit fits the original's weights, which only the first stage has.")
    first = parsed[0].recipe
    if first.wiring is None and first.refit and first.refit_text:
        raise ValueError(f"{path}: a refit is for a model that is rewired first: give a wiring, or refit: none.")
    if all(stage.recipe.wiring is None and stage.recipe.tp_shards for stage in parsed):
        raise ValueError(f"{path}: tp_shards is for a model that is rewired first: give a wiring, too.")
    return parsed


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The keys of the recipe in `path`, over those of the one that it extends; `seen` are those that extend it."""
    if path.resolve() in seen:
        raise ValueError(f"{path} extends itself.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give a recipe, which is a YAML file.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not YAML ({str(error).splitlines()[0]}).") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a recipe: a recipe is a mapping of keys to values.")
    if parent := content.pop(_EXTENDS, None):
        content = _read(packaged.find(Path(str(parent)), path.parent), (*seen, path.resolve())) | content
    return content


def _parse(path: Path, content: Mapping[str, Any], overrides: Sequence[str]) -> Stage:
    """One stage, from the keys of the file and the arguments of the command line, as which those of the file are read
    that have no structure."""
    flags = [flag.lstrip("-").split("=")[0].replace("-", "_") for flag in overrides if flag.startswith("--")]
    keys = [*content, *flags]
    _check_keys(path, keys)
    parser = _Parser([Recipe, SFTConfig, *announced()], prog="adapt")  # type: ignore[list-item]
    for action in parser._actions:
        if action.dest in _yaml_keys():
            action.type, action.nargs = _from_yaml, None
        elif action.dest == "tp_size":
            action.type = _grid
    structures = {key: value for key, value in content.items() if isinstance(value, list | dict | None)}
    arguments = [f"--{key}={value}" for key, value in content.items() if key not in structures]
    parser.set_defaults_with_config(**_defaults(path) | structures)
    try:
        for key in structures.keys() - _yaml_keys():
            type_validator(key, structures[key], _types()[key])
        recipe, config, *companions = parser.parse_args_into_dataclasses(
            args=[*arguments, *overrides], look_for_args_file=False
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: {error.doc} is not JSON.") from None
    except (TypeError, argparse.ArgumentError) as error:
        raise ValueError(f"{path}: {error}") from None
    checks.check(config, recipe)
    for companion in companions:
        companion.check(recipe, config)
    owners = {key: next(owner for owner in (recipe, config, *companions) if hasattr(owner, key)) for key in keys}
    given = {key: _plain(key, getattr(owner, key), content.get(key)) for key, owner in owners.items()}
    return Stage(recipe, config, given, tuple(companions))


def _check_keys(path: Path, keys: Sequence[str]) -> None:
    for key in keys:
        if key not in _types():
            near = difflib.get_close_matches(str(key), _types(), 1)
            raise ValueError(
                f"{path}: '{key}' is not a key of recipes" + (f": did you mean '{near[0]}'?" if near else ".")
            )
        if key in UNSUPPORTED:
            raise ValueError(f"{path}: '{key}' is not for adapt: {UNSUPPORTED[key]}.")


def _defaults(path: Path) -> dict[str, Any]:
    """Defaults of `adapt` that are not SFTConfig's."""
    defaults: dict[str, Any] = {
        "output_dir": f"out/{path.stem}",
        "assistant_only_loss": True,
        "ddp_find_unused_parameters": False,  # every parameter that is trained is used in every step
        "activation_checkpointing": True,  # TRL's default, by its new name
    }
    if not torch.cuda.is_available():
        defaults |= {"use_cpu": True, "bf16": False}
    return defaults


def _plain(key: str, value: Any, written: Any) -> Any:
    """A value as YAML and JSON can hold it; of some mappings SFTConfig makes objects, for which the recipe keeps what
    was `written`. Numbers of steps are whole, though transformers holds some as floats, which may be shares."""
    value = value.written if isinstance(value, TpSize) else getattr(value, "value", value)
    if key.endswith("_steps") and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [getattr(each, "value", each) for each in value]
    return value if isinstance(value, str | int | float | dict | None) else written or str(value)


@cache
def _types() -> dict[str, Any]:
    return {name: hint for keys in (SFTConfig, Recipe, *announced()) for name, hint in get_type_hints(keys).items()}


@cache
def _yaml_keys() -> tuple[str, ...]:
    return (*_YAML_KEYS, *(field.name for keys in announced() for field in fields(keys)))


def _from_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (RecursionError, yaml.YAMLError):
        raise argparse.ArgumentTypeError(f"{text} is not YAML") from None


def _grid(text: str) -> TpSize:
    try:
        return TpSize.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class _Parser(TrlParser):
    """TrlParser that raises ValueError instead of ending the program."""

    def error(self, message: str) -> Any:
        message = re.sub(r"^argument --(\w+)(/\S+)?:", r"\1:", message)  # which may stand in the file
        raise ValueError(f"{message.rstrip('.')}.")
