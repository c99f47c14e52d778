"""The rewired families in vLLM: its stock models with our layers."""

from __future__ import annotations

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from .rewired_layer import RewiredForCausalLM


class RewiredLlamaForCausalLM(RewiredForCausalLM, LlamaForCausalLM):
    pass


class RewiredMistralForCausalLM(RewiredForCausalLM, MistralForCausalLM):
    pass


class RewiredQwen2ForCausalLM(RewiredForCausalLM, Qwen2ForCausalLM):
    pass


class RewiredQwen3ForCausalLM(RewiredForCausalLM, Qwen3ForCausalLM):
    pass
