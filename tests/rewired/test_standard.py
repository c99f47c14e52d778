"""The `standard` wiring is stock Llama, to the last bit; and where no view differs per shard, only nn.Linear runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer, LlamaForCausalLM

from rewired.convert import Request, convert
from rewired.model import sharding
from rewired.model.modeling_rewired_llama import RewiredLlamaForCausalLM

from ..conftest import PROSE
from .tiny import LLAMA3_ROPE, WIRINGS, rewired_model, stock_twin, tokens

SHAPES = {
    "gqa": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied, odd head_dim": {"tie_word_embeddings": True, "head_dim": 6},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_tiny_models_are_bit_identical(shape: dict[str, Any], dtype: torch.dtype) -> None:
    model = rewired_model([], **shape).to(dtype)
    assert_bit_identical(model, stock_twin(model), tokens())


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_smollm2_is_bit_identical(smollm2: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    dense = convert(smollm2, tmp_path / "dense", Request([{"layers": "0-", "preset": "standard"}])).out
    stock = LlamaForCausalLM.from_pretrained(smollm2, dtype=dtype).eval()
    model = RewiredLlamaForCausalLM.from_pretrained(dense, dtype=dtype).eval()
    prose = AutoTokenizer.from_pretrained(smollm2)(PROSE.read_text(), return_tensors="pt").input_ids[:, :64]
    assert_bit_identical(model, stock, prose)


def assert_bit_identical(model: nn.Module, stock: nn.Module, input_ids: torch.Tensor) -> None:
    logits, expected = model(input_ids, labels=input_ids), stock(input_ids, labels=input_ids)
    assert torch.equal(logits.logits, expected.logits)
    logits.loss.backward()
    expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in stock.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name


@pytest.mark.parametrize("wiring", ["standard", "ladder"])
def test_no_shard_axis_where_views_do_not_differ(wiring: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a projection ran on a shard axis")

    monkeypatch.setattr(sharding, "column_parallel", refuse)
    monkeypatch.setattr(sharding, "row_parallel", refuse)
    rewired_model(WIRINGS[wiring])(tokens())


@pytest.mark.parametrize("wiring", WIRINGS)
def test_a_shard_axis_costs_no_matmul_flops(wiring: str) -> None:
    model = rewired_model(WIRINGS[wiring])
    assert matmul_flops(model) == matmul_flops(stock_twin(model))


def matmul_flops(model: nn.Module) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens())
    return counter.get_total_flops()
