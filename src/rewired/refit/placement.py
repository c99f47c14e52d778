"""Which shard computes which of an MLP's neurons.

To a dense model their order means nothing. Where shards read different views it means much: what a neuron reads may be
just what one shard has of its own and the others lack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations

import torch

from .half import Half

Seen = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def place_neurons(half: Half, seen: Callable[[], Iterable[Seen]]) -> tuple[float, float]:
    """Move each neuron of the MLP `half` to the shard that computes it best, if what the MLP adds then errs less; the
    error of that, before and after.

    A batch of n tokens has the views that shards read, normalised, [r, n, H], the one that they would read if nothing
    were missing, [n, H], and what an error counts at each token, [n, 1]. Neurons are placed as if they erred
    independently; where they do not, that may be worse, and then they stay.
    """
    before = _error(half, seen())
    order = best_shards(_errors(half, seen())).argsort(stable=True)
    half.reorder_neurons(order)
    after = _error(half, seen())
    if after < before:
        return before, after
    half.reorder_neurons(order.argsort())
    return before, before


def _error(half: Half, batches: Iterable[Seen]) -> float:
    """The mean square of what is wrong with what the MLP adds."""
    total, count = 0.0, 0
    for views, fresh, scale in batches:
        wrong = half.output(half.own_neurons(views)) - half.output(half.neurons(fresh))
        total += float((scale * wrong).double().square().sum())
        count += fresh.numel()
    return total / count


def _errors(half: Half, batches: Iterable[Seen]) -> torch.Tensor:
    """Of each neuron's part of what is added, summed over tokens, if a shard computed it, [r, N]."""
    shape = half.shards.total, half.output.in_features
    errors = torch.zeros(shape, dtype=torch.float64, device=half.output.weight.device)
    for views, fresh, scale in batches:
        wanted = half.neurons(fresh)
        for shard, view in enumerate(views):
            errors[shard] += (scale * (half.neurons(view) - wanted)).square().sum(0)
    return (errors * half.output.weight.square().sum(0)).cpu()


def best_shards(errors: torch.Tensor) -> torch.Tensor:  # [r, N] -> [N]
    """The shard of each neuron, as many on each, with the least sum of `errors` that pairs of shards can reach.

    Neurons lie in r blocks at first. Two shards share theirs out anew, each taking the half that it is better for,
    until a round over all pairs gains nothing.
    """
    shards = _in_blocks(errors)
    before, total = float("inf"), _total(errors, shards)
    while total < before:
        for one, other in combinations(range(len(errors)), 2):
            both = ((shards == one) | (shards == other)).nonzero().flatten()
            better_for_one = both[(errors[one, both] - errors[other, both]).argsort(stable=True)]
            shards[better_for_one] = torch.tensor([one, other]).repeat_interleave(len(both) // 2)
        before, total = total, _total(errors, shards)
    return shards


def _in_blocks(errors: torch.Tensor) -> torch.Tensor:
    shards, neurons = errors.shape
    return torch.arange(shards).repeat_interleave(neurons // shards)


def _total(errors: torch.Tensor, shards: torch.Tensor) -> float:
    return float(errors.gather(0, shards[None]).sum())
