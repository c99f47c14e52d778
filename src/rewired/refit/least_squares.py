"""Ridge regression over streamed tokens: the fit needs only sums, and held-out tokens, kept whole, choose the ridge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Errors:
    """Mean squared errors on held-out tokens before and after a fit; equal where the fit was dropped."""

    before: float
    after: float
    ridges: Sequence[float | None] = ()  # chosen for each problem; None where no ridge made its error smaller

    @property
    def has_fit(self) -> bool:
        """Whether any of the problems has a fit that is better than no change."""
        return any(ridge is not None for ridge in self.ridges)


class RidgeRegression:
    """s problems side by side, targets [s, N, B] on inputs [s, N, A]: min ||X D - Y||^2 + ridge * g * ||D||^2.

    g is the mean diagonal of X^T X. Products are taken in the inputs' precision and summed in float64.
    """

    def __init__(self, problems: int, inputs: int, outputs: int, device: torch.device) -> None:
        self.gram = torch.zeros(problems, inputs, inputs, dtype=torch.float64, device=device)
        self.cross = torch.zeros(problems, inputs, outputs, dtype=torch.float64, device=device)
        self.held_out: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, inputs: torch.Tensor, targets: torch.Tensor, held_out: bool) -> None:
        """More tokens: [s, n, A] and [s, n, B]."""
        if held_out:
            self.held_out.append((inputs, targets))
            return
        self.gram += inputs.mT @ inputs
        self.cross += inputs.mT @ targets

    def solve(self, ridges: Sequence[float]) -> tuple[torch.Tensor, Errors]:
        """Each problem's D, [s, A, B] in float32, by the best of `ridges` on held-out tokens; zero where none helps."""
        delta = torch.zeros_like(self.cross, dtype=torch.float32)
        before = self._held_out_error(delta)
        best = before.clone()
        chosen: list[float | None] = [None] * len(self.gram)
        scale = self.gram.diagonal(dim1=-2, dim2=-1).mean(-1)  # [s]
        for ridge in ridges:
            candidate = self._solve(ridge * scale).float()
            error = self._held_out_error(candidate)
            for problem in (error < best).nonzero().flatten().tolist():
                best[problem], delta[problem], chosen[problem] = error[problem], candidate[problem], ridge
        return delta, Errors(float(before.mean()), float(best.mean()), tuple(chosen))

    def _solve(self, penalty: torch.Tensor) -> torch.Tensor:  # [s] -> [s, A, B]
        damped = self.gram.clone()
        damped.diagonal(dim1=-2, dim2=-1).add_(penalty[:, None])
        factor, failed = torch.linalg.cholesky_ex(damped)
        solution = torch.cholesky_solve(self.cross, factor)
        # inputs that are all zero, or so nearly dependent that rounding decides, have no fit
        return solution.masked_fill_((failed != 0)[:, None, None], 0.0)

    def _held_out_error(self, delta: torch.Tensor) -> torch.Tensor:  # [s, A, B] -> [s]
        squares = [(inputs @ delta - targets).double().square().sum((1, 2)) for inputs, targets in self.held_out]
        return torch.stack(squares).sum(0) / sum(targets[0].numel() for _, targets in self.held_out)
