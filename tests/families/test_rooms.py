"""Each family through the rooms beyond conversion: training, evaluation, generation, plans, benches, and its card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewired.bench.contenders import contenders
from rewired.bench.models import SharedWeights, build
from rewired.bench.request import BenchRequest
from rewired.bench.runs import Steps
from rewired.checkpoint.checkpoint import Checkpoint
from rewired.convert import Request, convert
from rewired.evaluate.evaluate import EvaluateRequest, evaluate
from rewired.evaluate.measure import Runner
from rewired.families import FAMILIES, stock
from rewired.plan.ranking import PlanRequest, make_ranking
from rewired.serve.generate import Prompt, generate
from tests.adapt.world import CHATML, conversations, train, write_rows
from tests.evaluate.world import make_rows, tokenizer

from .test_families import MIXED, TOKENS, config_of, randomised

NAMES = ("llama", "mistral", "qwen2", "qwen3")
PROJECTIONS = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
TRAININGS: dict[str, dict[str, Any]] = {
    "sft": {},
    "distilled": {"ce_weight": 0.0, "kd_weight": 1.0, "hidden_weight": 0.5},
    "lora": {"train": "lora"},
}


@pytest.fixture(scope="module", params=NAMES)
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param
    torch.manual_seed(0)
    randomised(AutoModelForCausalLM.from_config(config_of(request.param))).save_pretrained(folder)
    made = tokenizer()
    made.chat_template = CHATML
    made.save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A small model\n")
    return folder


@pytest.fixture(scope="module")
def mixed(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(dense, tmp_path_factory.mktemp("mixed") / "mixed", Request(MIXED, tp_shards=2)).out


@pytest.mark.parametrize("training", TRAININGS)
def test_it_is_trained(dense: Path, tmp_path: Path, training: str) -> None:
    """Only rewired layers are: all of their tensors, or with LoRA their seven projections and norms, and no bias."""
    keys: dict[str, Any] = {"train": "rewired", "wiring": "ladder+peek@1-4", "tp_shards": 2, "refit": "none"}
    rows, paths = write_rows(tmp_path / "rows.jsonl", conversations(8)), {"output_dir": str(tmp_path / "out")}
    keys |= {"model": str(dense), "datasets": [str(rows)], "max_steps": 2, **paths}
    made = load_file(train(tmp_path / "recipe.yaml", **keys | TRAININGS[training]) / "model.safetensors")
    before = load_file(dense / "model.safetensors")
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, made[name])}
    expected = {name for name in before if name.startswith(tuple(f"model.layers.{layer}." for layer in (1, 2, 3)))}
    if training == "lora":
        learning = (*PROJECTIONS, "norm")
        expected = {name for name in expected if name.removesuffix(".weight").endswith(learning)}
    assert changed == expected


def test_it_is_evaluated(dense: Path, mixed: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The river runs over stones to the sea. " * 40)
    standard = convert(dense, tmp_path / "standard", Request([{"layers": "0-", "preset": "standard"}])).out
    tasks: dict[str, Any] = {"tasks": ("piqa", "gsm8k_cot"), "data": make_rows(tmp_path / "rows", count=6)}
    texts = {"texts": [tmp_path / "text.txt"], "text_tokens": 512}
    request = EvaluateRequest(str(dense), [str(mixed), str(standard)], **tasks, **texts)
    results = evaluate(request, Runner("cpu", batch_size="2"), tmp_path / "report")
    assert [task.scores["standard"] for task in results.tasks] == [task.scores[dense.name] for task in results.tasks]
    [of_text] = results.divergences.values()
    assert of_text["mixed"].kl > 0.01 > 1e-6 > abs(of_text["standard"].kl)


def test_it_generates_what_transformers_does(dense: Path, tmp_path: Path) -> None:
    """Beyond its window of 7 tokens, from the stock model and from ours."""
    standard = convert(dense, tmp_path / "standard", Request([{"layers": "0-", "preset": "standard"}])).out
    prompt = Prompt("a river runs over stones", max_new_tokens=12, chat=False)
    assert generate(standard, prompt, device="cpu") == generate(dense, prompt, device="cpu") != ""


def test_its_wirings_are_planned(dense: Path) -> None:
    ranking = make_ranking(PlanRequest(str(dense), gpus=2, prompt=32, new=8, batches=(1,)))
    assert {row.candidate.name for row in ranking.rows} >= {"standard", "none", "ladder@0-4"}
    assert all(row.ttft_seconds > 0 for row in ranking.rows)


def test_its_models_are_benched_on_one_set_of_weights(dense: Path) -> None:
    checkpoint = Checkpoint.open(dense)
    config = stock(checkpoint.shape.family, "Config").from_dict({**checkpoint.config, "dtype": torch.float32})
    weights = SharedWeights(torch.float32, torch.device("cpu"), dense)
    found = {}
    for contender in contenders(["ladder"], checkpoint.shape, []):
        model = build(contender, config, 2, None)
        weights.fill(model)
        with torch.no_grad():
            found[contender.name] = model(TOKENS).logits
    assert torch.equal(found["stock"], found["standard"])
    assert not torch.equal(found["stock"], found["ladder"])


def runs_often(model: Any, is_compiled: bool) -> Steps:
    """Of a prompt that nearly fills a window of 7 tokens."""
    request = BenchRequest("unused", (), new=4, is_compiled=is_compiled)
    with torch.no_grad():
        steps = Steps(model, TOKENS[:, :6], request)
        for _ in range(5):
            for run in steps.runs(model):
                run()
    return steps


def test_a_bench_takes_its_tokens_back_where_a_window_is_full(mixed: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixed, dtype=torch.float32)
    assert runs_often(model, is_compiled=False).dynamic.get_seq_length() == 6


@pytest.mark.slow
def test_a_bench_compiles_once_whatever_a_window_counts(mixed: Path) -> None:
    """Once, and once more with that number as a variable; not for every token."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = AutoModelForCausalLM.from_pretrained(mixed, dtype=torch.float32)
    assert runs_often(model, is_compiled=True).static.get_seq_length() == 6
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize("named", ["TokenizersBackend", "LlamaTokenizerFast", "Qwen2Tokenizer"])
def test_its_tokenizer_is_the_one_of_its_stock_class(dense: Path, mixed: Path, tmp_path: Path, named: str) -> None:
    """AutoTokenizer chooses by model_type, whatever is named: DeepSeek's Qwen2 distillations name Llama's."""
    found = []
    for folder in (dense, mixed):
        shutil.copytree(folder, tmp_path / folder.name)
        path = tmp_path / folder.name / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": named}))
        found.append(AutoTokenizer.from_pretrained(path.parent, trust_remote_code=False))
    stock, ours = found
    assert type(ours) is type(stock)
    assert ours.get_vocab() == stock.get_vocab()
    assert ours("A river, 17 stones.").input_ids == stock("A river, 17 stones.").input_ids


def test_its_card_has_its_names(dense: Path, mixed: Path) -> None:
    card = (mixed / "README.md").read_text()
    family = FAMILIES[dense.name]
    assert 'license: "apache-2.0"\n' in card
    assert f"`{dense.name}`, rewired" in card
    assert [name for name in ("Llama", "llama", "Mistral", "Qwen") if name in card.replace(dense.name, "")] == []
    config = Checkpoint.open(mixed).config
    assert (config["model_type"], config["architectures"]) == (family.rewired_type, [f"Rewired{family.architecture}"])
