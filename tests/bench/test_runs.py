"""What a bench times: a training step is one of AdamW, and a compiled prefill leaves the cache as decoding wants it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import distributed
from transformers import AutoModelForCausalLM

from rewired.bench.contenders import STANDARD, Contender
from rewired.bench.models import SharedWeights, build, meshes_of, shard, split_as
from rewired.bench.request import BenchRequest
from rewired.bench.runs import PREFILL_COMPILED, Steps, TrainingSteps
from rewired.grid.size import TpSize
from rewired.ranks import run_on_ranks
from tests.rewired.sharded import whole
from tests.rewired.tiny import llama_config, rewired_model

TOKENS = torch.arange(24).view(2, 12)


def test_a_training_step_is_one_of_adamw_on_copies_of_the_weights() -> None:
    """Two models with one set of copies: the second goes on where the first ended, and no model changes."""
    torch.manual_seed(0)
    first = AutoModelForCausalLM.from_config(llama_config()).eval()
    second, trained = copy.deepcopy(first), copy.deepcopy(first)
    before = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    steps = TrainingSteps(TOKENS)
    steps.step(first)()
    once = {name: tensor.clone() for name, tensor in steps.copies.items()}
    steps.step(second)()

    optimizer = torch.optim.AdamW(trained.parameters())
    trained(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(once[name], parameter.detach())
    optimizer.step()  # by the same gradients, since the models stay what they are
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(steps.copies[name], parameter.detach())
    for model in (first, second):
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("tp", "is_tied"), [("2", True), *(pytest.param(tp, False, marks=pytest.mark.slow) for tp in ("1", "2", "1x2"))]
)
def test_a_step_of_shards_is_that_of_one_process(tp: str, is_tied: bool) -> None:
    """Of weights that FSDP2 shares out beside tensor parallelism."""
    (expected,) = run_on_ranks(after_a_step, 1, "1", 1, is_tied)
    for found in run_on_ranks(after_a_step, 2 * TpSize.parse(tp), tp, 2, is_tied):
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(weight), atol=2e-5, rtol=1e-4, msg=name)


def after_a_step(tp: str, fsdp: int, is_tied: bool) -> dict[str, Any]:
    size = TpSize.parse(tp)
    request = BenchRequest("tiny", (), trains=True, fsdp=fsdp, device="cpu")
    mesh, fsdp_mesh = meshes_of(distributed.group.WORLD, request, size)
    model = build(Contender(STANDARD, []), llama_config(tie_word_embeddings=is_tied), 1, mesh, size)
    SharedWeights(torch.float32, torch.device("cpu")).fill(model)
    model.requires_grad_()
    if fsdp_mesh is not None:
        shard(model, fsdp_mesh)
    steps = TrainingSteps(TOKENS)
    steps.step(model)()
    return {
        name: whole(split_as(parameter, steps.copies[name])).numpy() for name, parameter in model.named_parameters()
    }


@pytest.mark.slow
def test_a_compiled_prefill_leaves_the_prompt_in_the_cache() -> None:
    model = rewired_model([{"layers": "0-2", "preset": "ladder"}], 4, num_hidden_layers=2).eval()
    with torch.no_grad():
        steps = Steps(model, TOKENS, BenchRequest("tiny", (), prompt=12, new=3, device="cpu"))
        runs = list(steps.runs(model))
        for run in (*runs, *reversed(runs)):
            run()
        assert steps.static is not None
        expected = model(torch.cat([TOKENS, TOKENS[:, -1:]], dim=1), use_cache=False).logits[:, -1]
        actual = model(TOKENS[:, -1:], past_key_values=steps.static).logits[:, -1]
    assert {measure for run in runs for measure in run()} >= {PREFILL_COMPILED}
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
