"""Models as they are given: what is refused before anything is compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rewired.convert.convert import Request, convert
from rewired.evaluate.models import open_model

from .world import DENSE, make_dense


def test_an_adapter_of_the_original_does_not_fit_a_rotated_model(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "dense")
    rotated = convert(str(dense), tmp_path / "rotated", Request(DENSE, rotate="hadamard")).out
    before, after = make_adapter(dense, tmp_path / "before"), make_adapter(rotated, tmp_path / "after")
    assert open_model(f"{dense}+{before}", "one").adapter == before
    assert open_model(f"{rotated}+{after}", "two").adapter == after
    with pytest.raises(ValueError, match=f"{before} was trained on {dense}, and {rotated} is that in another basis"):
        open_model(f"{rotated}+{before}", "three")


def make_adapter(base: Path, folder: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(folder)
    return folder
