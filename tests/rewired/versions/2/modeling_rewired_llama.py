"""A rewired Llama: transformers' own, with another residual stream."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
)

from .configuration import RewiredConfig, rewired_plan
from .llama_family import LLAMA
from .rewired_layer import RewiredLayer
from .rewired_model import (
    RewiredForCausalLM,
    RewiredModel,
    RewiredPreTrainedModel,
    gains_may_be_missing,
    recorded_outputs,
)


@strict
class RewiredLlamaConfig(RewiredConfig, LlamaConfig):
    model_type = LLAMA.rewired_type
    family = LLAMA
    base_model_tp_plan = rewired_plan(LLAMA, LlamaConfig.base_model_tp_plan)

    pretraining_tp: Any = None  # no number there: a stock Llama refuses it


class RewiredLlamaDecoderLayer(RewiredLayer, LlamaDecoderLayer):  # type: ignore[misc]  # our forward passes a stream
    family = LLAMA


class RewiredLlamaPreTrainedModel(RewiredPreTrainedModel, LlamaPreTrainedModel):
    family = LLAMA
    config_class = RewiredLlamaConfig
    layer_class = RewiredLlamaDecoderLayer
    _no_split_modules = ["RewiredLlamaDecoderLayer"]
    _keys_to_ignore_on_load_missing = gains_may_be_missing(LLAMA)
    _can_record_outputs = recorded_outputs(RewiredLlamaDecoderLayer, LlamaAttention)


class RewiredLlamaModel(RewiredModel, RewiredLlamaPreTrainedModel, LlamaModel):
    pass


class RewiredLlamaForCausalLM(RewiredForCausalLM, RewiredLlamaPreTrainedModel, LlamaForCausalLM):
    base_class = RewiredLlamaModel


RewiredLlamaConfig.register_for_auto_class()
RewiredLlamaModel.register_for_auto_class("AutoModel")
RewiredLlamaForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = ["RewiredLlamaConfig", "RewiredLlamaForCausalLM", "RewiredLlamaModel", "RewiredLlamaPreTrainedModel"]
