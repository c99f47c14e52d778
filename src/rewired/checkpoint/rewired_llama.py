"""A rewired checkpoint beside its weights: what its config.json says, and the code that it carries."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewired import model
from rewired.model.version import VERSION

from .llama import DENSE, REWIRED

# what a checkpoint carries of us, so that `trust_remote_code=True` loads it where rewired is not installed
_ONLY_HERE = ("__init__.py", "wiring_text.py")
MODEL_CODE = sorted(path for path in Path(model.__file__).parent.glob("*.py") if path.name not in _ONLY_HERE)
AUTO_MAP = {
    "AutoConfig": "configuration_rewired_llama.RewiredLlamaConfig",
    "AutoModel": "modeling_rewired_llama.RewiredLlamaModel",
    "AutoModelForCausalLM": "modeling_rewired_llama.RewiredLlamaForCausalLM",
}
# entries that a stock Llama's config does not have
_OURS = ("auto_map", "wiring", "wiring_version", "tp_shards", "ladder_layers")


def wired_config(config: Mapping[str, Any], wiring: Sequence[Mapping[str, Any]], tp_shards: int) -> dict[str, Any]:
    """The config of a Llama of `config` with this `wiring`, in its JSON form."""
    return _without_wiring(config) | {
        "model_type": REWIRED,
        "architectures": ["RewiredLlamaForCausalLM"],
        "auto_map": AUTO_MAP,
        "wiring_version": VERSION,
        "tp_shards": tp_shards,
        "wiring": list(wiring),
    }


def stock_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a stock Llama of `config`; what fits to a wiring recorded there is dropped."""
    unfitted = {name: value for name, value in _without_wiring(config).items() if name not in ("refit", "calibrated")}
    return unfitted | {"model_type": DENSE, "architectures": ["LlamaForCausalLM"]}


def write_code(folder: Path) -> None:
    """Copy the model's own code, which `AUTO_MAP` points to, into `folder`."""
    for path in MODEL_CODE:
        shutil.copyfile(path, folder / path.name)


def _without_wiring(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in _OURS}
