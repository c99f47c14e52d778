"""A checkpoint loads with the package and without it, survives saving, and is never mistaken for a dense one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM

import rewired
from rewired.checkpoint.rewired_config import stock_config, wired_config
from rewired.model.modeling_rewired_llama import RewiredLlamaForCausalLM, RewiredLlamaModel

from .tiny import PAYLOADS, WIRINGS, rewired_model, tokens

CODE = {
    "collectives.py",
    "configuration.py",
    "exchange.py",
    "family.py",
    "kernels.py",
    "modeling_rewired_llama.py",
    "payload.py",
    "presets.py",
    "quantisation.py",
    "quantised_reduction.py",
    "reductions.py",
    "regions.py",
    "residual_stream.py",
    "rewired_layer.py",
    "rewired_model.py",
    "sharding.py",
    "side_stream.py",
    "tensor_parallel.py",
    "version.py",
    "wide_sum.py",
    "wiring.py",
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    rewired_model(WIRINGS["mixed"]).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits


def test_auto_classes_load_it(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert type(model) is RewiredLlamaForCausalLM
    assert torch.equal(logits(model), logits(rewired_like(checkpoint)))
    assert type(AutoModel.from_pretrained(checkpoint)) is RewiredLlamaModel


def rewired_like(checkpoint: Path) -> RewiredLlamaForCausalLM:
    model = rewired_model(WIRINGS["mixed"])
    model.load_state_dict(load_file(checkpoint / "model.safetensors"))
    return model


def test_the_config_is_readable_and_names_our_class(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["architectures"] == ["RewiredLlamaForCausalLM"]
    assert config["model_type"] == "rewired_llama"
    assert (config["wiring_version"], config["tp_shards"]) == (2, 4)
    assert config["wiring"] == [
        {"layers": "0-2:attn", "preset": "ladder", "peek": True},
        {"layers": "0-1:mlp,2-4", "preset": "partial", "shared_fraction": 0.5, "merge": "sum"},
        {"layers": "1-2:mlp", "preset": "standard"},
        {"layers": "4-6", "preset": "parallel", "overlap": True},
    ]
    assert AutoConfig.from_pretrained(checkpoint).wiring == config["wiring"]


@pytest.mark.parametrize("way", ["saved", "trained with PEFT", "converted"])
def test_a_stock_class_refuses_it_and_says_how_to_load_it(way: str, checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    if way == "trained with PEFT":  # it sets pretraining_tp
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), LoraConfig(target_modules=["q_proj"]))
        model.merge_and_unload().save_pretrained(checkpoint)
    elif way == "converted":
        config = wired_config(stock_config(config), config["wiring"], config["tp_shards"])
        (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(StrictDataclassFieldValidationError, match="load it with AutoModelForCausalLM after"):
        LlamaForCausalLM.from_pretrained(checkpoint)
    assert stock_config(config)["pretraining_tp"] == 1


def test_it_carries_its_code(checkpoint: Path) -> None:
    assert {path.name for path in checkpoint.glob("*.py")} == CODE
    for name in CODE:
        assert (checkpoint / name).read_text() == (Path(rewired.__file__).parent / "model" / name).read_text()


ALONE = """
import sys
sys.modules["rewired"] = None  # as where it is not installed
import torch
from transformers import AutoModelForCausalLM
source, copy, tokens, logits = sys.argv[1:]
for path in (source, copy):
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()
    assert type(model).__name__ == "RewiredLlamaForCausalLM", type(model)
    with torch.no_grad():
        actual = model(torch.load(tokens, weights_only=True)).logits
    assert torch.equal(actual, torch.load(logits, weights_only=True))
    model.save_pretrained(copy)
"""


def test_a_fresh_interpreter_without_the_package_loads_saves_and_loads_it(checkpoint: Path, tmp_path: Path) -> None:
    torch.save(tokens(), tmp_path / "tokens.pt")
    torch.save(logits(rewired_like(checkpoint)), tmp_path / "logits.pt")
    arguments = [checkpoint, tmp_path / "copy", tmp_path / "tokens.pt", tmp_path / "logits.pt"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    subprocess.run([sys.executable, "-c", ALONE, *map(str, arguments)], check=True, env=environment, cwd=tmp_path)
    assert {path.name for path in (tmp_path / "copy").glob("*.py")} == CODE
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "copy")) is RewiredLlamaForCausalLM


IMPORTS = {
    "rewired first": "import rewired; from transformers import AutoModelForCausalLM",
    "rewired first, then a look for transformers": "import rewired, importlib.util; "
    "importlib.util.find_spec('transformers'); from transformers import AutoModelForCausalLM",
    "the config class first": "from rewired.model.modeling_rewired_llama import RewiredLlamaConfig; "
    "from transformers import AutoModelForCausalLM",
    "the model class first": "from rewired.model.modeling_rewired_llama import RewiredLlamaForCausalLM; "
    "from transformers import AutoModelForCausalLM",
    "rewired last": "from transformers import AutoModelForCausalLM; import rewired",
    "rewired in the middle": "from transformers import AutoConfig; import rewired; "
    "from transformers import AutoModelForCausalLM",
}


COMMON = ("rewired first", "rewired last")  # each takes an interpreter of its own


@pytest.mark.parametrize(
    "imports",
    [pytest.param(code, id=name, marks=() if name in COMMON else pytest.mark.slow) for name, code in IMPORTS.items()],
)
def test_import_rewired_registers_in_any_order(imports: str, checkpoint: Path) -> None:
    script = f"{imports}; import sys; print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", script, str(checkpoint)], capture_output=True, text=True, check=True, cwd=checkpoint
    )
    assert done.stdout.strip() == "RewiredLlamaForCausalLM"


def test_import_rewired_alone_imports_neither_torch_nor_transformers() -> None:
    script = "import sys, rewired, rewired.convert; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_gains_that_a_checkpoint_does_not_hold_start_at_one_without_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A conversion writes no tensors, so a peeking checkpoint may hold none."""
    model = rewired_model(WIRINGS["ladder-peek"], random_gains=False)
    stock_weights = {name: w for name, w in model.state_dict().items() if not name.endswith("_gain.weight")}
    model.save_pretrained(tmp_path, state_dict=stock_weights)
    capfd.readouterr()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert "gain" not in capfd.readouterr().err


@pytest.mark.parametrize("wiring", [*WIRINGS.values(), PAYLOADS["standard-int8"]], ids=[*WIRINGS, "standard-int8"])
@pytest.mark.parametrize("has_gains", [True, False])
def test_weights_that_wait_on_the_disk_give_the_same_logits(
    wiring: list[dict[str, Any]], has_gains: bool, tmp_path: Path
) -> None:
    rewired_model(wiring, attention_bias=True).save_pretrained(tmp_path / "model")
    if not has_gains:
        file = tmp_path / "model" / "model.safetensors"
        save_file({name: tensor for name, tensor in load_file(file).items() if "gain" not in name}, file)
    places = {f"model.layers.{layer}": "cpu" if layer == 2 else "disk" for layer in range(6)}
    places |= {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offloaded"
    )
    assert {weight.device.type for weight in offloaded.parameters()} == {"cpu", "meta"}
    assert torch.equal(logits(offloaded), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model")))
