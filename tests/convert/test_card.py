"""The card of a conversion: whoever pastes its blocks makes the model, loads it, and sees its layers."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from gguf import GGUFReader, GGUFWriter

from rewired.convert import Request
from rewired.convert.card import model_card
from rewired.convert.traffic import LayerTable
from rewired.model.wiring import Wiring
from rewired.sources import gguf
from tests.commands import run
from tests.evaluate.world import make_dense

from .checkpoints import snapshot


def blocks(card: str) -> list[str]:
    """The indented ones, one string each."""
    return [textwrap.dedent(block) for block in re.findall(r"\n\n((?:    .*\n|\n(?=    ))+)", card)]


@pytest.mark.parametrize("out", ["out/ladder", "with spaces/a ladder"])
def test_its_blocks_can_be_pasted(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dense(tmp_path / "tiny")
    assert run("convert", "tiny", out, "--ladder-layers", "2-4", cwd=tmp_path).returncode == 0
    made, python, info = blocks((tmp_path / out / "README.md").read_text())
    names: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    exec(python, names)
    assert type(names["model"]).__name__ == "RewiredLlamaForCausalLM"
    assert "ladder" in run(*shlex.split(info), cwd=tmp_path).stdout
    (tmp_path / "anew").mkdir()
    (tmp_path / "anew" / "tiny").symlink_to(tmp_path / "tiny")
    assert run(*shlex.split(made), cwd=tmp_path / "anew").returncode == 0
    assert snapshot(tmp_path / "anew" / out) == snapshot(tmp_path / out)


@pytest.mark.parametrize(
    ("base", "called"),
    [("org/model", "[`org/model`](https://huggingface.co/org/model), rewired"), ("model", "\n`model`, rewired")],
)
def test_an_original_on_the_hub_is_linked(base: str, called: str, tmp_path: Path) -> None:
    table = LayerTable.of(Wiring.from_json([{"layers": "0-2", "preset": "ladder"}], 2, 8), 1, "bfloat16")
    source, checkpoint, plan = (
        SimpleNamespace(base_model=base),
        SimpleNamespace(folder=tmp_path),
        SimpleNamespace(table=table),
    )
    job: Any = SimpleNamespace(out=Path("out"), source=source, checkpoint=checkpoint, plan=plan, request=Request())
    card = model_card(job, {"num_hidden_layers": 2}, [])
    assert called in card and "It stays under the original's licence." in card


def test_a_gguf_files_licence_goes_along(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_license("apache-2.0")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    gguf._write_licence(GGUFReader(path), tmp_path)
    assert yaml.safe_load((tmp_path / "README.md").read_text().split("---")[1]) == {"license": "apache-2.0"}
