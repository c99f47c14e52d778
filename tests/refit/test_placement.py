"""Neurons on the shards that compute them best: as many on each, never worse, and the dense model stays what it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch.nn.functional import silu

from rewired.refit.placement import best_shards, place_neurons
from rewired.refit.refit_module import RefitModule
from tests.rewired.tiny import WIRINGS, rewired_model


@given(st.integers(2, 5), st.integers(1, 12), st.integers(0, 2**31))
def test_neurons_are_shared_out_evenly_and_no_two_gain_by_changing_places(shards: int, each: int, seed: int) -> None:
    errors = random_errors(shards, each, seed)
    found = best_shards(errors)
    assert found.bincount(minlength=shards).tolist() == [each] * shards
    now = total(errors, torch.arange(shards).repeat_interleave(each))
    assert least_total(errors) - 1e-9 <= total(errors, found) <= now + 1e-9
    there = errors[found]  # [N, N]: of each neuron, where another one is
    gained = there.diagonal()[:, None] + there.diagonal() - there - there.T
    assert gained.max() <= 1e-9


@pytest.mark.parametrize(("shards", "rel"), [(2, 1e-12), (3, 0.02), (4, 0.02), (8, 0.02)])
def test_pairs_of_shards_come_as_near_to_the_best_as_makes_no_difference(shards: int, rel: float) -> None:
    """And reach it where there is one pair."""
    errors = random_errors(shards, each=200, seed=0)
    assert total(errors, best_shards(errors)) == pytest.approx(least_total(errors), rel=rel)


def random_errors(shards: int, each: int, seed: int) -> torch.Tensor:  # [r, N]
    return torch.rand(shards, shards * each, generator=torch.Generator().manual_seed(seed)).double()


def total(errors: torch.Tensor, shards: torch.Tensor) -> float:
    return errors.gather(0, shards[None]).sum().item()


def least_total(errors: torch.Tensor) -> float:
    """By scipy's assignment of single neurons to single places."""
    places = errors.T.repeat_interleave(errors.shape[1] // len(errors), dim=1).numpy()
    return float(places[linear_sum_assignment(places)].sum())


def test_shards_that_are_equally_good_keep_their_neurons() -> None:
    assert best_shards(torch.ones(3, 6)).tolist() == [0, 0, 1, 1, 2, 2]


@torch.no_grad()
def test_a_neuron_goes_to_the_shard_that_sees_what_it_reads() -> None:
    """Shard k sees the k-th quarter of the channels, and each neuron reads of one quarter."""
    module = RefitModule.all_of(rewired_model(WIRINGS["desync-2x"]).model.layers[3])[1]
    reads = torch.randperm(48, generator=torch.Generator().manual_seed(0)) % 4
    masks = torch.eye(4).repeat_interleave(8, dim=1)  # [r, H]
    for projection in module.inputs:
        projection.weight.mul_(masks[reads])
    gate, up, down = (p.weight.clone() for p in (*module.inputs, module.output))
    fresh, scale = torch.randn(200, 32), torch.rand(200, 1) + 0.1
    before, after = place_neurons(module, lambda: [(fresh * masks[:, None], fresh, scale)])
    for shard, rows in enumerate(module.inputs[0].weight.chunk(4)):
        assert (rows[:, masks[shard] == 0] == 0).all(), "reads only what its shard sees"
    x = module.normalised(fresh)
    dense = (silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(module.neurons(x / module.norm.weight) @ module.output.weight.T, dense)
    # as many neurons read each quarter: nothing is missing any more
    assert after == pytest.approx(0, abs=1e-12)
    hidden = silu(fresh @ gate.T) * (fresh @ up.T)
    elsewhere = reads != torch.arange(4).repeat_interleave(12)  # these gave zero
    missing = scale * (hidden[:, elsewhere] @ down.T[elsewhere])
    assert before == pytest.approx(missing.square().mean().item(), rel=1e-5)


@torch.no_grad()
def test_neurons_that_mend_each_other_s_errors_stay_together() -> None:
    """Pairs that read the same and add the opposite: by itself, each would be better on any shard that errs less."""
    module = RefitModule.all_of(rewired_model(WIRINGS["desync-2x"]).model.layers[3])[1]
    for projection in module.inputs:
        projection.weight[1::2] = projection.weight[::2] + 0.005 * torch.randn(24, 32)
    module.output.weight[:, 1::2] = -module.output.weight[:, ::2] + 0.002 * torch.randn(32, 24)
    fresh, weights = torch.randn(400, 32), [p.weight.clone() for p in (*module.inputs, module.output)]
    views = fresh + 0.7 * torch.randn(400, 32) + 0.2 * torch.randn(4, 400, 32)
    before, after = place_neurons(module, lambda: [(views, fresh, torch.ones(400, 1))])
    assert before == after > 0
    assert all(map(torch.equal, [p.weight for p in (*module.inputs, module.output)], weights))


@torch.no_grad()
def test_biases_go_with_their_neurons() -> None:
    module = RefitModule.all_of(rewired_model(WIRINGS["desync-2x"], mlp_bias=True).model.layers[3])[1]
    for projection in module.inputs:
        projection.bias.uniform_(-1, 1)
    x = torch.randn(5, 32)
    before = module.neurons(x) @ module.output.weight.T
    module.reorder_neurons(torch.randperm(48, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(module.neurons(x) @ module.output.weight.T, before)
