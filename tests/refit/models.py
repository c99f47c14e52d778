"""Models and requests of the refit's tests, and logits to compare."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rewired  # noqa: F401 - registers the classes
from rewired.divergence import divergence
from rewired.refit.calibration import load

LADDER = [{"layers": "1-4", "preset": "ladder"}]
PEEK = [{"layers": "1-4", "preset": "ladder", "peek": True}]
TOKENS = torch.arange(3, 67).reshape(2, 32)
INDEX = "model.safetensors.index.json"


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits


def kl(original: Path, other: Path, text: Path) -> float:
    """Of the loaded checkpoints, on the windows that were held out of 6,144 tokens."""
    calibration = load(str(text), AutoTokenizer.from_pretrained(original), 6144)
    windows = calibration.windows[torch.tensor(calibration.held_out)]
    return divergence(lambda ids: logits(original, ids), lambda ids: logits(other, ids), windows).kl
