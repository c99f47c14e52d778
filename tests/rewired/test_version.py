"""A checkpoint of any version computes the same by its own code and by the package, or is refused in one sentence."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rewired.checkpoint.checkpoint import Checkpoint
from rewired.checkpoint.rewired_config import stock_config
from rewired.convert import Request, convert
from rewired.model.modeling_rewired_llama import RewiredLlamaConfig, RewiredLlamaForCausalLM
from rewired.model.version import VERSION
from tests.commands import run
from tests.convert.checkpoints import edit_json, make_llama

VERSIONS = Path(__file__).parent / "versions"
FOLDERS = [VERSIONS / str(version) for version in range(1, VERSION + 1)]

ALONE = """
import json, sys
sys.modules["rewired"] = None  # as where it is not installed
import torch
from transformers import AutoModelForCausalLM
found = []
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        found.append(model(torch.tensor(json.load(open(f"{folder}/logits.json"))["tokens"])).logits)
torch.save(found, sys.argv[1])
"""


def test_every_version_computes_by_its_own_code_what_it_did(tmp_path: Path) -> None:
    """One interpreter for all, since it imports for seconds."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", ALONE, tmp_path / "logits.pt", *FOLDERS]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)
    for folder, logits in zip(FOLDERS, torch.load(tmp_path / "logits.pt"), strict=True):
        assert_as_written(folder, logits)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_version_computes_by_the_package_what_it_did(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    assert type(model) is RewiredLlamaForCausalLM
    with torch.no_grad():
        assert_as_written(
            folder, model(torch.tensor(json.loads((folder / "logits.json").read_text())["tokens"])).logits
        )


def assert_as_written(folder: Path, logits: torch.Tensor) -> None:
    expected = torch.tensor(json.loads((folder / "logits.json").read_text())["logits"], dtype=torch.float64)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4, msg=folder.name)


def test_the_first_version_becomes_the_current_one_where_it_is_converted_or_saved(tmp_path: Path) -> None:
    first = shutil.copytree(FOLDERS[0], tmp_path / "first")
    done = convert(first, tmp_path / "out", Request([{"layers": "0-1", "preset": "ladder"}]))
    AutoModelForCausalLM.from_pretrained(first).save_pretrained(tmp_path / "saved")
    for folder in (done.out, tmp_path / "saved"):
        config = json.loads((folder / "config.json").read_text())
        assert config["wiring_version"] == VERSION
        assert "wiring_version" not in stock_config(config)


def with_payload(folder: Path, **changes: Any) -> Path:
    """A checkpoint from before payloads had a version."""
    make_llama(folder.with_name("base"), sharded=False)
    convert(folder.with_name("base"), folder, Request([{"layers": "2-6", "preset": "ladder", "payload": "int4"}]))
    edit_json(folder / "config.json", wiring_version=None, **changes)
    return folder


REFUSED = (
    "config.json has a payload and no wiring_version, and what payloads compute has changed since it was written: make "
    "this model anew, with `convert {} --wiring config.json --tp-shards 4{}`, where config.json is this one{}."
)
RECORDS: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "converted": ({}, ("ORIGINAL", "", "")),
    "refitted": ({"refit": {"base": {"name": "my llama"}}}, ("'my llama'", " --refit", "")),
    "rotated": ({"rotation": {"base": "a/b", "kind": "hadamard"}}, ("a/b", " --rotate hadamard", "")),
    "trained": ({"adapted": {"base": {"name": "a/b"}}}, ("a/b", "", ", and train that")),
    "malformed": ({"refit": 3, "adapted": {"base": [1]}}, ("ORIGINAL", "", ", and train that")),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_payload_without_a_version_is_refused_with_the_command_that_makes_it_anew(name: str, tmp_path: Path) -> None:
    records, told = RECORDS[name]
    folder = with_payload(tmp_path / "model", **records)
    for load in (Checkpoint.open, AutoConfig.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError) as error:
            load(folder)
        assert str(error.value) == REFUSED.format(*told)


def test_that_command_makes_it(tmp_path: Path) -> None:
    folder = with_payload(tmp_path / "model")
    command = ["convert", "base", "anew", "--wiring", "model/config.json", "--tp-shards", "4"]
    assert run(*command, cwd=tmp_path).returncode == 0
    anew, old = (json.loads((folder.with_name(name) / "config.json").read_text()) for name in ("anew", "model"))
    assert anew["wiring"] == old["wiring"] and anew["wiring_version"] == VERSION


COMMANDS = {
    "info": ("rewired", "info", "model"),
    "convert": ("convert", "model", "out", "--ladder-layers", "0-2"),
    "adapt": ("adapt", "smollm2-135m-ladder-distill", "--model", "model", "--dry-run"),
    "evaluate": ("evaluate", "model", "--text", "text"),
    "generate": ("rewired", "generate", "model", "--prompt", "a"),
    "bench": ("rewired", "bench", "model", "--out", "out"),
    "select": ("rewired", "select", "model", "--budget", "2"),
    "plan": ("rewired", "plan", "model"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("info", "adapt") else pytest.mark.slow) for name in COMMANDS]
)
def test_every_command_refuses_it(name: str, tmp_path: Path) -> None:
    with_payload(tmp_path / "model")
    (tmp_path / "text").write_text("a text")
    done = run(*COMMANDS[name], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "config.json has a payload and no wiring_version" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("version", [VERSION + 1, 0, -1, "2", 2.0, True, [2]])
def test_a_version_that_is_newer_or_malformed_is_refused(version: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDERS[0], tmp_path / "model")
    edit_json(folder / "config.json", wiring_version=version)
    newer = version == VERSION + 1
    match = "made by a newer rewired.* Upgrade rewired" if newer else "it must be an integer of at least 1"
    for load in (Checkpoint.open, AutoConfig.from_pretrained, lambda _: RewiredLlamaConfig(wiring_version=version)):
        with pytest.raises(ValueError, match=match):
            load(folder)


def test_a_config_made_in_python_is_of_the_current_version(tmp_path: Path) -> None:
    wiring = [{"layers": "0-1", "preset": "ladder", "payload": "int8"}]
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 16}
    config = RewiredLlamaConfig(**sizes, num_hidden_layers=1, wiring=wiring)
    RewiredLlamaForCausalLM(config).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).wiring_version == config.wiring_version == VERSION
