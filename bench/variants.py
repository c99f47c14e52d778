"""Changes to `rewired.refit` while it runs: what else it could do. `bench/refit_variants.py` measures them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gauss_newton
import torch

from rewired.model.regions import make_region
from rewired.refit import fitting, sweep
from rewired.refit.calibration import Calibration
from rewired.refit.fitting import Errors
from rewired.refit.half import Half
from rewired.refit.least_squares import RidgeRegression, Solution
from rewired.refit.sweep import Sweep
from rewired.refit.weights import Finished

Patch = Callable[[], Any]  # makes a context in which something is replaced


def other_parts(target: Any, **parts: Any) -> Patch:
    return lambda: patch.multiple(target, **parts)


def other_input(change: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Patch:
    """`change` gives what the input's matrix maps, and onto what, of (half, view, stream, the original's stream, n-th
    fit)."""

    def start() -> Any:
        calls, step = count(), Sweep._step_original

        def remember(self: Sweep, half: Half, batches: Sequence[Any]) -> None:
            for batch in batches:
                batch.before = batch.original
            step(self, half, batches)

        def fit_input(half: Half, batches: Sequence[Any], device: torch.device) -> tuple[Errors, None]:
            number, width = next(calls), half.norm.weight.shape[0]
            shards = half.shards.total if half.wiring.reads_shards else 1
            regression = RidgeRegression(shards, width, width, device)
            for batch in batches:
                view, _ = half.read(batch.refitted)
                inputs, fresh = change(half, view, batch.refitted.total(half.shards), batch.before, number)
                regression.add(*(t.reshape(shards, -1, width) for t in (inputs, fresh - inputs)), batch.held_out)
            solution = regression.solve(fitting.INPUT_RIDGES)
            half.fold_input(solution.delta)
            return Errors.of(solution), None

        stack = ExitStack()
        stack.enter_context(patch.object(Sweep, "_step_original", remember))
        stack.enter_context(patch.object(sweep, "fit_input", fit_input))
        return stack

    return start


def towards(share_of: Callable[[int], float]) -> Patch:
    """The target is a blend of the stream that there would be and, for a share, of the original model's."""

    def change(
        half: Half, view: torch.Tensor, own: torch.Tensor, original: torch.Tensor, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        share = share_of(number)
        return half.normalised(view), share * half.normalised(original) + (1 - share) * half.normalised(own)

    return other_input(change)


def over_its_own_rms(
    half: Half, view: torch.Tensor, own: torch.Tensor, original: torch.Tensor, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target is divided by what the view is divided by: the norm's denominator is left as it is."""
    inverse = half.normalised(view).norm(dim=-1, keepdim=True) / view.norm(dim=-1, keepdim=True)
    return half.normalised(view), own * inverse


def fit_what_projections_give(half: Half, batches: Sequence[Any], device: torch.device) -> tuple[Errors, None]:
    """One module further: what q, k, v or gate, up give, not what they are given; the ridge is on their weights."""
    weights = [projection.weight * half.norm.weight for projection in half.inputs]
    joint, width = torch.cat(weights), half.norm.weight.shape[0]
    regression = RidgeRegression(1, width, len(joint), device)
    for batch in batches:
        view, _ = half.read(batch.refitted)
        inputs, fresh = half.normalised(view), half.normalised(batch.refitted.total(half.shards))
        targets = (fresh - inputs) @ joint.T
        regression.add(inputs.reshape(1, -1, width), targets.reshape(1, -1, len(joint)), batch.held_out)
    solution = regression.solve(fitting.INPUT_RIDGES)
    half.norm.weight.fill_(1.0)
    changes = solution.delta[0].T.split([len(weight) for weight in weights])
    for projection, weight, change in zip(half.inputs, weights, changes, strict=True):
        projection.weight.copy_(weight + change)
    return Errors.of(solution), None


def regressed(
    half: Half, hidden: Sequence[torch.Tensor], batches: Sequence[Any], weights: Any = None, constant: float = 0.0
) -> tuple[Solution, list[torch.Tensor]]:
    """The shipped output regression, with weights for tokens or a constant input; and what is missing of each batch."""
    inputs, outputs = half.output.in_features + bool(constant), half.output.out_features
    regression, residuals = RidgeRegression(1, inputs, outputs, torch.device("cpu")), []
    for number, (batch, own) in enumerate(zip(batches, hidden, strict=True)):
        scale = fitting._inverse_rms(batch.original)
        _, stream = half.read(batch.refitted)
        missing = scale * (batch.original - half.write(stream, own).total(half.shards))
        own = torch.cat([own, torch.full_like(own[..., :1], constant)], -1) if constant else own
        counts = weights[number] if weights is not None and not batch.held_out else 1.0
        pair = (counts * scale * own, counts * missing)
        regression.add(pair[0].reshape(1, -1, inputs), pair[1].reshape(1, -1, outputs), batch.held_out)
        residuals.append((scale * own, missing))
    solution = regression.solve(fitting.OUTPUT_RIDGES)
    left = [(missing - own @ solution.delta[0]).square().mean(-1, keepdim=True) for own, missing in residuals]
    return solution, left


def fit_robustly(half: Half, hidden: Sequence[Any], batches: Sequence[Any], device: torch.device) -> Errors:
    """Twice; in the second fit, tokens that the first left far off count less (Cauchy's weights)."""
    _, left = regressed(half, hidden, batches)
    scale = 4 * torch.cat([errors.flatten() for errors in left]).median()
    solution, _ = regressed(half, hidden, batches, weights=[(1 + errors / scale).rsqrt() for errors in left])
    half.fold_output(solution.delta[0])
    return Errors.of(solution)


def fit_with_a_bias(half: Half, hidden: Sequence[Any], batches: Sequence[Any], device: torch.device) -> Errors:
    constant = 3 * float(torch.stack([own.square().mean() for own in hidden]).mean().sqrt())
    solution, _ = regressed(half, hidden, batches, constant=constant)
    half.fold_output(solution.delta[0, :-1])
    half.output.bias = torch.nn.Parameter(solution.delta[0, -1] * constant, requires_grad=False)
    return Errors.of(solution)


def with_biases() -> Any:
    """What modules add has a bias, fitted; the source has none, so its own are zero."""
    gains = Sweep._gains

    def and_biases(self: Sweep, layer: Any) -> dict[str, torch.Tensor]:
        names = ("self_attn.o_proj", "mlp.down_proj")
        return gains(self, layer) | {f"{name}.bias": torch.zeros(self.config.hidden_size) for name in names}

    stack = ExitStack()
    stack.enter_context(patch.object(Sweep, "_gains", and_biases))
    stack.enter_context(patch.object(sweep, "fit_output", fit_with_a_bias))
    return stack


def solve_each_channel(self: RidgeRegression, ridges: Sequence[float], by_diagonal: bool = False) -> Solution:
    """A ridge for each channel of the target; or, `by_diagonal`, one for all that grows with each input's square."""
    diagonal = self.gram.diagonal(dim1=-2, dim2=-1)
    delta = torch.zeros_like(self.cross, dtype=torch.float32)

    def errors(candidate: torch.Tensor) -> torch.Tensor:
        found = sum((x @ candidate - y).double().square().sum(1) for x, y in self.held_out)
        assert isinstance(found, torch.Tensor)
        return found.sum(-1, keepdim=True).expand_as(found) if by_diagonal else found

    before = best = errors(delta)
    for ridge in ridges:
        penalty = diagonal + 1e-3 * diagonal.mean() if by_diagonal else diagonal.mean().expand_as(diagonal)
        damped = self.gram + torch.diag_embed(ridge * penalty)
        candidate = torch.linalg.solve(damped, self.cross).float()
        found = errors(candidate)
        delta = torch.where((found < best)[:, None], candidate, delta)
        best = torch.minimum(found, best)
    return Solution(delta, (ridges[0],) * len(delta), float(before.mean()), float(best.mean()))


def solve_by_diagonal(self: RidgeRegression, ridges: Sequence[float]) -> Solution:
    return solve_each_channel(self, ridges, by_diagonal=True)


def two_sweeps() -> Any:
    """The second begins with the first's weights; the original stays what it is."""
    run, fit_layer, build = Sweep.run, Sweep.fit_layer, Sweep._layer
    first: dict[int, dict[str, torch.Tensor]] = {}

    def run_twice(self: Sweep, finished: Finished, on_layer: Any) -> Any:
        with tempfile.TemporaryDirectory() as scratch:
            earlier = Finished(Path(scratch) / "first", {})
            run(self, earlier, lambda *_: None)
            layers = range(self.config.num_hidden_layers)
            for index in layers:
                if known := earlier.read(index):
                    first[index] = {name: tensor.float() for name, tensor in known.tensors.items()}
        return run(self, finished, on_layer)

    def fit_from_the_first(self: Sweep, index: int, batches: Any, known: Any = None) -> Any:
        calls = count()

        def third_is_fitted(self: Sweep, index: int, wirings: Any, tensors: dict[str, torch.Tensor]) -> Any:
            return build(self, index, wirings, tensors | (first.get(index, {}) if next(calls) == 2 else {}))

        with patch.object(Sweep, "_layer", third_is_fitted):
            return fit_layer(self, index, batches, known)

    return patch.multiple(Sweep, run=run_twice, fit_layer=fit_from_the_first)


def above_too() -> Any:
    """The outputs of the standard layers after the region, too."""
    step = Sweep._step_refitted

    def step_refitted(self: Sweep, index: int, half: Half, *others: Any, **options: Any) -> Any:
        layers = self.config.num_hidden_layers
        alike = make_region(f"0-{layers}", "ladder", layers, overlap=False)
        half.wiring = replace(half.wiring, region=alike)  # computes the same, and counts as rewired
        return step(self, index, half, *others, **options)

    return patch.multiple(Sweep, _step_refitted=step_refitted)


def first_tokens(weight: float) -> Patch:
    """The first token of a text, to which most attention goes, counts `weight` times."""
    normalised, inverse_rms = Half.normalised, fitting._inverse_rms

    def weights(states: torch.Tensor) -> torch.Tensor:  # [..., T, H] -> [T, 1]
        found = torch.ones(states.shape[-2], 1)
        found[0] = weight
        return found.sqrt()

    def begin() -> Any:
        stack = ExitStack()
        stack.enter_context(patch.object(Half, "normalised", lambda self, x: weights(x) * normalised(self, x)))
        stack.enter_context(patch.object(fitting, "_inverse_rms", lambda x: weights(x) * inverse_rms(x)))
        return stack

    return begin


def both(*patches: Patch) -> Patch:
    def begin() -> Any:
        stack = ExitStack()
        for each in patches:
            stack.enter_context(each())
        return stack

    return begin


def windows_only(self: Calibration, held_out: bool) -> list[torch.Tensor]:
    return [self.windows[torch.tensor(self.held_out) == held_out]]


def weighted_by_rms(power: float) -> Patch:
    """Tokens count by rms ** -(2 * power) of the original's stream, and not by its inverse square."""

    def inverse(original: torch.Tensor) -> torch.Tensor:
        return original.square().mean(-1, keepdim=True).pow(-power / 2)

    return other_parts(fitting, _inverse_rms=inverse)


VARIANTS: dict[str, Patch] = {
    "as shipped": nullcontext,
    "inputs only": other_parts(sweep, fit_output=lambda *_: None),
    "outputs only": other_parts(sweep, fit_input=lambda *_: (None, None)),
    "target: the original's stream": towards(lambda _: 1.0),
    "target: half the original's": towards(lambda _: 0.5),
    "target: the original's, less with depth": towards(lambda number: max(0.0, 1 - number / 60)),
    "target: over the view's own rms": other_input(over_its_own_rms),
    "target: what projections give": other_parts(sweep, fit_input=fit_what_projections_give),
    "tokens count alike": weighted_by_rms(0.0),
    "tokens count by 1 / rms": weighted_by_rms(0.5),
    "tokens far off count less": other_parts(sweep, fit_output=fit_robustly),
    "ridge: 1e-3, 1e-2": other_parts(fitting, INPUT_RIDGES=(1e-3,), OUTPUT_RIDGES=(1e-2,)),
    "ridge: 1e-2, 1e-1": other_parts(fitting, INPUT_RIDGES=(1e-2,), OUTPUT_RIDGES=(1e-1,)),
    "ridge: 1e-1, 1": other_parts(fitting, INPUT_RIDGES=(1e-1,), OUTPUT_RIDGES=(1.0,)),
    "ridge: of seven": other_parts(
        fitting, INPUT_RIDGES=(1e-4, 1e-3, 1e-2, 1e-1, 1.0), OUTPUT_RIDGES=(1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 10.0)
    ),
    "ridge: for each channel": other_parts(RidgeRegression, solve=solve_each_channel),
    "ridge: by the diagonal": other_parts(RidgeRegression, solve=solve_by_diagonal),
    "not drawn": other_parts(sweep, PULL=0.0),
    "drawn by 0.03": other_parts(sweep, PULL=0.03),
    "drawn by 0.1": other_parts(sweep, PULL=0.1),
    "drawn by 0.3": other_parts(sweep, PULL=0.3),
    "first tokens count 10 times": first_tokens(10),
    "no token stands alone": other_parts(Calibration, texts=windows_only),
    "no token stands alone, first ones count 100 times": both(
        other_parts(Calibration, texts=windows_only), first_tokens(100)
    ),
    "a bias": with_biases,
    "two sweeps": two_sweeps,
    "neurons, too": other_parts(sweep, fit_input=gauss_newton.fit_input),
    "the middle third alone": nullcontext,
    "the middle third, outputs above too": above_too,
}
