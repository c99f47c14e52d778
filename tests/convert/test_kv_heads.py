"""More ranks than KV heads: each head is repeated in the weights, which changes no function, and merged again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rewired.bench.request import BenchRequest
from rewired.bench.run import _find
from rewired.checkpoint.checkpoint import Checkpoint
from rewired.convert import RefitRequest, Request, convert
from rewired.grid.size import TpSize
from rewired.plan.ranking import PlanRequest, make_ranking
from rewired.ranks import run_on_ranks
from rewired.rotate.original import as_made
from tests.commands import run
from tests.evaluate.world import tokenizer
from tests.families.test_families import TOKENS, config_of, forward_and_backward, gains_of, randomised
from tests.rewired.reference import reference_logits

from .checkpoints import INDEX, edit_json, edit_tensors, make_llama, snapshot

RANKS = 4
STANDARD: list[dict[str, Any]] = [{"layers": "0-", "preset": "standard"}]
WIRINGS: dict[str, list[dict[str, Any]]] = {
    "ladder-peek": [{"layers": "1-4", "preset": "ladder", "peek": True}],
    "desync": [{"layers": "0-4", "preset": "desync", "every": 2}],
    "partial": [{"layers": "1-3", "preset": "partial", "shared_fraction": 0.5}],
    "parallel": [{"layers": "1-3", "preset": "parallel"}],
}


@pytest.fixture(
    scope="module", params=["qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3"))]
)
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 heads, 2 KV heads."""
    folder = tmp_path_factory.mktemp("models") / request.param
    torch.manual_seed(0)
    config = config_of(request.param, num_attention_heads=8, num_key_value_heads=2, head_dim=8)
    tokenizer().save_pretrained(folder)
    randomised(AutoModelForCausalLM.from_config(config)).save_pretrained(folder, max_shard_size="20KB")
    return folder


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(TOKENS).logits


def test_the_function_is_the_same(dense: Path, tmp_path: Path) -> None:
    done = convert(dense, tmp_path / "wide", Request(STANDARD, tp_shards=RANKS))
    config = json.loads((done.out / "config.json").read_text())
    assert (config["num_key_value_heads"], config["kv_head_copies"], config["tp_shards"]) == (4, 2, 4)
    sizes = [json.loads((folder / INDEX).read_text())["metadata"] for folder in (dense, done.out)]
    assert "total_parameters" in sizes[0] and list(sizes[1]) == ["total_size"], "there are more now"
    torch.testing.assert_close(logits(done.out), logits(dense), rtol=1e-4, atol=1e-5)
    assert any(note.startswith("Each of 2 KV heads is there 2 times, for 4 ranks") for note in done.plan.notes)
    assert {path.name for path in done.out.iterdir() if path.name.startswith(".")} == set()


def test_a_stock_model_may_have_copies_too(dense: Path, tmp_path: Path) -> None:
    wide = convert(dense, tmp_path / "wide", Request(STANDARD, tp_shards=RANKS, to_stock=True)).out
    model = AutoModelForCausalLM.from_pretrained(wide)
    assert not type(model).__name__.startswith("Rewired") and model.config.num_key_value_heads == 4
    torch.testing.assert_close(logits(wide), logits(dense), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "wiring",
    [pytest.param(WIRINGS[name], marks=[] if name == "ladder-peek" else pytest.mark.slow, id=name) for name in WIRINGS],
)
def test_as_many_ranks_are_one_process_and_the_reference(
    dense: Path, tmp_path: Path, wiring: list[dict[str, Any]]
) -> None:
    """Forward and backward; the reference repeats the heads of the original itself."""
    folder = convert(dense, tmp_path / "wide", Request(wiring, tp_shards=RANKS)).out
    expected, expected_gradients = forward_and_backward(folder, 1)
    for found, gradients in run_on_ranks(forward_and_backward, RANKS, folder, RANKS):
        torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)
        for name, gradient in gradients.items():
            pair = map(torch.from_numpy, (gradient, expected_gradients[name]))
            torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-5, msg=name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("_gain.weight")}
    original = AutoModelForCausalLM.from_pretrained(dense).state_dict()
    for name, tensor in original.items():
        heads = tensor.unflatten(0, (2, -1)) if name.split(".")[-2] in ("k_proj", "v_proj") else None
        weights[name] = (
            tensor if heads is None else torch.cat([heads[[0]], heads[[0]], heads[[1]], heads[[1]]]).flatten(0, 1)
        )
    with torch.no_grad():
        reference = reference_logits(weights, model.config, wiring, RANKS, TOKENS, gains_of(model))
    torch.testing.assert_close(logits(folder), reference, rtol=1e-4, atol=1e-4)


