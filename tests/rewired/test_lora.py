"""PEFT's LoRA on all seven projections, also where a projection has a shard axis."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from .reference import reference_logits
from .test_against_reference import assert_close
from .tiny import WIRINGS, rewired_model, tokens

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
every_wiring = pytest.mark.parametrize("wiring", WIRINGS.values(), ids=WIRINGS)


def lora_model(wiring: list[dict[str, Any]], **options: Any) -> PeftModel:
    """A rewired model with LoRA that already does something: B is no longer zero."""
    model = rewired_model(wiring, attention_bias=True, mlp_bias=True)
    config = LoraConfig(r=3, lora_alpha=6, target_modules=PROJECTIONS, task_type="CAUSAL_LM", **options)
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or name.endswith("bias"):
                parameter.normal_(std=0.1)
    return adapted.eval()


@every_wiring
def test_lora_is_the_model_with_its_weights_added(wiring: list[dict[str, Any]]) -> None:
    """The reference, on W + scaling * B A of every projection: logits and the adapters' gradients."""
    adapted = lora_model(wiring)
    parameters = {name: p.detach().clone().requires_grad_() for name, p in adapted.named_parameters()}
    weights, gains = merged_weights(parameters, scaling=2.0)
    expected = reference_logits(weights, adapted.config, wiring, 4, tokens(), gains)
    logits = adapted(input_ids=tokens()).logits
    assert_close(logits, expected, "logits")

    direction = torch.randn_like(expected)
    (expected * direction).sum().backward()
    (logits * direction).sum().backward()
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 6
    scale = torch.cat([parameters[name].grad.flatten() for name in trained]).norm()
    for name, parameter in trained.items():
        assert_close(parameter.grad, parameters[name].grad, name, floor=0.1 * scale)


def merged_weights(parameters: dict[str, torch.Tensor], scaling: float) -> tuple[dict[str, Any], dict[Any, Any]]:
    weights, gains = {}, {}
    for full_name, parameter in parameters.items():
        name = full_name.removeprefix("base_model.model.").replace("base_layer.", "")
        if name.endswith("_gain.weight"):
            gains[int(name.split(".")[2]), "attn" if "input_gain" in name else "mlp"] = parameter
        elif "base_layer.weight" in full_name:
            a = parameters[full_name.replace("base_layer.weight", "lora_A.default.weight")]
            b = parameters[full_name.replace("base_layer.weight", "lora_B.default.weight")]
            weights[name] = parameter + scaling * b @ a
        elif "lora_" not in name:
            weights[name] = parameter
    return weights, gains


@every_wiring
def test_train_save_load_merge(wiring: list[dict[str, Any]], tmp_path: Path) -> None:
    adapted = lora_model(wiring, lora_dropout=0.1).train()
    optimiser = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = adapted(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    expected = adapted.eval()(input_ids=tokens()).logits

    adapted.save_pretrained(tmp_path)
    base = rewired_model(wiring, attention_bias=True, mlp_bias=True)
    base.load_state_dict(adapted.unload().state_dict())
    loaded = PeftModel.from_pretrained(base, tmp_path).eval()
    torch.testing.assert_close(loaded(input_ids=tokens()).logits, expected)

    merged = loaded.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=tokens()).logits, expected, rtol=1e-4, atol=1e-5)
    assert not any("lora" in name for name in merged.state_dict())


def test_lora_with_gradient_checkpointing_has_the_same_gradients() -> None:
    adapted = lora_model(WIRINGS["ladder-peek"]).train()
    adapted.enable_input_require_grads()
    found = []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            adapted.gradient_checkpointing_enable()
        adapted.zero_grad()
        adapted(input_ids=tokens(), labels=tokens()).loss.backward()
        found.append({name: p.grad.clone() for name, p in adapted.named_parameters() if p.requires_grad})
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


def test_dora_on_a_shard_axis_is_refused_in_one_sentence() -> None:
    adapted = lora_model(WIRINGS["desync-2x"], use_dora=True)
    with pytest.raises(ValueError, match="plain LoRA"):
        adapted(input_ids=tokens())


@every_wiring
def test_rows_of_a_batch_get_the_adapters_that_are_named_for_them(wiring: list[dict[str, Any]]) -> None:
    adapted = lora_model(wiring)
    adapted.add_adapter("other", LoraConfig(r=2, target_modules=PROJECTIONS, init_lora_weights=False))
    adapted.eval()
    names = ["other", "__base__", "default", "other"]
    batch = tokens(batch=4)
    logits = adapted(input_ids=batch, adapter_names=names).logits
    for row, name in enumerate(names):
        adapted.set_adapter("default" if name == "__base__" else name)
        with adapted.disable_adapter() if name == "__base__" else nullcontext():
            expected = adapted(input_ids=batch[row : row + 1]).logits
        torch.testing.assert_close(logits[row : row + 1], expected, rtol=1e-4, atol=1e-5)


def test_activated_lora_on_a_shard_axis_is_refused_in_one_sentence() -> None:
    adapted = lora_model(WIRINGS["desync-2x"], alora_invocation_tokens=[5])
    with pytest.raises(ValueError, match="no aLoRA"):
        adapted(input_ids=tokens())
