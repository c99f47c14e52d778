"""The seam of families: one that is data and a page, in two files beside this one, runs through every room."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import rewired.families as families
from rewired.adapt.model.teacher import without_layers
from rewired.bench.contenders import contenders
from rewired.bench.models import SharedWeights, build
from rewired.checkpoint.checkpoint import Checkpoint
from rewired.checkpoint.rewired_config import model_code
from rewired.convert import RefitRequest, Request, convert
from rewired.convert.request import regions_in
from rewired.divergence import divergence
from rewired.evaluate.evaluate import EvaluateRequest, evaluate
from rewired.evaluate.measure import Runner
from rewired.plan.ranking import PlanRequest, make_ranking
from rewired.ranks import run_on_ranks
from rewired.select.request import SelectRequest
from rewired.select.select import select
from rewired.serve.generate import Prompt, generate
from tests.adapt.world import CHATML, conversations, train, write_rows
from tests.evaluate.world import tokenizer

from .modeling_rewired_toy import RewiredToyConfig, RewiredToyForCausalLM, ToyConfig, ToyForCausalLM
from .toy_family import TOY

families.FAMILIES[TOY.model_type] = TOY
families.register_classes(TOY)

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
STANDARD = [{"layers": "0-", "preset": "standard"}]
PEEK = [{"layers": "1-4", "preset": "ladder", "peek": True}]
MIXED = [{"layers": "0-2", "preset": "desync"}, {"layers": "2-4", "preset": "ladder", "peek": True}]
TOKENS = torch.arange(3, 35).view(2, 16)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "toy"
    torch.manual_seed(0)
    model = ToyForCausalLM(ToyConfig(**SIZES))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms and biases that are not all alike
            torch.nn.init.normal_(parameter, 0.0 if name.endswith("bias") else 1.0, 0.2)
    model.save_pretrained(folder)
    made = tokenizer()
    made.chat_template = CHATML
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(f"The river {n} runs over stone {n * n % 97} to the sea." for n in range(200)))
    return path


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(TOKENS).logits


def kl(original: Path, other: Path) -> float:
    models = [AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).eval() for each in (original, other)]
    return divergence(*(lambda ids, model=model: model(ids).logits for model in models), TOKENS).kl


def rewire(dense: Path, out: Path, wiring: list[dict[str, Any]] = MIXED, **options: Any) -> Path:
    return convert(dense, out, Request(wiring, tp_shards=2, **options)).out


def test_a_conversion_changes_no_tensor_and_loads_by_the_auto_class(dense: Path, tmp_path: Path) -> None:
    standard, mixed = rewire(dense, tmp_path / "standard", STANDARD), rewire(dense, tmp_path / "mixed")
    assert torch.equal(logits(standard), logits(dense))
    assert type(AutoModelForCausalLM.from_pretrained(mixed)) is RewiredToyForCausalLM
    assert not torch.equal(logits(mixed), logits(dense))
    back = convert(mixed, tmp_path / "back", Request(STANDARD, to_stock=True)).out
    assert json.loads((back / "config.json").read_text())["model_type"] == "toy"
    assert torch.equal(logits(back), logits(dense))


def test_its_code_goes_along_and_stands_alone(dense: Path, tmp_path: Path) -> None:
    folder = rewire(dense, tmp_path / "mixed")
    code = model_code(TOY)
    assert {path.name for path in folder.glob("*.py")} == set(code) > {"toy_family.py", "modeling_rewired_toy.py"}
    assert not any(re.search(r"^\s*(from|import) rewired\b", text, re.MULTILINE) for text in code.values())


def test_one_process_computes_what_the_equations_say(dense: Path, tmp_path: Path) -> None:
    """Ladder in all layers: each module reads the stream without the last update. From the stock modules alone."""
    ladder = rewire(dense, tmp_path / "ladder", [{"layers": "0-", "preset": "ladder"}])
    model = ToyForCausalLM.from_pretrained(dense).eval()
    with torch.no_grad():
        stream, late = model.model.tokens(TOKENS), 0.0
        positions = model.model.rotary_emb(stream, torch.arange(TOKENS.shape[1])[None])
        for block in model.model.blocks:
            mixed, _ = block.mixer(block.mixer_norm(stream), positions, None)
            stream, late = stream + late, mixed
            fed = block.feed_forward(block.feed_forward_norm(stream))
            stream, late = stream + late, fed
        expected = model.output(model.model.final_norm(stream + late))
    torch.testing.assert_close(logits(ladder), expected, rtol=1e-4, atol=1e-4)


def test_two_ranks_are_one_process_forward_and_backward(dense: Path, tmp_path: Path) -> None:
    folder = rewire(dense, tmp_path / "mixed")
    expected, expected_gradients = forward_and_backward(folder, 1)
    for found, gradients in run_on_ranks(forward_and_backward, 2, folder, 2):
        torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in gradients.items():
            pair = map(torch.from_numpy, (gradient, expected_gradients[name]))
            torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-5, msg=name)


def forward_and_backward(folder: Path, ranks: int, compiled: bool = False) -> tuple[Any, dict[str, Any]]:
    """Logits, and whole gradients; those of the norms on heads are summed once, not once more by a stock plan."""
    split = {"distributed_config": DistributedConfig(tp_size=ranks, tp_plan="auto")} if ranks > 1 else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **split).train()
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    outputs = run(TOKENS, labels=TOKENS)
    outputs.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    whole = {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in gradients.items()}
    return outputs.logits.detach().numpy(), {name: grad.numpy() for name, grad in whole.items() if grad is not None}


@pytest.mark.parametrize("wiring", [PEEK, MIXED], ids=["peek", "mixed"])
def test_a_refit_brings_it_closer(dense: Path, text: Path, tmp_path: Path, wiring: list[dict[str, Any]]) -> None:
    plain = rewire(dense, tmp_path / "plain", wiring)
    refitted = rewire(dense, tmp_path / "refitted", wiring, refit=RefitRequest(str(text), 4096))
    assert kl(dense, refitted) < kl(dense, plain)


def test_a_rotation_leaves_the_function(dense: Path, tmp_path: Path) -> None:
    rotated = rewire(dense, tmp_path / "rotated", STANDARD, rotate="hadamard")
    torch.testing.assert_close(logits(rotated), logits(dense), rtol=1e-3, atol=1e-3)
    before, after = (load_file(folder / "model.safetensors") for folder in (dense, rotated))
    for name in ("mixer.wq.bias", "mixer.q_scale.weight"):  # beyond the projections that read the stream
        assert torch.equal(before[f"model.blocks.0.{name}"], after[f"model.blocks.0.{name}"])


def test_layers_are_selected(dense: Path, text: Path, tmp_path: Path) -> None:
    request = SelectRequest("ladder", budget=2, tp_shards=2, text=str(text), tokens=2048)
    select(str(dense), tmp_path / "selection", request)
    converted = convert(dense, tmp_path / "out", Request(regions_in(str(tmp_path / "selection" / "wiring.json")))).out
    assert len(Checkpoint.open(converted).wiring.rewired_layers) >= 2


SFT: dict[str, Any] = {"train": "rewired"}
DISTILLED: dict[str, Any] = {"train": "rewired", "ce_weight": 0.0, "kd_weight": 1.0, "hidden_weight": 0.5}
LORA: dict[str, Any] = {"train": "lora", "kd_weight": 1.0}


@pytest.mark.parametrize("changes", [SFT, DISTILLED, LORA], ids=["sft", "distilled", "lora"])
def test_it_is_trained(dense: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", conversations(8))
    made = train(
        tmp_path / "recipe.yaml",
        model=str(dense),
        wiring="ladder+peek@1-4",
        tp_shards=2,
        datasets=[str(rows)],
        output_dir=str(tmp_path / "out"),
        refit="none",
        max_steps=2,
        **changes,
    )
    before, after = load_file(dense / "model.safetensors"), load_file(made / "model.safetensors")
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert {name.rpartition(".blocks.")[2][:2] for name in changed} == {"1.", "2.", "3."}
    assert "model.blocks.2.mixer.wq.weight" in changed


def test_a_teacher_without_its_first_layers_keeps_the_settings_of_the_others() -> None:
    """Stock models count layers, and what is set for each of them, from 0."""
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = RewiredToyConfig(**SIZES, wiring=PEEK, tp_shards=2, layer_types=kinds)
    cut = without_layers(config, 1)
    assert (cut.num_hidden_layers, cut.layer_types) == (3, kinds[1:])
    assert (config.num_hidden_layers, config.layer_types) == (4, kinds)


def test_it_is_evaluated(dense: Path, text: Path, tmp_path: Path) -> None:
    folder = rewire(dense, tmp_path / "mixed")
    request = EvaluateRequest(str(dense), [str(folder)], texts=[text], text_tokens=1024)
    results = evaluate(request, Runner("cpu", batch_size="2"), tmp_path / "report")
    [of_text] = results.divergences.values()
    assert of_text["mixed"].kl > 0


def test_it_generates(dense: Path, tmp_path: Path) -> None:
    folder = rewire(dense, tmp_path / "mixed")
    assert isinstance(generate(folder, Prompt("a river", max_new_tokens=4, chat=False), device="cpu"), str)


def test_its_wirings_are_planned(dense: Path) -> None:
    ranking = make_ranking(PlanRequest(str(dense), gpus=2, prompt=32, new=8, batches=(1,)))
    assert {row.candidate.name for row in ranking.rows} >= {"standard", "none", "ladder@0-4"}
    assert all(row.ttft_seconds > 0 for row in ranking.rows)


def test_its_models_are_benched_on_one_set_of_weights(dense: Path) -> None:
    checkpoint = Checkpoint.open(dense)
    config = ToyConfig.from_dict({**checkpoint.config, "dtype": torch.float32})
    weights = SharedWeights(torch.float32, torch.device("cpu"), dense)
    found = {}
    for contender in contenders(["ladder"], checkpoint.shape, []):
        model = build(contender, config, 2, None)
        weights.fill(model)
        with torch.no_grad():
            found[contender.name] = model(TOKENS).logits
    assert torch.equal(found["stock"], found["standard"])
    assert not torch.equal(found["stock"], found["ladder"])


def test_its_tokenizer_comes_along(dense: Path, tmp_path: Path) -> None:
    assert AutoTokenizer.from_pretrained(rewire(dense, tmp_path / "mixed"), trust_remote_code=False) is not None
