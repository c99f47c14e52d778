"""The sweep over a model's layers, against the naive one of `reference.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._pytree import tree_leaves

from rewired.checkpoint.shape import Shape
from rewired.model.family import LLAMA
from rewired.model.modeling_rewired_llama import RewiredLlamaForCausalLM
from rewired.model.wiring_text import parse_wiring
from rewired.refit import fitting
from rewired.refit.calibration import Calibration
from rewired.refit.cost import Cost
from rewired.refit.sweep import Sweep
from rewired.refit.weights import Finished, Weights
from tests.refit.reference import reference_refit
from tests.rewired.tiny import WIRINGS, rewired_config, rewired_model

NAMES = (
    "ladder",
    "ladder-peek",
    "desync-2x",
    "desync-4x-mean",
    "partial",
    "partial-mean-overlap",
    "parallel",
    "parallel-overlap-peek",
    "late-mixed",
    "mixed",
)
CASES = {name: WIRINGS[name] for name in NAMES} | {
    # the MLPs between them are standard, and read a stream from which something is missing
    "desync of attentions": [{"layers": "0-4:attn", "preset": "desync", "every": 2}]
}
WINDOWS = torch.randint(2, 61, (12, 24), generator=torch.Generator().manual_seed(6))
CALIBRATION = Calibration(WINDOWS, tuple(number >= 9 for number in range(12)), "random tokens")


def weights_of(model: RewiredLlamaForCausalLM, folder: Path) -> Weights:
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if "_gain" not in name}
    save_file(tensors, folder / "model.safetensors")
    return Weights(dict.fromkeys(tensors, folder / "model.safetensors"), torch.device("cpu"), LLAMA)


def swept(
    wiring: Sequence[dict[str, Any]], folder: Path, gains: bool = False
) -> tuple[RewiredLlamaForCausalLM, dict[str, torch.Tensor]]:
    """The model before a sweep, and the tensors that the sweep changed."""
    before = rewired_model(list(wiring), random_gains=False)
    weights = weights_of(before, folder)
    sweep = Sweep(
        rewired_config(list(wiring)),
        weights,
        CALIBRATION,
        "float32",
        gains=gains,
        matrices=True,
    )
    finished = Finished(folder / "finished", {}, LLAMA)
    sweep.run(finished, lambda *_: None)
    found = Weights(finished.files(), torch.device("cpu"), LLAMA)
    return before, {name: found.tensor(name) for name in found.files}


@pytest.mark.parametrize(
    ("name", "gains"),
    [*((name, False) for name in CASES), ("ladder-peek", True), ("desync-2x", True), ("partial", True)],
)
def test_weights_are_those_of_the_naive_refit(name: str, gains: bool, tmp_path: Path) -> None:
    before, changed = swept(CASES[name], tmp_path, gains)
    alone = WINDOWS[:9].flatten()[::8].tolist()  # one token in eight, as a text of its own
    unseen = [token for token in WINDOWS[9:].flatten().tolist() if token not in alone]
    assert 9 < len(unseen) < 72
    expected = reference_refit(
        {key: tensor for key, tensor in before.state_dict().items() if "_gain" not in key},
        before.config,
        CASES[name],
        4,
        [WINDOWS[:9], torch.tensor(alone)[:, None]],
        [WINDOWS[9:], torch.tensor(unseen[:: len(unseen) // 9])[:, None]],
        fitting.INPUT_RIDGES,
        fitting.OUTPUT_RIDGES,
        fitting.TEACHER_SHARE,
        gains,
    )
    assert len(changed) > 4
    assert gains == any("_gain" in key for key, tensor in changed.items() if not (tensor == 1).all())
    found = before.state_dict() | changed
    for key, tensor in expected.items():
        torch.testing.assert_close(
            found[key].double(), tensor, rtol=1e-3, atol=1e-3, msg=lambda text, k=key: f"{k}: {text}"
        )


@pytest.mark.parametrize(
    "text", ["ladder", "ladder+peek", "standard+int4", "desync-2x+int4", "ladder+peek+int4", "ladder+delay-2+peek+int4"]
)
def test_streams_take_no_more_memory_than_it_says(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What shards hold of their own counts, as do updates in flight."""
    wiring, sizes = parse_wiring(text), {"hidden_size": 128, "num_hidden_layers": 4, "head_dim": 16}
    config = rewired_config(wiring, **sizes)
    sweep = Sweep(config, weights_of(rewired_model(wiring, **sizes), tmp_path), CALIBRATION, "float32", False, True)
    batches, held = sweep.start(), [0]
    step = Sweep._step_refitted

    def measured(*args: Any, **options: Any) -> Any:
        done = step(*args, **options)
        streams = tree_leaves([(batch.refitted, batch.original) for batch in batches])
        held.append(sum(part.nbytes for part in streams if isinstance(part, torch.Tensor)))
        return done

    monkeypatch.setattr(Sweep, "_step_refitted", measured)
    for index in range(4):
        sweep.fit_layer(index, batches)
    shape = Shape.from_config(config.to_dict())
    assert max(held) < Cost.of(shape, config.resolved_wiring, 4, CALIBRATION.tokens).activations
