"""On a grid of ranks a model computes what it computes in one process, forward and backward."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

from rewired.grid.parallel import tp_plan
from rewired.grid.size import TpSize
from rewired.ranks import run_on_ranks
from tests.rewired.sharded import gradients, load, saved, whole
from tests.rewired.test_against_reference import assert_close
from tests.rewired.test_tensor_parallel_training import assert_same
from tests.rewired.tiny import PAYLOADS, WIRINGS, rewired_config, tokens

MEANT = ("standard", "ladder", "ladder-peek", "desync-2x", "partial", "mixed")
BRIEFLY = (("mixed", "2x2"),)


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        pytest.param(name, grid, marks=[] if (name, grid) in BRIEFLY else pytest.mark.slow)
        for name in MEANT
        for grid in ("2x2", "1x4", "4x1")
    ],
)
def test_logits_tokens_and_gradients_are_those_of_one_process(name: str, grid: str, tmp_path: Path) -> None:
    folder = saved(WIRINGS[name], tmp_path)
    expected = answers(load(folder).train())
    for found in run_on_ranks(answers_on_grid, 4, folder, grid):
        assert_close(torch.from_numpy(found[0]), torch.from_numpy(expected[0]), grid)
        assert found[1] == expected[1]
        assert_same(found[2], expected[2])
        assert_same(found[3], expected[2])


@pytest.mark.parametrize(
    ("payload", "width"), [("int8", 512), pytest.param("8:0.5,4/8:0.25,0:0.25", 2048, marks=pytest.mark.slow)]
)
def test_payloads_are_those_of_one_process(payload: str, width: int, tmp_path: Path) -> None:
    """Ranks hold whole groups, and keep the same of what rounding leaves. One layer runs: a norm whose sum has another
    order may turn a rounding, and in more layers all tokens would know of it.
    """
    wiring = [{"layers": "0-1", "preset": "ladder", "payload": payload}]
    folder = saved(wiring, tmp_path, hidden_size=width, head_dim=8, num_hidden_layers=1)
    expected = logits_on(folder, "1")
    for found in run_on_ranks(logits_on, 4, folder, "2x2"):
        is_same = abs(found - expected).max(-1) < 1e-6 * abs(expected).max()  # [B, T]
        assert is_same.mean() > 0.7


def test_embeddings_may_be_given_and_a_tuple_asked_for(tmp_path: Path) -> None:
    folder = saved(WIRINGS["mixed"], tmp_path)
    expected = logits_on(folder, "1")
    for found in run_on_ranks(logits_of_embeddings, 2, folder):
        for logits in found:
            assert_close(torch.from_numpy(logits), torch.from_numpy(expected), "of embeddings")


def logits_of_embeddings(folder: Path) -> Any:
    model = load_on(folder, "1x2").double()
    with torch.no_grad():
        embeds = torch.nn.functional.embedding(tokens(), whole(model.get_input_embeddings().weight))
        last, *_, (*_, last_of_all), _ = model.model(
            inputs_embeds=embeds, return_dict=False, output_hidden_states=True, output_attentions=True
        )
        return [
            model(inputs_embeds=embeds).logits.numpy(),
            *(model.lm_head(each).numpy() for each in (last, last_of_all)),
        ]


@pytest.mark.parametrize("sizes", [{"dp_replicate_size": 2}, {"fsdp_size": 2}])
def test_replicas_and_fsdp2_hold_blocks_of_channels(sizes: dict[str, int], tmp_path: Path) -> None:
    folder = saved([{"layers": "0-1", "preset": "partial", "shared_fraction": 0.5}], tmp_path, num_hidden_layers=1)
    expected = load(folder)
    for weights in run_on_ranks(weights_on, 4, folder, sizes):
        assert_same(weights, {name: whole(weight).numpy() for name, weight in expected.named_parameters()})


def weights_on(folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    model = load_on(folder, "1x2", **sizes)
    return {name: whole(weight).numpy() for name, weight in model.named_parameters()}


def logits_on(folder: Path, grid: str) -> Any:
    model = load_on(folder, grid) if grid != "1" else load(folder)
    with torch.no_grad():
        return model.double()(tokens()).logits.numpy()


def answers_on_grid(folder: Path, grid: str) -> tuple[Any, ...]:
    """The last is with gradient checkpointing."""
    model = load_on(folder, grid).train()
    found = answers(model)
    model.zero_grad()
    model.activation_checkpointing_enable()
    return *found, answers(model)[2]


def answers(model: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Logits, greedy tokens, and gradients of two batches, of a loss on hidden states, too."""
    with torch.no_grad():
        logits = model(tokens()).logits.numpy()
        generated = model.eval().generate(tokens(), max_new_tokens=8, min_new_tokens=8, do_sample=False).tolist()
    for batch in tokens(4).split(2):
        outputs = model.train()(batch, labels=batch, output_hidden_states=True)
        (outputs.loss + sum(states[..., 3:20].square().mean() for states in outputs.hidden_states)).backward()
    return logits, generated, gradients(model)


