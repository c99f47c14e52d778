"""Weight gradients that are computed while the all-reduce of their input's gradient is under way (AxoNN's OAR).

Where a module waits for an update, its backward starts an all-reduce that the module before it needs at once. What can
hide that are the products of the weights' gradients, which nobody waits for (arXiv 2305.13525, section 4).

Of the nodes that are ready, autograd runs the one that forward made last. So a weight passes a node that is made before
the stream is read: in backward its turn is after that of the read, which starts the all-reduce, and before that of the
launch, which waits. Until then the gradient is a product that is still to be made.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from rewired.model.reductions import WhenRead
from rewired.model.rewired_layer import RewiredLayer, StandIns
from rewired.model.sharding import is_plain_linear, on_this_rank


def compute_late(model: nn.Module) -> None:
    """Let the layers of a tensor-parallel `model` compute these weight gradients late."""
    for layer in model.modules():
        if isinstance(layer, RewiredLayer):
            layer.stand_ins = late_linears  # type: ignore[method-assign]


def late_linears(stock: Any) -> StandIns | None:
    """Those of the readers of an attention or MLP that waits. To be called before it reads the stream."""
    wiring, shards = stock.wiring, stock.shards
    if shards.group is None or not wiring.wait or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if wiring.reads_shards and shards.held > 1:
        return None
    readers = {linear.name: getattr(stock, linear.name) for linear in stock.names.readers}
    return {
        name: partial(_linear, _Late.apply(_as_computed(reader.weight)), _as_computed(reader.bias))
        for name, reader in readers.items()
        if is_plain_linear(reader) and reader.weight.requires_grad
    }


def _linear(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = _Linear.apply(x.to(weight.dtype), weight, bias)
    return output


def _as_computed(parameter: Any) -> Any:
    """What this rank holds, in the dtype of autocast, where that is on."""
    if parameter is None:
        return None
    own = on_this_rank(parameter)
    device = own.device.type
    return own.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else own


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.trigger_wait() if isinstance(gradient, WhenRead) else gradient


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        rows, inputs = gradient.flatten(0, -2), x.flatten(0, -2)  # [tokens, out], [tokens, in]
        of_weight = WhenRead(weight, lambda: rows.T @ inputs)
        return gradient @ weight, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None
