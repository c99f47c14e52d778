"""`adapt --dry-run` tells what would be trained, of a model from wherever one may come, and fetches no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rewired.convert import Request, convert
from rewired.sources import find_source
from tests.convert.checkpoints import run
from tests.convert.hub_server import HubServer

from .world import LADDER, command, write_recipe

PER_LAYER = 4 * 24 * 24 + 3 * 24 * 48 + 2 * 24


def test_it_tells_and_writes_nothing(
    keys: dict[str, Any],
    dense: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", **keys)
    monkeypatch.chdir(tmp_path)
    convert(dense, request=Request(LADDER))  # under the name that this conversion has by default
    assert command(monkeypatch, recipe, "--dry-run", "--max_steps", "5") == 0
    told = capsys.readouterr().out
    trained = f"rewired of layers 2-4, {2 * PER_LAYER:,} of"
    for part in ("max_steps: 5", "40 rows", "5 steps", trained, "teacher 0.00 GB"):
        assert part in told, part
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wiring", "targets", "told"),
    [
        (LADDER, ["q_proj", "down_proj"], f"LoRA on layers 2-4, {2 * 2 * (24 + 24 + 24 + 48)} of"),
        ([{"layers": "0-", "preset": "standard"}], ["q_proj"], f"LoRA on layers 0-4, {4 * 2 * (24 + 24)} of"),
    ],
)
def test_it_counts_what_lora_trains(
    wiring: list[dict[str, Any]],
    targets: list[str],
    told: str,
    keys: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a dense control, too, all of whose layers learn."""
    keys |= {"train": "lora", "lora_r": 2, "lora_target_modules": targets, "wiring": wiring}
    assert command(monkeypatch, write_recipe(tmp_path / "r.yaml", **keys), "--dry-run") == 0
    assert told in capsys.readouterr().out


def test_it_takes_the_recipes_chat_template(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which has to mark what the assistant says: the model's own would do."""
    (tmp_path / "plain.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    recipe = write_recipe(tmp_path / "r.yaml", **keys)
    assert command(monkeypatch, recipe, "--dry-run") == 0
    assert command(monkeypatch, recipe, "--dry-run", "--chat_template_path", tmp_path / "plain.jinja") == 2
    assert "chat_template_path" in capsys.readouterr().err


def test_of_a_model_on_the_hub_it_fetches_no_weights(keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", **keys | {"model": "org/chat"})
    with HubServer({"org/chat": dense}) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        done = run("adapt", recipe, "--dry-run", cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert "40 rows" in done.stdout
    asked = {path.rsplit("/", 1)[-1] for _, path, _, _ in hub.requests}
    assert "tokenizer.json" in asked
    assert not {name for name in asked if name.endswith(".safetensors")}


def test_the_tokenizer_of_a_gguf_file_comes_without_its_weights(smollm2_gguf: Path, tmp_path: Path) -> None:
    folder = find_source(str(smollm2_gguf)).tokenizer(tmp_path)
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text()
    assert (folder / "tokenizer.json").is_file()
    assert not list(folder.glob("*.safetensors"))
