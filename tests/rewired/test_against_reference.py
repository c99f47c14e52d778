"""Every wiring equals the naive loop over ranks in reference.py: logits and all gradients."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from .reference import reference_logits
from .tiny import WIRINGS, rewired_model, tokens


@pytest.mark.parametrize("wiring", WIRINGS.values(), ids=WIRINGS)
def test_every_kind_of_wiring(wiring: list[dict[str, Any]]) -> None:
    assert_like_reference(rewired_model(wiring), wiring, 4)


@st.composite
def regions(draw: st.DrawFn, num_layers: int) -> list[dict[str, Any]]:
    """Disjoint regions of random kinds, some of one module only; gaps stay dense."""
    cuts = sorted(draw(st.sets(st.integers(0, num_layers), min_size=2, max_size=4)))
    merge = draw(st.sampled_from(["sum", "mean"]))  # local parts of different merges may not mix
    wiring = []
    for start, stop in pairwise(cuts):
        for module in draw(st.sampled_from([("",), (":attn",), (":mlp",), (":attn", ":mlp"), ()])):
            wiring.append(draw(region(f"{start}-{stop}{module}", merge, whole_layers=not module)))
    return wiring


@st.composite
def region(draw: st.DrawFn, layers: str, merge: str, whole_layers: bool) -> dict[str, Any]:
    presets = ["standard", "ladder", "desync", "partial"] + ["parallel"] * whole_layers
    entry: dict[str, Any] = {"layers": layers, "preset": draw(st.sampled_from(presets))}
    if entry["preset"] == "desync":
        entry |= {"every": draw(st.integers(2, 7)), "merge": merge}
    if entry["preset"] == "partial":
        entry |= {"shared_fraction": draw(st.sampled_from([0, 0.1, 0.37, 0.5, 0.9, 1])), "merge": merge}
    if entry["preset"] == "parallel" and merge == "mean":
        entry["preset"] = "ladder"
    for modifier in ("peek", "overlap"):
        if draw(st.booleans()):
            entry[modifier] = draw(st.booleans())
    if entry.get("overlap", True) and draw(st.booleans()):
        entry["delay"] = draw(st.sampled_from([1, 2]))
    return entry


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[dict[str, Any]], int, dict[str, Any]]:
    tp_shards = draw(st.sampled_from([1, 2, 3, 4]))
    kv_heads = tp_shards * draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 2))
    num_layers = draw(st.integers(1, 5))
    sizes = {
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * draw(st.integers(1, 4)) * 4,
        "head_dim": 2 * draw(st.integers(2, 4)),
        "intermediate_size": tp_shards * draw(st.integers(4, 12)),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
    }
    return draw(regions(num_layers)), tp_shards, sizes


@settings(max_examples=120)
@given(cases())
def test_any_wiring_of_any_shape(case: tuple[list[dict[str, Any]], int, dict[str, Any]]) -> None:
    wiring, tp_shards, sizes = case
    torch.manual_seed(0)
    model = rewired_model(wiring, tp_shards, **sizes)
    with torch.no_grad():  # biases start at zero, where nothing could be seen of them
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_()
    assert_like_reference(model, wiring, tp_shards)


def assert_like_reference(model: torch.nn.Module, wiring: list[dict[str, Any]], tp_shards: int) -> None:
    """Logits, and gradients of all parameters for a random direction, to 1e-5 of their size in float32."""
    input_ids = tokens()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    gains = {
        (int(name.split(".")[2]), "attn" if "input_gain" in name else "mlp"): weight
        for name, weight in weights.items()
        if name.endswith("_gain.weight")
    }
    expected = reference_logits(weights, model.config, wiring, tp_shards, input_ids, gains)
    logits = model(input_ids).logits
    assert_close(logits, expected, "logits")

    direction = torch.randn_like(expected)
    (expected * direction).sum().backward()
    (logits * direction).sum().backward()
    # a gradient that cancels to almost nothing (a key's bias) is compared on the scale of all gradients
    scale = torch.cat([weight.grad.flatten() for weight in weights.values() if weight.grad is not None]).norm()
    for name, parameter in model.named_parameters():
        expected_gradient = weights[name].grad
        assert (parameter.grad is None) == (expected_gradient is None), name
        if parameter.grad is not None:
            assert_close(parameter.grad, expected_gradient, name, floor=0.1 * scale)


def assert_close(actual: Tensor, expected: Tensor | None, name: str, floor: Tensor | float = 0.0) -> None:
    assert expected is not None
    error = (actual - expected).norm() / max(expected.norm(), floor)
    assert error < 1e-5, f"{name}: relative error {error:.2e}"
