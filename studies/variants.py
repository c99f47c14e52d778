"""Variants of the refit: each overrides a part of its `Fitter`. refit_variants.py measures them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from gauss_newton import FitsNeurons

from rewired.model.residual_stream import ResidualStream
from rewired.model.wiring import ModuleWiring
from rewired.refit.calibration import Calibration
from rewired.refit.fitting import Batch, Errors, Fitter
from rewired.refit.least_squares import RidgeRegression, Solution
from rewired.refit.refit_module import RefitModule
from rewired.refit.weights import Finished


@dataclass(frozen=True)
class Variant:
    """What a refit is run with; `has_biases` says that the model has biases, zero in the source."""

    fitter: Callable[[], Fitter] = Fitter
    calibration: type[Calibration] = Calibration
    has_biases: bool = False
    sweeps: int = 1


class InputsOnly(Fitter):
    def fit_output(self, *_: Any) -> None:
        return None


class OutputsOnly(Fitter):
    def fit_input(self, *_: Any) -> tuple[None, None]:
        return None, None


@dataclass
class TowardsOriginal(Fitter):
    """The input's target is a blend of the stream that there would be and, for a share, of the original model's."""

    share_of: Callable[[int], float] = lambda number: 1.0  # of the n-th module that is fitted
    fits_done: int = 0
    before: list[torch.Tensor] = field(default_factory=list)  # the original's streams before the module

    def before_module(self, batches: Sequence[Batch]) -> None:
        self.before = [batch.original for batch in batches]

    def fit_input(
        self, module: RefitModule, batches: Sequence[Batch], device: torch.device
    ) -> tuple[Errors | None, Errors | None]:
        self.originals = iter(self.before)
        errors = super().fit_input(module, batches, device)
        self.fits_done += 1
        return errors

    def input_problem(
        self, module: RefitModule, batch: Batch, stream: ResidualStream
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, fresh = super().input_problem(module, batch, stream)
        share = self.share_of(self.fits_done)
        return inputs, share * module.normalised(next(self.originals)) + (1 - share) * fresh


class OverTheViewsRms(Fitter):
    """The input's target is divided by what the view is divided by: the norm's denominator is left as it is."""

    def input_problem(
        self, module: RefitModule, batch: Batch, stream: ResidualStream
    ) -> tuple[torch.Tensor, torch.Tensor]:
        view, _ = module.read(stream)
        inputs = module.normalised(view)
        inverse = inputs.norm(dim=-1, keepdim=True) / view.norm(dim=-1, keepdim=True)
        return inputs, stream.total(module.shards) * inverse


class WhatProjectionsGive(Fitter):
    """One module further: the outputs of q, k, v or gate, up are fitted, not their input; the ridge is on weights."""

    def fit_input(
        self, module: RefitModule, batches: Sequence[Batch], device: torch.device
    ) -> tuple[Errors | None, Errors | None]:
        weights = [projection.weight * module.norm.weight for projection in module.inputs]
        joint, width = torch.cat(weights), module.norm.weight.shape[0]
        regression = RidgeRegression(1, width, len(joint), device)
        for batch in batches:
            inputs, fresh = self.input_problem(module, batch, batch.refitted)
            targets = (fresh - inputs) @ joint.T
            regression.add(inputs.reshape(1, -1, width), targets.reshape(1, -1, len(joint)), batch.held_out)
        solution = self.solve(regression, self.input_ridges)
        module.norm.weight.fill_(1.0)
        changes = solution.delta[0].T.split([len(weight) for weight in weights])
        for projection, weight, change in zip(module.inputs, weights, changes, strict=True):
            projection.weight.copy_(weight + change)
        return Errors.of(solution), None


class OutputRegression(Fitter):
    """The shipped regression of outputs, with weights for tokens or a constant input."""

    def regressed(
        self,
        module: RefitModule,
        hidden: Sequence[torch.Tensor],
        batches: Sequence[Batch],
        weights: Sequence[torch.Tensor] | None = None,
        constant: float = 0.0,
    ) -> tuple[Solution, list[torch.Tensor]]:
        """The solution, and the mean square that it leaves at each token of each batch."""
        inputs, outputs = module.output.in_features + bool(constant), module.output.out_features
        regression, residuals = RidgeRegression(1, inputs, outputs, torch.device("cpu")), []
        for number, (batch, own) in enumerate(zip(batches, hidden, strict=True)):
            scale = self.token_weights(batch.original)
            _, stream = module.read(batch.refitted)
            missing = scale * (batch.original - module.write(stream, own).total(module.shards))
            own = torch.cat([own, torch.full_like(own[..., :1], constant)], -1) if constant else own
            counts = weights[number] if weights is not None and not batch.held_out else 1.0
            pair = (counts * scale * own, counts * missing)
            regression.add(pair[0].reshape(1, -1, inputs), pair[1].reshape(1, -1, outputs), batch.held_out)
            residuals.append((scale * own, missing))
        solution = self.solve(regression, self.output_ridges)
        left = [(missing - own @ solution.delta[0]).square().mean(-1, keepdim=True) for own, missing in residuals]
        return solution, left


class Robust(OutputRegression):
    """Outputs are fitted twice; the second time, tokens that the first left far off count less (Cauchy's weights)."""

    def fit_output(
        self, module: RefitModule, hidden: Sequence[torch.Tensor], batches: Sequence[Batch], device: torch.device
    ) -> Errors:
        _, left = self.regressed(module, hidden, batches)
        scale = 4 * torch.cat([errors.flatten() for errors in left]).median()
        weights = [(1 + errors / scale).rsqrt() for errors in left]
        solution, _ = self.regressed(module, hidden, batches, weights)
        module.fold_output(solution.delta[0])
        return Errors.of(solution)


class FitsBiases(OutputRegression):
    """What modules add has a bias, which is fitted too."""

    def fit_output(
        self, module: RefitModule, hidden: Sequence[torch.Tensor], batches: Sequence[Batch], device: torch.device
    ) -> Errors:
        constant = 3 * float(torch.stack([own.square().mean() for own in hidden]).mean().sqrt())
        solution, _ = self.regressed(module, hidden, batches, constant=constant)
        module.fold_output(solution.delta[0, :-1])
        module.output.bias.copy_(solution.delta[0, -1] * constant)
        return Errors.of(solution)


@dataclass
class OtherRidge(Fitter):
    """A ridge for each channel of the target; or, `by_diagonal`, one for all that grows with each input's square."""

    by_diagonal: bool = False

    def solve(self, regression: RidgeRegression, ridges: Sequence[float]) -> Solution:
        diagonal = regression.gram.diagonal(dim1=-2, dim2=-1)
        delta = torch.zeros_like(regression.cross, dtype=torch.float32)
        before = best = self._errors(regression, delta)
        for ridge in ridges:
            mean = diagonal.mean()
            penalty = diagonal + 1e-3 * mean if self.by_diagonal else mean.expand_as(diagonal)
            damped = regression.gram + torch.diag_embed(ridge * penalty)
            candidate = torch.linalg.solve(damped, regression.cross).float()
            errors = self._errors(regression, candidate)
            delta = torch.where((errors < best)[:, None], candidate, delta)
            best = torch.minimum(errors, best)
        return Solution(delta, (ridges[0],) * len(delta), float(before.mean()), float(best.mean()))

    def _errors(self, regression: RidgeRegression, delta: torch.Tensor) -> torch.Tensor:  # [s, A, B] -> [s, B]
        squares = [(x @ delta - y).double().square().sum(1) for x, y in regression.held_out]
        errors = torch.stack(squares).sum(0)
        return errors.sum(-1, keepdim=True).expand_as(errors) if self.by_diagonal else errors


@dataclass
class Continues(Fitter):
    """Another sweep, which starts from the weights of an `earlier` one; the original stays what it is."""

    earlier: Finished | None = None

    def start(self, layer: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        finished = self.earlier and self.earlier.read(layer)
        return tensors | {name: tensor.float() for name, tensor in finished.tensors.items()} if finished else tensors


@dataclass
class AboveToo(Fitter):
    """The outputs of the standard layers after the region are fitted, too."""

    first: int | None = None  # the first rewired layer

    def fits(self, layer: int, wiring: ModuleWiring) -> bool:
        if self.first is None and wiring.is_rewired:
            self.first = layer
        return self.first is not None and layer >= self.first


@dataclass
class TokensWeightedByRms(Fitter):
    """Tokens are weighted by rms ** -(2 * power) of the original's stream, and not by its inverse square."""

    power: float = 1.0

    def token_weights(self, original: torch.Tensor) -> torch.Tensor:
        return original.square().mean(-1, keepdim=True).pow(-self.power / 2)


@dataclass
class FirstTokens(Fitter):
    """The first token of a text, to which most attention goes, counts `weight` times."""

    weight: float = 1.0

    def token_weights(self, original: torch.Tensor) -> torch.Tensor:
        return self._weights(original) * super().token_weights(original)

    def input_problem(
        self, module: RefitModule, batch: Batch, stream: ResidualStream
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = super().input_problem(module, batch, stream)
        return self._weights(inputs) * inputs, self._weights(targets) * targets

    def _weights(self, states: torch.Tensor) -> torch.Tensor:  # [..., T, H] -> [T, 1]
        weights = torch.ones(states.shape[-2], 1)
        weights[0] = self.weight
        return weights.sqrt()


class WindowsOnly(Calibration):
    """No token is a text of its own."""

    def texts(self, held_out: bool) -> list[torch.Tensor]:
        return [self.windows[torch.tensor(self.held_out) == held_out]]


def _ridges(inputs: Sequence[float], outputs: Sequence[float]) -> Variant:
    return Variant(partial(Fitter, input_ridges=inputs, output_ridges=outputs))


def _towards(share_of: Callable[[int], float]) -> Variant:
    return Variant(partial(TowardsOriginal, share_of=share_of))


VARIANTS: dict[str, Variant] = {
    "as shipped": Variant(),
    "inputs only": Variant(InputsOnly),
    "outputs only": Variant(OutputsOnly),
    "target: the original's stream": _towards(lambda _: 1.0),
    "target: half the original's": _towards(lambda _: 0.5),
    "target: the original's, less with depth": _towards(lambda number: max(0.0, 1 - number / 60)),
    "target: over the view's own rms": Variant(OverTheViewsRms),
    "target: what projections give": Variant(WhatProjectionsGive),
    "tokens count alike": Variant(partial(TokensWeightedByRms, power=0.0)),
    "tokens count by 1 / rms": Variant(partial(TokensWeightedByRms, power=0.5)),
    "tokens far off count less": Variant(Robust),
    "ridge: 1e-3, 1e-2": _ridges((1e-3,), (1e-2,)),
    "ridge: 1e-2, 1e-1": _ridges((1e-2,), (1e-1,)),
    "ridge: 1e-1, 1": _ridges((1e-1,), (1.0,)),
    "ridge: of seven": _ridges((1e-4, 1e-3, 1e-2, 1e-1, 1.0), (1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 10.0)),
    "ridge: for each channel": Variant(OtherRidge),
    "ridge: by the diagonal": Variant(partial(OtherRidge, by_diagonal=True)),
    "not drawn": Variant(partial(Fitter, teacher_share=0.0)),
    "drawn by 0.03": Variant(partial(Fitter, teacher_share=0.03)),
    "drawn by 0.1": Variant(partial(Fitter, teacher_share=0.1)),
    "drawn by 0.3": Variant(partial(Fitter, teacher_share=0.3)),
    "first tokens count 10 times": Variant(partial(FirstTokens, weight=10)),
    "no token stands alone": Variant(calibration=WindowsOnly),
    "no token stands alone, first ones count 100 times": Variant(partial(FirstTokens, weight=100), WindowsOnly),
    "a bias": Variant(FitsBiases, has_biases=True),
    "two sweeps": Variant(sweeps=2),
    "neurons, too": Variant(FitsNeurons),
    "the middle third alone": Variant(),
    "the middle third, outputs above too": Variant(AboveToo),
}
