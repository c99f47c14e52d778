"""What shards miss, against a loop over ranks, and the basis that follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding
from transformers import LlamaConfig

from rewired.refit.calibration import Calibration
from rewired.refit.sweep import BrokenWeightsError, Sweep
from rewired.rotate.missing import Missing, measure
from tests.refit.test_sweep import weights_of
from tests.rewired.reference import (
    answers_by_module,
    attention,
    layer_weights,
    mlp,
    rms_norm,
    rotary_table,
)
from tests.rewired.tiny import WIRINGS, rewired_config, rewired_model

WINDOWS = torch.randint(2, 61, (6, 24), generator=torch.Generator().manual_seed(6))
CALIBRATION = Calibration(WINDOWS, tuple(number >= 5 for number in range(6)), "random tokens")
CASES: dict[str, list[dict[str, Any]]] = {
    "partial": WIRINGS["partial"],
    "a payload of 0 bits, without a peek": [
        {"layers": "1-3", "preset": "standard", "payload": {8: 0.5, 0: 0.5}},
        {"layers": "4-6", "preset": "ladder", "payload": {8: 0.25, 0: 0.75}, "peek": True},
    ],
    "two regions, one within the other": WIRINGS["mixed"],
}


def reference_covariance(
    weights: dict[str, Tensor], config: LlamaConfig, wiring: list[dict[str, Any]], r: int, texts: list[Tensor]
) -> Tensor:
    """A sum over tokens, ranks and modules of what a rank misses, over the RMS of the original's stream."""
    wired, covariance = answers_by_module(wiring, config), torch.zeros(config.hidden_size, config.hidden_size).double()
    for ids in texts:
        x = embedding(ids, weights["model.embed_tokens.weight"])
        rotary = tuple(table.double() for table in rotary_table(config, x, ids.shape[1]))
        kept: list[Tensor | float] = [0.0] * r
        for layer in range(config.num_hidden_layers):
            own = layer_weights(weights, layer)
            for kind, norm in (("attn", "input_layernorm"), ("mlp", "post_attention_layernorm")):
                answers = wired.get((layer, kind))
                sees = 1.0 if answers is not None and answers.peek else 0.0  # of its own
                for k in range(r) if isinstance(kept[0], Tensor) else ():
                    missing = (sum(kept) - sees * kept[k]) / x.square().mean(-1, keepdim=True).sqrt()
                    covariance += torch.einsum("bti,btj->ij", missing, missing)
                normed = rms_norm(x, own[f"{norm}.weight"], config)
                z = [
                    attention(normed, own, config, rotary, k, r) if kind == "attn" else mlp(normed, own, k, r)
                    for k in range(r)
                ]
                x = x + sum(z)
                if answers is not None and answers.reduce == "shared":
                    kept = [before + part for before, part in zip(kept, z, strict=True)]
                elif answers is None or answers.reduce == "all":
                    kept = [0.0] * r
    return covariance


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_ranks_miss(name: str, tmp_path: Path) -> None:
    wiring = CASES[name]
    model = rewired_model(wiring, random_gains=False)
    sweep = _sweep(wiring, weights_of(model, tmp_path))
    found = measure(sweep)
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    expected = reference_covariance(weights, sweep.config, wiring, 4, CALIBRATION.texts(held_out=False))
    turned = found.basis.T @ expected @ found.basis
    scale = float(expected.diagonal().max())
    torch.testing.assert_close(turned, turned.diagonal().diag(), rtol=0, atol=1e-4 * scale)
    torch.testing.assert_close(turned.diagonal(), found.components, rtol=0, atol=1e-4 * scale)
    torch.testing.assert_close(found.basis @ found.basis.T, torch.eye(32, dtype=torch.float64))
    assert bool((found.components.diff() <= 0).all())
    before, after = found.shares(12)
    assert before == pytest.approx(float(expected.diagonal()[:12].sum() / expected.trace()), abs=1e-4)
    assert after > before


def test_what_never_is_missing_leaves_no_share() -> None:
    assert Missing.of(torch.zeros(4, 4, dtype=torch.float64)).shares(2) == (0.0, 0.0)


def test_broken_weights_are_named(tmp_path: Path) -> None:
    model = rewired_model(CASES["partial"], random_gains=False)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(BrokenWeightsError, match="are the checkpoint's weights whole"):
        measure(_sweep(CASES["partial"], weights_of(model, tmp_path)))


def _sweep(wiring: list[dict[str, Any]], weights: Any) -> Sweep:
    config = rewired_config(wiring)
    return Sweep(config, weights, CALIBRATION, None, gains=False, matrices=False)
