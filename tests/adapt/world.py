"""A tiny Llama that chats, conversations for it, and recipes that train it within a second."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from trl import SFTConfig

from rewired.adapt.cli import main
from rewired.adapt.data import corpus
from rewired.adapt.recipe.keys import Recipe
from rewired.adapt.recipe.reading import read
from rewired.adapt.run import adapt
from rewired.checkpoint import provenance
from rewired.checkpoint.checkpoint import Checkpoint
from rewired.convert import Request, convert
from tests.evaluate.world import make_dense, tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LADDER = [{"layers": "2-4", "preset": "ladder"}]
SIZES = {"initializer_range": 0.3, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 4}


def make_chat(folder: Path, **changes: Any) -> Path:
    """A dense checkpoint whose tokenizer has ChatML's template."""
    make_dense(folder, **(SIZES | changes))
    made = tokenizer()
    made.chat_template = CHATML
    made.save_pretrained(folder)
    return folder


def make_rewired(dense: Path, folder: Path, wiring: list[dict[str, Any]], **options: Any) -> Path:
    return convert(dense, folder, Request(wiring, tp_shards=4, **options)).out


def make_chat_of_4_bits(folder: Path, **changes: Any) -> Path:
    """One whose projections hold numbers that NF4 has, so that quantising changes none, not even a part at a time."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit  # which a GPU's machine may lack

    make_chat(folder, **{"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.13} | changes)
    tensors = weights(folder)
    for name, weight in tensors.items():
        if name.endswith("proj.weight"):
            tensors[name] = dequantize_4bit(*quantize_4bit(weight, quant_type="nf4"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def original(made: Path) -> str | None:
    """The original that a trained model names."""
    return provenance.original(provenance.base_of(Checkpoint.open(made).config))


def conversations(count: int = 40) -> list[dict[str, Any]]:
    """As Infinity-Instruct has them."""
    words = ["river", "stone", "bread", "cloud"]
    return [
        {
            "conversations": [
                {"from": "human", "value": f"Say {words[n % 4]} {n}."},
                {"from": "gpt", "value": " ".join([words[n % 4]] * (1 + n % 3))},
            ]
        }
        for n in range(count)
    ]


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(*datasets: Any, longest: int | None = None, packing: bool = False, **keys: Any) -> corpus.Corpus:
    tokens = tokenizer()
    tokens.chat_template = CHATML
    options = {"max_length": longest, "packing": packing, "assistant_only_loss": True, "seed": 3}
    config = SFTConfig(output_dir="unused", use_cpu=True, bf16=False, **options)
    recipe = Recipe(model="unused", datasets=list(datasets), **{"held_out": 0} | keys)
    return corpus.load(recipe, config, tokens)


def texts(found: corpus.Corpus) -> list[str]:
    return [tokenizer().decode(row["input_ids"]) for row in found.train]


def distillation(model: Path, rows: Path, out: Path) -> dict[str, Any]:
    """Keys of a recipe that distills a ladder, converted only."""
    return {
        "model": str(model),
        "wiring": LADDER,
        "refit": "none",
        "datasets": [str(rows)],
        "train": "rewired",
        "ce_weight": 0.0,
        "kd_weight": 1.0,
        "output_dir": str(out),
    }


def write_recipe(path: Path, **keys: Any) -> Path:
    """A short training, unless `keys` say otherwise; None removes a key."""
    short: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "max_length": 128,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_steps": 2,
        "held_out": 4,
        "activation_checkpointing": False,
        "disable_tqdm": True,
    }
    path.write_text(yaml.safe_dump({key: value for key, value in (short | keys).items() if value is not None}))
    return path


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> Any:
    """The exit status of the command `adapt`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["adapt", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def train(path: Path, resume: bool = False, **keys: Any) -> Path:
    """What a recipe of these `keys` makes."""
    return adapt(read(write_recipe(path, **keys), []), resume)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def logged(folder: Path, name: str) -> list[float]:
    return [entry[name] for entry in json.loads((folder / "training.json").read_text()) if name in entry]


def logits_of(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return LlamaForCausalLM.from_pretrained(folder)(ids).logits


def check_names(card: str) -> None:
    """The model has the name of its output_dir, and is made of the original, whatever folders were between them."""
    assert "\n# out\n" in card and card.count('out/final"') == 2 and re.search("\n    rewired info .*out/final\n", card)
    assert "base_model" not in card and "`dense`, rewired" in card
    assert "start`" not in card and "final`" not in card
