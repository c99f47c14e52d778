"""While the gradient of what a writer reads is summed over Y, the gradient of its weight is computed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rewired.ranks import run_on_ranks
from tests.rewired.sharded import gradients, load, saved
from tests.rewired.tiny import WIRINGS, tokens

from .test_grid import load_on

LAYERS = 6
NO_BIASES = {"attention_bias": False, "mlp_bias": False}


@pytest.mark.parametrize("name", ["ladder-peek", pytest.param("desync-2x", marks=pytest.mark.slow)])
def test_every_writer_s_sum_is_behind_a_product(name: str, tmp_path: Path) -> None:
    widths = (32, 48)  # of what the attentions' and the MLPs' writers read
    for products in run_on_ranks(products_behind_sums, 2, saved(WIRINGS[name], tmp_path, **NO_BIASES)):
        assert {width: products[width] for width in widths} == {width: [1] * LAYERS for width in widths}


def products_behind_sums(folder: Path) -> dict[int, list[int]]:
    """Of each gradient that a backward sums over Y, by its channels: how many products begin before it is used."""
    model = load_on(folder, "1x2").train()
    y, _ = model.model.layers[0].self_attn.forward.args[-1]
    loss = model.model(tokens()).last_hidden_state.square().mean()
    with Behind(y) as behind:
        loss.backward()
    products: dict[int, list[int]] = {}
    for total, number in zip(behind.sums, behind.products, strict=True):
        products.setdefault(total.shape[-1], []).append(number)
    return products


def test_gradients_under_autocast_are_those_of_one_process(tmp_path: Path) -> None:
    folder = saved(WIRINGS["ladder-peek"], tmp_path)
    expected = gradients_under_autocast(folder, "1")
    for found in run_on_ranks(gradients_under_autocast, 2, folder, "1x2"):
        for name, gradient in expected.items():
            if not re.search("[qk]_proj", name):  # whose own are noise in 16 bits, nearly all keys being alike
                torch.testing.assert_close(
                    torch.tensor(found[name]),
                    torch.tensor(gradient),
                    rtol=0.0,
                    atol=0.03 * abs(gradient).max(),
                    msg=name,
                )


def gradients_under_autocast(folder: Path, grid: str) -> dict[str, Any]:
    model = (load_on(folder, grid) if grid != "1" else load(folder)).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    return gradients(model)


class Behind(TorchDispatchMode):
    """Counts the products between the start of each of a group's sums and its use."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group
        self.sums: list[torch.Tensor] = []
        self.products: list[int] = []
        self.used: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name != "_c10d_functional::_wrap_tensor_autograd":
            self.used |= {self._address(each) for each in tree_leaves(args) if isinstance(each, torch.Tensor)}
        if name in ("aten::mm", "aten::bmm"):
            for number, total in enumerate(self.sums):
                self.products[number] += total.data_ptr() not in self.used
        result = func(*args, **(kwargs or {}))
        if name == "_c10d_functional::all_reduce" and args[2] == self.group:
            self.sums.append(result)
            self.products.append(0)
            self.used.discard(result.data_ptr())  # of a tensor that is gone
        return result

    def _address(self, tensor: torch.Tensor) -> int:
        return (tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor).data_ptr()
