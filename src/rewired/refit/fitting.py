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

from .activations import on_device
from .least_squares import Errors, RidgeRegression
from .placement import Seen, place_neurons
from .refit_module import RefitModule

# candidates of the ridge, relative to the Gram matrix's mean diagonal; held-out tokens choose
INPUT_RIDGES = (1e-3, 1e-2, 1e-1)
OUTPUT_RIDGES = (1e-2, 1e-1, 1.0)
TEACHER_SHARE = 0.05  # of the original's stream, mixed into those that are fitted on, after each module

_GAIN_RIDGE = 1e-6  # relative to a channel's mean square: one that is nearly silent keeps its gain


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
        """Whether nothing is fitted on its tokens: fits are chosen by their errors on them."""
        return self.converted is not None

    @property
    def is_measured(self) -> bool:
        """Whether the model's KL is measured on it: it is held out, and no text of a single token."""
        return self.held_out and self.original.shape[1] > 1


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
        parts: dict[str, Any] = {name: Errors(**part) if isinstance(part, dict) else part for name, part in fit.items()}
        return cls(**parts)


def fit_gain(module: RefitModule, batches: Sequence[Batch], device: torch.device) -> Errors:
    """Let what a shard sees of its own stand for what all contributed: a quotient for each shard and channel.

    g[k, c] = <u_c, z^k_c> / <z^k_c, z^k_c>, u what the view lacks and z^k the shard's own part; with a small ridge
    that draws it to what it was (docs/refit.md).
    """
    assert module.gain is not None, "only a module that reads shards has a gain"
    gain = module.gain.weight
    products, squares = torch.zeros(2, *gain.shape, dtype=torch.float64, device=device)  # [r, H]
    held_out = []
    for batch in batches:
        stream = on_device(batch.refitted, device)
        _, after = module.read(stream)
        scale = token_weights(batch.original.to(device))
        own, missing = scale * after.own_parts(), scale * (module.fresh(stream) - after.settled)
        if batch.held_out:
            held_out.append((own, missing))
        else:
            products += (own * missing).double().sum((1, 2))
            squares += own.double().square().sum((1, 2))
    ridge = _GAIN_RIDGE * squares.mean()
    quotients = (products + ridge * gain) / (squares + ridge)
    fitted = torch.where(squares + ridge > 0, quotients, gain.double()).to(gain.dtype)
    errors = Errors(_gain_error(gain, held_out), _gain_error(fitted, held_out))
    if not errors.after < errors.before:
        return Errors(errors.before, errors.before)
    gain.copy_(fitted)
    return errors


def fit_input(module: RefitModule, batches: Sequence[Batch], device: torch.device) -> tuple[Errors, Errors | None]:
    """Map what the module reads onto what it would read if nothing were in flight or local, and fold the map.

    min ||X (I + D) - Y||^2 + ridge * ||D||^2 with X = n(view), Y = n(fresh); for each shard where views differ.
    There an MLP's neurons then move to the shards that compute them best. Returns the map's errors, and those of
    what an MLP adds before and after its neurons are placed.
    """
    shards, width = module.shards.total if module.wiring.reads_shards else 1, module.norm.weight.shape[0]
    regression, scales = RidgeRegression(shards, width, width, device), []
    for batch in batches:
        stream = on_device(batch.refitted, device)
        view, _ = module.read(stream)
        inputs = module.normalised(view).reshape(shards, -1, width)
        targets = module.normalised(module.fresh(stream)).reshape(1, -1, width)
        regression.add(inputs, targets - inputs, batch.held_out)
        if batch.held_out:
            scales.append(token_weights(batch.original.to(device)).reshape(-1, 1))
    delta, errors = regression.solve(INPUT_RIDGES)
    placement = _place(module, delta, regression, scales) if module.is_mlp and shards > 1 else None
    if errors.has_fit:
        module.fold_input(delta)
    return errors, placement


def fit_output(
    module: RefitModule, hidden: Sequence[torch.Tensor], batches: Sequence[Batch], device: torch.device
) -> Errors:
    """Let the module add what its stream lacks of the original's, as far as `hidden`, one [B, T, A] a batch, tells.

    W += ridge(hidden -> original's stream after the module - ours).
    """
    inputs, outputs = module.output.in_features, module.output.out_features
    regression = RidgeRegression(1, inputs, outputs, device)
    for batch, own in zip(batches, hidden, strict=True):
        own, original = own.to(device), batch.original.to(device)
        _, stream = module.read(on_device(batch.refitted, device))
        missing = original - module.total(module.write(stream, own))
        scale = token_weights(original)
        pair = (scale * own).reshape(1, -1, inputs), (scale * missing).reshape(1, -1, outputs)
        regression.add(*pair, batch.held_out)
    delta, errors = regression.solve(OUTPUT_RIDGES)
    if errors.has_fit:
        module.fold_output(delta[0])
    return errors


def token_weights(original: torch.Tensor) -> torch.Tensor:  # [B, T, H] -> [B, T, 1]
    """What an error at each token counts, as a factor: the inverse RMS of the original's stream."""
    mean_square = original.square().mean(-1, keepdim=True)
    return torch.where(mean_square > 0, mean_square.rsqrt(), 0.0)  # a padding token's embedding may be zero


def _gain_error(gain: torch.Tensor, held_out: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The mean square of what `gain`, [r, H], leaves of what views lack; of each batch own parts and that."""
    count = sum(own.numel() for own, _ in held_out)
    return sum(float((missing - gain[:, None, None] * own).square().sum()) for own, missing in held_out) / count


def _place(
    module: RefitModule, delta: torch.Tensor, regression: RidgeRegression, scales: Sequence[torch.Tensor]
) -> Errors:
    """Move an MLP's neurons to the shards that compute them best, as held-out tokens show after the fit `delta`."""

    def seen() -> Iterator[Seen]:
        for (inputs, targets), scale in zip(regression.held_out, scales, strict=True):
            yield inputs + inputs @ delta, inputs[0] + targets[0], scale

    return Errors(*place_neurons(module, seen))
