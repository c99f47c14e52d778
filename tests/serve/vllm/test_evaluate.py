"""`evaluate --engine vllm`: the items, and what the models answer, are those of the engine `transformers`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm")

from rewired.evaluate.evaluate import PACKAGED_TEXT, EvaluateRequest, evaluate
from rewired.evaluate.measure import Runner
from rewired.evaluate.results import Results
from rewired.families import FAMILIES, stock
from tests.evaluate.world import LADDER, make_dense, make_rewired, make_rows, tokenizer
from tests.evaluate.world import SIZES as SMALL

from .engine import environment
from .models import SIZES

TASKS = ("piqa", "lambada_openai", "gsm8k_cot")
ENGINES = ("transformers", "vllm")
WIDE = {name: SIZES[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")}
PEEKING = [{"layers": "1-4", "preset": "ladder", "peek": True}]  # another function on another number of ranks


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dense, and made from it peeking, with heads that vLLM's attention on a CPU takes."""
    folder = tmp_path_factory.mktemp("world")
    make_rewired(make_dense(folder / "dense", **WIDE), folder / "peeking", PEEKING)
    make_rows(folder / "rows", count=6)
    return folder


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("REWIRED_CACHE", str(tmp_path / "cache"))


def request(world: Path, **changes: Any) -> EvaluateRequest:
    asked: dict[str, Any] = {"tasks": TASKS, "data": world / "rows", "text_tokens": 512}
    return EvaluateRequest(str(world / "dense"), [str(world / "peeking")], **(asked | changes))


def test_two_ranks_of_vllm_answer_as_transformers_does(world: Path, tmp_path: Path) -> None:
    """Divergences, in transformers, have one engine."""
    transformers = evaluate(request(world), Runner("cpu"), tmp_path / "transformers")
    vllm = evaluate(request(world, texts=()), Runner("cpu", ranks=2, engine="vllm"), tmp_path / "vllm")
    assert_equal_answers(transformers, vllm, tmp_path)
    assert transformers.settings["answers"]["engine"] == "transformers"
    assert vllm.settings["answers"]["versions"]["vllm"].startswith("0.32")


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_every_family_answers_as_in_transformers(model_type: str, tmp_path: Path) -> None:
    make_family(tmp_path / "dense", model_type)
    make_rewired(tmp_path / "dense", tmp_path / "ladder", LADDER)
    asked = EvaluateRequest(
        str(tmp_path / "dense"),
        [str(tmp_path / "ladder")],
        tasks=("piqa", "gsm8k_cot"),
        data=make_rows(tmp_path / "rows", count=6),
        texts=(),
    )
    found = {engine: evaluate(asked, Runner("cpu", engine=engine), tmp_path / engine) for engine in ENGINES}
    assert_equal_answers(*found.values(), tmp_path)


def make_family(folder: Path, model_type: str, **changes: Any) -> None:
    torch.manual_seed(0)
    config = stock(FAMILIES[model_type], "Config")(**SMALL | WIDE | changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def assert_equal_answers(transformers: Results, vllm: Results, folder: Path) -> None:
    """Scores, log-likelihoods and generated words of each item, of two reports in `folder`."""
    for expected, found in zip(transformers.tasks, vllm.tasks, strict=True):
        assert found.scores.keys() == expected.scores.keys() and len(found.scores) == 2
        for name, score in found.scores.items():
            assert score.value == pytest.approx(expected.scores[name].value, rel=1e-3), (found.title, name)
            items = [samples(folder / engine, name, found.title) for engine in ENGINES]
            for one, other in zip(*items, strict=True):
                assert one["id"] == other["id"]
                assert responses(one) == [pytest.approx(each, abs=1e-3) for each in responses(other)]


def samples(folder: Path, model: str, title: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples" / model / f"{title}.jsonl").open()]


def responses(sample: dict[str, Any]) -> list[Any]:
    """Log-likelihoods, or words."""
    return [each[0] if isinstance(each, list) else each for each in sample["responses"]]


def test_the_command_answers_where_no_terminal_shows_its_progress(world: Path, tmp_path: Path) -> None:
    arguments = [world / "dense", "--tasks", "piqa", "--data", world / "rows", "--no-text", "--engine", "vllm"]
    command = [Path(sys.executable).parent / "evaluate", *arguments, "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "piqa" in (tmp_path / "out" / "report.md").read_text()


def test_texts_are_measured_in_transformers_and_the_report_says_so(world: Path, tmp_path: Path) -> None:
    asked = request(world, tasks=())
    found, expected = (
        evaluate(asked, replace(Runner("cpu"), engine=engine), tmp_path / engine) for engine in ("vllm", "transformers")
    )
    assert found.divergences == expected.divergences
    assert found.divergences[PACKAGED_TEXT.name]["peeking"].kl > 0
    assert found.notes == ["Perplexity and divergence need all logits, and ran in transformers, not in vLLM."]


def test_what_vllm_refuses_is_said_before_anything_is_asked(tmp_path: Path) -> None:
    """Such as a window in some layers only."""
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    make_family(tmp_path / "dense", "qwen2", **windows)
    make_rewired(tmp_path / "dense", tmp_path / "ladder", LADDER)
    asked = EvaluateRequest(
        str(tmp_path / "ladder"), tasks=("piqa",), data=make_rows(tmp_path / "rows", count=6), texts=()
    )
    with pytest.raises(ValueError, match=r"^vLLM cannot run ladder: Only some layers of this model have a sliding"):
        evaluate(asked, Runner("cpu", engine="vllm"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
