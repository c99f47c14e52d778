"""The start of a training: its checkpoint, rewired first if the recipe says so, and the original of that."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from rewired.checkpoint import provenance
from rewired.checkpoint.checkpoint import Checkpoint
from rewired.checkpoint.kv_heads import with_copies
from rewired.checkpoint.rewired_config import wired_config
from rewired.convert import RefitRequest, Request, convert
from rewired.convert.plan import Plan, make_plan
from rewired.families import classes
from rewired.grid.parallel import tp_plan
from rewired.model.configuration import RewiredConfig
from rewired.model.rewired_model import RewiredForCausalLM
from rewired.progress import announce
from rewired.refit.run import model_config
from rewired.rotate.original import as_made
from rewired.sources import checkpoint_folder, find_source

from . import scratch
from .model.four_bit import check_blocks
from .model.trainable import UNCHANGED, Changed, changed_after, choose_or_adapt, rewired_layers
from .recipe.keys import Recipe

RECORD = provenance.TRAINED


@dataclass(frozen=True)
class Start:
    """The student's `folder`, and its original, the `base`: name, revision and the files' SHA-256, as in a config.

    `changed` is what differs from the original's weights before the training.
    """

    folder: Path
    base: dict[str, Any]
    changed: Changed = UNCHANGED

    @property
    def name(self) -> str | None:
        """The name of the original, of a folder the last part; None if it is not recorded."""
        original = provenance.original(self.base)
        return Path(original).name if original and Path(original).is_absolute() else original

    @property
    def original(self) -> Path:
        """The original's folder, in the student's basis. Raises ValueError if it does not exist any more."""
        if self.changed == UNCHANGED:
            return self.folder
        return as_made(self.folder, provenance.find(self.base, self.folder))


def prepare(recipe: Recipe, folder: Path, seed: int = 0) -> Start:
    """The start of `recipe`; what has to be rewired first is converted into `folder`, unless that was done before.

    Of a training from scratch, random weights of that `seed` are drawn there. Raises ValueError for a checkpoint or a
    wiring that cannot be used.
    """
    if recipe.from_scratch:
        if not (folder / "config.json").is_file():
            announce(f"Drawing random weights in the sizes of {recipe.model}.")
            with _preview(recipe) as checkpoint:
                scratch.draw(recipe, _planned(recipe, checkpoint), seed, folder)
        return Start(folder, provenance.record(find_source(str(folder)), folder) | {provenance.FROM_SCRATCH: True})
    if recipe.wiring is None:
        folder = checkpoint_folder(recipe.model)
    elif not (folder / "config.json").is_file():
        with _preview(recipe) as checkpoint:
            request = _request(recipe, checkpoint)
        without = ", without a refit: it was trained or refitted before" if recipe.refit_text else ""
        announce(f"Rewiring {recipe.model}{' and refitting it' if request.refit else without}.")
        convert(recipe.model, folder, request, on_layer=_announce_layer)
    checkpoint = Checkpoint.open(folder)
    _check_rewired(checkpoint)
    checkpoint.tensors()  # raises where the weights are not whole, and transformers would make some up
    model_config(checkpoint.config)  # raises for one of no model
    changed = provenance.changed(checkpoint.config)
    base = provenance.base_of(checkpoint.config)
    if base is None:  # the weights are still the original's
        base = provenance.record(find_source(recipe.model), checkpoint_folder(recipe.model))
    return Start(folder, dict(base), changed)


def _announce_layer(layer: int, layers: int, fits: list[Any]) -> None:
    announce(f"refit: layer {layer + 1} of {layers}")


def outline(recipes: Sequence[Recipe]) -> RewiredForCausalLM:
    """The student of the last of `recipes`, each of which trains the model of the one before it: without weights, and
    frozen where it is not trained.

    Raises ValueError for a model, a wiring or a `train` that make no sense. Nothing is written.
    """
    config, recipe = _config(recipes), recipes[-1]
    if recipe.hidden_weight and not rewired_layers(config):
        raise ValueError("hidden_weight compares what rewired layers give, and this model has none: leave it out.")
    return _without_weights(config, recipe)


def _without_weights(config: RewiredConfig, recipe: Recipe) -> RewiredForCausalLM:
    with torch.device("meta"):
        model: RewiredForCausalLM = classes(config.family, "ForCausalLM")(config)
    if recipe.load_in_4bit and recipe.is_sharded:
        check_blocks(model, recipe.tp_size)
    tp_plan(config, recipe.grid, recipe.fsdp_size)
    choose_or_adapt(model, recipe)  # LoRA in the model's own modules
    return model


def _config(recipes: Sequence[Recipe]) -> RewiredConfig:
    """The config of the model after the last of `recipes` has rewired it. Raises ValueError for what `convert` would
    refuse."""
    first = recipes[0]
    with _preview(first) as checkpoint:
        checkpoint.check_unquantised()
        checkpoint = _planned(first, checkpoint)
    for number, (before, recipe) in enumerate(pairwise(recipes), start=1):
        config = model_config(checkpoint.config)
        changed = changed_after(_without_weights(config, before), provenance.changed(checkpoint.config))
        trained = {RECORD: {"base": {"name": first.model}, "tokens": 0, **changed._asdict()}}
        folder = Path(f"What stage {number} makes")  # for error messages
        checkpoint = replace(checkpoint, folder=folder, config=checkpoint.config | trained)
        if recipe.wiring is not None:
            plan = make_plan(checkpoint, replace(_request(recipe, checkpoint), refit=None, retrain=True))
            checkpoint = _rewired(checkpoint, plan)
    return model_config(checkpoint.config)


def _planned(recipe: Recipe, checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` as `recipe` rewires it, apart from its weights."""
    if recipe.wiring is None:
        _check_rewired(checkpoint)
        return checkpoint
    request = _request(recipe, checkpoint)
    if recipe.from_scratch:
        return _rewired(checkpoint, make_plan(checkpoint, request))
    return _rewired(checkpoint, convert(recipe.model, request=request, dry_run=True).plan)


