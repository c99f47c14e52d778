"""Rewired Qwen3 models in vLLM: the stock classes with our layers."""

from __future__ import annotations

from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM

from .rewired_layer import RewiredForCausalLM, RewiredLayer


class RewiredQwen3DecoderLayer(RewiredLayer, Qwen3DecoderLayer):
    pass


class RewiredQwen3ForCausalLM(RewiredForCausalLM, Qwen3ForCausalLM):
    layer_class = RewiredQwen3DecoderLayer
