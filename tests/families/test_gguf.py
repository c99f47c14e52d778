"""A GGUF file of each family that transformers reads becomes the model that it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map
from transformers import AutoModelForCausalLM

from rewired.convert import Request, convert
from tests.evaluate.world import tokenizer

from .test_families import TOKENS, config_of, randomised

STANDARD = [{"layers": "0-", "preset": "standard"}]
# its name in GGUF, and what is changed: GGUF has no windows, transformers reads Qwen3's width of heads as 128
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": False}),
    "mistral-whole": ("llama", {"head_dim": 6}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen2-tied": ("qwen2", {}),
    "qwen3": ("qwen3", {"use_sliding_window": False, "head_dim": 128}),
}


def write_gguf(model: Any, architecture: str, path: Path, name: str = "A river 7B") -> None:
    """As llama.cpp writes it, in float32: a Mistral is a Llama there, and a Llama's q and k are permuted."""
    config, writer = model.config, GGUFWriter(path, architecture)
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokenizer().convert_ids_to_tokens(range(config.vocab_size - 1)), "th"])
    writer.add_token_merges(["t h"])
    names = get_tensor_name_map(
        next(arch for arch, known in MODEL_ARCH_NAMES.items() if known == architecture), config.num_hidden_layers
    )
    for parameter, tensor in model.named_parameters():
        rows = tensor.detach()
        if architecture == "llama" and ("q_proj" in parameter or "k_proj" in parameter):
            rows = rows.view(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
        writer.add_tensor(names.get_name(parameter, (".weight", ".bias")), np.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(folder: Path, config: str, architecture: str, name: str = "A river 7B", **changes: Any) -> Any:
    """The model that is in `folder`/tiny.gguf."""
    torch.manual_seed(0)
    model = randomised(AutoModelForCausalLM.from_config(config_of(config, vocab_size=260, **changes))).eval()
    write_gguf(model, architecture, folder / "tiny.gguf", name)
    return model


def dequantised(folder: Path) -> Path:
    return convert(folder / "tiny.gguf", folder / "out", Request(STANDARD, dtype="float32")).out


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWIRED_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_gguf_file_is_the_model_that_it_was_made_of(name: str, tmp_path: Path) -> None:
    architecture, changes = FAMILIES[name]
    model = make(tmp_path, name, architecture, **changes)
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(dequantised(tmp_path)).eval()(TOKENS).logits
        torch.testing.assert_close(found, model(TOKENS).logits, rtol=1e-4, atol=1e-4)


# what is written, as which architecture and with which name
REFUSED: dict[str, tuple[tuple[str, str, str], str]] = {
    "no biases": (("mistral-whole", "qwen2", "river"), "lacks the tensor 'model.layers.0.self_attn.k_proj.bias'"),
    "heads of another width": (("qwen3", "qwen3", "river"), "or has it in another size"),
    "a Llama's biases": (("llama", "llama", "river"), "'blk.0.attn_k.bias', which transformers does not read"),
    "a name that misleads": (("mistral-whole", "llama", "mistral"), "is a mistral, of which transformers reads no"),
}


@pytest.mark.parametrize(("made", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_transformers_would_make_up_or_drop_is_refused(
    made: tuple[str, str, str], sentence: str, tmp_path: Path
) -> None:
    make(tmp_path, *made)
    with pytest.raises(ValueError) as error:
        dequantised(tmp_path)
    assert sentence in str(error.value)
    assert not (tmp_path / "out").exists()
