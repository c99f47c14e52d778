"""Frozen projections in 4 bits in a model that is sharded when it is loaded.

bitsandbytes' own layer keeps the scales of its numbers beside its parameters, where nothing shards them. Here both are
parameters, row by row as in the weight that they stand for: FSDP2 and tensor parallelism split them as they split that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from rewired.model.rewired_model import RewiredForCausalLM, RewiredPreTrainedModel
from rewired.model.sharding import on_this_rank

BLOCK = 64  # numbers of a row that share a scale


def check_blocks(model: RewiredForCausalLM, tp_size: int) -> None:
    """Raise ValueError where `tp_size` ranks would share a block of a projection's row."""
    for module in model.family.modules:
        for projection in module.linears:
            path = f"{module.path}.{projection.name}"
            columns = model.base.decoder_layers[0].get_submodule(path).in_features
            ranks = tp_size if projection is module.writer else 1
            if columns % (BLOCK * ranks):
                where = f" on each of {ranks} ranks" if ranks > 1 else ""
                raise ValueError(
                    f"load_in_4bit: the {columns} columns of {path} do not fill blocks of {BLOCK}{where}: hold the "
                    "weights in 16 bits."
                )


class Linear4bit(nn.Module):
    """A frozen projection whose weight, [out, in], is held in NF4: two numbers a byte, and a scale for each block."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = rows, columns = plain.weight.shape
        self.dtype = plain.weight.dtype
        packed = plain.weight.new_empty(rows, columns // 2, dtype=torch.uint8)
        scales = plain.weight.new_empty(rows, columns // BLOCK, dtype=torch.float32)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = plain.bias

    @property
    def weight(self) -> Any:
        """What this rank holds of it, as bitsandbytes' parameter."""
        from bitsandbytes.functional import QuantState
        from bitsandbytes.nn import Params4bit

        packed, scales = on_this_rank(self.packed), on_this_rank(self.scales)
        shape = torch.Size((packed.shape[0], 2 * packed.shape[1]))
        state = QuantState(scales.flatten(), shape, blocksize=BLOCK, quant_type="nf4", dtype=self.dtype)
        return Params4bit(packed, quant_state=state, bnb_quantized=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], in the dtype that a plain projection would give."""
        from bitsandbytes import matmul_4bit

        device, weight = inputs.device.type, self.weight
        if torch.is_autocast_enabled(device):
            inputs = inputs.to(torch.get_autocast_dtype(device))
        bias = None if self.bias is None else on_this_rank(self.bias).to(inputs.dtype)
        return matmul_4bit(inputs, weight, weight.quant_state, bias=bias)


class In4Bit:
    """Before a model's class among the bases of one that quantises its projections while it is loaded."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        model: Any = self
        for layer in model.base.decoder_layers:
            for path, module in list(layer.named_modules()):
                if type(module) is nn.Linear and "lora_" not in path:
                    layer.set_submodule(path, Linear4bit(module))

    def _resolve_parallel_plans(self, *args: Any, **kwargs: Any) -> tuple[dict[str, str], ...]:
        """transformers' own, but that calls of such projections are not wrapped: their parts are split."""
        of_layers, *others = super()._resolve_parallel_plans(*args, **kwargs)  # type: ignore[misc]
        modules: dict[str, Any] = dict(self.named_modules())  # type: ignore[attr-defined]
        split = {path: style for path, style in of_layers.items() if not isinstance(modules.get(path), Linear4bit)}
        return split, *others

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, files: Any, load_config: Any, *args: Any) -> Any:
        family = model.family
        path = rf"({family.layers}\.\d+\..*\b(?:{'|'.join(family.linears)})(?:\.base_layer)?)"
        # the first has the dtype in which a weight is read
        quantised = WeightConverter(rf"{path}\.weight", [r"\1.scales", r"\1.packed"], [_Quantise()])
        load_config = replace(load_config, weight_mapping=[*load_config.weight_mapping, quantised])
        # one after another: threads would read faster than this quantises, and fill the device
        with patch_environment(HF_DEACTIVATE_ASYNC_LOAD="1"):
            return RewiredPreTrainedModel._load_pretrained_model(model, state_dict, files, load_config, *args)


class _Quantise(ConversionOps):
    """This rank's part of a weight, [out, in], to the parameters of a Linear4bit."""

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        from bitsandbytes.functional import quantize_4bit

        ((weight,),) = input_dict.values()
        packed, state = quantize_4bit(weight.contiguous(), blocksize=BLOCK, quant_type="nf4")
        path, rows = kwargs["full_layer_name"].removesuffix(".scales"), len(weight)
        return {f"{path}.scales": state.absmax.view(rows, -1), f"{path}.packed": packed.view(rows, -1)}


def keep_packing(model: nn.Module) -> None:
    """Leave weights in 4 bits as they are packed. For inference on CPUs with AVX-512, bitsandbytes packs them anew, in
    place, and rounds activations to bfloat16; no gradient passes such weights later."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
