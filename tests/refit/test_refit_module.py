"""A layer's modules, taken apart: together they are the model, and what is folded into them is what they compute."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rewired.model.modeling_rewired_llama import RewiredLlamaDecoderLayer, RewiredLlamaForCausalLM
from rewired.model.residual_stream import ResidualStream
from rewired.refit.refit_module import RefitModule
from tests.rewired.tiny import LLAMA3_ROPE, WIRINGS, rewired_model, tokens

CHANGES = {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE}


def position_embeddings(model: RewiredLlamaForCausalLM, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return LlamaRotaryEmbedding(model.config)(torch.empty(1), torch.arange(length)[None])


def modules(model: RewiredLlamaForCausalLM) -> list[RefitModule]:
    return [module for layer in model.model.layers for module in RefitModule.all_of(layer)]


@pytest.mark.parametrize("wiring", WIRINGS.values(), ids=WIRINGS)
@torch.no_grad()
def test_modules_one_after_the_other_are_the_model(wiring: list[dict[str, object]]) -> None:
    model = rewired_model(wiring, **CHANGES)
    stream = ResidualStream(model.model.embed_tokens(tokens()))
    for module in modules(model):
        view, stream = module.read(stream)
        stream = module.write(stream, module.hidden(view, position_embeddings(model, tokens().shape[1])))
    logits = model.lm_head(model.model.norm(stream.total(module.shards)))
    torch.testing.assert_close(logits, model(tokens()).logits)


@pytest.mark.parametrize("is_mlp", [False, True], ids=["attention", "MLP"])
@pytest.mark.parametrize("name", ["ladder", "ladder-peek"])
@torch.no_grad()
def test_a_folded_input_is_a_matrix_on_what_the_norm_gives(name: str, is_mlp: bool) -> None:
    """Projections of gamma * (n(view) M_k), computed shard by shard."""
    model = rewired_model(WIRINGS[name], **CHANGES)
    layer: RewiredLlamaDecoderLayer = model.model.layers[3]
    module = RefitModule.all_of(layer)[is_mlp]
    shards = 4 if module.wiring.reads_shards else 1
    module.norm.weight.uniform_(0.5, 2.0)
    view = torch.randn(*([4] if shards > 1 else []), 2, 5, 32)
    delta = 0.3 * torch.randn(shards, 32, 32)
    normalised = view * torch.rsqrt(view.square().mean(-1, keepdim=True) + model.config.rms_norm_eps)
    mapped = normalised + torch.einsum("kbth,khi->kbti", normalised.reshape(shards, 2, 5, 32), delta).reshape(
        view.shape
    )
    inputs = (mapped * module.norm.weight).reshape(shards, 2, 5, 32)
    expected = [
        torch.cat(
            [
                torch.nn.functional.linear(inputs[k], weight, bias)
                for k, (weight, bias) in enumerate(
                    zip(projection.weight.clone().chunk(shards), projection.bias.clone().chunk(shards), strict=True)
                )
            ],
            dim=-1,
        )
        for projection in module.inputs
    ]
    module.fold_input(delta)
    assert (module.norm.weight == 1).all()
    for projection, wanted in zip(module.inputs, expected, strict=True):
        rows, biases = projection.weight.chunk(shards), projection.bias.chunk(shards)
        views = module.norm(view).reshape(shards, 2, 5, 32)
        found = [torch.nn.functional.linear(views[k], rows[k], biases[k]) for k in range(shards)]
        torch.testing.assert_close(torch.cat(found, dim=-1), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["ladder", "desync-2x", "desync-4x-mean", "partial-mean-overlap"])
@torch.no_grad()
def test_a_folded_output_adds_to_what_is_written(name: str) -> None:
    model = rewired_model(WIRINGS[name])
    module = RefitModule.all_of(model.model.layers[3])[1]
    stream, hidden, delta = ResidualStream(torch.randn(2, 5, 32)), torch.randn(2, 5, 48), torch.randn(48, 32)
    before = module.total(module.write(stream, hidden))
    module.fold_output(delta)
    after = module.total(module.write(stream, hidden))
    torch.testing.assert_close(after - before, hidden @ delta, rtol=1e-4, atol=1e-4)
