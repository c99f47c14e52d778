"""Trainings with `comm` on four ranks of two nodes: they learn what others do, and are resumed bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import distributed

from rewired.adapt.recipe.reading import read
from rewired.adapt.run import adapt
from rewired.comm.communication import Communication
from rewired.comm.options import PRESETS
from rewired.ranks import run_on_ranks
from tests.adapt.trainer import on_cpus
from tests.adapt.world import distillation, logged, weights, write_recipe

pytestmark = pytest.mark.slow

RANKS, STEPS = 4, 6
COMM = {"error_feedback": True, "ranks_per_node": 2}
DIFFERENCES = COMM | {"weights": "int4-difference"}
HALF = [{"layers": "1-4", "preset": "partial", "shared_fraction": 0.5}]
WAYS: dict[str, dict[str, Any]] = {
    # in parts of a step, with activations computed twice and gradients clipped
    "all": {
        **{"gradient_accumulation_steps": 2, "activation_checkpointing": True, "max_grad_norm": 0.5, "train": "all"},
        "comm": COMM | {"gradients": {0: "int4", 0.25: "int8"}, "pipeline": 2},  # changes before it is cut off
    },
    "differences": {"comm": DIFFERENCES, "eval_steps": STEPS // 2},  # measured, and so gathered, before it is saved
    "norms": {"train": "norms_and_gains"},  # of a layer's weights few are trained
    "SFT": {"ce_weight": 1.0, "kd_weight": 0.0, "max_grad_norm": 0.5},
    "TP": {"tp_size": 2, "tp_shards": 2, "fsdp_size": 2, "max_grad_norm": 0.5},
    "grid": {"wiring": HALF, "tp_size": "1x2", "fsdp_size": 2, "max_grad_norm": 0.5},  # FSDP2 splits columns of readers
    "HSDP": {"dp_replicate_size": 2, "fsdp_size": 2, "max_grad_norm": 0.5, "comm": COMM | {"ranks_per_node": 1}},
}


@pytest.fixture(scope="module", params=list(WAYS))
def outs(
    request: pytest.FixtureRequest, dense: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The output folders of a training without comm, of one with it, and of one that was cut off and went on."""
    folder = tmp_path_factory.mktemp("out")
    keys = {
        "model": str(dense),
        "wiring": [{"layers": "2-4", "preset": "ladder", "peek": True}],
        "refit": "none",
        "datasets": [str(rows)],
        "train": "rewired",
        "ce_weight": 0.5,
        "kd_weight": 1.0,
        "max_steps": STEPS,
        "save_steps": STEPS // 2,
        "per_device_train_batch_size": 1,
        "fsdp_size": RANKS,
        "comm": COMM,
    } | WAYS[request.param]
    outs = {name: folder / name for name in ("plain", "whole", "cut")}
    changes: dict[str, dict[str, Any]] = {name: {"output_dir": str(out)} for name, out in outs.items()}
    changes["plain"]["comm"] = None
    recipes = {name: write_recipe(folder / f"{name}.yaml", **keys | changes[name]) for name in outs}
    run_on_ranks(train, RANKS, recipes, outs)
    return outs


def train(recipes: dict[str, Path], outs: dict[str, Path]) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # accelerate asks for them, though nobody listens there
    on_cpus.allow()
    followed, done = Communication.at, list[float]()

    def at(self: Communication, part: float) -> None:
        done.append(part)
        followed(self, part)

    Communication.at = at  # type: ignore[method-assign]
    for name in ("plain", "whole"):
        adapt(read(recipes[name], []))
    if distributed.get_rank() == 0:
        shutil.copytree(outs["whole"], outs["cut"])
        for lost in ("final", f"checkpoint-{STEPS}"):
            shutil.rmtree(outs["cut"] / lost)
    distributed.barrier()
    adapt(read(recipes["cut"], []), resume=True)
    (outs["cut"].parent / f"done-{distributed.get_rank()}.json").write_text(json.dumps(done))


def test_schedules_go_by_the_part_of_all_steps_that_is_done(outs: dict[str, Path]) -> None:
    """In a training, and in the second half of it, which is done anew."""
    for rank in range(RANKS):
        done = json.loads((outs["cut"].parent / f"done-{rank}.json").read_text())
        steps = [*range(STEPS), *range(STEPS // 2, STEPS)]
        assert [part for part, _ in groupby(done)] == [step / STEPS for step in steps]


def test_it_learns_what_a_training_without_it_does(outs: dict[str, Path]) -> None:
    plain, whole = (logged(outs[name] / "final", "loss") for name in ("plain", "whole"))
    assert whole == pytest.approx(plain, rel=0.05) != []
    assert whole != plain


def test_a_training_that_was_cut_off_goes_on_bit_for_bit(outs: dict[str, Path]) -> None:
    assert logged(outs["cut"] / "final", "loss") == logged(outs["whole"] / "final", "loss")
    found, expected = weights(outs["cut"] / "final"), weights(outs["whole"] / "final")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def diverge(recipe: Path) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    adapt(read(recipe, []))


@pytest.mark.parametrize("preset", ["slow-link", "zero++"])
def test_a_loss_that_diverges_ends_it_with_the_last_good_checkpoint(
    preset: str, dense: Path, rows: Path, tmp_path: Path
) -> None:
    """As without comm (tests/adapt/trainer/test_diverged.py): no rounding makes numbers of what is none."""
    keys = distillation(dense, rows, tmp_path / "out")
    keys |= {"fsdp_size": RANKS, "comm": asdict(replace(PRESETS[preset], ranks_per_node=2))}
    keys |= {"max_steps": 9, "save_steps": 1, "optim": "sgd", "learning_rate": 1e38, "warmup_steps": 2}
    recipe = write_recipe(tmp_path / "r.yaml", **keys)
    with pytest.raises(ValueError, match=r"At step 3 the loss is nan.*good checkpoint is .*checkpoint-1\. "):
        run_on_ranks(diverge, RANKS, recipe)
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]
    assert not (tmp_path / "out" / "final").exists()


def test_a_rank_that_dies_ends_the_others_within_a_minute(dense: Path, rows: Path, tmp_path: Path) -> None:
    keys = {"model": str(dense), "wiring": [{"layers": "2-4", "preset": "ladder"}], "refit": "none"}
    keys |= {"datasets": [str(rows)], "max_steps": 10_000, "fsdp_size": RANKS, "comm": COMM}
    out, program = tmp_path / "out", str(Path(sys.executable).parent / "torchrun")
    recipe = write_recipe(tmp_path / "r.yaml", **keys, output_dir=str(out), save_steps=2, save_total_limit=1)
    started = subprocess.Popen(
        [program, "--standalone", "--nproc-per-node", str(RANKS), "-m", "rewired.adapt", str(recipe)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not list(out.glob("checkpoint-*")):  # it is in the middle of its steps
            assert started.poll() is None
            time.sleep(0.2)
        ranks = psutil.Process(started.pid).children()
        ranks[-1].send_signal(signal.SIGKILL)
        assert started.wait() != 0
        psutil.wait_procs(ranks)
        assert not any(rank.is_running() for rank in ranks)
    finally:
        started.kill()