def load_on(folder: Path, grid: str, **sizes: int) -> Any:
    size = TpSize.parse(grid)
    plan = tp_plan(AutoConfig.from_pretrained(folder), size, sizes.get("fsdp_size", 1))
    return AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=int(size), tp_plan=plan, **sizes)
    )


@pytest.mark.parametrize(
    ("grid", "backend", "layers"), [("1x2", "aot_eager", 2), pytest.param("2x2", "inductor", 3, marks=pytest.mark.slow)]
)
def test_a_compiled_model_is_one_graph_that_computes_the_same(
    grid: str, backend: str, layers: int, tmp_path: Path
) -> None:
    folder = saved([{"layers": f"1-{layers}", "preset": "ladder", "peek": True}], tmp_path, num_hidden_layers=layers)
    expected_logits, expected = compiled_answers(folder, "1", None)
    for logits, found in run_on_ranks(compiled_answers, int(TpSize.parse(grid)), folder, grid, backend):
        assert_close(torch.from_numpy(logits), torch.from_numpy(expected_logits), "logits")
        assert_same(found, expected)


def compiled_answers(folder: Path, grid: str, backend: str | None) -> tuple[Any, dict[str, Any]]:
    model = load_on(folder, grid).train()
    run = torch.compile(model, fullgraph=True, backend=backend) if backend else model
    with torch.no_grad():
        logits = run(tokens()).logits.numpy()
    run(tokens(), labels=tokens()).loss.backward()
    return logits, gradients(model)


def test_adapters_that_nothing_has_split_are_refused(tmp_path: Path) -> None:
    folder = saved(WIRINGS["ladder"], tmp_path)
    for sentence in run_on_ranks(refusal, 2, folder):
        assert sentence == (
            "A model on a grid of ranks takes no adapters: `adapt` adds them before it splits the model, with "
            "train: lora."
        )


def refusal(folder: Path) -> str:
    adapted = get_peft_model(load_on(folder, "1x2"), LoraConfig(target_modules=["down_proj"]))
    with pytest.raises(ValueError) as error:
        adapted(tokens())
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "grid", "sentence"),
    [
        ("ladder", {}, "3x2", "8 heads, 4 KV heads and MLP width 48 over X = 3: choose an X of 1, 2 or 4."),
        ("desync-2x", {"tp_shards": 2}, "4x2", "and tp_shards 2 over X = 4: choose an X of 1 or 2."),
        (
            "ladder",
            {"hidden_size": 48, "head_dim": 6},
            "2x5",
            "hidden_size 48 over Y = 5: choose a Y of 1, 2, 3, 4, 6,",
        ),
        ("partial", {}, "1x8", "hidden_size 32, in 8 blocks of 4 over Y = 8: choose a Y of 1, 2 or 4."),
        (
            "standard-int8",
            {"hidden_size": 192, "head_dim": 8},
            "1x2",
            "hidden_size 192, in 3 blocks of 64, in groups of 64 over Y = 2: choose a Y of 1.",
        ),
    ],
)
def test_a_grid_that_a_model_does_not_fit_is_refused(
    name: str, changes: dict[str, Any], grid: str, sentence: str
) -> None:
    config = rewired_config((WIRINGS | PAYLOADS)[name], **changes)
    with pytest.raises(ValueError, match=f"^tp_size {grid} splits.*{sentence}"):
        tp_plan(config, TpSize.parse(grid))


def test_a_model_that_is_not_rewired_is_refused_on_a_grid() -> None:
    with pytest.raises(ValueError, match="tp_size 2x2 is a grid, on which rewired models run: convert this one with"):
        tp_plan(LlamaConfig(), TpSize.parse("2x2"))
    assert tp_plan(LlamaConfig(), TpSize.parse("4")) == "auto"


def test_quantised_weights_are_refused_on_a_grid() -> None:
    config = rewired_config(WIRINGS["ladder"], quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match="transformers does not split quantised weights over ranks"):
        tp_plan(config, TpSize.parse("1x2"))


@pytest.mark.parametrize("text", ["0", "2x", "x2", "2x0", "2.5", "two", "2x2x2"])
def test_what_is_no_grid_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"tp_size is '{text}': give a number of ranks, or a grid"):
        TpSize.parse(text)


def test_a_grid_counts_as_its_ranks_and_survives_copies() -> None:
    size = deepcopy(TpSize.parse("2x3"))
    assert (size, size.x, size.y, str(size), json.dumps({"tp_size": size})) == (6, 2, 3, "2x3", '{"tp_size": 6}')
    assert (TpSize.parse("4"), TpSize.parse("4x1"), str(TpSize.parse("4x1"))) == (4, 4, "4")
