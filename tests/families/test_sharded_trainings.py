"""Each family's training on ranks that share the model learns what one process does, over slow links too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rewired.adapt.recipe.reading import read
from rewired.adapt.run import adapt
from rewired.ranks import run_on_ranks
from tests.adapt.world import CHATML, conversations, logged, train, weights, write_recipe, write_rows
from tests.evaluate.world import tokenizer

from .test_families import config_of, randomised

RANKS, ROWS = 2, 2


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "qwen2"))]
)
def test_two_ranks_learn_what_one_process_does(name: str, tmp_path: Path) -> None:
    dense = tmp_path / name
    torch.manual_seed(0)
    randomised(AutoModelForCausalLM.from_config(config_of(name))).save_pretrained(dense)
    chats = tokenizer()
    chats.chat_template = CHATML
    chats.save_pretrained(dense)
    keys: dict[str, Any] = {
        "model": str(dense),
        "wiring": "ladder+peek@1-4",
        "tp_shards": 2,
        "refit": "none",
        "datasets": [str(write_rows(tmp_path / "rows.jsonl", conversations(24)))],
        "train": "all",
        "ce_weight": 0.5,
        "kd_weight": 1.0,
        "max_steps": 6,
        "save_strategy": "no",
    }
    alone = {"per_device_train_batch_size": ROWS * RANKS, "output_dir": str(tmp_path / "alone")}
    expected = train(tmp_path / "alone.yaml", **keys | alone)
    shared = {"per_device_train_batch_size": ROWS, "fsdp_size": RANKS}
    ways: dict[str, dict[str, Any]] = {"fsdp": {}, "comm": {"comm": {"ranks_per_node": 1}}}
    recipes = {
        way: write_recipe(tmp_path / f"{way}.yaml", **keys | shared | changes | {"output_dir": str(tmp_path / way)})
        for way, changes in ways.items()
    }
    run_on_ranks(train_all, RANKS, list(recipes.values()))
    for quantity in ("loss", "ce", "kd", "num_tokens"):
        found = {way: logged(tmp_path / way / "final", quantity) for way in ways}
        assert found["fsdp"] == pytest.approx(logged(expected, quantity), rel=2e-4) != [], quantity
        assert found["comm"] == pytest.approx(found["fsdp"], rel=5e-2), quantity
    found_weights = weights(tmp_path / "fsdp" / "final")
    for tensor_name, tensor in weights(expected).items():
        torch.testing.assert_close(found_weights[tensor_name], tensor, rtol=1e-3, atol=1e-4, msg=tensor_name)


def train_all(recipes: list[Path]) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # accelerate asks for them, though nobody listens there
    for recipe in recipes:
        adapt(read(recipe, []))
