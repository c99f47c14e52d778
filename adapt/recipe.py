"""Recipes: YAML files whose keys are TRL's and transformers' own names, and those of `Recipe`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import torch
import yaml
from huggingface_hub.dataclasses import type_validator
from trl import SFTConfig, TrlParser

from rewired.convert.request import MIX
from rewired.sharding import COLUMN_PARALLEL, ROW_PARALLEL

from . import feasible, refused
from .data import Source
from .losses import DIVERGENCES
from .trainable import CHOICES

LORA = "lora"
NO_REFIT = ("none", "false", "no")
_STAGED = "stages"  # a list of what each stage changes of the recipe
_IN_YAML = ("wiring", "datasets")  # keys whose values are written in YAML on the command line too
_PROJECTIONS = (*COLUMN_PARALLEL, *ROW_PARALLEL)
_EXTENDS = "extends"  # another recipe, from which this one inherits
# transformers' older names, which it reads only where the new one is not given
_NEW_NAMES = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}


@dataclass
class Recipe:
    """What `adapt` adds to TRL's SFTConfig."""

    model: str = field(
        default="", metadata={"help": "A checkpoint: a folder, a hub id, or a short name; dense or rewired."}
    )
    wiring: list[dict] | None = field(  # type: ignore[type-arg]
        default=None, metadata={"help": "Rewire it first, as in a config: a list of {layers: 16-32, preset: ladder}."}
    )
    tp_shards: int | None = field(default=None, metadata={"help": "Logical tensor-parallel shards, as for convert."})
    refit: str | None = field(
        default=None,
        metadata={
            "help": "Text to refit on after rewiring: a file, a folder, a dataset, or mix. Where a recipe distills, "
            "mix is the default; none leaves it out."
        },
    )
    refit_tokens: int = field(default=32_768, metadata={"help": "Tokens to refit on."})
    datasets: list[dict] | None = field(  # type: ignore[type-arg]
        default=None, metadata={"help": "What to train on: paths, or {path, name, split, weight, languages, sources}."}
    )
    streaming: bool = field(default=False, metadata={"help": "Read datasets while training, not before."})
    skip_bad: bool = field(default=False, metadata={"help": "Leave rows out that are no good, and count them."})
    held_out: int = field(default=16, metadata={"help": "The first rows, which are never trained on, and judge."})
    train: str = field(default="all", metadata={"help": "Which parameters.", "choices": [*CHOICES, LORA]})
    lora_r: int = field(default=16, metadata={"help": "The rank of LoRA."})
    lora_alpha: int = field(default=32, metadata={"help": "The scale of LoRA, over its rank."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "The projections that get LoRA; all seven of a layer by default."}
    )
    fsdp_size: int = field(default=1, metadata={"help": "Ranks that the model is sharded over (FSDP2)."})
    dp_replicate_size: int = field(default=1, metadata={"help": "Such groups of ranks, each with a model (HSDP)."})
    tp_size: int = field(default=1, metadata={"help": "Ranks that share each layer's work (tensor parallelism)."})
    ce_weight: float = field(default=1.0, metadata={"help": "Of the cross-entropy with the data: SFT."})
    kd_weight: float = field(default=0.0, metadata={"help": "Of the divergence from the original: distillation."})
    divergence: str = field(default="forward_kl", metadata={"help": "Which one.", "choices": list(DIVERGENCES)})
    temperature: float = field(default=1.0, metadata={"help": "Of both models' logits in the divergence."})
    hidden_weight: float = field(
        default=0.0, metadata={"help": "Of the normalised squared error after each rewired layer."}
    )

    align: bool = field(
        default=False,
        metadata={"help": "Each rewired layer learns by itself to give what the original's gives; no other loss."},
    )

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("The recipe names no model: give model, a checkpoint's folder or hub id.")
        if isinstance(self.lora_target_modules, str):  # YAML's way to write a list of one
            self.lora_target_modules = [self.lora_target_modules]
        for name in self.lora_target_modules or ():
            if name not in _PROJECTIONS:
                near = difflib.get_close_matches(str(name), _PROJECTIONS, 1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_PROJECTIONS)}."
                raise ValueError(f"lora_target_modules has '{name}', which is no projection of a layer: {hint}")
        if not self.datasets:
            raise ValueError("The recipe names no datasets: give a list of paths.")
        for one in dataclasses.fields(self):  # argparse looks at flags only, and not at what a file says
            choices, value = one.metadata.get("choices"), getattr(self, one.name)
            if choices and value not in choices:
                raise ValueError(f"{one.name} is '{value}': choose {', '.join(choices)}.")
        for name in ("ce_weight", "kd_weight", "hidden_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}: give 0 or more.")
        if not (self.align or self.ce_weight + self.kd_weight + self.hidden_weight):
            raise ValueError("ce_weight, kd_weight and hidden_weight are all 0: there is nothing to minimise.")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}: give one above 0.")
        if self.held_out < 0 or min(self.refit_tokens, self.lora_r, self.lora_alpha) < 1:
            raise ValueError("held_out is at least 0, and refit_tokens, lora_r and lora_alpha at least 1.")
        if self.align and self.train == "all":
            raise ValueError(
                "align trains nothing but rewired layers: say train: rewired, or norms_and_gains, or lora."
            )
        if self.align and self.tp_size > 1:
            raise ValueError("align runs the original whole on each rank: leave tp_size out, fsdp_size may stay.")
        if self.train == LORA and self.is_sharded:
            raise ValueError("LoRA is not sharded: leave fsdp_size, dp_replicate_size and tp_size out.")
        if not isinstance(self.wiring, list | None):
            raise ValueError(f"wiring is {self.wiring!r}: give a list of {{layers: 16-32, preset: ladder}}.")
        _ = self.mix  # raises for entries that make no sense

    @property
    def is_sharded(self) -> bool:
        """Whether no rank holds the whole model."""
        return max(self.fsdp_size, self.tp_size, self.dp_replicate_size) > 1

    @property
    def ranks(self) -> int:
        """That it is split over."""
        return self.fsdp_size * self.dp_replicate_size * self.tp_size

    @property
    def refit_text(self) -> str | None:
        """What to refit on after rewiring; where it distills, the packaged mix by default."""
        text = self.refit or (MIX if self.distills else NO_REFIT[0])
        return None if text.lower() in NO_REFIT else text

    @property
    def distills(self) -> bool:
        """Whether the original is needed to train."""
        return self.align or self.kd_weight > 0 or self.hidden_weight > 0

    @property
    def losses(self) -> list[str]:
        """The names of those that are measured where it distills; cross-entropy always is, unless layers align."""
        if self.align:
            return ["hidden"]
        if not self.distills:
            return []
        weights = {"ce": 1.0, "kd": self.kd_weight, "hidden": self.hidden_weight}
        return [name for name, weight in weights.items() if weight]

    @property
    def mix(self) -> list[Source]:
        entries = self.datasets if isinstance(self.datasets, list) else [self.datasets]
        return [Source.from_recipe(entry) for entry in entries]


@dataclass(frozen=True)
class Stage:
    """One training; a recipe without `stages` has one."""

    recipe: Recipe
    config: SFTConfig
    given: dict[str, Any]  # what the file and the command line say; the rest is default


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
    feasible.check(config, recipe.distills)
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
