"""Recipes in files: YAML whose keys are TRL's and transformers' own names, and those of `Recipe`."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import torch
import yaml
from huggingface_hub.dataclasses import type_validator
from trl import SFTConfig, TrlParser

from . import feasible, refused
from .recipe import NO_REFIT, Recipe, Stage

_STAGED = "stages"  # a list of what each stage changes of the recipe
_IN_YAML = ("wiring", "datasets")  # keys whose values are written in YAML on the command line too
_EXTENDS = "extends"  # another recipe, from which this one inherits
# transformers' older names, which it reads only where the new one is not given
_NEW_NAMES = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}


def read(path: Path, overrides: Sequence[str]) -> list[Stage]:
    """The stages of the recipe in `path`, with `--key value` from the command line put over it.

    Raises ValueError for a file that is no recipe, for unknown keys, and for values that make no sense.
    """
    refused.check_launch()
    content = _read(path, ())
    stages = content.pop(_STAGED, None) or [{}]
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise ValueError(f"{path}: `stages` is a list of what each stage changes.")
    for key in ("output_dir", "model"):
        if any(key in stage for stage in stages):
            raise ValueError(f"{path}: all stages have one {key}: name it beside `stages`.")
    overrides = [_with_new_name(part) for part in overrides]
    found = [_parse(path, content | _with_new_names(stage), overrides) for stage in stages]
    if any(stage.get("refit") not in (None, False, *NO_REFIT) for stage in stages[1:]):
        raise ValueError(f"{path}: a refit fits the original's weights, which only the first stage has.")
    first = found[0].recipe
    if first.wiring is None and first.refit and first.refit_text:
        raise ValueError(f"{path}: a refit is for a model that is rewired first: give a wiring, or refit: none.")
    if all(stage.recipe.wiring is None and stage.recipe.tp_shards for stage in found):
        raise ValueError(f"{path}: tp_shards is for a model that is rewired first: give a wiring, too.")
    return found


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """A recipe's keys, after those of the one that it extends."""
    if path.resolve() in seen:
        raise ValueError(f"{path} extends itself.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        beside = [one.name for one in path.parent.glob("*.yaml")]
        near = difflib.get_close_matches(path.name, beside, 1)
        raise ValueError(f"There is no recipe {path}" + (f": did you mean {near[0]}?" if near else ".")) from None
    except (IsADirectoryError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is no YAML ({str(error).splitlines()[0]}).") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no recipe: a recipe is a mapping of keys to values.")
    content = _with_new_names(content)
    if parent := content.pop(_EXTENDS, None):
        content = _read(path.parent / str(parent), (*seen, path.resolve())) | content
    return content


def _with_new_names(content: Mapping[str, Any]) -> dict[str, Any]:
    return {_NEW_NAMES.get(key, key): value for key, value in content.items()}


def _with_new_name(part: str) -> str:
    """Of a command line: `--key`, `--key=value`, or a value."""
    flag, equals, value = part.partition("=")
    name = _NEW_NAMES.get(flag.removeprefix("--").replace("-", "_")) if flag.startswith("--") else None
    return f"--{name}{equals}{value}" if name else part


def _parse(path: Path, content: Mapping[str, Any], overrides: Sequence[str]) -> Stage:
    parser = _Parser([Recipe, SFTConfig], prog="adapt")  # type: ignore[list-item]
    for action in parser._actions:
        if action.dest in _IN_YAML:
            action.type, action.nargs = _from_yaml, None
    given = [flag.lstrip("-").split("=")[0].replace("-", "_") for flag in overrides if flag.startswith("--")]
    for key in [*content, *given]:
        if key not in _types():
            near = difflib.get_close_matches(str(key), _types(), 1)
            raise ValueError(
                f"{path}: '{key}' is no key of a recipe" + (f": did you mean '{near[0]}'?" if near else ".")
            )
        if key in refused.NEVER:
            raise ValueError(f"{path}: '{key}' is not for adapt: {refused.NEVER[key]}.")
    defaults: dict[str, Any] = {
        "output_dir": f"out/{path.stem}",
        "assistant_only_loss": True,
        "ddp_find_unused_parameters": False,  # every parameter that is trained is used in every step
        "ddp_timeout": 36_000,  # seconds that other ranks wait while the first one refits and tokenises
        "activation_checkpointing": True,  # TRL's default, by its new name
    }
    if not torch.cuda.is_available():
        defaults |= {"use_cpu": True, "bf16": False}
    parser.set_defaults_with_config(**defaults | {key: _typed(path, key, value) for key, value in content.items()})
    try:
        recipe, config = parser.parse_args_into_dataclasses(args=list(overrides), look_for_args_file=False)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: {error.doc} is no JSON.") from None
    except (TypeError, argparse.ArgumentError) as error:
        raise ValueError(f"{path}: {error}") from None
    if recipe.streaming and config.max_steps < 1:
        raise ValueError(f"{path}: nobody knows how long a stream is: give max_steps.")
    if recipe.streaming and config.dataloader_num_workers:
        raise ValueError(
            f"{path}: a stream is read, and its rows are counted, where it trains: leave dataloader_num_workers out."
        )
    if config.eval_steps and not recipe.held_out:
        raise ValueError(f"{path}: eval_steps measures on rows that are held out: give held_out.")
    feasible.check(config, recipe)
    read_as = {name: getattr(recipe if hasattr(recipe, name) else config, name) for name in [*content, *given]}
    return Stage(recipe, config, {name: _plain(value, content.get(name)) for name, value in read_as.items()})


def _plain(value: Any, written: Any) -> Any:
    """As YAML and JSON have it; SFTConfig makes objects of some mappings, which then stay as they were `written`."""
    value = getattr(value, "value", value)
    return value if isinstance(value, str | int | float | list | dict | None) else written or str(value)


def _typed(path: Path, key: str, value: Any) -> Any:
    """A value of a file, in its key's type; argparse sees to strings. Raises ValueError for one of another type."""
    expected = _types()[key]
    if key == "refit" and value is False:  # YAML's no
        return "none"
    if "float" in str(expected) and isinstance(value, str):  # PyYAML reads 5e-6 as one
        with suppress(ValueError):
            return float(value)
    if isinstance(value, str) or key in _IN_YAML:
        return value
    numbers = (value, float(value)) if isinstance(value, int) and not isinstance(value, bool) else (value,)
    for one in numbers:
        with suppress(TypeError):
            type_validator(key, one, expected)
            return one
    wanted = expected.__name__ if isinstance(expected, type) else str(expected)
    raise ValueError(f"{path}: {key} is {value!r}, and is to be of type {wanted}.")


@cache
def _types() -> dict[str, Any]:
    return get_type_hints(SFTConfig) | get_type_hints(Recipe)


def _from_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise argparse.ArgumentTypeError(f"{text} is no YAML") from None


class _Parser(TrlParser):
    """TrlParser, which says what is wrong instead of ending the program."""

    def error(self, message: str) -> Any:
        raise ValueError(f"{message[0].upper()}{message[1:].rstrip('.')}.")
