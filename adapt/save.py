"""The model that comes of a training, as a Hugging Face folder: weights, code, tokenizer, card and curves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from peft import PeftModel
from torch.distributed.tensor import DTensor

from rewired.checkpoint.checkpoint import Checkpoint
from rewired.checkpoint.rewired_llama import AUTO_MAP, write_code
from rewired.convert.destination import staged_folder
from rewired.sources import checkpoint_folder
from rewired.sources.hub import COMPANION_FILES

from .card import card
from .plots import curves
from .recipe.keys import Stage
from .start import RECORD, Start
from .trainable import changed_after


def save(trainer: Any, stage: Stage, start: Start, notes: Sequence[str], made: Path) -> None:
    """Write the trained model to `made`, whole or not at all, in the dtype that it started from."""
    config = json.loads((start.folder / "config.json").read_text(encoding="utf-8"))
    model = trainer.accelerator.unwrap_model(trainer.model)
    layers, ends = changed_after(model, start.changed, start.ends_changed)
    tensors = _tensors(trainer, model, config)
    if not trainer.is_world_process_zero():
        return
    history = trainer.state.log_history
    config["auto_map"] = AUTO_MAP
    before = config.get(RECORD, {"tokens": 0})
    config[RECORD] = {
        "base": start.base,
        "layers": layers,
        "ends": ends,
        "tokens": int(trainer._total_train_tokens),
        "steps": trainer.state.global_step,
        "tokens_before": before["tokens"] + before.get("tokens_before", 0),
    }
    readme = card(
        start.folder,
        _trained(stage.recipe.model),
        made.parent.name,
        start.name,
        stage.given,
        history,
        config[RECORD],
        notes,
    )
    with staged_folder(made) as staging:
        _copy_companions(start.folder, staging)
        write_code(staging)  # what was fetched brings none
        if stage.given.get("chat_template_path"):
            template = trainer.processing_class.chat_template
            (staging / "chat_template.jinja").write_text(template, encoding="utf-8")
        save_torch_state_dict(tensors, staging)
        (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (staging / "training.json").write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")
        curves(history, staging / "curves.png")
        (staging / "README.md").write_text(readme, encoding="utf-8")


def _tensors(trainer: Any, model: Any, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What is to be written, on the first rank; all ranks have to take part."""
    if isinstance(model, PeftModel):
        model = model.merge_and_unload()
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"))
    found = {}
    for name, tensor in model.state_dict().items():
        if not (name == "lm_head.weight" and config.get("tie_word_embeddings")):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if trainer.is_world_process_zero():
                found[name] = whole.to("cpu", dtype, copy=True).contiguous()
    return found


def _copy_companions(start: Path, folder: Path) -> None:
    """And nothing else: an output_dir may lie in the start's folder."""
    for path in (path for pattern in COMPANION_FILES for path in start.glob(pattern)):
        copy = folder / path.relative_to(start)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def _trained(model: str) -> Path | None:
    """The folder of a checkpoint, if a training made it."""
    folder = checkpoint_folder(model)
    return folder if RECORD in Checkpoint.open(folder).config else None
