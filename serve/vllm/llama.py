"""Rewired Llamas in vLLM: the stock classes with our layers."""

from __future__ import annotations

from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM

from .rewired_layer import RewiredForCausalLM, RewiredLayer


class RewiredLlamaDecoderLayer(RewiredLayer, LlamaDecoderLayer):
    pass


class RewiredLlamaForCausalLM(RewiredForCausalLM, LlamaForCausalLM):
    layer_class = RewiredLlamaDecoderLayer
