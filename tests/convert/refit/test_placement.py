"""Neurons on the shards that compute them best: as many on each, never worse, and the dense model stays what it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch.nn.functional import silu

from rewired.convert.refit.half import Half
from rewired.convert.refit.placement import best_shards, place_neurons
from tests.rewired.tiny import WIRINGS, rewired_model


@given(st.integers(2, 5), st.integers(1, 12), st.integers(0, 2**31))
def test_neurons_are_shared_out_evenly_and_as_well_as_can_be(shards: int, each: int, seed: int) -> None:
    """Against scipy's assignment of single neurons to single places. Pairs of shards reach the best where there is one
    pair, and come close to it where there are more."""
    errors = torch.rand(shards, shards * each, generator=torch.Generator().manual_seed(seed)).double()
    found = best_shards(errors)
    assert found.bincount(minlength=shards).tolist() == [each] * shards
    places = errors.T.repeat_interleave(each, dim=1).numpy()
    best = places[linear_sum_assignment(places)].sum()
    total = errors.gather(0, found[None]).sum().item()
    in_blocks = torch.arange(shards).repeat_interleave(each)
    now = errors.gather(0, in_blocks[None]).sum().item()
    assert best - 1e-9 <= total <= now + 1e-9
    assert total == pytest.approx(best, rel=1e-3 if shards == 2 else 0.25)


def test_shards_that_are_equally_good_keep_their_neurons() -> None:
    assert best_shards(torch.ones(3, 6)).tolist() == [0, 0, 1, 1, 2, 2]


@torch.no_grad()
def test_a_neuron_goes_to_the_shard_that_sees_what_it_reads() -> None:
    """Shard k sees the k-th quarter of the channels, and each neuron reads of one quarter."""
    half = Half(rewired_model(WIRINGS["desync-2x"]).model.layers[3], is_mlp=True)
    reads = torch.randperm(48, generator=torch.Generator().manual_seed(0)) % 4
    masks = torch.eye(4).repeat_interleave(8, dim=1)  # [r, H]
    for projection in half.inputs:
        projection.weight.mul_(masks[reads])
    gate, up, down = (p.weight.clone() for p in (*half.inputs, half.output))
    fresh, scale = torch.randn(200, 32), torch.rand(200, 1) + 0.1
    before, after = place_neurons(half, lambda: [(fresh * masks[:, None], fresh, scale)])
    for shard, rows in enumerate(half.inputs[0].weight.chunk(4)):
        assert (rows[:, masks[shard] == 0] == 0).all(), "reads only what its shard sees"
    x = half.normalised(fresh)
    dense = (silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(half.neurons(x / half.norm.weight) @ half.output.weight.T, dense)
    # as many neurons read each quarter: nothing is missing any more
    assert after == pytest.approx(0, abs=1e-12)
    hidden = silu(fresh @ gate.T) * (fresh @ up.T)
    elsewhere = reads != torch.arange(4).repeat_interleave(12)  # these gave zero
    missing = scale * (hidden[:, elsewhere] @ down.T[elsewhere])
    assert before == pytest.approx(missing.square().mean().item(), rel=1e-5)


@torch.no_grad()
def test_neurons_that_mend_each_other_s_errors_stay_together() -> None:
    """Pairs that read the same and add the opposite: by itself, each would be better on any shard that errs less."""
    half = Half(rewired_model(WIRINGS["desync-2x"]).model.layers[3], is_mlp=True)
    for projection in half.inputs:
        projection.weight[1::2] = projection.weight[::2] + 0.005 * torch.randn(24, 32)
    half.output.weight[:, 1::2] = -half.output.weight[:, ::2] + 0.002 * torch.randn(32, 24)
    fresh, weights = torch.randn(400, 32), [p.weight.clone() for p in (*half.inputs, half.output)]
    views = fresh + 0.7 * torch.randn(400, 32) + 0.2 * torch.randn(4, 400, 32)
    before, after = place_neurons(half, lambda: [(views, fresh, torch.ones(400, 1))])
    assert before == after > 0
    assert all(map(torch.equal, [p.weight for p in (*half.inputs, half.output)], weights))


@torch.no_grad()
def test_biases_go_with_their_neurons() -> None:
    half = Half(rewired_model(WIRINGS["desync-2x"], mlp_bias=True).model.layers[3], is_mlp=True)
    for projection in half.inputs:
        projection.bias.uniform_(-1, 1)
    x = torch.randn(5, 32)
    before = half.neurons(x) @ half.output.weight.T
    half.reorder_neurons(torch.randperm(48, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(half.neurons(x) @ half.output.weight.T, before)
