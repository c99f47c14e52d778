"""What `rewired generate` refuses before torch is loaded, which takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapt.world import make_chat, make_rewired

WITHOUT_TORCH = 'import sys; sys.modules["torch"] = None; from rewired.cli import main; main()'


@pytest.mark.parametrize(
    ("preset", "sentence"),
    [
        ("desync", "--tp 3 does not divide tp_shards 4: what this model computes depends on its logical shards"),
        ("ladder", "--tp 3 does not divide num_attention_heads 4"),
    ],
)
def test_ranks_that_cannot_share_the_model_are_refused_at_once(preset: str, sentence: str, tmp_path: Path) -> None:
    folder = make_rewired(make_chat(tmp_path / "dense"), tmp_path / "model", [{"layers": "1-4", "preset": preset}])
    command = [sys.executable, "-c", WITHOUT_TORCH, "generate", str(folder), "--prompt", "x", "--tp", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"rewired generate: {sentence}"), done.stderr
    assert done.stderr.count("\n") == 1
