"""The placement of an MLP's neurons on shards.

To a dense model their order means nothing. Where shards read different views it means much: what a neuron reads may be
just what one shard has of its own and the others lack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations

import torch

from .refit_module import RefitModule

Seen = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def place_neurons(module: RefitModule, seen: Callable[[], Iterable[Seen]]) -> tuple[float, float]:
    """Move each neuron of the MLP `module` to the shard that computes it best, if that makes the MLP's error smaller;
    returns this error before and after.

    A batch of n tokens has the views that shards read, normalised, [r, n, H], the one that they would read if nothing
    were missing, [n, H], and the weight of each token's error, [n, 1]. Neurons are placed as if their errors were
    independent; where they are not, the result may be worse, and then they stay where they were.
    """
    before = _error(module, seen())
    order = best_shards(_errors(module, seen())).argsort(stable=True)
    module.reorder_neurons(order)
    after = _error(module, seen())
    if after < before:
        return before, after
    module.reorder_neurons(order.argsort())
    return before, before


def _error(module: RefitModule, batches: Iterable[Seen]) -> float:
    """The mean square of what is wrong with what the MLP adds."""
    total, count = 0.0, 0
    for views, fresh, scale in batches:
        wrong = module.output(module.own_neurons(views)) - module.output(module.neurons(fresh))
        total += float((scale * wrong).double().square().sum())
        count += fresh.numel()
    return total / count


def _errors(module: RefitModule, batches: Iterable[Seen]) -> torch.Tensor:
    """Of each neuron's part of what is added, summed over tokens, if a shard computed it, [r, N]."""
    shape = module.shards.total, module.output.in_features
    errors = torch.zeros(shape, dtype=torch.float64, device=module.output.weight.device)
    for views, fresh, scale in batches:
        wanted = module.neurons(fresh)
        for shard, view in enumerate(views):
            errors[shard] += (scale * (module.neurons(view) - wanted)).square().sum(0)
    return (errors * module.output.weight.square().sum(0)).cpu()


def best_shards(errors: torch.Tensor) -> torch.Tensor:  # [r, N] -> [N]
    """The shard of each neuron, as many on each, with the least sum of `errors` that pairs of shards can reach.

    Neurons lie in r blocks at first. Two shards share theirs out anew, each taking the half that it is better for,
    until a round over all pairs gains nothing.
    """
    count, neurons = errors.shape
    shards = torch.arange(count).repeat_interleave(neurons // count)
    before, total = float("inf"), _total(errors, shards)
    while total < before:
        for one, other in combinations(range(count), 2):
            both = ((shards == one) | (shards == other)).nonzero().flatten()
            better_for_one = both[(errors[one, both] - errors[other, both]).argsort(stable=True)]
            shards[better_for_one] = torch.tensor([one, other]).repeat_interleave(len(both) // 2)
        before, total = total, _total(errors, shards)
    return shards


def _total(errors: torch.Tensor, shards: torch.Tensor) -> float:
    return float(errors.gather(0, shards[None]).sum())
