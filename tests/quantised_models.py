"""Tiny models quantised by compressed-tensors, rounded to the nearest number, as llm-compressor writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from transformers import AutoModelForCausalLM

SCHEMES = ("W8A8", "W4A16", "FP8_DYNAMIC")
GROUP = 16


def quantise(dense: Path, out: Path, scheme: str) -> Path:
    """The checkpoint `dense`, its projections quantised to one of SCHEMES or NVFP4A16; 4 bits in groups of 16."""
    model = AutoModelForCausalLM.from_pretrained(dense)
    chosen = preset_name_to_scheme(scheme, ["Linear"])
    if chosen.weights.group_size:  # NVFP4's own is 16
        chosen.weights.group_size = GROUP
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": chosen}, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            _take_scales(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)
    return out


def _take_scales(module: Any) -> None:
    args = module.quantization_scheme.weights
    rows = module.weight.detach().unflatten(1, (-1, args.group_size or module.in_features))  # [out, groups, in a group]
    least, most = rows.amin(-1), rows.amax(-1)
    of_all = None
    if hasattr(module, "weight_global_scale"):
        of_all = generate_gparam(least.amin(), most.amax())
        module.weight_global_scale.data.copy_(of_all)
    scale, zero_point = calculate_qparams(least, most, args, global_scale=of_all)
    module.weight_scale.data.copy_(scale)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero_point)


@torch.no_grad()
def dequantised(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The weights that a quantised stock checkpoint stands for, as compressed-tensors unpacks them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model(torch.zeros(1, 1, dtype=torch.long))  # unpacks
    return {name: tensor for name, tensor in model.state_dict().items() if name.endswith((".weight", ".bias"))}
