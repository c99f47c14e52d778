"""What the ranks of a grid send is what AxoNN's equations say, and what norms and shared parameters add to it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from rewired.ranks import run_on_ranks
from tests.rewired.sharded import saved
from tests.rewired.tiny import WIRINGS, tokens

from .test_grid import load_on

X, Y, LAYERS, H = 2, 2, 6, 32
ROWS = tokens().numel()
READ, WRITTEN = (32 + 2 * 16) + 2 * 48, 32 + 48  # channels of queries, keys, values, gate and up; and into the writers


@pytest.mark.parametrize("name", ["standard", pytest.param("desync-2x", marks=pytest.mark.slow)])
def test_numbers_that_are_summed_over_rows_and_over_columns(name: str, tmp_path: Path) -> None:
    """Equations 6 and 7 of a layer: [m, n] over one side of the grid in forward, [m, k] over the other in backward."""
    folder = saved(WIRINGS[name], tmp_path, attention_bias=False, mlp_bias=False)
    updates = {"standard": 2 * LAYERS, "desync-2x": 4 + 8 // 2}[name]
    norms = (2 * LAYERS + 1) * ROWS * (4 if name == "desync-2x" else 1)
    for forward, backward in run_on_ranks(numbers, X * Y, folder):
        update = ROWS * H / Y
        assert forward["x"] == updates * update
        assert backward["x"] == updates * update + update + LAYERS * 2 * H / Y  # the embedding's, and norms' weights
        if name == "standard":
            assert forward["y"] == LAYERS * ROWS * READ / X + norms
            assert backward["y"] == LAYERS * ROWS * WRITTEN / X + norms


def numbers(folder: Path) -> tuple[Counter[str], Counter[str]]:
    model = load_on(folder, f"{X}x{Y}").train()
    layer = model.model.layers[0]
    x, (y, _) = layer.shards.group, layer.self_attn.forward.args[-1]
    with Sums({x: "x", y: "y"}) as forward:
        loss = model(tokens(), labels=tokens()).loss
    with Sums({x: "x", y: "y"}) as backward:
        loss.backward()
    return forward.numbers, backward.numbers


class Sums(TorchDispatchMode):
    """Counts the numbers that a rank puts into all-reduces, by the names of their groups."""

    def __init__(self, names: dict[str, str]) -> None:
        super().__init__()
        self.names, self.numbers = names, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "_c10d_functional::all_reduce":
            self.numbers[self.names.get(args[2], "all")] += args[0].numel()
        return func(*args, **(kwargs or {}))
