"""A basis whose first directions are those of what shards miss: principal components, on some text.

Where a reduction carries the first channels only (`partial`, or a payload that gives channels 0 bits), a shard sees of
the others what it contributed itself, and misses what the others did, ever more up to the region's last module. Of all
bases this one leaves the least of that in the channels that are not sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rewired.checkpoint.shape import family_in
from rewired.model.sharding import row_parallel
from rewired.model.wiring import ModuleWiring
from rewired.ranks import choose_device
from rewired.refit.activations import memory_errors, on_host
from rewired.refit.calibration import Calibration
from rewired.refit.fitting import token_weights
from rewired.refit.refit_module import RefitModule
from rewired.refit.request import RefitRequest
from rewired.refit.run import load_text, model_config
from rewired.refit.sweep import BrokenWeightsError, Sweep
from rewired.refit.weights import Weights


@dataclass(frozen=True)
class Missing:
    """The basis, [H, H], float64, and how much of what is missing its first channels hold, and the original's did."""

    basis: torch.Tensor
    components: torch.Tensor  # [H], mean squares in the basis
    channels: torch.Tensor  # [H], in the original's

    @classmethod
    def of(cls, covariance: torch.Tensor) -> Missing:
        components, directions = torch.linalg.eigh(covariance)  # the smallest first
        return cls(directions.flip(1), components.flip(0).clamp(min=0), covariance.diagonal())

    def shares(self, channels: int) -> tuple[float, float]:
        """Of what is missing, the share in the first `channels` before the rotation, and after it."""
        both = (self.channels, self.components)
        before, after = (float(each[:channels].sum() / each.sum().clamp(min=1e-300)) for each in both)
        return before, after


def find_missing(
    config: Mapping[str, Any], source: Path, tensors: Mapping[str, Path], request: RefitRequest
) -> tuple[Missing, Calibration]:
    """The basis for the checkpoint in `source`, as `config` wires it, on the text of a refit's `request`.

    `tensors` names the file of each of the source's tensors. Raises ValueError for text or a tokenizer that cannot be
    used, and for weights that are not whole.
    """
    calibration = load_text(config, source, request.text, request.tokens)
    weights = Weights(tensors, torch.device(choose_device("auto", 1)), family_in(config))
    with memory_errors():
        sweep = Sweep(model_config(config), weights, calibration, None, gains=False, matrices=False)
        return measure(sweep), calibration


def measure(sweep: Sweep) -> Missing:
    """The basis for the wiring that `sweep` would refit, on the texts that it would fit on.

    Tokens are weighted by 1 / rms^2 of the original's stream, as in a refit. Raises BrokenWeightsError where that is
    not finite.
    """
    width = sweep.config.hidden_size
    covariance = torch.zeros(width, width, dtype=torch.float64, device=sweep.device)
    for total, missing in _reads(sweep):
        rows = (token_weights(total) * missing).reshape(-1, width)
        covariance += rows.mT @ rows
    if not bool(covariance.isfinite().all()):
        raise BrokenWeightsError("The original gives no finite numbers: are the checkpoint's weights whole?")
    return Missing.of(covariance.cpu())


@torch.no_grad()
def _reads(sweep: Sweep) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:  # [B, T, H], [r, B, T, H]
    """The original's stream wherever a module reads it while something is local, and what each shard's view lacks, if
    shards send nothing up to the next reduction of all channels.

    The original runs, and of what its shards contribute that is kept which the wiring of `sweep` might keep.
    """
    walks = [_Walk(sweep, batch.original) for batch in sweep.start() if not batch.held_out]
    leaving = [any(module.leaves_channels for module in modules) for modules in sweep.wirings]
    last = max(index for index, leaves in enumerate(leaving) if leaves)
    for index in range(last + 1):
        layer = sweep.layers.build(index, sweep.dense_wirings[index], sweep.weights.layer(index))
        for module, wiring in zip(RefitModule.all_of(layer), sweep.wirings[index], strict=True):
            for walk in walks:
                if (missing := walk.missing(wiring)) is not None:
                    yield walk.total.to(sweep.device), missing
                walk.pass_module(module, wiring)


class _Walk:
    """Some texts on their way through the original, and what each shard would have of its own."""

    def __init__(self, sweep: Sweep, embedded: torch.Tensor) -> None:
        self.sweep, self.total = sweep, embedded  # [B, T, H]
        self.local: torch.Tensor | None = None  # [r, B, T, H], contributed since the last reduction of all channels

    def missing(self, wiring: ModuleWiring) -> torch.Tensor | None:
        """What the views of a module lack: sum_j d^j - [peek] d^k; None where nothing is local."""
        if self.local is None:
            return None
        local = self.local.to(self.sweep.device)
        return local.sum(0) - (local if wiring.reads_shards else torch.zeros_like(local))

    def pass_module(self, module: RefitModule, wiring: ModuleWiring) -> None:
        sweep = self.sweep
        total = self.total.to(sweep.device)
        parts = row_parallel(module.output, module.shards, sweep.hidden(module, total))
        self.total = on_host(total + parts.sum(0))
        if wiring.leaves_channels:
            self.local = on_host(parts if self.local is None else self.local.to(sweep.device) + parts)
        elif wiring.reduce == "all":
            self.local = None
