"""A variant of the refit: an MLP's neurons, too, are fitted to what the stream lacks, before the last projection is.

One Gauss-Newton step on all rows of gate_proj and up_proj together, from where the linear map of the input has left
them: min ||lack - W_down h(gate, up)||^2 with h linear in the change, by a few preconditioned conjugate gradients
(Nocedal and Wright, Numerical Optimization, algorithms 5.3 and 10.2). Each costs two passes of the MLP. Held-out tokens
say after how many to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from rewired.refit.fitting import Batch, Errors, Fitter
from rewired.refit.refit_module import RefitModule

ITERATIONS, RIDGE = 6, 1e-2


@dataclass(frozen=True)
class Tokens:
    """What an MLP reads, normalised, and what its stream lacks; scaled as in every fit."""

    views: torch.Tensor  # [n, H]
    lack: torch.Tensor  # [n, H]
    scale: torch.Tensor  # [n, 1]

    @classmethod
    def of(cls, module: RefitModule, batches: Sequence[Batch], fitter: Fitter) -> Tokens:
        parts = []
        for batch in batches:
            view, stream = module.read(batch.refitted)
            scale = fitter.token_weights(batch.original)
            lack = scale * (batch.original - stream.total(module.shards))
            parts.append([part.flatten(0, -2) for part in (module.normalised(view), lack, scale)])
        return cls(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def error(self, rows: torch.Tensor, down: torch.Tensor) -> float:
        """Mean square of what the MLP with gate and up `rows`, [2, N, H], leaves."""
        gate, up = self.views @ rows.mT
        return float((self.lack - self.scale * silu(gate) * up @ down.T).square().mean())


class FitsNeurons(Fitter):
    """The shipped fit of inputs, and the neurons' where all shards read the same."""

    def fit_input(
        self, module: RefitModule, batches: Sequence[Batch], device: torch.device
    ) -> tuple[Errors | None, Errors | None]:
        errors = super().fit_input(module, batches, device)
        if module.is_mlp and not module.wiring.reads_shards:
            width = module.norm.weight.shape[0]
            module.fold_input(torch.zeros(1, width, width))  # the norm's weight goes into the rows
            fitted, held_out = (
                Tokens.of(module, [batch for batch in batches if batch.held_out == is_held_out], self)
                for is_held_out in (False, True)
            )
            rows = torch.stack([projection.weight for projection in module.inputs])
            better = improved(rows, module.output.weight, fitted, held_out)
            for projection, weight in zip(module.inputs, better, strict=True):
                projection.weight.copy_(weight)
        return errors


def improved(rows: torch.Tensor, down: torch.Tensor, fitted: Tokens, held_out: Tokens) -> torch.Tensor:
    """The best gate and up rows, [2, N, H], of all iterations, by their error on `held_out`."""
    gate, up = fitted.views @ rows.mT
    sigmoid = gate.sigmoid()
    slopes = torch.stack([up * sigmoid * (1 + gate * (1 - sigmoid)), silu(gate)]) * fitted.scale  # [2, n, N]
    left = fitted.lack - fitted.scale * silu(gate) * up @ down.T
    importance = slopes.square().mean(1, keepdim=True).mT * down.square().sum(0)[:, None] + 1e-9  # [2, N, 1]
    gram = fitted.views.mT @ fitted.views
    penalty = RIDGE * gram.diagonal().mean()
    factor = torch.linalg.cholesky(gram + penalty * torch.eye(len(gram)))

    def transposed(outputs: torch.Tensor) -> torch.Tensor:  # [n, H] -> [2, N, H]
        return (slopes * (outputs @ down)).mT @ fitted.views

    def normal(change: torch.Tensor) -> torch.Tensor:
        return transposed((slopes * (fitted.views @ change.mT)).sum(0) @ down.T) + penalty * importance * change

    def preconditioned(gradient: torch.Tensor) -> torch.Tensor:
        return torch.cholesky_solve(gradient.flatten(0, 1).T, factor).T.view_as(gradient) / importance

    best, least = rows, held_out.error(rows, down)
    for change in conjugate_gradients(normal, preconditioned, transposed(left)):
        error = held_out.error(rows + change, down)
        if error < least:
            best, least = rows + change, error
    return best


def conjugate_gradients(
    normal: Callable[[torch.Tensor], torch.Tensor],
    preconditioned: Callable[[torch.Tensor], torch.Tensor],
    gradient: torch.Tensor,
) -> list[torch.Tensor]:
    """What solves normal(x) = gradient better and better."""
    found, solution = [], torch.zeros_like(gradient)
    direction = steepest = preconditioned(gradient)
    product = (gradient * steepest).sum()
    for _ in range(ITERATIONS):
        ahead = normal(direction)
        length = product / (direction * ahead).sum()
        solution, gradient = solution + length * direction, gradient - length * ahead
        found.append(solution)
        steepest = preconditioned(gradient)
        before, product = product, (gradient * steepest).sum()
        direction = steepest + product / before * direction
    return found
