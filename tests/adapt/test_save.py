"""The folder that a training makes: what goes along with the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from .world import CHATML, LADDER, make_rewired, train


def test_the_chat_template_that_was_trained_on_goes_along(keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    template = CHATML.replace("im_start", "begin")
    (tmp_path / "t.jinja").write_text(template)
    keys |= {"chat_template_path": str(tmp_path / "t.jinja"), "assistant_only_loss": False, "max_steps": 1}
    made = train(tmp_path / "r.yaml", **keys)
    assert AutoTokenizer.from_pretrained(made).chat_template == template
    assert AutoTokenizer.from_pretrained(dense).chat_template == CHATML


def test_a_folder_in_the_models_own_is_not_copied(keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    model = make_rewired(dense, tmp_path / "model", LADDER)
    (model / "notes.bin").write_bytes(b"0")
    keys |= {"model": str(model), "wiring": None, "output_dir": str(model / "adapted"), "max_steps": 2}
    made = train(tmp_path / "r.yaml", **keys)
    assert not [path for path in made.iterdir() if path.is_dir() or path.name == "notes.bin"]
    AutoModelForCausalLM.from_pretrained(made)
