"""Trainings that follow one another in one recipe, and what the last one tells of the others."""

from __future__ import annotations

import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import rewired  # noqa: F401 - registers the rewired classes
from rewired.adapt.losses.distillation import add_losses
from rewired.adapt.losses.token_loss import TokenLoss
from rewired.adapt.model.teacher import beside
from rewired.adapt.model.trainable import choose, rewired_layers
from rewired.adapt.recipe.keys import Recipe
from rewired.adapt.start import outline, prepare
from rewired.convert.refit import notes_on_making
from rewired.model.modeling_rewired_llama import RewiredLlamaForCausalLM

from .world import (
    LADDER,
    check_names,
    conversations,
    logged,
    logits_of,
    make_chat,
    original,
    train,
    weights,
    write_rows,
)


def test_after_two_trainings_the_original_is_still_the_first_one(
    keys: dict[str, Any], dense: Path, tmp_path: Path
) -> None:
    """The first changed everything, the second only what is rewired: the teacher shares nothing with the student."""
    stages = [{"train": "all", "learning_rate": 1e-2}, {"train": "lora", "learning_rate": 1e-2}]
    made = train(tmp_path / "r.yaml", **keys | {"stages": stages})
    recipe = Recipe(model=str(made), datasets=["unused"], train="norms_and_gains", kd_weight=1.0)  # type: ignore[list-item]
    start = prepare(recipe, tmp_path / "unused")
    student: Any = AutoModelForCausalLM.from_pretrained(start.folder)
    choose(student, "norms_and_gains")
    add_losses(student, beside(student, start.original, start.changed), TokenLoss(), 0.0, [])
    ids = torch.randint(3, 259, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(student(input_ids=ids, original=True), logits_of(dense, ids), rtol=1e-4, atol=1e-4)


def test_stages_follow_one_another(keys: dict[str, Any], tmp_path: Path) -> None:
    """Progressive conversion: one layer is rewired and healed, then another one too."""
    stages = [{"wiring": [{"layers": "3-4", "preset": "ladder"}]}, {"wiring": LADDER, "kd_weight": 2.0}]
    made = train(tmp_path / "r.yaml", **keys | {"stages": stages})
    assert made == tmp_path / "out" / "final"
    assert not any(isinstance(one, RewiredLlamaForCausalLM) for one in gc.get_objects()), "no stage's model stays"
    model: Any = AutoModelForCausalLM.from_pretrained(made)
    assert [region["layers"] for region in model.config.wiring if region["preset"] == "ladder"] == ["2-4"]
    half = tmp_path / "out" / "stage-1" / "final"
    first, second = weights(half), weights(made)
    assert not torch.equal(first["model.layers.2.mlp.up_proj.weight"], second["model.layers.2.mlp.up_proj.weight"])
    assert original(made) == str(Path(keys["model"]).resolve()), "the second stage learns from the same original"
    seen, in_all = (json.loads((folder / "config.json").read_text())["adapted"] for folder in (half, made))
    assert in_all["tokens_before"] == seen["tokens"] > 0
    check_card(made, f"after {seen['tokens']:,} tokens of earlier training", "kd_weight: 1.0", "kd_weight: 2.0")


def test_a_stage_may_go_back_towards_dense(keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    """As CAAT-Net raises p to 1: weights and gains stay, the original stays the teacher, each wiring is recorded."""
    stages = [{"wiring": wiring} for wiring in ("partial-0.5@1-4", "partial-0.75@1-4", "standard")]
    made = train(tmp_path / "r.yaml", **keys | {"stages": stages, "train": "all", "kd_weight": 1.0, "max_steps": 2})
    config = json.loads((made / "config.json").read_text())
    assert original(made) == str(Path(keys["model"]).resolve())
    before = config["rewired_again"]["before"]
    assert [text.split(" ")[0] for text in before] == ["partial-0.5@1-4", "partial-0.75@1-4"]
    halves = [weights(tmp_path / "out" / f"stage-{number}" / part) for number, part in ((1, "final"), (2, "start"))]
    assert any(name.endswith("gain.weight") for name in halves[0])
    assert all(torch.equal(halves[0][name], halves[1][name]) for name in halves[0])
    assert not any(name.endswith("gain.weight") for name in weights(made))
    assert "Before, it was partial-0.5@1-4" in "\n".join(notes_on_making(config))


def test_a_stage_goes_on_with_what_an_earlier_one_rewired(keys: dict[str, Any], tmp_path: Path) -> None:
    """It needs no wiring of its own, and another stage's is refused before any is trained."""
    stages: list[dict[str, Any]] = [{"wiring": LADDER, "tp_shards": 4}, {"learning_rate": 1e-4}]
    keys |= {"wiring": None, "max_steps": 2}
    made = train(tmp_path / "r.yaml", **keys | {"stages": stages})
    config = json.loads((made / "config.json").read_text())
    assert config["wiring"][1:] == LADDER and config["tp_shards"] == 4
    check_card(made, "of earlier training", "learning_rate: 0.001", "learning_rate: 0.0001")


def check_card(made: Path, tokens: str, first: str, second: str) -> None:
    """It tells of two trainings, and names the log of the last."""
    card = (made / "README.md").read_text()
    assert tokens in card
    assert card.index("## Earlier training") < card.index(first) < card.index("## Training") < card.index(second)
    assert card.count("training.json)") == 1
    check_names(card)


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ({}, [{"layers": "1-2", "preset": "desync", "every": 2, "overlap": 3}], "overlap"),
        ({}, [{"layers": "2-4", "preset": "standard"}], []),
        ({"refit": "mix"}, [{"layers": "2-4", "preset": "desync"}], [2, 3]),
        ({}, "ladder@0-2, ladder+peek@2-4", [0, 1, 2, 3]),
        ({"wiring": "ladder+peek@2-4"}, "desync@2-4", [2, 3]),
    ],
)
def test_a_stage_is_planned_on_what_the_one_before_it_makes(
    first: dict[str, Any], second: str | list[dict[str, Any]], found: str | list[int], keys: dict[str, Any]
) -> None:
    """It may change the wiring of what was trained; what makes no sense is refused before any is trained."""
    before = Recipe(**{"model": keys["model"], "datasets": keys["datasets"], "wiring": LADDER} | first)
    recipes = [before, replace(before, wiring=second, refit="none")]
    if isinstance(found, list):
        assert rewired_layers(outline(recipes).config) == found
    else:
        with pytest.raises(ValueError, match=found):
            outline(recipes)


