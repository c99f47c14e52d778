"""A training from a recipe, as a user runs it, and what comes of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import rewired  # noqa: F401 - registers the rewired classes
from rewired.convert import RefitRequest, Request, convert
from rewired.model.modeling_rewired_llama import RewiredLlamaDecoderLayer

from .world import check_names, command, conversations, logged, original, train, weights, write_recipe, write_rows

DENSE = [{"layers": "0-", "preset": "standard"}]


def test_a_distilled_model_is_nearer_to_the_original(keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    keys |= {"max_steps": 60, "save_steps": 60, "eval_steps": 30, "learning_rate": 3e-3}
    made = train(tmp_path / "r.yaml", **keys)
    measured = logged(made, "held_out_kl")
    assert len(measured) == 3 and measured[-1] < 0.9 * measured[0]
    assert logged(made, "kd")[-1] < 0.7 * logged(made, "kd")[0]

    before, after = weights(dense), weights(made)
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed and all(name.startswith(("model.layers.2.", "model.layers.3.")) for name in changed)

    model: Any = AutoModelForCausalLM.from_pretrained(made)
    assert [region["layers"] for region in model.config.wiring if region["preset"] == "ladder"] == ["2-4"]
    card = (made / "README.md").read_text()
    assert (
        "## Training" in card and "kd_weight: 1.0" in card and "the weights were trained since: see Training." in card
    )
    assert "`kd` is the divergence from the original, in nats. `held_out_kl` is KL(original || this)" in card
    check_names(card)


def test_what_takes_long_before_the_first_step_is_told(
    keys: dict[str, Any], rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In lines of their own, where stderr is no terminal."""
    keys |= {"refit": str(rows), "refit_tokens": 1024, "eval_steps": 2, "max_steps": 2, "packing": True}
    monkeypatch.setattr("rewired.progress._LONG", 0.0)
    assert command(monkeypatch, write_recipe(tmp_path / "r.yaml", **keys)) == 0
    err = capfd.readouterr().err.replace("\r", "\n")
    lines = [line for line in err.splitlines() if line and not re.search(r"\d%|\[", line)]  # no bars of libraries
    assert lines[:2] == [f"Reading and tokenising {rows}.", f"Rewiring {keys['model']} and refitting it."]
    assert [line for line in lines if line.startswith("refit")] == [f"refit: layer {n} of 4" for n in range(1, 5)]
    assert lines[6:8] == ["Loading the model and its original.", "Packing rows to 128 tokens."]
    assert re.fullmatch(
        r"Before the first step, and every 2 steps: KL to the original on 4 held-out rows of \d+ tokens\.", lines[8]
    )
    assert re.fullmatch(r"held-out row 1 of 4, about \d+ s left", lines[9])


def test_tensorboard_draws_what_is_logged(keys: dict[str, Any], tmp_path: Path) -> None:
    names = ("loss", "ce", "kd", "tokens_per_second", "held_out_kl")
    made = train(tmp_path / "r.yaml", **keys | {"report_to": "tensorboard", "eval_steps": 2})
    (events,) = made.parent.rglob("events.out.tfevents.*")
    drawn = EventAccumulator(str(events)).Reload()
    for name in names:
        values = [scalar.value for scalar in drawn.Scalars(f"train/{name}")]
        assert values == pytest.approx(logged(made, name), rel=1e-6) != [], name


