"""A training on many ranks is the same as on one: losses, tokens, weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.convert.checkpoints import run

from .world import LADDER, write_recipe

STEPS, ROWS = 50, 4
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "DDP": (2, {}),
    "FSDP2": (2, {"fsdp_size": 2, "save_strategy": "no"}),
    "HSDP": (4, {"fsdp_size": 2, "dp_replicate_size": 2, "save_strategy": "no"}),
}


def launch(ranks: int, recipe: Path) -> None:
    command = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, "-m", "rewired.adapt", str(recipe)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def keys(dense: Path, rows: Path) -> dict[str, Any]:
    return {
        "model": str(dense),
        "wiring": [*LADDER, {"layers": "1-2", "preset": "desync", "every": 2}],
        "tp_shards": 4,
        "refit": "none",
        "datasets": [str(rows)],
        "train": "rewired",
        "ce_weight": 0.5,
        "kd_weight": 1.0,
        "hidden_weight": 0.1,
        "max_steps": STEPS,
        "eval_steps": 25,
        "logging_steps": 5,
        "save_steps": 50,
    }


@pytest.fixture(scope="module")
def alone(keys: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes of it."""
    folder = tmp_path_factory.mktemp("alone")
    changes = {"per_device_train_batch_size": ROWS, "output_dir": str(folder / "out")}
    done = run("adapt", write_recipe(folder / "r.yaml", **keys | changes), cwd=folder, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return folder / "out" / "final"


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_ranks_learn_what_one_process_does(split: str, keys: dict[str, Any], alone: Path, tmp_path: Path) -> None:
    ranks, changes = SPLITS[split]
    changes = changes | {"per_device_train_batch_size": ROWS // ranks, "output_dir": str(tmp_path / "out")}
    launch(ranks, write_recipe(tmp_path / "r.yaml", **keys | changes))
    made = tmp_path / "out" / "final"
    logs = [json.loads((folder / "training.json").read_text()) for folder in (alone, made)]
    for name in ("loss", "ce", "kd", "hidden", "num_tokens", "held_out_kl"):
        expected, found = ([entry[name] for entry in log if name in entry] for log in logs)
        assert expected and found == pytest.approx(expected, rel=2e-4), name
    expected_weights, weights = (load_file(folder / "model.safetensors") for folder in (alone, made))
    for name, tensor in expected_weights.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