def test_only_what_comes_after_the_last_whole_stage_is_trained(keys: dict[str, Any], tmp_path: Path) -> None:
    """The first one's folder may be deleted to save space."""
    other = write_rows(tmp_path / "other.jsonl", conversations(20))
    stages = [{}, {"learning_rate": 1e-4}, {"datasets": [str(other)]}]
    keys |= {"max_steps": 2, "stages": stages}
    whole = train(tmp_path / "r.yaml", **keys | {"output_dir": str(tmp_path / "whole")})
    expected = weights(whole)
    for lost in (whole, tmp_path / "whole" / "stage-1", tmp_path / "whole" / "stage-3"):
        shutil.rmtree(lost)
    again = train(tmp_path / "r.yaml", resume=True, **keys | {"output_dir": str(tmp_path / "whole")})
    found = weights(again)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not (tmp_path / "whole" / "stage-1").exists()


def test_stages_go_on_in_a_folder_that_is_named_otherwise(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys |= {"stages": [{"wiring": [{"layers": "3-4", "preset": "ladder"}]}, {"wiring": LADDER}]}
    made = train(tmp_path / "r.yaml", **keys)
    expected = weights(made)
    for lost in (made, tmp_path / "out" / "stage-2" / "checkpoint-4"):
        shutil.rmtree(lost)
    monkeypatch.chdir(tmp_path)
    again = train(tmp_path / "r.yaml", resume=True, **keys | {"output_dir": "out"})
    assert again == Path("out/final") and all(torch.equal(one, expected[name]) for name, one in weights(again).items())


def test_a_trained_model_goes_on_with_the_recipe_that_made_it(
    keys: dict[str, Any], rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose wiring it has and whose refit it had: it is neither rewired nor refitted again."""
    keys |= {"refit": str(rows), "refit_tokens": 1024, "max_steps": 2, "tp_shards": 4}
    made = train(tmp_path / "r.yaml", **keys)
    again = train(tmp_path / "r.yaml", **keys | {"model": str(made), "output_dir": str(tmp_path / "2")})
    assert f"Rewiring {made}, without a refit: it was trained or refitted before." in capsys.readouterr().err
    without = keys | {"model": str(made), "wiring": None, "refit": None, "tp_shards": None}
    expected = weights(train(tmp_path / "r.yaml", **without | {"output_dir": str(tmp_path / "3")}))
    assert all(torch.equal(one, expected[name]) for name, one in weights(again).items())
    configs = [json.loads((folder / "config.json").read_text()) for folder in (made, again)]
    assert configs[0]["wiring"] == configs[1]["wiring"] and original(again) == original(made)
    assert configs[1]["adapted"]["tokens_before"] == configs[0]["adapted"]["tokens"]


def test_a_trained_model_is_refitted_to_no_other_wiring(keys: dict[str, Any], rows: Path, tmp_path: Path) -> None:
    made = train(tmp_path / "r.yaml", **keys | {"max_steps": 1})
    keys |= {"model": str(made), "output_dir": str(tmp_path / "2"), "refit": str(rows)}
    with pytest.raises(ValueError, match="trained as it is wired"):
        train(tmp_path / "r.yaml", **keys | {"wiring": [{"layers": "1-4", "preset": "ladder"}]})


def test_a_model_with_copied_kv_heads_learns_from_its_original(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher has as many: on the layers that are the original's it runs on the student's own modules."""
    monkeypatch.setenv("REWIRED_CACHE", str(tmp_path / "cache"))
    dense = make_chat(tmp_path / "dense", num_key_value_heads=2)
    changes = {"model": str(dense), "tp_shards": 4, "train": "all", "kd_weight": 1.0, "ce_weight": 0.0, "max_steps": 3}
    made = train(tmp_path / "r.yaml", **keys | changes)
    config = json.loads((made / "config.json").read_text())
    assert (config["num_key_value_heads"], config["kv_head_copies"]) == (4, 2)
    assert original(made) == str(dense.resolve())
    again = train(tmp_path / "r.yaml", **keys | changes | {"model": str(made), "output_dir": str(tmp_path / "more")})
    first, last = logged(made, "kd"), logged(again, "kd")
    assert 0 < last[-1] < first[0]
