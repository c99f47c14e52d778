"""The cost of a selection, known before it begins: operations as the refit counts them, at this machine's speed."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from rewired.checkpoint.shape import Shape
from rewired.model.wiring_text import parse_wiring
from rewired.quantities import count, duration, operations, size
from rewired.ranks import choose_device
from rewired.refit.cost import Cost

from .choice import entries, last
from .request import SelectRequest

_PROBE_TOKENS = 4096
_PROBE_SECONDS = 0.2
_SHARE = 1 / 3  # of the probe's speed: what SmolLM2-135M reaches on a CPU
_DOUBLE = 2  # how much longer an operation in float64 takes, in which least squares are solved


def note(shape: Shape, tp_shards: int, request: SelectRequest, missing: Mapping[str, Collection[int]]) -> str:
    """The sentence on scoring the layers that are `missing` for each wiring, and on measuring."""
    layers = [(name, layer) for name, unknown in missing.items() for layer in unknown]
    costs = [_of_pair(shape, tp_shards, request.tokens, name, layer) for name, layer in layers]
    costs += 2 * [_of_choice(shape, tp_shards, request)] if request.measure else []
    if not costs:
        return "All scores are known from earlier runs, and nothing is to be measured."
    refits = " and up to 2 refits of a whole choice" if request.measure else ""
    seconds = sum(cost.operations + _DOUBLE * cost.solves for cost in costs) / (_SHARE * _speed(shape))
    return (
        f"{count(len(layers), 'score')} of a layer to measure{refits}: "
        f"{operations(sum(cost.operations + cost.solves for cost in costs))}, about {duration(seconds)} at a third of "
        "the speed of this machine's matrix products, which were timed just now, and about "
        f"{size(max(cost.activations for cost in costs))} of host memory for activations and "
        f"{size(max(cost.matrices for cost in costs))} for matrices."
    )


def _of_pair(shape: Shape, tp_shards: int, tokens: int, name: str, layer: int) -> Cost:
    """Of scoring `layer` alone and with the next one: a refit of the model from the layer before them on."""
    rest = replace(shape, num_hidden_layers=shape.num_hidden_layers - layer + 1)
    wiring = rest.wiring(parse_wiring(f"{name}@1-{min(3, rest.num_hidden_layers)}"))
    return Cost.of(rest, wiring, tp_shards, tokens)


def _of_choice(shape: Shape, tp_shards: int, request: SelectRequest) -> Cost:
    """Of the papers' choice, as an example of one within the budget."""
    choice = last(shape.num_hidden_layers, request.names[0], *request.limit(shape))
    return Cost.of(shape, shape.wiring(entries(choice)), tp_shards, request.tokens)


def _speed(shape: Shape) -> float:
    """Operations a second in a product of the MLP's size, in float32."""
    device = torch.device(choose_device("auto", 1))
    states = torch.ones(_PROBE_TOKENS, shape.hidden_size, device=device)
    weight = torch.ones(shape.hidden_size, shape.intermediate_size, device=device)
    (states @ weight).sum().item()  # libraries are loaded the first time
    runs, started = 0, time.perf_counter()
    while time.perf_counter() - started < _PROBE_SECONDS:
        (states @ weight)[0, 0].item()  # waits for a GPU
        runs += 1
    return 2 * runs * _PROBE_TOKENS * weight.numel() / (time.perf_counter() - started)
