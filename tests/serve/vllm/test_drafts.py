"""What drafts read of a rewired model: whole hidden states between its layers, as transformers gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm")

from .models import PROMPTS, SIZES, WIRINGS, answers, greedy, save

pytestmark = pytest.mark.timeout(1200)
CHOSEN = ("standard", "ladder-peek", "desync-2x", "partial", "mixed")
LAYERS = [1, 2, 3]
PROMPT = PROMPTS[0]


@pytest.fixture(scope="module")
def models(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: save(folder / name, WIRINGS[name], ranks) for name in CHOSEN}


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random EAGLE-3 head: one layer, which reads three hidden states of the model."""
    folder = tmp_path_factory.mktemp("eagle")
    hidden, mlp, vocab = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["vocab_size"]
    head_dim = hidden // SIZES["num_attention_heads"]
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (hidden, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (SIZES["num_key_value_heads"] * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (SIZES["num_key_value_heads"] * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, hidden),
        "midlayer.mlp.gate_proj.weight": (mlp, hidden),
        "midlayer.mlp.up_proj.weight": (mlp, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, mlp),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    torch.manual_seed(0)
    save_file({name: 0.15 * torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    config = SIZES | {"num_hidden_layers": 1, "draft_vocab_size": vocab, "max_position_embeddings": 128}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "dtype": "float32"}
    config["eagle_aux_hidden_state_layer_ids"] = LAYERS
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def found(models: dict[str, Path], eagle: Path, ranks: int, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    jobs: dict[Any, dict[str, Any]] = {
        name: {"model": str(model), "prompts": [PROMPT], "record_states": LAYERS} for name, model in models.items()
    }
    drafts = {"method": "eagle3", "model": str(eagle), "num_speculative_tokens": 2}
    jobs |= {f"drafted {name}": {"model": str(model), "speculative_config": drafts} for name, model in models.items()}
    other = save(tmp_path_factory.mktemp("other"), WIRINGS["standard"], 1, vocab_size=2 * SIZES["vocab_size"])
    drafts = {"method": "draft_model", "model": str(other), "num_speculative_tokens": 2}
    jobs["another vocabulary"] = {"model": str(models["ladder-peek"]), "speculative_config": drafts}
    return answers(jobs, tmp_path_factory.mktemp("engine"), ranks)


@pytest.mark.parametrize("name", CHOSEN)
def test_hidden_states_are_whole(name: str, models: dict[str, Path], found: dict[Any, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(models[name])
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    assert len(found[name]) == len(LAYERS), found[name]
    for layer, states in zip(LAYERS, found[name], strict=True):
        torch.testing.assert_close(torch.tensor(states), expected[layer][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_draft_that_reads_them_changes_no_token(name: str, models: dict[str, Path], found: dict[Any, Any]) -> None:
    assert found[f"drafted {name}"] == greedy(models[name])


def test_a_draft_of_another_vocabulary_is_refused(found: dict[Any, Any]) -> None:
    assert "Target and draft model should have the same vocabulary size" in found["another vocabulary"]
