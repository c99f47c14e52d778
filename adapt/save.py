"""Saving a trained model as a Hugging Face folder: weights, code, tokenizer, and card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict

from rewired.checkpoint import provenance
from rewired.checkpoint.checkpoint import Checkpoint
from rewired.checkpoint.foreign_code import copy_without_foreign_code, without_foreign_code
from rewired.checkpoint.rewired_config import format_entries, write_code
from rewired.checkpoint.shape import family_in
from rewired.convert.destination import staged_folder
from rewired.sources import checkpoint_folder
from rewired.sources.hub import COMPANION_FILES

from .card import card
from .model.lora import merged, whole
from .model.student import unwrapped
from .model.trainable import changed_after
from .recipe.keys import LORA, Stage
from .start import RECORD, Start
from .trainer import checkpoints


def save(trainer: Any, stage: Stage, start: Start, notes: Sequence[str], final: Path) -> None:
    """Write the trained model to `final`, whole or not at all, in the dtype that it started from."""
    config, _ = without_foreign_code((start.folder / "config.json").read_text(encoding="utf-8"))
    model = trainer.accelerator.unwrap_model(trainer.model)
    record = _record(trainer, model, start, config.get(RECORD, {"tokens": 0}))
    tensors = _tensors(trainer, model, config, start.folder if stage.recipe.train == LORA else None)
    if not trainer.is_world_process_zero():
        return
    history = trainer.state.log_history
    earlier = None if stage.recipe.from_scratch else _trained_folder(stage.recipe.model)
    readme = card(start.folder, earlier, final, start.name, stage.given, history, record, notes)
    family = family_in(config)
    config |= {**format_entries(family), RECORD: record}
    with checkpoints.disk_errors(str(final), Path(trainer.args.output_dir)), staged_folder(final) as staging:
        _copy_companions(start.folder, staging)
        write_code(family, staging)  # a start that was fetched from the hub brings none
        if stage.given.get("chat_template_path"):
            template = trainer.processing_class.chat_template
            (staging / "chat_template.jinja").write_text(template, encoding="utf-8")
        save_torch_state_dict(tensors, staging)
        (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (staging / "training.json").write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")
        (staging / "README.md").write_text(readme, encoding="utf-8")


def _record(trainer: Any, model: Any, start: Start, before: Mapping[str, Any]) -> dict[str, Any]:
    """The config's record of this training; `before` is that of the training before it."""
    return {
        "base": start.base,
        **changed_after(model, start.changed)._asdict(),
        "tokens": int(trainer._total_train_tokens),
        "steps": trainer.state.global_step,
        "tokens_before": provenance.trained_tokens(before),
    }


def _tensors(trainer: Any, model: Any, config: Mapping[str, Any], start: Path | None) -> dict[str, torch.Tensor]:
    """The tensors to be written, on the first rank; of LoRA, added to those of `start`. All ranks have to call this."""
    model = unwrapped(model)
    named = merged(model, start) if start else ((name, whole(tensor)) for name, tensor in model.state_dict().items())
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"))
    tensors, head = {}, f"{model.family.head}.weight"
    for name, tensor in named:
        if trainer.is_world_process_zero() and not (name == head and config.get("tie_word_embeddings")):
            tensors[name] = tensor.to("cpu", dtype, copy=True).contiguous()
    return tensors


def _copy_companions(start: Path, folder: Path) -> None:
    """Copy the tokenizer and the like, and nothing else: an output_dir may lie in the start's folder."""
    for path in (path for pattern in COMPANION_FILES for path in start.glob(pattern)):
        copy = folder / path.relative_to(start)
        copy.parent.mkdir(exist_ok=True)
        copy_without_foreign_code(path, copy)


def _trained_folder(model: str) -> Path | None:
    """The folder of the checkpoint `model`, if it was trained before."""
    folder = checkpoint_folder(model)
    return folder if RECORD in Checkpoint.open(folder).config else None
