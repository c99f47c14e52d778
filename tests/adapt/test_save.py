"""The folder that a training makes: what goes along with the weights."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewired.adapt.card import card
from rewired.adapt.cli import main as adapt_main
from rewired.checkpoint.rewired_config import auto_map, model_code
from rewired.cli import main as rewired_main
from rewired.evaluate.evaluate import EvaluateRequest, evaluate
from rewired.evaluate.measure import Runner
from rewired.model.family import LLAMA
from tests.convert.checkpoints import edit_json

from .world import CHATML, LADDER, make_rewired, original, train, weights


def test_the_chat_template_that_was_trained_on_goes_along(keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    template = CHATML.replace("im_start", "begin")
    (tmp_path / "t.jinja").write_text(template)
    keys |= {"chat_template_path": str(tmp_path / "t.jinja"), "assistant_only_loss": False, "max_steps": 1}
    made = train(tmp_path / "r.yaml", **keys)
    assert AutoTokenizer.from_pretrained(made).chat_template == template
    assert AutoTokenizer.from_pretrained(dense).chat_template == CHATML


def test_of_a_tokenizer_with_several_templates_the_default_is_trained_on(
    keys: dict[str, Any], dense: Path, tmp_path: Path
) -> None:
    several = AutoTokenizer.from_pretrained(dense)
    several.chat_template = {"default": CHATML, "tool_use": "{{ tools }}"}
    several.save_pretrained(tmp_path / "several")
    keys |= {"chat_template_path": str(tmp_path / "several"), "assistant_only_loss": False, "max_steps": 1}
    assert AutoTokenizer.from_pretrained(train(tmp_path / "r.yaml", **keys)).chat_template == CHATML


def test_it_is_evaluated_against_the_original(keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    """By its folder alone: what it was converted from is farther away."""
    made = train(tmp_path / "r.yaml", **keys | {"max_steps": 60, "save_steps": 60, "assistant_only_loss": False})
    text = tmp_path / "text.txt"
    turn = "<|im_start|>{}\n{}<|im_end|>\n"
    text.write_text((turn.format("user", "Say river 3.") + turn.format("assistant", "river river")) * 40)
    request = EvaluateRequest(str(dense), [str(tmp_path / "out" / "start"), str(made)], texts=[text], text_tokens=512)
    found = evaluate(request, Runner("cpu"), tmp_path / "report").divergences[str(text)]
    converted, trained = found["start"].kl, found["out/final"].kl
    assert 0 < trained < 0.9 * converted


def test_a_tokenizer_without_a_template_gives_none(keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    plain = AutoTokenizer.from_pretrained(dense)
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="neither a file nor a tokenizer that has a template"):
        train(tmp_path / "r.yaml", **keys | {"chat_template_path": str(tmp_path / "plain")})


def test_code_that_the_start_points_to_stays_behind(keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    """A rewired checkpoint from the hub may say anything."""
    start = make_rewired(dense, tmp_path / "rewired", LADDER)
    for name in ("tokenizer_config.json", "config.json"):
        edit_json(start / name, auto_map={"AutoTokenizer": ["other/repo--tok.Tok", None]})
    edit_json(start / "config.json", custom_pipelines={"text-generation": {"impl": "other/repo--evil.Pipeline"}})
    made = train(tmp_path / "r.yaml", **keys | {"model": str(start), "wiring": None, "max_steps": 1})
    assert not [path.name for path in made.glob("*.json") if "other/repo" in path.read_text()]
    assert json.loads((made / "config.json").read_text())["auto_map"] == auto_map(LLAMA)


def test_the_code_that_goes_along_is_what_is_installed(keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    """A checkpoint that was fetched has none, and an older one has old code."""
    model = make_rewired(dense, tmp_path / "model", LADDER)
    (model / "configuration.py").unlink()
    (model / "modeling_rewired_llama.py").write_text("raise RuntimeError")
    (model / "script.py").write_text("")
    made = train(tmp_path / "r.yaml", **keys | {"model": str(model), "wiring": None, "max_steps": 1})
    assert {path.name: path.read_text() for path in made.glob("*.py")} == model_code(LLAMA)
    assert json.loads((made / "config.json").read_text())["auto_map"] == auto_map(LLAMA)


def test_a_hybrid_is_not_called_the_original(keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    """Of a checkpoint that was converted only, its own card knows what it was made of."""
    model = make_rewired(dense, tmp_path / "model", LADDER)
    made = train(tmp_path / "r.yaml", **keys | {"model": str(model), "wiring": None, "max_steps": 1})
    text = (made / "README.md").read_text()
    assert "\n`dense`, rewired" in text and "\n`model`, rewired" not in text
    assert original(made) is None
    again = train(tmp_path / "r.yaml", **keys | {"model": str(made), "wiring": None, "output_dir": str(tmp_path / "2")})
    assert "\n`dense`, rewired" in (again / "README.md").read_text()


@pytest.mark.parametrize(
    ("declared", "original", "expected"),
    [
        ('base_model: "dense"\n', "dense", ""),
        ('base_model: "org/model"\n', "org/model", 'base_model: "org/model"\n'),
        ('base_model: "start"\n', "org/model", 'base_model: "org/model"\n'),
        ("", "org/model", 'base_model: "org/model"\n'),
        ('base_model: "org/model"\n', "dense", 'base_model: "org/model"\n'),
        ('base_model: "org/model"\n', None, 'base_model: "org/model"\n'),
        ("base_model:\n- org/one\n- org/two\n", "merged", "base_model:\n- org/one\n- org/two\n"),
    ],
)
def test_the_base_model_of_a_card_is_an_id_on_the_hub(
    declared: str, original: str | None, expected: str, dense: Path, tmp_path: Path
) -> None:
    """A folder's name would link to nothing; a merge's list stays."""
    start = make_rewired(dense, tmp_path / "model", LADDER)
    written = re.sub(r"^base_model: .*\n", "", (start / "README.md").read_text(), flags=re.MULTILINE)
    (start / "README.md").write_text(written.replace("---\n", f"---\n{declared}", 1))
    record = {"tokens": 8, "steps": 2, "tokens_before": 0}
    trained = card(start, None, Path("out/final"), original, {}, [], record, [])
    assert trained.startswith(f"---\n{expected}library_name: transformers\n")
    assert trained.count("base_model") == len(expected.splitlines()[:1])


def test_the_card_says_how_to_load_it_and_to_make_it_anew(
    keys: dict[str, Any], dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks, pasted."""
    monkeypatch.chdir(tmp_path)
    made = train(tmp_path / "r.yaml", **keys | {"output_dir": "runs/kd", "max_steps": 2})
    assert made == Path("runs/kd/final")
    text = (made / "README.md").read_text()
    assert "Made by:\n\n    adapt recipe.yaml\n" in text and "Trained by\n\n    adapt recipe.yaml\n" in text
    names: dict[str, Any] = {}
    (python,) = re.findall(r"## Load it\n\n((?:    .*\n|\n)+)", text)
    exec(textwrap.dedent(python), names)
    assert type(names["model"]).__name__ == "RewiredLlamaForCausalLM"
    (recipe,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    Path("recipe.yaml").write_text(recipe)
    first = weights(made)
    shutil.rmtree("runs")
    monkeypatch.setattr(sys, "argv", ["adapt", "recipe.yaml"])
    with pytest.raises(SystemExit) as ended:
        adapt_main()
    assert ended.value.code in (0, None)
    assert all(torch.equal(one, first[name]) for name, one in weights(made).items())


def test_a_folder_in_the_models_own_is_not_copied(keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    model = make_rewired(dense, tmp_path / "model", LADDER)
    (model / "notes.bin").write_bytes(b"0")
    keys |= {"model": str(model), "wiring": None, "output_dir": str(model / "adapted"), "max_steps": 2}
    made = train(tmp_path / "r.yaml", **keys)
    assert not [path for path in made.iterdir() if path.is_dir() or path.name == "notes.bin"]
    AutoModelForCausalLM.from_pretrained(made)


def test_info_says_what_it_was_made_from(
    keys: dict[str, Any],
    dense: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = train(tmp_path / "r.yaml", **keys | {"max_steps": 1})
    tokens = json.loads((made / "config.json").read_text())["adapted"]["tokens"]
    monkeypatch.setattr(sys, "argv", ["rewired", "info", str(made)])
    with pytest.raises(SystemExit):
        rewired_main()
    printed = capsys.readouterr().out
    assert f"Its weights were made from those of {dense.resolve()}." in printed
    assert f"Trained on {tokens:,} tokens." in printed and "tp_shards 4; this wiring computes the same" in printed
