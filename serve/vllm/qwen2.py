"""Rewired Qwen2 models in vLLM: the stock classes with our layers."""

from __future__ import annotations

from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer, Qwen2ForCausalLM

from .rewired_layer import RewiredForCausalLM, RewiredLayer


class RewiredQwen2DecoderLayer(RewiredLayer, Qwen2DecoderLayer):
    pass


class RewiredQwen2ForCausalLM(RewiredForCausalLM, Qwen2ForCausalLM):
    layer_class = RewiredQwen2DecoderLayer
