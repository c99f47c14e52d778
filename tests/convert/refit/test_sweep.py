"""The sweep over a model's layers, against the naive one of `reference.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rewired.convert.refit import fitting
from rewired.convert.refit.shelf import Shelf
from rewired.convert.refit.sweep import Sweep
from rewired.convert.refit.text import Calibration
from rewired.convert.refit.weights import Finished, Weights
from rewired.modeling_rewired_llama import RewiredLlamaForCausalLM
from tests.convert.refit.reference import reference_refit
from tests.rewired.tiny import WIRINGS, rewired_config, rewired_model

NAMES = ["ladder", "ladder-peek", "desync-2x", "partial", "parallel", "parallel-overlap-peek", "mixed"]
WINDOWS = torch.randint(2, 61, (12, 24), generator=torch.Generator().manual_seed(3))
CALIBRATION = Calibration(WINDOWS, tuple(number >= 9 for number in range(12)), "random tokens")


def weights_of(model: RewiredLlamaForCausalLM, folder: Path) -> Weights:
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if "_gain" not in name}
    save_file(tensors, folder / "model.safetensors")
    return Weights(dict.fromkeys(tensors, folder / "model.safetensors"), torch.device("cpu"))


def swept(
    wiring: Sequence[dict[str, Any]],
    folder: Path,
    gains: bool = False,
    matrices: bool = True,
    spill: Path | None = None,
) -> tuple[RewiredLlamaForCausalLM, RewiredLlamaForCausalLM, Any]:
    """The model before and after a sweep, and the divergences that it tells."""
    before = rewired_model(list(wiring), random_gains=False)
    weights = weights_of(before, folder)
    sweep = Sweep(
        rewired_config(list(wiring)), weights, CALIBRATION, "float32", Shelf(spill), gains=gains, matrices=matrices
    )
    finished = Finished(folder / "finished", {})
    told = sweep.run(finished, lambda *_: None)
    after = rewired_model(list(wiring), random_gains=False)
    after.load_state_dict(before.state_dict())
    found = Weights(finished.files(), torch.device("cpu"))
    after.load_state_dict({name: found.tensor(name) for name in found.files}, strict=False)
    return before, after, told


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_naive_refit(name: str, tmp_path: Path) -> None:
    before, after, _ = swept(WIRINGS[name], tmp_path)
    expected = reference_refit(
        {key: tensor for key, tensor in before.state_dict().items() if "_gain" not in key},
        before.config,
        WIRINGS[name],
        4,
        WINDOWS[:9],
        WINDOWS[9:],
        fitting.INPUT_RIDGES,
        fitting.OUTPUT_RIDGES,
    )
    changed = 0
    for key, tensor in after.state_dict().items():
        if "_gain" not in key:
            torch.testing.assert_close(
                tensor.double(), expected[key], rtol=1e-3, atol=1e-3, msg=lambda text, k=key: k + text
            )
            changed += not torch.equal(tensor, before.state_dict()[key])
    assert changed > 4
