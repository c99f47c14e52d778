"""Tiny dense Llamas, and a text that they can be fitted on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.evaluate.world import make_dense

from .checkpoints import make_llama


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dense(tmp_path_factory.mktemp("models") / "dense", initializer_range=0.3)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_llama(tmp_path / "tiny-llama")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a small vocabulary, so that there is something to learn."""
    generator = torch.Generator().manual_seed(0)
    words = ["river", "stone", "bread", "cloud", "under", "over", "runs", "the"]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(words[number] for number in torch.randint(8, (3000,), generator=generator).tolist()))
    return path
