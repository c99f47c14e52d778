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

X, Y, Z, LAYERS, H = 2, 2, 2, 6, 32
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


@pytest.mark.slow
def test_numbers_of_weights_that_z_gathers_and_scatters_and_replicas_sum(tmp_path: Path) -> None:
    """Equations 4, 5 and 8 of a layer: kn / (Y Z) on a rank of 1x2, Z 2. FSDP2 gathers once more, in backward."""
    folder = saved(WIRINGS["standard"], tmp_path, attention_bias=False, mlp_bias=False)
    layer = 2 * H * 32 + 2 * H * 16 + 3 * H * 48 + 2 * H  # queries and output; keys and values; the MLP; norms
    own = layer // (Y * Z)
    for numbers in run_on_ranks(numbers_of_weights, 2 * Y * Z, folder):
        assert numbers["_allgather_base_", own] == 2 * LAYERS
        assert numbers["_reduce_scatter_base_", own * Z] == LAYERS
        assert numbers["allreduce_", own] == LAYERS
        assert (
            sum(numbers.values()) == (2 + 1 + 1) * LAYERS + 3 + 2 + 2
        )  # and the embedding's, and the head's with a norm


def numbers_of_weights(folder: Path) -> Counter[tuple[str, int]]:
    model = load_on(folder, f"1x{Y}", fsdp_size=Z, dp_replicate_size=2).train()
    with Inputs() as inputs:
        model(tokens(), labels=tokens()).loss.backward()
    return inputs.numbers


class Inputs(TorchDispatchMode):
    """Counts the collectives of FSDP2, by the numbers that a rank puts in."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = Counter[tuple[str, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            put_in = args[0][0] if name == "allreduce_" else args[1]
            self.numbers[name, put_in.numel()] += 1
        return func(*args, **(kwargs or {}))


class Sums(TorchDispatchMode):
    """Counts the numbers that a rank puts into all-reduces, by the names of their groups."""

    def __init__(self, names: dict[str, str]) -> None:
        super().__init__()
        self.names, self.numbers = names, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "_c10d_functional::all_reduce":
            self.numbers[self.names.get(args[2], "all")] += args[0].numel()
        return func(*args, **(kwargs or {}))
