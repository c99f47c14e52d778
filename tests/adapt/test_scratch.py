"""Training from scratch: random weights that depend on the seed alone, and next-token cross-entropy."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rewired.adapt.recipe.keys import Recipe
from rewired.adapt.start import outline, prepare
from rewired.checkpoint import provenance
from rewired.checkpoint.checkpoint import Checkpoint
from rewired.convert.refit import notes_on_making
from rewired.text.tokenizer import load_tokenizer

from .trainer.test_ranks import SPLITS, fork
from .world import command, logged, original, train, weights, write_recipe

SHARDS = 4


@pytest.fixture
def keys(dense: Path, rows: Path, tmp_path: Path) -> dict[str, Any]:
    """Of the model's folder, only what is not weights is there."""
    sizes = tmp_path / "sizes"
    shutil.copytree(dense, sizes, ignore=shutil.ignore_patterns("*.safetensors"))
    return {
        "model": str(sizes),
        "init": "scratch",
        "wiring": "desync-2x",
        "tp_shards": SHARDS,
        "datasets": [str(rows)],
        "output_dir": str(tmp_path / "out"),
        "learning_rate": 1e-2,
        "max_steps": 12,
    }


def start(folder: Path, keys: dict[str, Any], seed: int = 0, **changes: Any) -> dict[str, torch.Tensor]:
    given = {name: keys[name] for name in ("model", "init", "wiring", "tp_shards", "datasets")} | changes
    return weights(prepare(Recipe(**given), folder / "start", seed).folder)


def test_a_model_learns_from_nothing(keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    final = train(tmp_path / "r.yaml", **keys)
    losses = logged(final, "loss")
    assert losses[0] > 0.8 * math.log(259) and losses[-1] < losses[0] - 1
    config = Checkpoint.open(final).config
    assert provenance.base_of(config)["from_scratch"] and original(final) is None  # type: ignore[index]
    assert notes_on_making(config)[0] == "Trained from scratch: its first weights were random."
    card = (final / "README.md").read_text()
    assert card.count("# out\n") == 1 and "Trained from scratch" in card and "init: scratch" in card
    assert "Losses are means a token." in card and "`kd`" not in card and "KL(original" not in card
    assert load_tokenizer(final).chat_template == load_tokenizer(dense).chat_template


def test_it_goes_on_where_it_was_cut_off(keys: dict[str, Any], tmp_path: Path) -> None:
    keys |= {"lr_scheduler_type": "constant"}
    whole = weights(train(tmp_path / "r.yaml", **keys | {"output_dir": str(tmp_path / "whole")}))
    train(tmp_path / "r.yaml", **keys | {"max_steps": 4})
    again = weights(train(tmp_path / "r.yaml", resume=True, **keys))
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())


def test_the_seed_alone_decides_the_weights(keys: dict[str, Any], tmp_path: Path) -> None:
    """In every wiring, of whatever number of ranks: what differs afterwards is the wiring's."""
    torch.manual_seed(7)
    desync = start(tmp_path / "desync", keys)
    dense = start(tmp_path / "standard", keys, wiring="standard")
    assert all(torch.equal(tensor, desync[name]) for name, tensor in dense.items())
    assert all((desync[name] == 1).all() for name in desync.keys() - dense.keys())  # gains
    another = start(tmp_path / "another", keys, seed=1)
    name = next(name for name in dense if name.endswith("o_proj.weight"))
    assert not torch.equal(another[name], desync[name])


def test_private_channels_begin_as_large_as_sums(keys: dict[str, Any], tmp_path: Path) -> None:
    """As CAAT-Net's first version has it; the model's last module sums all channels."""
    dense = start(tmp_path / "standard", keys, wiring="standard")
    partial = start(tmp_path / "partial", keys, wiring="partial-0.5")
    for name, tensor in dense.items():
        expected = tensor.clone()
        if name.endswith(("o_proj.weight", "down_proj.weight")) and not name.startswith("model.layers.3.mlp"):
            expected[12:] *= math.sqrt(SHARDS)
        torch.testing.assert_close(partial[name], expected)


def test_a_shape_takes_another_tokenizer(keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    keys |= {"model": "tiny", "tokenizer": str(dense)}
    final = train(tmp_path / "r.yaml", **keys | {"max_steps": 2})
    config, tokenizer = Checkpoint.open(final).config, load_tokenizer(dense)
    assert (config["vocab_size"], config["hidden_size"]) == (512, 64)
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert "sizes of `tiny`" in (final / "README.md").read_text()


def test_the_papers_shapes_need_no_hub(tmp_path: Path) -> None:
    recipe = Recipe(model="ladder-1b", init="scratch", tokenizer="some/tokenizer", wiring="ladder", datasets=["a/b"])  # type: ignore[list-item]
    student = outline([recipe])
    assert sum(parameter.numel() for parameter in student.parameters()) > 1e9


def test_a_dry_run_writes_nothing(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, write_recipe(tmp_path / "r.yaml", **keys), "--dry-run") == 0
    assert "Trained: everything" in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_a_later_stage_goes_on_with_the_weights(keys: dict[str, Any], tmp_path: Path) -> None:
    stages = [{"wiring": "standard"}, {"wiring": "ladder@3-4", "max_steps": 2}]
    final = train(tmp_path / "r.yaml", **keys | {"stages": stages})
    assert logged(final, "loss")[0] < 0.7 * math.log(259)
    assert provenance.base_of(Checkpoint.open(final).config)["from_scratch"]  # type: ignore[index]


@pytest.mark.parametrize("split", ["FSDP2", pytest.param("TP x FSDP2", marks=pytest.mark.slow)])
def test_ranks_learn_what_one_process_does(split: str, keys: dict[str, Any], tmp_path: Path) -> None:
    _, ranks, sizes = SPLITS[split]
    batch = 4 // (ranks // sizes.get("tp_size", 1))
    expected = train(tmp_path / "r.yaml", **keys | {"per_device_train_batch_size": 4})
    out = {"output_dir": str(tmp_path / "ranks"), "per_device_train_batch_size": batch}
    fork(ranks, write_recipe(tmp_path / "ranks.yaml", **keys | sizes | out))
    assert logged(tmp_path / "ranks" / "final", "loss") == pytest.approx(logged(expected, "loss"), rel=1e-3)


def test_a_tokenizer_that_is_too_large_is_refused(keys: dict[str, Any], tmp_path: Path) -> None:
    config = Path(keys["model"]) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 100}))
    with pytest.raises(ValueError, match="has a vocabulary of 100: give another tokenizer"):
        train(tmp_path / "r.yaml", **keys)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"init": "random"}, "init: invalid choice: 'random' (choose from 'scratch')"),
        ({"init": None, "tokenizer": "a/b"}, "tokenizer is for a model from scratch"),
        ({"kd_weight": 1.0}, "no original to learn from"),
        ({"refit": "mix"}, "or to fit to"),
        ({"train": "lora"}, "no weights to keep"),
        ({"eval_steps": 2}, "eval_steps measures KL to the original"),
        ({"tp_shards": 8}, "tp_shards"),
        ({"model": "ladder-1b"}, "ladder-1b is a shape without a tokenizer"),
        ({"wiring": None, "tp_shards": None}, "give a wiring to rewire it first"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(
    changes: dict[str, Any],
    problem: str,
    keys: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, write_recipe(tmp_path / "r.yaml", **keys | changes), "--dry-run") == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1
