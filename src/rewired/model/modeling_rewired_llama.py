"""A rewired Llama: transformers' own, with another residual stream."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
)

from .configuration import RewiredConfig, rewired_plan
from .family import LLAMA
from .rewired_layer import RewiredLayer
from .rewired_model import RewiredForCausalLM, RewiredModel, RewiredPreTrainedModel


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


class RewiredLlamaModel(RewiredModel, RewiredLlamaPreTrainedModel, LlamaModel):
    pass


class RewiredLlamaForCausalLM(RewiredForCausalLM, RewiredLlamaPreTrainedModel, LlamaForCausalLM):
    base_class = RewiredLlamaModel
