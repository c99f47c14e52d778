"""Rewired Mistrals in vLLM: the stock classes with our layers."""

from __future__ import annotations

from vllm.model_executor.models.mistral import MistralDecoderLayer, MistralForCausalLM

from .rewired_layer import RewiredForCausalLM, RewiredLayer


class RewiredMistralDecoderLayer(RewiredLayer, MistralDecoderLayer):
    pass


class RewiredMistralForCausalLM(RewiredForCausalLM, MistralForCausalLM):
    layer_class = RewiredMistralDecoderLayer
