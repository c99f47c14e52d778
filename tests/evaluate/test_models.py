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


def test_a_pickled_adapter_is_refused(tmp_path: Path) -> None:
    """Unpickling runs what the file says, and PEFT would."""
    dense = make_dense(tmp_path / "dense")
    adapter = make_adapter(dense, tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ValueError, match=f"{adapter} holds no adapter_model.safetensors: save the adapter as"):
        open_model(f"{dense}+{adapter}", "one")


@pytest.mark.parametrize("file", ["vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "tokenizer.json"])
def test_another_tokenizer_is_another_model(file: str, tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "dense")
    before = open_model(str(dense), "dense")
    (dense / file).write_text("something else")
    after = open_model(str(dense), "dense")
    assert before.sha256 != after.sha256 and before.tokenizer_sha256 != after.tokenizer_sha256


def make_adapter(base: Path, folder: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(folder)
    return folder
