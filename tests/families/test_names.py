"""What a model of a family is called stands in the family's files alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

import rewired

SOURCE = Path(rewired.__file__).parent
NAMES = re.compile(
    r"\b(?:[qkvo]|gate|up|down)_proj\b|\b(?:input|post_attention)_layernorm\b|\bself_attn\b|\bembed_tokens\b|\blm_head\b"
    r"|\bLlama(?:Config|Model|ForCausalLM|DecoderLayer|Attention|MLP|RMSNorm)\b|\bmodeling_llama\b|\bmodel\.layers\b"
)
PARITY = re.compile(r"\b(?:index|module|position)\w* (?:%|//) 2\b|\b2 \* (?:layer|index) \+")
# files that may name them, each with its reason
OF_A_FAMILY = {
    "model/modeling_rewired_llama.py": "the family's classes",
    "serve/vllm/families.py": "the families' classes in vLLM",
    "model/family.py": "what most families call their modules, embedding and head",
    "model/rewired_layer.py": "an example of a class in its docstring",
    "model/sharding.py": "an example of a class in its docstring",
}
OF_MODULES = {
    "model/regions.py": "which modules a range covers, and the layer of one that is given twice",
    "model/presets.py": "parallel reduces after every second module",
    "model/wiring.py": "the order in which a model's modules run",
}


def found(pattern: re.Pattern[str], exceptions: dict[str, str]) -> set[str]:
    files = (Path(folder, name) for folder, _, names in os.walk(SOURCE, followlinks=True) for name in names)
    paths = {path.relative_to(SOURCE).as_posix(): path for path in files if path.suffix == ".py"}
    assert paths.keys() > exceptions.keys()
    return {name for name, path in paths.items() if pattern.search(path.read_text("utf-8"))}


def test_no_other_file_names_a_projection_a_norm_or_a_stock_class() -> None:
    assert found(NAMES, OF_A_FAMILY) == set(OF_A_FAMILY)


def test_no_other_file_counts_modules_by_parity() -> None:
    assert found(PARITY, OF_MODULES) <= set(OF_MODULES)
