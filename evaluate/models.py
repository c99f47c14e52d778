"""The models to compare: opened by the names that users give them, checked together, and loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import rewired  # noqa: F401 - registers the classes
from rewired.cache import digest
from rewired.checkpoint import provenance
from rewired.checkpoint.checkpoint import Checkpoint, check_loadable
from rewired.families import family_of
from rewired.loading import loading
from rewired.model.tensor_parallel import check_ranks
from rewired.sources import checkpoint_folder
from rewired.sources.adapters import check_basis
from rewired.text.tokenizer import load_tokenizer

from .names import base_and_adapter

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    *("vocab.json", "merges.txt", "vocab.txt", "added_tokens.json"),
)
_DEFINING = ("config.json", "generation_config.json", "adapter_config.json", *_TOKENIZER)


@dataclass(frozen=True)
class Model:
    """A checkpoint on disk, with an adapter or without."""

    name: str  # in the report
    folder: Path
    adapter: Path | None
    sha256: str  # of all files that its answers depend on
    tokenizer_sha256: str


def original_of(given: str) -> str | None:
    """The original that the config of a model `given` by a user names.

    Raises ValueError where the model cannot be opened, or its original is not what it was.
    """
    folder = checkpoint_folder(base_and_adapter(given)[0])
    base = provenance.base_of(Checkpoint.open(folder).config)
    return provenance.find_name(base, folder) if base and provenance.original(base) else None


def open_model(given: str, name: str) -> Model:
    """The model `given` by a user: any source that `convert` takes, or BASE+ADAPTER. Raises ValueError."""
    base, adapter = base_and_adapter(given)
    folder = checkpoint_folder(base)
    check_loadable(folder)
    if not adapter:
        return Model(name, folder, None, _sha256(folder), _tokenizer_sha256(folder))
    adapter_folder = Path(adapter)
    if not (adapter_folder / "adapter_config.json").is_file():
        raise ValueError(f"{adapter} holds no adapter_config.json: after the + goes the folder of a PEFT adapter.")
    if not (adapter_folder / "adapter_model.safetensors").is_file():
        raise ValueError(f"{adapter} holds no adapter_model.safetensors: save the adapter as safetensors.")
    check_basis(adapter_folder, folder)
    digest = hashlib.sha256((_sha256(folder) + _sha256(adapter_folder)).encode()).hexdigest()
    return Model(name, folder, adapter_folder, digest, _tokenizer_sha256(folder))


def check_together(models: Sequence[Model], ranks: int) -> None:
    """Raises ValueError where the models' vocabularies differ, or one cannot run on so many ranks."""
    first = models[0]
    for model in models:
        with loading(f"{model.name} cannot be loaded"):
            config = AutoConfig.from_pretrained(model.folder, trust_remote_code=False)
        if family := family_of(config.model_type):
            check_ranks(family, config, ranks, "--tp")
        if load_tokenizer(model.folder).get_vocab() != load_tokenizer(first.folder).get_vocab():
            raise ValueError(
                f"{first.name} and {model.name} have different vocabularies, so their tokens cannot be compared: "
                "evaluate a rewired model against the one that it was made from."
            )


def load_model(model: Model, dtype: str, device_type: str, ranks: int) -> PreTrainedModel:
    """On this process's device; with several `ranks`, this rank's part. Raises ValueError if it cannot be loaded."""
    options: dict[str, Any] = (
        {"distributed_config": DistributedConfig(tp_size=ranks, tp_plan="auto")} if ranks > 1 else {}
    )
    with loading(f"{model.name} cannot be loaded"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model.folder, dtype=dtype, use_safetensors=True, trust_remote_code=False, **options
        )
    if ranks == 1:
        loaded = loaded.to(torch.device(device_type))
    if model.adapter is not None:
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(loaded, model.adapter)
    return loaded.eval()


def _sha256(folder: Path) -> str:
    """Of a checkpoint's weights and of the files that define it, by name and content."""
    return _sha256_of([*(folder / name for name in _DEFINING), *sorted(folder.glob("*.safetensors"))])


def _tokenizer_sha256(folder: Path) -> str:
    return _sha256_of([folder / name for name in _TOKENIZER])


def _sha256_of(files: Sequence[Path]) -> str:
    """Of those that exist."""
    lines = [f"{file.name} {digest(file)}" for file in files if file.is_file()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
