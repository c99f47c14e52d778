"""A rewired checkpoint as SOURCE: further layers, other wirings, and back to dense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from rewired.convert import Request, convert

from .checkpoints import config_of, logits


def again(source: Path, *entries: dict[str, Any], out: str = "again", **options: Any) -> Path:
    """`source` converted, beside itself."""
    return convert(source, source.parent / out, Request(list(entries), **options)).out


def test_named_layers_change_and_the_others_keep_their_wiring(source: Path) -> None:
    first = again(source, {"layers": "1-5", "preset": "ladder", "peek": True}, out="first", tp_shards=2)
    second = again(first, {"layers": "2-3", "preset": "parallel"})
    assert config_of(second)["wiring"] == [
        {"layers": "0-1", "preset": "standard"},
        {"layers": "1-2,3-5", "preset": "ladder", "peek": True},
        {"layers": "2-3", "preset": "parallel"},
        {"layers": "5-6", "preset": "standard"},
    ]
    assert config_of(second)["tp_shards"] == 2


def test_back_to_dense_and_to_a_stock_llama(source: Path) -> None:
    first = again(source, {"layers": "1-5", "preset": "desync"}, out="first")
    dense = again(first, {"layers": "0-", "preset": "standard"}, out="dense")
    assert torch.equal(logits(dense), logits(source))
    stock = again(dense, to_stock=True, out="stock")
    assert config_of(stock) == config_of(source)
    assert not list(stock.glob("*.py"))
    ids = torch.arange(6)[None]
    llamas = (LlamaForCausalLM.from_pretrained(folder) for folder in (stock, source))
    assert torch.equal(*(llama(ids).logits for llama in llamas))


def test_a_payload_is_taken_and_taken_off_again(source: Path) -> None:
    first = again(source, {"layers": "0-", "preset": "standard", "payload": "int8"}, out="first")
    assert not torch.equal(logits(first), logits(source))
    dense = again(first, {"layers": "0-", "preset": "standard"}, out="dense")
    assert torch.equal(logits(dense), logits(source))


def test_trained_gains_are_never_carried_into_another_wiring(source: Path) -> None:
    first = again(source, {"layers": "2-6", "preset": "ladder", "peek": True}, out="first")
    AutoModelForCausalLM.from_pretrained(first).save_pretrained(source.parent / "trained")
    trained = source.parent / "trained"
    assert any(name.endswith("_gain.weight") for name in load_file(trained / "model.safetensors"))
    with pytest.raises(ValueError, match=r"gains .* of its present wiring"):
        again(trained, {"layers": "2-6", "preset": "desync"})
    with pytest.raises(ValueError, match="gains"):
        again(trained, tp_shards=2)
    more = again(trained, {"layers": "0-2", "preset": "parallel"})
    assert torch.isfinite(logits(more)).all()


@pytest.mark.parametrize("layers", ["1-6", "1-2"])
def test_more_layers_may_peek_beside_those_whose_gains_were_trained(layers: str, source: Path) -> None:
    """As progressive conversion does it: trained gains stay, and those of new layers are new."""
    first = again(source, {"layers": "2-6", "preset": "ladder", "peek": True}, out="first")
    model: Any = AutoModelForCausalLM.from_pretrained(first)
    with torch.no_grad():
        model.model.layers[3].input_gain.weight.fill_(0.5)
    model.save_pretrained(source.parent / "trained")
    more = again(source.parent / "trained", {"layers": layers, "preset": "ladder", "peek": True})
    grown: Any = AutoModelForCausalLM.from_pretrained(more)
    assert (grown.model.layers[3].input_gain.weight == 0.5).all()
    fresh: Any = AutoModelForCausalLM.from_pretrained(
        again(source, {"layers": "1-6", "preset": "ladder", "peek": True}, out="fresh")
    )
    expected = fresh.model.layers[1].post_attention_gain.weight
    assert torch.equal(grown.model.layers[1].post_attention_gain.weight, expected)
