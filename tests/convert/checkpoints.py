"""Tiny Llama checkpoints on disk, whole or broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
INDEX = "model.safetensors.index.json"


def make_llama(folder: Path, sharded: bool = True, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A random Llama as transformers saves it, in three shards or one file, with small companion files."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | changes))).to(dtype)
    model.save_pretrained(folder, max_shard_size="60KB" if sharded else "1GB")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("---\nlicense: llama3.1\n---\n# A tiny Llama\n")
    (folder / "modeling_evil.py").write_text("raise SystemExit('code from a source folder ran')")
    return folder


def broken_copy(source: Path, folder: Path, layer: int) -> Path:
    """A copy of a checkpoint in one file, with a weight of `layer` that is no number."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    weights[f"model.layers.{layer}.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Change entries of a JSON file; None removes one."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: entry for name, entry in value.items() if entry is not None}))


def edit_tensors(path: Path, changes: Mapping[str, torch.Tensor | None]) -> None:
    """Change tensors of a safetensors file; None removes one."""
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, {"format": "pt"})


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def logits(path: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path)(torch.arange(12).view(2, 6)).logits


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` and its content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
