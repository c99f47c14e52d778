"""A training step by hand, and on the command line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rewired.checkpoint.named_shapes import named_shapes
from rewired.plan.compute import Rank, Step
from rewired.plan.grids import plan_grids
from rewired.plan.machine import serving_machine
from rewired.plan.training_step import TRAINED, PricedStep, price_steps, training_step
from rewired.plan.wirings import wiring_of
from tests.plan.test_plan_command import plan, run

SHAPE, STEP = named_shapes()["llama-3.2-1b"], Step(2, 512, 512)
MACHINE = serving_machine("h100", "nccl", 8)
RANK = Rank(SHAPE, MACHINE.hardware, MACHINE.engine, 8)


def test_standard_by_hand() -> None:
    """Forward waits for each all-reduce in 16 bits, backward hides a share of it, and attention's is done again."""
    step = training_step(RANK, MACHINE.all_reduce, wiring_of(SHAPE, "standard"), STEP)
    attention, mlp = RANK.attention(STEP), RANK.mlp(STEP)
    head = RANK.products(STEP.rows, SHAPE.head_weights / 8)
    assert step.compute == pytest.approx(SHAPE.num_hidden_layers * 4 * (attention + mlp) + 3 * head)
    size, reduce = STEP.rows * SHAPE.hidden_size * 2, MACHINE.all_reduce
    whole = reduce.seconds(size, 8)
    least = (1 - reduce.hide) * (whole - reduce.latency(size, 8))
    behind_mlp, behind_attention = (max(whole - work, least) for work in (mlp, attention))
    layers = SHAPE.num_hidden_layers
    backward = layers * behind_mlp + (layers - 1) * behind_attention + whole
    assert step.activations == pytest.approx(3 * layers * whole + backward)


def test_a_ladder_waits_for_the_last_all_reduce_alone_where_compute_is_slow() -> None:
    """The final norm waits for it in forward, and the last MLP for its gradient in backward."""
    slow = replace(RANK, hardware=replace(RANK.hardware, flops=1e12))
    step = training_step(slow, replace(MACHINE.all_reduce, hide=1.0), wiring_of(SHAPE, "ladder"), STEP)
    assert step.activations == pytest.approx(2 * MACHINE.all_reduce.seconds(STEP.rows * SHAPE.hidden_size * 2, 8))


def test_wirings_are_ranked_between_standard_and_none() -> None:
    rows = priced(8)
    assert [row.speedup for row in rows] == sorted((row.speedup for row in rows), reverse=True)
    assert (rows[0].name, rows[-1].name, rows[-1].speedup) == ("none", "standard", 1)
    assert len(rows) == len(TRAINED) + 2


def test_a_step_on_more_nodes_takes_longer() -> None:
    standard = [next(row.step.seconds for row in priced(node) if row.name == "standard") for node in (8, 4, 1)]
    assert standard[0] < standard[1] < standard[2]


def priced(gpus_per_node: int) -> list[PricedStep]:
    """Steps on eight ranks of tensor parallelism."""
    grid = next(grid for grid in plan_grids(SHAPE, MACHINE.hardware, 1, 8, batch=8, tokens=2048).grids if grid.tp == 8)
    return price_steps(SHAPE, "h100", gpus_per_node, grid, 8, 2048, None)


def test_the_command_prices_what_is_named() -> None:
    arguments = ("llama-3.1-8b", "--goal", "train", "--gpus", 8, "--wirings", "ladder; desync-2x")
    assert {row["wiring"] for row in plan(*arguments)["wirings"]} == {
        "standard",
        "ladder@0-32",
        "desync-2x@0-32",
        "none",
    }
    assert "wirings on tp" in run(*arguments).output


@pytest.mark.parametrize(
    ("gpus", "wiring", "sentence"),
    [
        ("8", "ladder+int8", "'ladder+int8@0-32' sends quantised activations: a training is not priced with them."),
        ("1", "ladder", "No grid with tensor parallelism fits, so --wirings means nothing."),
    ],
)
def test_what_is_not_priced(gpus: str, wiring: str, sentence: str) -> None:
    model = "llama-3.1-8b" if gpus == "8" else "tiny"
    done = run(model, "--goal", "train", "--gpus", gpus, "--wirings", wiring)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert sentence in done.stderr