def _rewired(checkpoint: Checkpoint, plan: Plan) -> Checkpoint:
    """`checkpoint` as it will be after `plan`, apart from its weights."""
    checkpoint = with_copies(checkpoint, plan.kv_copies)
    config = wired_config(checkpoint.config, plan.wiring.to_json(), plan.tp_shards)
    if plan.cost:
        config["refit"] = {"base": {"name": str(checkpoint.folder)}, "wiring": config["wiring"]}
    return replace(checkpoint, config=config, wiring=plan.wiring)


def _request(recipe: Recipe, checkpoint: Checkpoint) -> Request:
    """The conversion that `recipe` asks for.

    Weights that were trained or refitted before are not refitted by default, and those that were trained with the same
    wiring are not even if the recipe says so: it may be the one that made them.
    """
    text, config = recipe.refit_text, checkpoint.config
    if recipe.refit is None and config.keys() & {RECORD, "refit", provenance.AGAIN}:
        text = None
    elif RECORD in config and recipe.tp_shards in (None, checkpoint.tp_shards):
        has_wiring = checkpoint.wiring.rewire(recipe.regions).modules == checkpoint.wiring.modules
        text = None if has_wiring else text
    refit = RefitRequest(text, recipe.refit_tokens) if text else None
    return Request(recipe.regions, recipe.tp_shards, refit=refit, retrain=recipe.retrain, command="adapt recipe.yaml")


@contextmanager
def _preview(recipe: Recipe) -> Iterator[Checkpoint]:
    """The checkpoint that `recipe` begins with, without its weights."""
    with tempfile.TemporaryDirectory(prefix="rewired-") as made:
        if recipe.from_scratch:
            yield scratch.sizes(recipe, Path(made))
        else:
            yield Checkpoint.open(find_source(recipe.model).preview(Path(made)))


def _check_rewired(checkpoint: Checkpoint) -> None:
    if checkpoint.config["model_type"] != checkpoint.shape.family.rewired_type:
        raise ValueError(
            f"{checkpoint.folder} is a dense model: give a wiring to rewire it first; standard keeps it as it is."
        )
