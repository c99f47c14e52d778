"""Tiny rewired checkpoints that vLLM's attention on a CPU takes, and what vLLM and transformers continue with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rewired.checkpoint.rewired_config import auto_map
from rewired.model.family import LLAMA
from tests.rewired.tiny import rewired_model

from .engine import run

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,  # of 32 channels, the fewest there are kernels for
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
}

# one wiring of every kind, for four layers
WIRINGS: dict[str, list[dict[str, Any]]] = {
    "standard": [],
    "parallel": [{"layers": "0-4", "preset": "parallel"}],
    "parallel-overlap": [{"layers": "1-3", "preset": "parallel", "overlap": True}],
    "ladder": [{"layers": "0-4", "preset": "ladder"}],
    "ladder-in-the-middle": [{"layers": "1-3", "preset": "ladder"}],
    "ladder-peek": [{"layers": "0-4", "preset": "ladder", "peek": True}],
    "delay-2": [{"layers": "0-4", "preset": "ladder", "delay": 2}],
    "delay-2-peek": [{"layers": "0-3", "preset": "ladder", "peek": True, "delay": 2}],
    "desync-2x": [{"layers": "0-4", "preset": "desync"}],
    "desync-3x-overlap": [{"layers": "0-4", "preset": "desync", "every": 3, "overlap": True}],
    "desync-4x-mean": [{"layers": "0-4", "preset": "desync", "every": 4, "merge": "mean"}],
    "partial": [{"layers": "0-4", "preset": "partial", "shared_fraction": 0.4}],
    "partial-without-peek": [{"layers": "0-3", "preset": "partial", "shared_fraction": 0.5, "peek": False}],
    "mixed": [
        {"layers": "0-1:attn", "preset": "ladder", "peek": True},
        {"layers": "0-1:mlp,2-3", "preset": "partial", "shared_fraction": 0.5},
        {"layers": "3-4", "preset": "parallel", "overlap": True},
    ],
}

# reductions that send quantised parts
PAYLOADS: dict[str, list[dict[str, Any]]] = {
    "standard-int8": [{"layers": "0-4", "preset": "standard", "payload": "int8"}],
    "ladder-int8": [{"layers": "0-4", "preset": "ladder", "payload": "int8"}],
    "mixed-payloads": [
        {"layers": "0-2", "preset": "ladder", "peek": True, "payload": "8:0.5,0:0.5"},
        {"layers": "3-4", "preset": "desync", "payload": "int8"},
    ],
}

# of unequal lengths, so that a batch holds prompts and single tokens side by side
PROMPTS = [[5, 9, 33, 17], list(range(2, 31)), [40]]
NEW_TOKENS = 24


def save(folder: Path, wiring: list[dict[str, Any]], tp_shards: int, **changes: Any) -> Path:
    """A checkpoint with random gains, norm weights and biases, none of which can be forgotten."""
    torch.manual_seed(0)
    model = rewired_model(wiring, tp_shards, **(SIZES | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1, 0.2)
    model.to(changes.get("dtype", torch.float32)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": auto_map(LLAMA)}))  # as a conversion writes it
    return folder


def save_adapter(folder: Path, model: Path) -> tuple[Path, Path]:
    """A random LoRA of all projections of the checkpoint `model`, and a checkpoint with its weights merged."""
    adapter, merged = folder / "adapter", folder / "merged"
    adapter.mkdir(parents=True)
    shutil.copytree(model, merged)
    weights, deltas, rank = load_file(model / "model.safetensors"), {}, 4
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        lora_b = 0.1 * torch.randn(weights[name].shape[0], rank)
        lora_a = torch.randn(rank, weights[name].shape[1])
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        deltas |= {f"{prefix}.lora_A.weight": lora_a, f"{prefix}.lora_B.weight": lora_b}
        weights[name] += lora_b @ lora_a
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    save_file(deltas, adapter / "adapter_model.safetensors")
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": projections, "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return adapter, merged


def add_tokenizer(folder: Path) -> Any:
    """A tokenizer to which token 7 is the word `w7`, and which chats by saying what it was told."""
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(SIZES["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return tokenizer


def answers(jobs: dict[str, dict[str, Any]], folder: Path, ranks: int) -> dict[str, Any]:
    """What each job answers, by its name: on PROMPTS, in eager mode, where it does not say otherwise."""
    defaults = {"prompts": PROMPTS, "new_tokens": NEW_TOKENS, "enforce_eager": True}
    return dict(zip(jobs, run([defaults | job for job in jobs.values()], folder, ranks), strict=True))


@torch.no_grad()
def greedy(folder: Path, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """What transformers continues each prompt with."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.generation_config.eos_token_id = None  # as vLLM's `ignore_eos`
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    return [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts]


@torch.no_grad()
def regret(folder: Path, continuations: list[list[int]]) -> float:
    """By how much transformers would prefer another token anywhere in continuations of PROMPTS, in logits."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    worst = 0.0
    for prompt, tokens in zip(PROMPTS, continuations, strict=True):
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, (logits.amax(-1) - chosen).max().item())
    return worst
