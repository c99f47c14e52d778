"""One module fitted by least squares: its gain, what it reads, and what it adds to the stream.

A stale stream predicts the fresh one well, linearly, and a linear map of a module's input or output folds into the
weights that are there: no fit costs anything at inference, or depends on how many ranks run it.

Every error is a mean square in units of the original's normalised stream. That is what the next norm makes of it, and
it keeps the few tokens with huge activations from deciding alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rewired.model.residual_stream import ResidualStream

from .half import Half
from .least_squares import RidgeRegression, Solution
from .placement import Seen, place_neurons
from .shelf import on_device

# candidates of the ridge, relative to the Gram matrix's mean diagonal; held-out tokens choose
INPUT_RIDGES = (1e-3, 1e-2, 1e-1)
OUTPUT_RIDGES = (1e-2, 1e-1, 1.0)

_GAIN_RIDGE = 1e-6  # relative to a channel's mean square: one that is nearly silent keeps its gain

PULL = 0.05  # the share of what a stream lacks of the original's that is added after each module, where it is fitted on


@dataclass
class Batch:
    """Some texts of one length on their way through the layers of the original and of the refitted model."""

    original: torch.Tensor  # [B, T, H], all that was contributed so far
    refitted: ResidualStream
    converted: ResidualStream | None  # what conversion alone gives; only where held out

    @classmethod
    def start(cls, stream: ResidualStream, total: torch.Tensor, held_out: bool) -> Batch:
        """Where all models are still the same; `total` is what has been contributed to `stream`."""
        return cls(total, stream, stream if held_out else None)

    @property
    def held_out(self) -> bool:
        """Whether its tokens only judge."""
        return self.converted is not None

    @property
    def is_measured(self) -> bool:
        """Whether the model's KL is measured on it: it judges, and is no text of one token."""
        return self.held_out and self.original.shape[1] > 1


@dataclass(frozen=True)
class Errors:
    """Of a fit, on held-out tokens, before and after; equal where nothing was better than what was there."""

    before: float
    after: float
    ridges: tuple[float | None, ...] = ()  # chosen for each problem; None where nothing was better

    @classmethod
    def of(cls, solution: Solution) -> Errors:
        return cls(solution.before, solution.after, solution.ridges)


@dataclass(frozen=True)
class Fit:
    """What was fitted of a module, and how well."""

    layer: int
    module: str  # attention or MLP
    gain: Errors | None
    input: Errors | None
    placement: Errors | None  # of an MLP's sum, before and after its neurons moved to other shards
    output: Errors | None

    @classmethod
    def from_json(cls, fit: dict[str, Any]) -> Fit:
        """The inverse of `dataclasses.asdict`."""
        parts = {name: fit[name] for name in ("gain", "input", "placement", "output")}
        errors = {
            name: part and Errors(part["before"], part["after"], tuple(part["ridges"])) for name, part in parts.items()
        }
        return cls(fit["layer"], fit["module"], **errors)


def fit_gain(half: Half, batches: Sequence[Batch], device: torch.device) -> Errors:
    """Let what a shard sees of its own stand for what all contributed: a quotient for each shard and channel.

    Design, section 4: g[k, c] = <u_c, z^k_c> / <z^k_c, z^k_c>, u what the view lacks and z^k the shard's own part; with
    a small ridge that draws it to what it was.
    """
    assert half.gain is not None, "only a module that reads shards has a gain"
    gain = half.gain.weight
    products, squares = torch.zeros(2, *gain.shape, dtype=torch.float64, device=device)  # [r, H]
    held_out = []
    for batch in batches:
        stream = on_device(batch.refitted, device)
        _, after = half.read(stream)
        scale = _inverse_rms(batch.original.to(device))
        own, missing = scale * after.own_parts(), scale * (stream.total(half.shards) - after.settled)
        if batch.held_out:
            held_out.append((own, missing))
        else:
            products += (own * missing).double().sum((1, 2))
            squares += own.double().square().sum((1, 2))
    ridge = _GAIN_RIDGE * squares.mean()
    quotients = (products + ridge * gain) / (squares + ridge)
    fitted = torch.where(squares + ridge > 0, quotients, gain.double()).to(gain.dtype)
    count = sum(own.numel() for own, _ in held_out)
    before, after_fit = (
        sum(float((missing - g[:, None, None] * own).square().sum()) for own, missing in held_out) / count
        for g in (gain, fitted)
    )
    if not after_fit < before:
        return Errors(before, before)
    gain.copy_(fitted)
    return Errors(before, after_fit)


def fit_input(half: Half, batches: Sequence[Batch], device: torch.device) -> tuple[Errors, Errors | None]:
    """Map what the module reads onto what it would read if nothing were in flight or local, and fold the map; the map's
    errors, and those of what an MLP adds before and after its neurons are placed.

    Design, section 4: min ||X (I + D) - Y||^2 + ridge * ||D||^2 with X = n(view), Y = n(fresh); for each shard where
    views differ. There an MLP's neurons then move to the shards that compute them best.
    """
    shards, width = half.shards.total if half.wiring.reads_shards else 1, half.norm.weight.shape[0]
    regression, scales = RidgeRegression(shards, width, width, device), []
    for batch in batches:
        stream = on_device(batch.refitted, device)
        view, _ = half.read(stream)
        inputs = half.normalised(view).reshape(shards, -1, width)
        fresh = half.normalised(stream.total(half.shards)).reshape(1, -1, width)
        regression.add(inputs, fresh - inputs, batch.held_out)
        if batch.held_out:
            scales.append(_inverse_rms(batch.original.to(device)).reshape(-1, 1))
    solution = regression.solve(INPUT_RIDGES)
    placed = _placed(half, solution, regression, scales) if half.is_mlp and shards > 1 else None
    if solution.is_better:
        half.fold_input(solution.delta)
    return Errors.of(solution), placed


def _placed(half: Half, solution: Solution, regression: RidgeRegression, scales: Sequence[torch.Tensor]) -> Errors:
    """Move an MLP's neurons to the shards that compute them best, by what held-out tokens show after `solution`."""

    def seen() -> Iterator[Seen]:
        for (inputs, targets), scale in zip(regression.held_out, scales, strict=True):
            yield inputs + inputs @ solution.delta, inputs[0] + targets[0], scale

    return Errors(*place_neurons(half, seen))


def fit_output(half: Half, hidden: Sequence[torch.Tensor], batches: Sequence[Batch], device: torch.device) -> Errors:
    """Let the module add what its stream lacks of the original's, as far as `hidden` tells it, one [B, T, A] a batch.

    Design, section 4: W += ridge(hidden -> original's stream after the module - ours).
    """
    inputs, outputs = half.output.in_features, half.output.out_features
    regression = RidgeRegression(1, inputs, outputs, device)
    for batch, own in zip(batches, hidden, strict=True):
        own, original = own.to(device), batch.original.to(device)
        _, stream = half.read(on_device(batch.refitted, device))
        missing = original - half.write(stream, own).total(half.shards)
        scale = _inverse_rms(original)
        regression.add((scale * own).reshape(1, -1, inputs), (scale * missing).reshape(1, -1, outputs), batch.held_out)
    solution = regression.solve(OUTPUT_RIDGES)
    if solution.is_better:
        half.fold_output(solution.delta[0])
    return Errors.of(solution)


def _inverse_rms(original: torch.Tensor) -> torch.Tensor:  # [B, T, H] -> [B, T, 1]
    mean_square = original.square().mean(-1, keepdim=True)
    return torch.where(mean_square > 0, mean_square.rsqrt(), 0.0)  # a padding token's embedding may be zero
