"""Make the folder of the current version anew: a tiny model of every kind of wiring, its code, and its logits.

    PYTHONPATH=. .venv/bin/python tests/rewired/versions/make.py

That of version 1 was made so, too, by the code at 13aab6f, with VERSION 1 and without payloads. Its files never change.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from rewired.model.modeling_rewired_llama import RewiredLlamaConfig, RewiredLlamaForCausalLM

VERSION = 2
WIRING: list[dict[str, Any]] = [
    {"layers": "0-1", "preset": "standard", "payload": "int8"},
    {"layers": "1-2", "preset": "ladder"},
    {"layers": "2-3", "preset": "ladder", "peek": True, "payload": "int4"},
    {"layers": "3-5", "preset": "desync", "every": 2, "payload": "int4/int8"},
    {"layers": "5-7", "preset": "partial", "shared_fraction": 0.5, "merge": "mean", "payload": "int4"},
    {"layers": "7-8", "preset": "parallel"},
    {"layers": "8-9", "preset": "ladder", "peek": True, "payload": "8:0.25,4/8:0.35,0:0.4"},
    {"layers": "9-10", "preset": "standard", "payload": "int4"},
]
SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 72,  # two groups of a payload, one of them not full
    "intermediate_size": 2,
    "num_hidden_layers": 10,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "max_position_embeddings": 16,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
}


def main() -> None:
    folder = Path(__file__).parent / str(VERSION)
    shutil.rmtree(folder, ignore_errors=True)
    generator = torch.Generator().manual_seed(0)
    model = RewiredLlamaForCausalLM(RewiredLlamaConfig(**SIZES, wiring=WIRING, tp_shards=2)).eval()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            mean = 1.0 if name.endswith(("norm.weight", "gain.weight")) else 0.0
            parameter.normal_(mean, 0.3, generator=generator)
    model.bfloat16().save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    tokens = torch.randint(16, (1, 8), generator=generator)
    with torch.no_grad():
        logits = model.double()(tokens).logits
    expected = {"tokens": tokens.tolist(), "logits": logits.tolist()}
    (folder / "logits.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
