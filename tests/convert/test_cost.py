"""The predicted cost of a refit, against what it takes."""

from __future__ import annotations

import re
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from rewired.checkpoint.checkpoint import Checkpoint
from rewired.convert import RefitRequest, Request, convert
from rewired.convert.plan import make_plan
from rewired.refit import sweep
from rewired.refit.cost import RIDGES
from rewired.refit.fitting import INPUT_RIDGES, OUTPUT_RIDGES
from tests.commands import run
from tests.evaluate.world import make_dense

WIRINGS = {
    "ladder": [{"layers": "1-4", "preset": "ladder"}],
    "ladder, a standard half above": [{"layers": "0-2", "preset": "ladder"}],
    "peek": [{"layers": "0-4", "preset": "ladder", "peek": True}],
    "parallel": [{"layers": "0-4", "preset": "parallel"}],
    "partial": [{"layers": "0-4", "preset": "partial", "shared_fraction": 0.5}],
}


some_wirings = pytest.mark.parametrize(
    "wiring",
    [pytest.param(one, id=name, marks=pytest.mark.slow if name == "partial" else ()) for name, one in WIRINGS.items()],
)


@some_wirings
def test_operations_and_activations_are_those_that_are_counted(
    wiring: list[dict[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a third. Left out of operations are attention's own products, the solves and held-out tokens; out of
    activations, at the peak, what is held of held-out tokens for a module's fit."""
    dense = make_dense(tmp_path / "dense", hidden_size=64, intermediate_size=256, num_key_value_heads=8)
    (tmp_path / "text.txt").write_text("so it is written. " * 2000)
    request = Request(wiring, refit=RefitRequest(str(tmp_path / "text.txt"), 16_384))
    cost = make_plan(Checkpoint.open(dense), request).cost
    assert cost is not None
    alive, peak = 0, 0

    def put(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal alive, peak
        kept = tensor.clone()
        alive += kept.nbytes
        peak = max(peak, alive)
        weakref.finalize(kept, drop, kept.nbytes)
        return kept

    def drop(size: int) -> None:
        nonlocal alive
        alive -= size

    monkeypatch.setattr(sweep, "on_host", partial(tree_map_only, torch.Tensor, put))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        convert(dense, tmp_path / "out", request)
    assert cost.operations == pytest.approx(counter.get_total_flops(), rel=0.33)
    assert 0.67 < peak / cost.activations < 1.33


def test_gains_alone_cost_no_least_squares_problem(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "dense", hidden_size=64, intermediate_size=256, num_key_value_heads=8)
    (tmp_path / "text.txt").write_text("so it is written. " * 2000)
    wanted = RefitRequest(str(tmp_path / "text.txt"), 16_384, gains=True, matrices=False)
    request = Request(WIRINGS["peek"], refit=wanted)
    cost = make_plan(Checkpoint.open(dense), request).cost
    assert cost is not None and cost.solves == 0
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        convert(dense, tmp_path / "out", request)
    assert cost.operations == pytest.approx(counter.get_total_flops(), rel=0.33)


def test_as_many_ridges_are_counted_as_are_tried() -> None:
    assert len(INPUT_RIDGES) == len(OUTPUT_RIDGES) == RIDGES


def test_a_dry_run_tells_it(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "dense")
    done = run("convert", dense, "out", "--ladder-layers", "1-4", "--refit", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"The refit needs about [1-9][\d.]* [kM]B of host memory .* and [1-9][\d.]* [MG]FLOP", done.stdout)
    assert sorted(tmp_path.iterdir()) == [dense]
