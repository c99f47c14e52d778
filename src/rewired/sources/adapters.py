"""PEFT adapters, which hold no model of their own: refused where a model is asked for, or where they do not fit one."""

from __future__ import annotations

import json
from pathlib import Path

_CONFIG = "adapter_config.json"


def missing_config(folder: Path, name: str) -> str:
    """The sentence for the checkpoint `name` in `folder`, which has no config.json: an adapter has none either."""
    if not (folder / _CONFIG).is_file():
        return f"{name} holds no config.json: point to a folder with a Hugging Face checkpoint."
    return f"{name} holds a PEFT adapter{_of_base(folder)}, and no model: merge it into its base first, {_how(name)}"


def check_none_beside(folder: Path) -> None:
    """Raise ValueError where an adapter lies beside the weights of the checkpoint in `folder`."""
    if (folder / _CONFIG).is_file():
        raise ValueError(
            f"{folder} holds a PEFT adapter{_of_base(folder)} beside its weights ({_CONFIG}), which would be left "
            f"behind: remove that file if the weights are what you want, or merge the adapter first, {_how(folder)}"
        )


def check_basis(adapter: Path, folder: Path) -> None:
    """Raise ValueError where `adapter` was trained on what the checkpoint in `folder` was made from, by a rotation."""
    rotation = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("rotation")
    base = _base(adapter)
    if rotation and base and rotation["base"] in (base, str(Path(base).resolve())):
        raise ValueError(
            f"{adapter} was trained on {base}, and {folder} is that in another basis, which the adapter does not fit: "
            f"merge it into {base} first, and convert what that gives."
        )


def _how(name: str | Path) -> str:
    return (
        f'in Python with AutoPeftModelForCausalLM.from_pretrained("{name}").merge_and_unload().save_pretrained('
        '"merged"), save the tokenizer beside it, and take that folder.'
    )


def _of_base(folder: Path) -> str:
    base = _base(folder)
    return f" of {base}" if base else ""


def _base(folder: Path) -> str | None:
    """The model that the adapter in `folder` says it was trained on."""
    try:
        base = json.loads((folder / _CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError, RecursionError):
        return None
    return base if isinstance(base, str) else None
