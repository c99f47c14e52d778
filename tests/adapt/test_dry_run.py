"""`adapt --dry-run` tells what would be trained, of a model from wherever one may come, and fetches no weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rewired.adapt import dry_run
from rewired.adapt.model.teacher import beside
from rewired.adapt.model.trainable import choose
from rewired.convert import Request, convert
from rewired.sources import find_source
from tests.commands import run
from tests.convert.hub_server import HubServer

from .world import LADDER, command, distillation, make_chat, make_rewired, train, write_recipe

PER_LAYER = 4 * 24 * 24 + 3 * 24 * 48 + 2 * 24


def test_it_tells_and_writes_nothing(
    keys: dict[str, Any],
    dense: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", **keys)
    monkeypatch.chdir(tmp_path)
    convert(dense, request=Request(LADDER))  # under the name that this conversion has by default
    assert command(monkeypatch, recipe, "--dry-run", "--max_steps", "5") == 0
    told = capsys.readouterr().out
    trained = f"rewired of layers 2-4, {2 * PER_LAYER:,} of"
    for part in ("max_steps: 5", "40 rows", "5 steps", trained, "teacher 46.5 kB"):
        assert part in told, part
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"warmup_steps": 20}, "warms up for 20 steps, and the training has only 4 steps: it never reaches 0.001."),
        ({"warmup_steps": 0.9}, "warms up for 4 steps, and the training has only 4 steps"),
        ({"warmup_steps": 99, "max_steps": -1, "num_train_epochs": 0.5}, "99 steps, and the training has only 9 steps"),
        ({"warmup_steps": 3}, None),
    ],
    ids=str,
)
def test_a_warm_up_that_outlasts_the_training_is_told(
    changes: dict[str, Any],
    warning: str | None,
    keys: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, write_recipe(tmp_path / "r.yaml", **keys | changes), "--dry-run") == 0
    told = capsys.readouterr().out
    assert warning in told if warning else "warms up" not in told


def test_it_may_be_told_where_a_package_is_missing(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a laptop, of what a cluster is to train."""
    keys |= {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}
    assert command(monkeypatch, write_recipe(tmp_path / "r.yaml", **keys), "--dry-run") == 0
    assert re.search(r"Not to be trained here: attn_implementation: .*[Ff]lash", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("wiring", "targets", "told"),
    [
        (
            LADDER,
            ["q_proj", "down_proj"],
            f"LoRA, norms and gains of layers 2-4, {2 * (2 * (24 + 24 + 24 + 48) + 2 * 24)} of",
        ),
        (
            [{"layers": "0-", "preset": "standard"}],
            ["q_proj"],
            f"LoRA, norms and gains of layers 0-4, {4 * (2 * (24 + 24) + 2 * 24)} of",
        ),
    ],
)
def test_it_counts_what_lora_trains(
    wiring: list[dict[str, Any]],
    targets: list[str],
    told: str,
    keys: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a dense control, too, all of whose layers learn."""
    keys |= {"train": "lora", "lora_r": 2, "lora_target_modules": targets, "wiring": wiring}
    assert command(monkeypatch, write_recipe(tmp_path / "r.yaml", **keys), "--dry-run") == 0
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(("split", "bytes_each"), [({}, 0.5 + 1 / 64), ({"fsdp_size": 2}, 0.5 + 4 / 64)])
def test_it_counts_projections_in_4_bits(
    split: dict[str, int],
    bytes_each: float,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of what is sharded, on one rank, and its teacher's where that needs none of its own: norms."""
    dense = make_chat(tmp_path / "dense", hidden_size=128, intermediate_size=256)
    keys = distillation(dense, rows, tmp_path / "out") | {"train": "lora", "lora_r": 2} | split
    monkeypatch.setattr(dry_run.quantities, "size", lambda number: f"{number:.0f} GB")
    sizes = []
    for in_4bit in (False, True):
        recipe = write_recipe(tmp_path / "r.yaml", **keys | {"load_in_4bit": in_4bit})
        assert command(monkeypatch, recipe, "--dry-run") == 0
        told = capsys.readouterr().out
        sizes.append([int(size) for size in re.findall(r"(?:weights|teacher) (\d+) GB", told)])
    projections = 4 * (4 * 128 * 128 + 3 * 128 * 256)
    saved = projections * (4 - bytes_each) / split.get("fsdp_size", 1)
    assert sizes[0][0] - sizes[1][0] == pytest.approx(saved, rel=1e-2)
    assert [teacher for _, teacher in sizes] == [2 * 2 * 128 * 4] * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"packing": True},
        {"dataloader_drop_last": True, "per_device_train_batch_size": 25},
        {"gradient_accumulation_steps": 5, "num_train_epochs": 1.5},
        {"gradient_accumulation_steps": 16, "num_train_epochs": 3},
    ],
    ids=["packed", "the last rows dropped", "accumulated", "in epochs that end with a few rows"],
)
def test_it_tells_as_many_steps_and_tokens_as_are_taken(
    changes: dict[str, Any],
    keys: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys |= {"max_steps": None, "num_train_epochs": 2, "kd_weight": 1.0} | changes
    assert command(monkeypatch, write_recipe(tmp_path / "r.yaml", **keys), "--dry-run") == 0
    told = re.search(r"device: (\d+) steps, about ([\d,]+) tokens", capsys.readouterr().out)
    record = json.loads((train(tmp_path / "r.yaml", **keys) / "config.json").read_text())["adapted"]
    assert told is not None and int(told[1]) == record["steps"]
    assert int(told[2].replace(",", "")) == pytest.approx(record["tokens"], rel=0.1)


def test_a_device_holds_a_part_of_a_model_that_is_split(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On as many devices as the recipe says; those that share a layer read the same rows."""
    sizes = []
    for split in ({}, {"fsdp_size": 2, "tp_size": 2}):
        big = {"model_init_kwargs": {"dtype": "bfloat16"}, "optim": "sgd", "train": "all"}
        path = write_recipe(tmp_path / "r.yaml", **keys | big | split)
        monkeypatch.setattr(dry_run.quantities, "size", lambda number: f"{number / 1e3:.2f} GB")
        assert command(monkeypatch, path, "--dry-run") == 0
        told = capsys.readouterr().out
        sizes.append({name: float(size) for name, size in re.findall(r"(\w+) ([\d.]+) GB", told)})
        assert ("4 rows a step on 4 devices" if split else "2 rows a step on 1 device:") in told
    whole, part = sizes
    assert whole["optimizer"] == part["optimizer"] == 0
    assert whole["weights"] == whole["gradients"] == whole["teacher"] > 0
    assert part == {name: pytest.approx(size / 4, abs=0.01) for name, size in whole.items()}


@pytest.mark.parametrize("what", ["all", "rewired"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_teacher_in_16_bits_is_as_large_as_it_says(
    is_tied: bool,
    what: str,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And has no gains of peeking modules."""
    dense, wiring = make_chat(tmp_path / "dense", tie_word_embeddings=is_tied), [LADDER[0] | {"peek": True}]
    student: Any = AutoModelForCausalLM.from_pretrained(make_rewired(dense, tmp_path / "m", wiring))
    choose(student, what)
    teacher = beside(student, dense, dtype=torch.bfloat16)
    parts = {*teacher.model.parameters(), teacher.head.weight} - set(student.parameters())
    keys = distillation(dense, rows, tmp_path / "out") | {"train": what, "bf16": True, "wiring": wiring}
    monkeypatch.setattr(dry_run.quantities, "size", lambda number: f"{number:.2f} GB")
    assert command(monkeypatch, write_recipe(tmp_path / "r.yaml", **keys), "--dry-run") == 0
    told = re.search(r"teacher ([\d.]+) GB", capsys.readouterr().out)
    assert told is not None and float(told[1]) == sum(one.nbytes for one in parts) > 0


@pytest.mark.parametrize(
    ("before", "own"),
    [("rewired", 2 * PER_LAYER), ("norms_and_gains", 2 * PER_LAYER), ("all", None)],
)
def test_the_teacher_of_a_later_stage_has_what_was_trained_before(
    before: str,
    own: int | None,
    keys: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And the whole of it after a stage that trained everything."""
    keys |= {"stages": [{"train": before}, {"train": "rewired"}]}
    monkeypatch.setattr(dry_run.quantities, "size", lambda number: f"{number / 4:.2f} GB")
    assert command(monkeypatch, write_recipe(tmp_path / "r.yaml", **keys), "--dry-run") == 0
    last = capsys.readouterr().out.rpartition("Memory")[2]
    sizes = {name: float(size) for name, size in re.findall(r"(\w+) ([\d.]+) GB", last)}
    assert sizes["teacher"] == (sizes["weights"] if own is None else own)


def test_what_the_training_would_refuse_it_refuses(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("a file")
    for changes, problem in (
        ({}, "is a file: choose another output_dir"),
        ({"output_dir": str(tmp_path)}, "exists: continue it with --resume"),
        ({"output_dir": str(tmp_path / "new"), "report_to": "comet_ml"}, "report_to"),
    ):
        assert command(monkeypatch, write_recipe(tmp_path / "r.yaml", **keys | changes), "--dry-run") == 2
        assert problem in capsys.readouterr().err


def test_dropout_that_would_reach_the_teacher_is_refused(keys: dict[str, Any], tmp_path: Path) -> None:
    """It reads what the student's layers below the rewired ones give in a training step."""
    keys |= {"model_init_kwargs": {"attention_dropout": 0.1}}
    with pytest.raises(ValueError, match=r"attention_dropout is 0.1, .* give 0 in model_init_kwargs"):
        train(tmp_path / "r.yaml", **keys)


def test_it_takes_the_recipes_chat_template(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which has to mark what the assistant says: the model's own would do."""
    (tmp_path / "plain.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    recipe = write_recipe(tmp_path / "r.yaml", **keys)
    assert command(monkeypatch, recipe, "--dry-run") == 0
    assert command(monkeypatch, recipe, "--dry-run", "--chat_template_path", tmp_path / "plain.jinja") == 2
    assert "chat_template_path" in capsys.readouterr().err


def test_of_a_model_on_the_hub_it_fetches_no_weights(keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", **keys | {"model": "org/chat"})
    with HubServer({"org/chat": dense}) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        done = run("adapt", recipe, "--dry-run", cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert "40 rows" in done.stdout
    asked = {path.rsplit("/", 1)[-1] for _, path, _, _ in hub.requests}
    assert "tokenizer.json" in asked
    assert not {name for name in asked if name.endswith(".safetensors")}


def test_the_tokenizer_of_a_gguf_file_comes_without_its_weights(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWIRED_CACHE", str(tmp_path / "cache"))  # the user's may hold the whole model
    folder = find_source(str(smollm2_gguf)).tokenizer(tmp_path / "tokenizer")
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text()
    assert (folder / "tokenizer.json").is_file()
    assert not list(folder.glob("*.safetensors"))
