"""`adapt` on a grid learns what one process does, and goes on, and is read, wherever there are ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import distributed

from rewired.adapt.recipe.reading import read
from rewired.adapt.run import adapt
from rewired.adapt.start import outline
from rewired.ranks import run_on_ranks
from tests.adapt.trainer import on_cpus
from tests.adapt.world import distillation, logged, train, weights, write_recipe

STEPS, ROWS = 10, 4
PARTIAL = [{"layers": "1-4", "preset": "partial", "shared_fraction": 0.5}]
LORA = {"train": "lora", "lora_r": 2, "learning_rate": 1e-2}


@pytest.fixture
def keys(dense: Path, rows: Path, tmp_path: Path) -> dict[str, Any]:
    """Two wirings, all losses, gradients clipped, activations computed twice."""
    return distillation(dense, rows, tmp_path / "alone") | {
        "wiring": [
            {"layers": "1-2", "preset": "desync", "every": 2},
            {"layers": "2-4", "preset": "ladder", "peek": True},
        ],
        **{"tp_shards": 4, "train": "all", "ce_weight": 0.5, "hidden_weight": 0.1},
        **{"max_steps": STEPS, "save_steps": STEPS // 2, "eval_steps": STEPS // 2, "max_grad_norm": 0.5},
        **{"activation_checkpointing": True, "per_device_train_batch_size": ROWS},
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "split", "later"),
    [
        ({}, {}, "1x4"),
        ({}, {"fsdp_size": 2}, "4"),
        ({}, {"dp_replicate_size": 2}, "4x1"),
        ({"wiring": PARTIAL, "train": "rewired"}, {"dp_replicate_size": 2}, "1x4"),
        ({"wiring": PARTIAL}, {"fsdp_size": 2}, "1x4"),
        (LORA | {"wiring": PARTIAL}, {"fsdp_size": 2}, "4"),
        (LORA, {}, "4"),
        (LORA, {"fsdp_size": 2}, "1x4"),
    ],
    ids=[
        *("2x2", "2x2 and FSDP2", "2x2 and replicas", "partial on 2x2 and replicas"),
        *("partial on 2x2 and FSDP2", "adapters on partial, 2x2 and FSDP2"),
        *("adapters on 2x2", "adapters on 2x2 and FSDP2"),
    ],
)
def test_it_learns_what_one_process_does_and_goes_on_elsewhere(
    trained: dict[str, Any], split: dict[str, int], later: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    keys |= trained
    expected = train(tmp_path / "alone.yaml", **keys)
    data_ranks = 2 if split else 1
    changes = split | {"tp_size": "2x2", "per_device_train_batch_size": ROWS // data_ranks}
    folders = tmp_path / "whole", tmp_path / "cut"
    recipe = write_recipe(tmp_path / "whole.yaml", **keys | changes | {"output_dir": str(folders[0])})
    run_on_ranks(train_and_go_on, 4 * data_ranks, recipe, folders, later)
    for folder in folders:
        for name in ("loss", "ce", "kd", "hidden", "grad_norm", "num_tokens", "held_out_kl"):
            assert logged(folder / "final", name) == pytest.approx(logged(expected, name), rel=2e-4) != [], name
        found = weights(folder / "final")
        for name, tensor in weights(expected).items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
    config = (folders[0] / "final" / "config.json").read_text()
    assert "2x2" not in config and "grid" not in config


def test_a_teacher_reads_the_channels_that_its_student_has_split(keys: dict[str, Any], tmp_path: Path) -> None:
    """The stream before the first rewired layer, in the student's blocks of channels."""
    keys |= {"wiring": PARTIAL, "train": "rewired", "max_steps": 2, "eval_steps": None, "logging_steps": 1}
    expected = train(tmp_path / "alone.yaml", **keys)
    recipe = write_recipe(tmp_path / "r.yaml", **keys | {"tp_size": "1x2", "output_dir": str(tmp_path / "shared")})
    run_on_ranks(train_on_cpus, 2, recipe)
    for name in ("kd", "hidden"):
        assert logged(tmp_path / "shared" / "final", name) == pytest.approx(logged(expected, name), rel=2e-4) != [], (
            name
        )


def train_on_cpus(recipe: Path) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # accelerate asks for them, though nobody listens there
    on_cpus.allow()
    adapt(read(recipe, []))


def train_and_go_on(recipe: Path, folders: tuple[Path, Path], later: str) -> None:
    """On a grid; and cut off in the middle, on another."""
    train_on_cpus(recipe)
    whole, cut = folders
    if distributed.get_rank() == 0:
        shutil.copytree(whole, cut)
        for lost in ("final", f"checkpoint-{STEPS}"):
            shutil.rmtree(cut / lost)
    distributed.barrier()
    adapt(read(recipe, ["--tp_size", later, "--output_dir", str(cut)]), resume=True)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tp_size": "2x"}, "tp_size is '2x': give a number of ranks, or a grid of X x Y, such as 2x2"),
        ({"tp_size": "2x0"}, "tp_size is '2x0': give a number of ranks"),
        (
            {"tp_size": "2x2", "train": "lora", "load_in_4bit": True},
            "tp_size 2x2 is a grid, which splits no weights in 4 bits: give tp_size 4, or leave load_in_4bit out",
        ),
        (
            {"tp_size": "2x2", "kd_weight": 0.0, "neftune_noise_alpha": 5.0},
            "tp_size 2x2 splits them: give tp_size 4, or leave the noise out",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    changes: dict[str, Any], sentence: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=sentence):
        read(write_recipe(tmp_path / "r.yaml", **keys | changes), [])


def test_a_grid_that_the_model_does_not_fit_is_refused_before_it_is_loaded(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"tp_size 2x5 splits hidden_size 24 over Y = 5: choose a Y of 1, 2, 3"):
        outline([read(write_recipe(tmp_path / "r.yaml", **keys | {"tp_size": "2x5"}), [])[0].recipe])


def test_fsdp2_gets_whole_blocks_of_channels(keys: dict[str, Any], tmp_path: Path) -> None:
    keys |= {"wiring": PARTIAL, "tp_size": "1x4", "fsdp_size": 4}
    sentence = "tp_size 1x4 with fsdp_size 4 splits hidden_size 24, in 4 blocks of 6 over Y = 4: choose a Y of 1, 2, 3"
    with pytest.raises(ValueError, match=sentence):
        outline([read(write_recipe(tmp_path / "r.yaml", **keys), [])[0].recipe])


def test_a_recipe_s_record_has_the_grid(keys: dict[str, Any], tmp_path: Path) -> None:
    (stage,) = read(write_recipe(tmp_path / "r.yaml", **keys), ["--tp_size", "2x2"])
    assert "tp_size: 2x2" in yaml.safe_dump(stage.given)
    assert (stage.recipe.tp_size, stage.recipe.ranks) == (4, 4)