def test_losses_are_means_a_token_however_a_step_is_divided(keys: dict[str, Any], tmp_path: Path) -> None:
    """Rows are of different lengths."""
    keys |= {"ce_weight": 0.25, "hidden_weight": 0.5, "max_steps": 6, "logging_steps": 3, "optim": "sgd"}
    made = [
        train(
            tmp_path / "r.yaml",
            **keys
            | {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 8 // rows}
            | {"output_dir": str(tmp_path / str(rows))},
        )
        for rows in (8, 2)
    ]
    ce, kd, hidden, total = (logged(made[1], name) for name in ("ce", "kd", "hidden", "loss"))
    assert total == pytest.approx([0.25 * a + b + 0.5 * c for a, b, c in zip(ce, kd, hidden, strict=True)], rel=1e-5)
    for name in ("loss", "ce", "kd", "hidden"):
        assert logged(made[1], name) == pytest.approx(logged(made[0], name), rel=1e-4) != [], name


def test_the_same_recipe_gives_the_same_weights(keys: dict[str, Any], tmp_path: Path) -> None:
    first, second = (
        weights(train(tmp_path / "r.yaml", **keys | {"output_dir": str(tmp_path / name)})) for name in ("a", "b")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_finished_training_in_bfloat16_is_written_after_a_kill(keys: dict[str, Any], tmp_path: Path) -> None:
    """Its last loss is looked at again, in the teacher's bfloat16."""
    keys |= {"bf16": True}
    made = train(tmp_path / "r.yaml", **keys)
    expected = weights(made)
    shutil.rmtree(made)
    found = weights(train(tmp_path / "r.yaml", resume=True, **keys))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_model_that_an_earlier_version_trained_is_gone_on_with(keys: dict[str, Any], tmp_path: Path) -> None:
    """Which did not count the tokens of trainings before it."""
    made = train(tmp_path / "r.yaml", **keys)
    config = json.loads((made / "config.json").read_text())
    seen = config["adapted"]["tokens"]
    del config["adapted"]["tokens_before"]
    (made / "config.json").write_text(json.dumps(config))
    again = train(tmp_path / "r.yaml", **keys | {"model": str(made), "wiring": None, "output_dir": str(tmp_path / "2")})
    assert json.loads((again / "config.json").read_text())["adapted"]["tokens_before"] == seen


def test_nothing_runs_back_through_frozen_layers(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where activations are computed once more, too, which is the default: what these layers give has no gradient."""
    with_gradients = set[int]()
    plain = RewiredLlamaDecoderLayer.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = plain(self, *args, **kwargs)
        if any(isinstance(part, torch.Tensor) and part.requires_grad for part in (given, *given)):
            with_gradients.add(self.self_attn.layer_idx)
        return given

    monkeypatch.setattr(RewiredLlamaDecoderLayer, "forward", forward)
    train(tmp_path / "r.yaml", **keys | {"max_steps": 1, "activation_checkpointing": True})
    assert with_gradients == {2, 3}


def test_trained_weights_are_not_taken_for_the_originals(keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    made = train(tmp_path / "r.yaml", **keys)
    for request in (
        Request([{"layers": "0-", "preset": "standard"}]),
        Request([{"layers": "1-4", "preset": "ladder"}], refit=RefitRequest()),
    ):
        with pytest.raises(ValueError, match=f"trained as it is wired.*{dense.name}"):
            convert(made, tmp_path / "other", request)
    assert convert(made, tmp_path / "more", Request([{"layers": "1-2", "preset": "ladder"}])).out.is_dir()


def test_lora_is_merged(keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    keys |= {"train": "lora", "lora_r": 2, "learning_rate": 1e-2, "eval_steps": 2}
    torch.manual_seed(5)
    made = train(tmp_path / "r.yaml", **keys)
    torch.manual_seed(6)
    again = train(tmp_path / "r.yaml", **keys | {"output_dir": str(tmp_path / "again")})
    assert logged(made, "loss") == logged(again, "loss"), "its matrices are drawn by the recipe's seed"
    before, after = weights(dense), weights(made)
    assert before.keys() == after.keys()
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    norms = {name for name in changed if name.endswith("norm.weight")}
    assert len(norms) == 4 and len(changed - norms) == 14 and all("proj" in name for name in changed - norms)


def test_gains_that_learn_beside_adapters_are_saved(keys: dict[str, Any], tmp_path: Path) -> None:
    keys |= {"train": "lora", "lora_r": 2, "learning_rate": 1e-2, "wiring": "ladder+peek@2-4"}
    made = train(tmp_path / "r.yaml", **keys)
    gains = [tensor for name, tensor in weights(made).items() if name.endswith("_gain.weight")]
    assert len(gains) == 4 and all((gain != 1).any() for gain in gains)
    model: Any = AutoModelForCausalLM.from_pretrained(made)
    assert (model.model.layers[3].input_gain.weight != 1).any()


def test_sft_of_a_packed_dense_control(keys: dict[str, Any], tmp_path: Path) -> None:
    changes = {"wiring": [{"layers": "0-", "preset": "standard"}], "train": "all", "kd_weight": 0.0, "ce_weight": 1.0}
    made = train(tmp_path / "r.yaml", **keys | changes | {"packing": True, "max_steps": 20, "save_steps": 20})
    losses = logged(made, "loss")
    assert losses[-1] < losses[0]


def test_a_packed_distillation_in_bf16_is_nearly_that_in_float32(keys: dict[str, Any], tmp_path: Path) -> None:
    keys |= {"packing": True, "max_steps": 8, "eval_steps": 8, "bf16": False}
    exact = train(tmp_path / "r.yaml", **keys)
    rounded = train(tmp_path / "r.yaml", **keys | {"bf16": True, "output_dir": str(tmp_path / "rounded")})
    for name in ("kd", "held_out_kl"):
        expected, found = (logged(made, name) for made in (exact, rounded))
        assert found == pytest.approx(expected, rel=0.1) and found != expected, name
    assert logged(rounded, "kd")[-1] < logged(rounded, "kd")[0]


def test_a_refitted_start_learns_from_its_base(keys: dict[str, Any], rows: Path, tmp_path: Path) -> None:
    made = train(tmp_path / "r.yaml", **keys | {"refit": str(rows), "refit_tokens": 1024, "eval_steps": 2})
    config = json.loads((made / "config.json").read_text())
    assert config["refit"]["base"] == config["adapted"]["base"]
    assert logged(made, "held_out_kl")
    card = (made / "README.md").read_text()
    assert "the weights were fitted and trained since: see Training." in card and "now read" not in card
    check_names(card)


def test_a_trained_model_is_rewired_further_and_not_refitted(keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    """Its weights are no more what a refit fits."""
    first = train(tmp_path / "r.yaml", **keys | {"max_steps": 1})
    more = {"model": str(first), "wiring": [{"layers": "1-2", "preset": "ladder"}], "refit": None}
    again = train(tmp_path / "r.yaml", **keys | more | {"output_dir": str(tmp_path / "again")})
    config = json.loads((again / "config.json").read_text())
    assert "refit" not in config and original(again) == str(dense.resolve())
    assert [entry["layers"] for entry in config["wiring"] if entry["preset"] == "ladder"] == ["1-2", "2-4"]


def test_an_original_that_is_gone_is_missed_only_where_it_teaches(
    keys: dict[str, Any], dense: Path, tmp_path: Path
) -> None:
    original = shutil.copytree(dense, tmp_path / "original")
    made = train(tmp_path / "r.yaml", **keys | {"model": str(original), "max_steps": 1})
    shutil.rmtree(original)
    sft = keys | {"model": str(made), "wiring": None, "ce_weight": 1.0, "kd_weight": 0.0}
    train(tmp_path / "r.yaml", **sft | {"output_dir": str(tmp_path / "alone")})
    for taught in ({"kd_weight": 1.0}, {"eval_steps": 2}):
        with pytest.raises(ValueError, match="original, which is needed as its original"):
            train(tmp_path / "r.yaml", **sft | taught | {"output_dir": str(tmp_path / "taught")})


def test_a_key_that_no_model_has_is_said(keys: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model_init_kwargs: .*attn_implementaton"):
        train(tmp_path / "r.yaml", **keys | {"model_init_kwargs": {"attn_implementaton": "sdpa"}})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"dataloader_drop_last": True, "per_device_train_batch_size": 99},
            "36 rows: fewer than the 99",
        ),
        ({"fsdp_size": 2}, "make 2 ranks, and there are 1: launch 2"),
        ({"model": "nowhere"}, "no folder 'nowhere'"),
        ({"datasets": ["gone.jsonl"]}, "There is no gone.jsonl"),
        ({"wiring": None}, "give a wiring"),
        ({"wiring": [{"layers": "2-9", "preset": "ladder"}]}, "2-9"),
        ({"train_sampling_strategy": "group_by_length"}, "an order that --resume cannot restore"),
        ({"activation_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant: "),
        ({"tp_size": 2}, "tp_size needs GPUs"),
        ({"fp16": True}, "fp16 needs a GPU, and there is none"),
        ({"kd_wieght": 1}, "did you mean 'kd_weight'"),
        ({"chat_template_path": "gone.jinja"}, "chat_template_path: gone.jinja"),
        ({"report_to": "nowhere"}, "nowhere"),
        ({"train": "norms_and_gains", "wiring": DENSE}, "trains nothing"),
        ({"stages": [{}, {"wiring": [{"layers": "2-9", "preset": "ladder"}]}]}, "2-9"),
        ({"report_to": "comet_ml"}, "comet"),
        ({"eval_steps": 1, "held_out": 1, "max_length": 1, "assistant_only_loss": False}, "No row can be trained on"),
        ({"pad_token": "<gone>"}, "pad_token is '<gone>'"),
        ({"stages": [{}, {"datasets": ["gone.jsonl"]}]}, "There is no gone.jsonl"),
        ({"model_init_kwargs": {"attn_implementation": "spda"}}, "attn_implementation: .*spda"),
        ({"model_init_kwargs": {"attn_implementation": 3}}, "attn_implementation: 3 is not the name"),
        ({"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}, "attn_implementation: .*[Ff]lash"),
        ({"hidden_weight": 1.0, "train": "all", "wiring": DENSE}, "this model has none"),
        ({"streaming": True, "held_out": 40}, "A streamed dataset has no row to train on"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], problem: str, keys: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        train(tmp_path / "r.yaml", **keys | changes)
    assert not (tmp_path / "out").exists(), "before anything is converted"


def test_several_gpus_want_a_launcher(keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL would say so after the refit."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match="One process sees 2 GPUs: launch one for each, by torchrun"):
        train(tmp_path / "r.yaml", **keys)
    assert not (tmp_path / "out").exists()


def test_bad_input_is_one_sentence(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, write_recipe(tmp_path / "r.yaml", **keys), "--kd_wieght", "1") == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "did you mean 'kd_weight'" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("assistant_only", [None, True, False])
def test_the_assistant_only_is_learnt_unless_the_recipe_says_otherwise(
    assistant_only: bool | None, keys: dict[str, Any], tmp_path: Path
) -> None:
    rows = [{"messages": [{"role": "user", "content": "a" * 20}, {"role": "assistant", "content": "b"}]}] * 20
    keys["datasets"] = [str(write_rows(tmp_path / "rows.jsonl", rows))]
    keys |= {"kd_weight": 0.0, "ce_weight": 1.0, "held_out": 0}
    keys |= {"max_steps": 60, "save_steps": 60, "learning_rate": 1e-2}
    made = train(tmp_path / "r.yaml", **keys, assistant_only_loss=assistant_only)
    told = AutoTokenizer.from_pretrained(made).apply_chat_template(rows[0]["messages"], return_tensors="pt")
    ids = told["input_ids"]
    asked = (ids[0] == ids[0].mode().values).nonzero()[1:, 0]  # the a's after the first one
    guesses = AutoModelForCausalLM.from_pretrained(made)(ids).logits[0, asked - 1].argmax(-1)
    assert (guesses == ids[0, asked]).all() == (assistant_only is False)


def test_a_bad_row_stops_before_anything_is_trained(keys: dict[str, Any], tmp_path: Path) -> None:
    rows = conversations(8)
    rows[5] = {"conversations": []}
    keys["datasets"] = [str(write_rows(tmp_path / "rows.jsonl", rows))]
    with pytest.raises(ValueError, match="row 6 is an empty conversation"):
        train(tmp_path / "r.yaml", **keys)
    made = train(tmp_path / "r.yaml", **keys | {"skip_bad": True, "output_dir": str(tmp_path / "again")})
    assert "1 bad row left out" in (made / "README.md").read_text()
