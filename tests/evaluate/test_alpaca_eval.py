"""AlpacaEval: outputs in its own format, and its judge where there is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rewired.evaluate import alpaca_eval
from rewired.evaluate.evaluate import EvaluateRequest, evaluate
from rewired.evaluate.measure import Runner

from .benchmark_rows import CASES, carry
from .world import make_dense, make_rows

LOGS = [
    {"doc": {"dataset": "helpful", "instruction": "Name a river."}, "responses": ["The Nile."], "metrics": {}},
    {"doc": {"dataset": "koala", "instruction": "Größe?"}, "responses": [""], "metrics": {}},
]
NO_KEY = "AlpacaEval's judge needs a key: export OPENAI_API_KEY=..."
NO_TOOL = (
    "AlpacaEval's judge needs the package 'alpaca_eval', which is not installed: "
    "pipx install --preinstall 'datasets<4' --preinstall 'setuptools<81' alpaca_eval"
)


def test_outputs_are_in_the_tools_format(tmp_path: Path) -> None:
    alpaca_eval.write_outputs(LOGS, "my-hybrid", tmp_path / "new" / "outputs.json")
    assert json.loads((tmp_path / "new" / "outputs.json").read_text()) == [
        {"dataset": "helpful", "instruction": "Name a river.", "output": "The Nile.", "generator": "my-hybrid"},
        {"dataset": "koala", "instruction": "Größe?", "output": "", "generator": "my-hybrid"},
    ]


@pytest.mark.parametrize(("tool", "key"), [(False, True), (True, False), (True, True)])
def test_the_judge_is_asked_where_it_is_installed_and_has_a_key(
    tool: bool, key: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("OPENAI_API_KEY", "k")
    if tool:
        script = tmp_path / "alpaca_eval"
        script.write_text('#!/bin/sh\necho "judged $*"\n')
        script.chmod(0o755)
    verdict = alpaca_eval.judge(Path("outputs.json"))
    command = "--model_outputs outputs.json --annotators_config weighted_alpaca_eval_gpt4_turbo"
    if tool and key:
        assert verdict == f"judged {command}"
    else:
        assert verdict == f"{NO_KEY if tool else NO_TOOL}; then: alpaca_eval {command}"


def test_tool_and_key_may_both_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert alpaca_eval.judge(Path("outputs.json")).startswith(f"{NO_TOOL}; {NO_KEY}; then: alpaca_eval ")


def test_a_judge_that_fails_does_not_cost_the_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    (tmp_path / "alpaca_eval").write_text("#!/bin/sh\necho no credit >&2\nexit 1\n")
    (tmp_path / "alpaca_eval").chmod(0o755)
    assert alpaca_eval.judge(Path("outputs.json")).startswith("AlpacaEval's judge failed (no credit): alpaca_eval")


def test_an_evaluation_writes_the_outputs_of_each_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWIRED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    dense = make_dense(tmp_path / "dense", max_position_embeddings=2560, eos_token_id=list(range(256)))
    rows = make_rows(tmp_path / "rows")
    (case,) = (case for case in CASES if case.task == "alpaca_eval")
    carry(rows, case.file, [case.carried])
    request = EvaluateRequest(str(dense), tasks=["alpaca_eval"], data=rows, texts=())
    results = evaluate(request, Runner("cpu"), tmp_path / "out")
    (output,) = json.loads((tmp_path / "out" / "alpaca_eval" / "dense.json").read_text())
    assert output["instruction"] == "Name a river."
    assert output["generator"] == "dense"
    assert results.tasks == []
    assert results.notes[-1].startswith("dense: AlpacaEval's judge needs ")
