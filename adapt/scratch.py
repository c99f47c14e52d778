"""Training from scratch: random weights in the sizes of a model, of which only config and tokenizer are read."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

from rewired.checkpoint import provenance
from rewired.checkpoint.checkpoint import Checkpoint, read_json
from rewired.checkpoint.named_shapes import named_shape
from rewired.checkpoint.records import KV_HEAD_COPIES
from rewired.checkpoint.rewired_config import write_code
from rewired.convert.destination import staged_folder
from rewired.families import classes
from rewired.model.rewired_model import RewiredForCausalLM
from rewired.model.wiring_text import wiring_text
from rewired.refit.run import model_config
from rewired.rotate.request import RECORD as ROTATED
from rewired.sources import find_source
from rewired.sources.hub import SHORT_NAMES
from rewired.text.tokenizer import load_tokenizer

from .recipe.keys import Recipe

_OF_WEIGHTS = (provenance.TRAINED, *provenance.FITS, provenance.AGAIN, ROTATED, KV_HEAD_COPIES)  # records in a config


@contextmanager
def tokenizer_of(recipe: Recipe) -> Iterator[Path]:
    """A folder that the tokenizer of `recipe` loads from, without weights. Raises ValueError if there is none."""
    is_shape = named_shape(recipe.model) and recipe.model.lower() not in SHORT_NAMES
    if recipe.from_scratch and is_shape and not recipe.tokenizer:
        raise ValueError(f"{recipe.model} is a shape without a tokenizer: give tokenizer, a checkpoint that has one.")
    with tempfile.TemporaryDirectory(prefix="rewired-") as made:
        yield find_source(recipe.tokenizer or recipe.model).tokenizer(Path(made))


def sizes(recipe: Recipe, made: Path) -> Checkpoint:
    """The config whose sizes `recipe` takes, in the folder `made`, without what it records of its weights.

    Raises ValueError where there is none, and for shards that do not divide it.
    """
    shape = named_shape(recipe.model) if recipe.tokenizer else None  # what has its own has more than sizes, too
    config = shape.config() if shape else read_json(find_source(recipe.model).preview(made) / "config.json")
    kept = {name: value for name, value in config.items() if name not in _OF_WEIGHTS}
    own = made / "sizes"
    own.mkdir()
    (own / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    checkpoint = Checkpoint.open(own)
    checkpoint.shape.check_shards(recipe.tp_shards or 1)  # no KV head is copied
    return checkpoint


def draw(recipe: Recipe, checkpoint: Checkpoint, seed: int, folder: Path) -> None:
    """Write a rewired `checkpoint` with random weights to `folder`: those that transformers draws after `seed`."""
    family = checkpoint.shape.family
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: RewiredForCausalLM = classes(family, "ForCausalLM")(model_config(checkpoint.config))
    _scale_private_channels(model)
    with tokenizer_of(recipe) as source, staged_folder(folder) as staging:
        tokenizer = load_tokenizer(source)
        tokenizer.save_pretrained(staging)
        ends = ("bos_token_id", "eos_token_id", "pad_token_id") if recipe.tokenizer else ()
        config = checkpoint.config | {"dtype": checkpoint.dtype} | {name: getattr(tokenizer, name) for name in ends}
        (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_torch_state_dict(_tensors(model, getattr(torch, checkpoint.dtype)), staging)
        write_code(family, staging)
        wiring = wiring_text(checkpoint.wiring.regions)
        card = _CARD.format(folder.parent.name, Path(recipe.model).name, wiring, checkpoint.tp_shards, seed)
        (staging / "README.md").write_text(card, encoding="utf-8")


def _tensors(model: RewiredForCausalLM, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    left_out = f"{model.family.head}.weight" if model.config.tie_word_embeddings else None
    return {name: tensor.to(dtype) for name, tensor in model.state_dict().items() if name != left_out}


def _scale_private_channels(model: RewiredForCausalLM) -> None:
    """Let what is never summed vary as much as what is: by the square root of the shards (CAAT-Net's first version,
    section 3.2)."""
    family = model.family
    for layer, wirings in zip(model.base.decoder_layers, model.config.resolved_wiring.layers, strict=True):
        for module, wiring in zip(family.modules, wirings, strict=True):
            if wiring.leaves_channels:
                weight = layer.get_submodule(f"{module.path}.{module.writer.name}").weight  # [H, in]
                with torch.no_grad():
                    weight[wiring.shared_channels :] *= math.sqrt(model.config.tp_shards)


_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- rewired
- tensor-parallelism
---
# {0}

Trained from scratch with `rewired`: in the sizes of `{1}`, wired as {2}, for {3} tensor-parallel ranks. The first
weights were random (seed {4}). `transformers` loads it after `import rewired`, or with `trust_remote_code=True`.
"""