def test_each_copy_is_fitted_to_its_shard(
    dense: Path, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWIRED_CACHE", str(tmp_path / "cache"))
    wiring = [{"layers": "1-4", "preset": "ladder", "peek": True}]
    done = convert(dense, tmp_path / "wide", Request(wiring, tp_shards=RANKS, refit=RefitRequest(str(text), 4096)))
    assert done.refit is not None and done.refit.after.kl < done.refit.before.kl
    keys = load_file_of(done.out, "model.layers.2.self_attn.k_proj.weight").unflatten(0, (4, -1))
    assert not torch.equal(keys[0], keys[1])
    record = json.loads((done.out / "config.json").read_text())["refit"]
    assert set(record["base"]["weights"]) == {path.name for path in Checkpoint.open(dense).weight_files()}
    original = as_made(done.out, dense)
    assert Checkpoint.open(original).shape.num_key_value_heads == 4
    torch.testing.assert_close(logits(original), logits(dense), rtol=1e-4, atol=1e-5)


def test_rotated_too(dense: Path, tmp_path: Path) -> None:
    wide = convert(dense, tmp_path / "wide", Request(STANDARD, tp_shards=RANKS, rotate="hadamard")).out
    torch.testing.assert_close(logits(wide), logits(dense), rtol=1e-3, atol=1e-4)


def test_back_to_dense_copies_are_merged(dense: Path, tmp_path: Path) -> None:
    wide = convert(dense, tmp_path / "wide", Request(WIRINGS["desync"], tp_shards=RANKS)).out
    done = convert(wide, tmp_path / "back", Request(STANDARD, to_stock=True))
    assert "The 2 copies of each KV head were equal, and are one again." in done.plan.notes
    before, after = (load_all(folder) for folder in (dense, done.out))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert "kv_head_copies" not in json.loads((done.out / "config.json").read_text())


def test_copies_that_differ_stay(dense: Path, tmp_path: Path) -> None:
    wide = convert(dense, tmp_path / "wide", Request(WIRINGS["desync"], tp_shards=RANKS)).out
    name = "model.layers.1.self_attn.v_proj.weight"
    (file,) = (path for path in wide.glob("*.safetensors") if name in load_file(path))
    edit_tensors(file, {name: load_file(file)[name] + torch.eye(*load_file(file)[name].shape)})
    done = convert(wide, tmp_path / "back", Request(STANDARD, to_stock=True))
    assert "Copies of KV heads differ by now, so they are not merged: the model keeps 4 KV heads." in done.plan.notes
    torch.testing.assert_close(logits(done.out), logits(convert(wide, tmp_path / "b", Request(STANDARD)).out))


def test_once_more_for_more_ranks(dense: Path, tmp_path: Path) -> None:
    wide = convert(dense, tmp_path / "wide", Request(STANDARD, tp_shards=4)).out
    wider = convert(wide, tmp_path / "wider", Request(tp_shards=8)).out
    config = json.loads((wider / "config.json").read_text())
    assert (config["num_key_value_heads"], config["kv_head_copies"]) == (8, 4)
    torch.testing.assert_close(logits(wider), logits(dense), rtol=1e-4, atol=1e-5)


def test_the_command_says_what_it_costs(dense: Path, tmp_path: Path) -> None:
    before = snapshot(dense)
    arguments = ("convert", dense, "out", "--ladder-layers", "1-3", "--tp-shards", "4")
    said = run(*arguments, "--dry-run", cwd=tmp_path).stdout
    assert "Each of 2 KV heads is there 2 times, for 4 ranks" in said and not (tmp_path / "out").exists()
    assert run(*arguments, cwd=tmp_path).returncode == 0
    told = run("rewired", "info", "out", cwd=tmp_path).stdout
    assert "Each of 2 KV heads is there 2 times, for 4 ranks" in told
    assert snapshot(dense) == before


def test_a_run_on_more_ranks_names_the_command(dense: Path, tmp_path: Path) -> None:
    done = run("rewired", "generate", dense, "--prompt", "x", "--tp", "4", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith("choose 1 or 2, or copy KV heads: `convert SOURCE --tp-shards 4`.\n")


@pytest.mark.parametrize("shards", [3, 5, 16])
def test_what_copies_do_not_help_is_refused(dense: Path, tmp_path: Path, shards: int) -> None:
    with pytest.raises(ValueError, match=rf"tp_shards {shards} does not divide .*: choose [\d, or]+\.$"):
        convert(dense, tmp_path / "out", Request(STANDARD, tp_shards=shards))
    assert not (tmp_path / "out").exists()


def test_a_broken_record_is_refused(dense: Path, tmp_path: Path) -> None:
    wide = convert(dense, tmp_path / "wide", Request(STANDARD, tp_shards=4)).out
    for value in ("two", 0, 3):
        edit_json(wide / "config.json", kv_head_copies=value)
        with pytest.raises(ValueError, match="kv_head_copies"):
            Checkpoint.open(wide)


def test_null_kv_heads_are_as_many_as_heads(tmp_path: Path) -> None:
    """As transformers reads it."""
    dense = make_llama(tmp_path / "dense", num_key_value_heads=8)
    config = json.loads((dense / "config.json").read_text()) | {"num_key_value_heads": None}
    (dense / "config.json").write_text(json.dumps(config))
    out = convert(dense, tmp_path / "out", Request(WIRINGS["ladder-peek"])).out
    assert Checkpoint.open(out).shape.num_key_value_heads == 8
    assert AutoModelForCausalLM.from_pretrained(out).config.num_key_value_heads == 8


def test_a_405b_is_planned_and_benched_on_16_ranks() -> None:
    assert make_ranking(PlanRequest("llama-3.1-405b", gpus=16)).shape.num_key_value_heads == 16
    model = _find(BenchRequest("llama-3.1-405b", ("ladder",))).for_ranks(TpSize(16))
    assert model.shape.num_key_value_heads == model.config["num_key_value_heads"] == 16


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def load_file_of(folder: Path, name: str) -> torch.Tensor:
    return load_all(folder)[name]
