"""A checkpoint that says one family and holds another's tensors, or windows that are none: one sentence, no output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rewired.convert import Request, convert
from tests.convert.checkpoints import edit_tensors

from .test_families import config_of

ATTENTION = "model.layers.1.self_attn"
K_BIAS, O_BIAS, K_NORM = (f"{ATTENTION}.{name}" for name in ("k_proj.bias", "o_proj.bias", "k_norm.weight"))
SLIDING = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]

BROKEN_TENSORS: dict[str, tuple[str, dict[str, torch.Tensor | None], str]] = {
    "a bias is missing": ("qwen2", {K_BIAS: None}, f"lacks the tensor '{K_BIAS}'"),
    "a bias too many": ("qwen2", {O_BIAS: torch.ones(48)}, f"'{O_BIAS}' in model.safetensors has no place in a Qwen2"),
    "a bias of another size": ("qwen2", {K_BIAS: torch.ones(3)}, "has shape"),
    "a norm of heads is missing": ("qwen3", {K_NORM: None}, f"lacks the tensor '{K_NORM}'"),
    "a norm of heads too many": ("mistral", {K_NORM: torch.ones(6)}, f"'{K_NORM}' in model.safetensors has no place"),
}
BROKEN_CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "Llama's tensors as a Qwen3": ("mistral", {"model_type": "qwen3"}, "lacks the tensor 'model.layers.0.self_attn."),
    "Llama's tensors as a Qwen2": ("mistral", {"model_type": "qwen2"}, "lacks the tensor 'model.layers.0.self_attn."),
    "a Qwen2 as a Llama": ("qwen2", {"model_type": "llama"}, "k_proj.bias' in model.safetensors has no place in a Ll"),
    "a Qwen3 as a Mistral": ("qwen3", {"model_type": "mistral"}, "k_norm.weight' in model.safetensors has no place"),
    "biases switched off": ("qwen3-bias", {"attention_bias": False}, "has no place in a Qwen3 of this config.json"),
    "a switch that is none": ("qwen3-bias", {"attention_bias": "yes"}, "attention_bias 'yes': it must be true or"),
    "a window that is a text": ("mistral", {"sliding_window": "4096"}, "sliding_window '4096': it must be null or an"),
    "a window of nothing": ("qwen3", {"sliding_window": 0}, "sliding_window 0: it must be null or an integer of at"),
    "a window that is true": ("qwen2", {"sliding_window": True}, "sliding_window True: it must be null or an integer"),
    "windows perhaps": ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window 'yes': it must be true or false"),
    "windows from a layer on that is none": ("qwen2", {"max_window_layers": "2"}, "max_window_layers '2': it must be"),
    "layers of no known kind": ("qwen3", {"layer_types": ["linear_attention"] * 4}, "one of full_attention, sliding_"),
    "kinds of too few layers": ("mistral", {"layer_types": SLIDING[1:]}, "for each of the 4 layers"),
    "windows switched off": ("qwen2", {"use_sliding_window": False}, "sliding_attention in layer_types, and no window"),
    "layers with a window, and none": ("mistral-whole", {"layer_types": SLIDING}, "layer_types, and no window"),
}


def source(name: str, folder: Path) -> Path:
    AutoModelForCausalLM.from_config(config_of(name)).save_pretrained(folder)
    return folder


def assert_refused(folder: Path, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        convert(folder / "source", folder / "out", Request([{"layers": "2-4", "preset": "ladder"}]))
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert [path.name for path in folder.iterdir()] == ["source"]


@pytest.mark.parametrize(("name", "changes", "sentence"), BROKEN_TENSORS.values(), ids=BROKEN_TENSORS)
def test_broken_tensors(name: str, changes: dict[str, torch.Tensor | None], sentence: str, tmp_path: Path) -> None:
    edit_tensors(source(name, tmp_path / "source") / "model.safetensors", changes)
    assert_refused(tmp_path, sentence)


@pytest.mark.parametrize(("name", "changes", "sentence"), BROKEN_CONFIGS.values(), ids=BROKEN_CONFIGS)
def test_broken_config(name: str, changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    path = source(name, tmp_path / "source") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert_refused(tmp_path, sentence)
