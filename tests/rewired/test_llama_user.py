"""Everything a Llama user expects keeps working, for every wiring."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, StaticCache

from rewired.model.modeling_rewired_llama import RewiredLlamaForCausalLM

from .tiny import LLAMA3_ROPE, WIRINGS, rewired_config, rewired_model, tokens

every_wiring = pytest.mark.parametrize("wiring", WIRINGS.values(), ids=WIRINGS)


@every_wiring
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_cached_decoding_equals_the_full_forward(wiring: list[dict[str, Any]], cache: str) -> None:
    model, input_ids = rewired_model(wiring), tokens(length=12)
    expected = model(input_ids, use_cache=False).logits
    past = StaticCache(config=model.config, max_cache_len=16) if cache == "static" else None
    with torch.no_grad():
        output = model(input_ids[:, :5], past_key_values=past, use_cache=True)  # prefill
        logits = [output.logits]
        for position in range(5, 12):  # decode
            step = input_ids[:, position : position + 1]
            output = model(step, past_key_values=output.past_key_values, use_cache=True)
            logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-4, atol=1e-5)


@every_wiring
def test_generate_greedy_with_either_cache_and_without(wiring: list[dict[str, Any]]) -> None:
    model, prompt = rewired_model(wiring), tokens(length=5)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(prompt, use_cache=False, **options)
    assert torch.equal(model.generate(prompt, **options), expected)
    assert torch.equal(model.generate(prompt, cache_implementation="static", **options), expected)


def test_it_drafts_with_its_own_first_layers() -> None:
    model, prompt = rewired_model(WIRINGS["mixed"]), tokens(length=5)[:1]
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(prompt, assistant_early_exit=3, **options), model.generate(prompt, **options))


@every_wiring
def test_a_model_is_pickled(wiring: list[dict[str, Any]]) -> None:
    model = rewired_model(wiring)
    copy = pickle.loads(pickle.dumps(model))
    assert torch.equal(copy(tokens()).logits, model(tokens()).logits)
    assert type(copy.model.layers[0].mlp) is type(model.model.layers[0].mlp)


@every_wiring
def test_generate_sampled_repeats_with_its_seed(wiring: list[dict[str, Any]]) -> None:
    model, prompt = rewired_model(wiring), tokens(length=5)
    runs = []
    for use_cache in (True, False):
        torch.manual_seed(7)
        runs.append(
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=6,
                do_sample=True,
                temperature=2.0,
                use_cache=use_cache,
            )
        )
    assert torch.equal(*runs)


@every_wiring
def test_a_left_padded_batch_generates_what_its_rows_do_alone(wiring: list[dict[str, Any]]) -> None:
    model = rewired_model(wiring)
    short, long = tokens(1, 4), tokens(1, 7)
    padding = torch.zeros(1, 3, dtype=torch.long)
    batch = torch.cat([torch.cat([padding, short], dim=1), long])
    mask = torch.cat([torch.cat([padding, torch.ones_like(short)], dim=1), torch.ones_like(long)])
    together = model.generate(batch, attention_mask=mask, max_new_tokens=5, do_sample=False)[:, 7:]
    for row, prompt in zip(together, (short, long), strict=True):
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)
        assert torch.equal(row, alone[0, prompt.shape[1] :])


@every_wiring
@pytest.mark.parametrize(
    "implementation",
    ["eager", pytest.param("flex_attention", marks=pytest.mark.slow)],
)
def test_attention_implementations_agree(wiring: list[dict[str, Any]], implementation: str) -> None:
    # flex attention wants head dimensions of at least 16
    model = rewired_model(wiring, head_dim=16)
    with torch.no_grad():  # flex attention has no backward on CPU
        expected = model(tokens()).logits
        model.set_attn_implementation(implementation)
        torch.testing.assert_close(model(tokens()).logits, expected, rtol=1e-4, atol=1e-5)


@every_wiring
@pytest.mark.parametrize("options", [None, {"preserve_rng_state": False}], ids=str)
def test_gradient_checkpointing_changes_no_gradient(
    wiring: list[dict[str, Any]], options: dict[str, bool] | None
) -> None:
    model, input_ids = rewired_model(wiring).train(), tokens()
    expected = gradients(model, input_ids)
    model.gradient_checkpointing_enable(options)
    for name, gradient in gradients(model, input_ids).items():
        assert torch.equal(gradient, expected[name]), name


def test_reentrant_checkpointing_is_refused_since_it_would_lose_gradients() -> None:
    model = rewired_model(WIRINGS["ladder"])
    with pytest.raises(ValueError, match="use_reentrant"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})


def gradients(model: RewiredLlamaForCausalLM, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids, labels=input_ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@every_wiring
def test_hidden_states_are_tensors_that_lead_to_the_logits(wiring: list[dict[str, Any]]) -> None:
    model, input_ids = rewired_model(wiring), tokens()
    output = model(input_ids, output_hidden_states=True)
    assert [state.shape for state in output.hidden_states] == [(2, 9, 32)] * 7
    torch.testing.assert_close(output.hidden_states[0], model.model.embed_tokens(input_ids))
    torch.testing.assert_close(model.lm_head(output.hidden_states[-1]), output.logits)
    as_tuple = model.model(input_ids, output_hidden_states=True, return_dict=False)
    assert [torch.equal(*pair) for pair in zip(as_tuple[-1], output.hidden_states, strict=True)] == [True] * 7


def test_hidden_states_hold_every_update_so_far() -> None:
    """With the layers above a dense prefix rewired, the prefix's hidden states are stock Llama's."""
    dense, ladder = rewired_model([]), rewired_model([{"layers": "3-6", "preset": "ladder"}])
    ladder.load_state_dict(dense.state_dict())
    expected, states = (m(tokens(), output_hidden_states=True).hidden_states for m in (dense, ladder))
    for layer in range(4):  # the input of layer 3 holds layer 2's MLP, although layer 3's attention does not read it
        torch.testing.assert_close(states[layer], expected[layer])
    assert not torch.allclose(states[4], expected[4])


def test_attentions_are_recorded() -> None:
    model = rewired_model(WIRINGS["desync-4x-mean"], attn_implementation="eager")
    attentions = model(tokens(), output_attentions=True).attentions
    assert [tuple(attention.shape) for attention in attentions] == [(2, 8, 9, 9)] * 6


@every_wiring
def test_loss_is_the_shifted_cross_entropy(wiring: list[dict[str, Any]]) -> None:
    model, input_ids = rewired_model(wiring), tokens()
    output = model(input_ids, labels=input_ids)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)


@every_wiring
def test_llama3_rope_scaling_is_applied(wiring: list[dict[str, Any]]) -> None:
    plain, scaled = rewired_model(wiring), rewired_model(wiring, rope_parameters=LLAMA3_ROPE)
    scaled.load_state_dict(plain.state_dict())
    assert scaled.model.rotary_emb.rope_type == "llama3"
    assert not torch.allclose(plain(tokens()).logits, scaled(tokens()).logits)


@every_wiring
def test_bfloat16_stays_close_to_float32(wiring: list[dict[str, Any]]) -> None:
    model = rewired_model(wiring)
    expected = model(tokens()).logits
    logits = model.to(torch.bfloat16)(tokens()).logits
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).norm() / expected.norm() < 0.03


@every_wiring
def test_trains_under_autocast(wiring: list[dict[str, Any]]) -> None:
    model, input_ids = rewired_model(wiring).train(), tokens()
    expected = gradients(model, input_ids)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(model, input_ids)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() < 0.2 * expected[name].norm() + 0.01, name


@pytest.mark.parametrize(
    "wiring",
    [
        pytest.param(wiring, id=name, marks=() if name == "mixed" else pytest.mark.slow)
        for name, wiring in WIRINGS.items()
    ],
)
def test_compiles_to_one_graph(wiring: list[dict[str, Any]]) -> None:
    model = rewired_model(wiring)
    expected = model(tokens()).logits
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens()).logits, expected)


def test_compiles_with_inductor_forward_and_backward() -> None:
    wiring = [{"layers": "0-1", "preset": "ladder", "peek": True}, {"layers": "1-2", "preset": "desync"}]
    model, input_ids = rewired_model(wiring, num_hidden_layers=2), tokens()
    expected = gradients(model, input_ids)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    model.zero_grad()
    compiled(input_ids, labels=input_ids).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_gains_are_1_at_first() -> None:
    wiring = [{"layers": "0-6", "preset": "partial", "shared_fraction": 0.5}]
    model = RewiredLlamaForCausalLM(rewired_config(wiring))
    gains = {name: p for name, p in model.named_parameters() if name.endswith("_gain.weight")}
    assert len(gains) == 11  # every module but the first, which has nothing to peek at
    assert all(torch.equal(gain, torch.ones(4, 32)) for gain in gains.values())


def test_stock_llama_weights_are_all_there_and_nothing_else_without_peek() -> None:
    model = RewiredLlamaForCausalLM(rewired_config(WIRINGS["ladder"]))
    stock = LlamaForCausalLM(model.config)
    assert set(model.state_dict()) == set(stock.state_dict())


def test_an_engine_s_transformers_backend_is_refused_with_the_name_of_our_plugin() -> None:
    """vLLM asks this before it splits a model by transformers' plan alone, which would lose the wiring."""
    with pytest.raises(ValueError, match="its extra 'vllm', which brings a plugin"):
        RewiredLlamaForCausalLM.is_backend_compatible()


@every_wiring
def test_a_projection_that_is_watched_is_called_with_what_each_shard_reads(wiring: list[dict[str, Any]]) -> None:
    model, seen = rewired_model(wiring), list[str]()
    with torch.no_grad():
        expected = model(tokens()).logits
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(lambda module, inputs, name=name: seen.append(name))
        torch.testing.assert_close(model(tokens()).logits, expected, rtol=1e-4, atol=1e-5)
    assert sorted(seen) == sorted(name for name, _ in model.named_modules() if name.endswith("_proj"))
