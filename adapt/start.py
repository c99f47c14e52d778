"""What a training starts from: the checkpoint, rewired first if the recipe says so, and the original of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from rewired.checkpoint import provenance
from rewired.checkpoint.checkpoint import Checkpoint, gain_names
from rewired.checkpoint.rewired_llama import wired_config
from rewired.convert import RefitRequest, Request, convert
from rewired.convert.request import Plan, check_gains, make_plan
from rewired.model.configuration_rewired_llama import RewiredLlamaConfig
from rewired.model.modeling_rewired_llama import RewiredLlamaForCausalLM
from rewired.sources import checkpoint_folder, find_source

from .lora import add_lora
from .recipe.choices import LORA
from .recipe.keys import Recipe
from .trainable import changed_after, choose, rewired_layers

RECORD = "adapted"  # the config's key for what a training leaves
_REWIRED = "is_rewired"  # of a base whose weights are the original's, and its wiring is not


@dataclass(frozen=True)
class Start:
    """The student's `folder`, and what a config says of its original, the `base`: name, revision, its files' SHA-256.

    The layers in `changed` have other weights than the original's; with `ends_changed`, embedding, last norm and head
    may have others as well.
    """

    folder: Path
    base: dict[str, Any]
    changed: tuple[int, ...] = ()
    ends_changed: bool = False

    @property
    def name(self) -> str | None:
        """The original's, without a folder's path; None where nobody wrote it down."""
        named = _original(self.base)
        return Path(named).name if named and Path(named).is_absolute() else named

    @property
    def original(self) -> Path:
        """Its folder. Raises ValueError where it is not there any more."""
        return provenance.find(self.base, self.folder) if self.changed or self.ends_changed else self.folder


def prepare(recipe: Recipe, folder: Path, on_layer: Callable[..., None]) -> Start:
    """The start of `recipe`; what has to be converted goes to `folder`, and is taken from there if it is whole.

    Raises ValueError for a checkpoint or a wiring that cannot be used.
    """
    if recipe.wiring is None:
        folder = checkpoint_folder(recipe.model)
    elif not (folder / "config.json").is_file():
        with tempfile.TemporaryDirectory(prefix="rewired-") as scratch:
            wanted = _request(recipe, Checkpoint.open(find_source(recipe.model).preview(Path(scratch))))
        convert(recipe.model, folder, wanted, on_layer=on_layer)
    return _opened(folder, recipe.model)


def outline(recipes: Sequence[Recipe]) -> RewiredLlamaForCausalLM:
    """The student of the last of `recipes`, of which each trains what the one before it made; without weights, and what
    is not trained frozen.

    Raises ValueError for a model, a wiring or a choice of what to train that make no sense; nothing is written.
    """
    config, recipe = _config(recipes), recipes[-1]
    if (recipe.align or recipe.hidden_weight) and not rewired_layers(config):
        raise ValueError(
            "align and hidden_weight compare what rewired layers give, and this model has none: leave them out."
        )
    return _without_weights(config, recipe)


def _without_weights(config: RewiredLlamaConfig, recipe: Recipe) -> RewiredLlamaForCausalLM:
    with torch.device("meta"):
        model = RewiredLlamaForCausalLM(config)
    if recipe.train == LORA:
        add_lora(model, recipe)  # in the model's own modules
    else:
        choose(model, recipe.train)
    return model


def _config(recipes: Sequence[Recipe]) -> RewiredLlamaConfig:
    """The model's, after the last of `recipes` rewired it. Raises ValueError for what `convert` would refuse."""
    first = recipes[0]
    with tempfile.TemporaryDirectory(prefix="rewired-") as scratch:
        checkpoint = Checkpoint.open(find_source(first.model).preview(Path(scratch)))
        if first.wiring is None:
            _check_rewired(checkpoint.folder, checkpoint.config)
        else:
            plan = convert(first.model, Path(scratch) / "start", _request(first, checkpoint), dry_run=True).plan
            checkpoint = _rewired(checkpoint, plan)
    for number, (before, recipe) in enumerate(pairwise(recipes), start=1):
        config = RewiredLlamaConfig.from_dict(checkpoint.config)
        layers, ends = changed_after(_without_weights(config, before), *changed_before(config))
        trained = {RECORD: {"base": {"name": first.model}, "layers": layers, "ends": ends}}
        made = Path(f"What stage {number} makes")
        checkpoint = replace(checkpoint, folder=made, config=checkpoint.config | trained)
        if recipe.wiring is not None:
            plan = make_plan(checkpoint, replace(_request(recipe, checkpoint), refit=None))
            gains = gain_names(checkpoint.wiring)
            check_gains(checkpoint, gains, plan.wiring, plan.tp_shards)
            checkpoint = _rewired(checkpoint, plan)
    return RewiredLlamaConfig.from_dict(checkpoint.config)


def _rewired(checkpoint: Checkpoint, plan: Plan) -> Checkpoint:
    """As it will be, weights aside."""
    config = wired_config(checkpoint.config, plan.wiring.to_json(), plan.tp_shards)
    if plan.cost:
        config["refit"] = {"base": {"name": str(checkpoint.folder)}}
    return replace(checkpoint, config=config, wiring=plan.wiring)


def _request(recipe: Recipe, checkpoint: Checkpoint) -> Request:
    """The conversion that `recipe` asks for. Weights that were trained or refitted before stay so by default."""
    text = recipe.refit_text
    if recipe.refit is None and checkpoint.config.keys() & {RECORD, "refit"}:
        text = None
    refit = RefitRequest(text, recipe.refit_tokens) if text else None
    return Request(recipe.wiring or [], recipe.tp_shards, refit=refit, command="adapt RECIPE  # below")


def _opened(folder: Path, model: str) -> Start:
    """The start in `folder`, which was made of the checkpoint `model` or is it."""
    config = Checkpoint.open(folder).config
    _check_rewired(folder, config)
    changed, ends_changed = changed_before(RewiredLlamaConfig.from_pretrained(folder))
    earlier = config.get(RECORD) or config.get("refit")
    made_from = earlier["base"] if earlier else _record(model)
    return Start(folder, made_from, tuple(changed), ends_changed)


def _record(model: str) -> dict[str, Any]:
    """Of a checkpoint with the original's weights; one that was only converted is not the original by its name."""
    folder = checkpoint_folder(model)
    found = provenance.record(find_source(model), folder)
    return found | ({_REWIRED: True} if Checkpoint.open(folder).is_rewired else {})


def changed_before(config: RewiredLlamaConfig) -> tuple[list[int], bool]:
    """What a checkpoint's config says of its weights: which layers' are not the original's any more, and whether any
    beside the layers are not."""
    if trained := getattr(config, RECORD, None):
        return trained["layers"], trained["ends"]
    return (rewired_layers(config) if getattr(config, "refit", None) else []), False


def _check_rewired(folder: Path, config: Mapping[str, Any]) -> None:
    if config["model_type"] != RewiredLlamaConfig.model_type:
        raise ValueError(
            f"{folder} is a dense Llama: give a wiring to rewire it first; [{{layers: 0-, preset: standard}}] keeps it "
            "as it is."
        )


def original_of(made: Path) -> str | None:
    """The original that the config of a trained model records, a path or an id on the hub, if it knows one."""
    return _original(Checkpoint.open(made).config[RECORD]["base"])


def _original(made_from: Mapping[str, Any]) -> str | None:
    return None if _REWIRED in made_from else str(made_from["name"])
