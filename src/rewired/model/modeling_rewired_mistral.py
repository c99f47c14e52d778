"""A rewired Mistral: transformers' own, with another residual stream."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import MistralConfig
from transformers.models.mistral.modeling_mistral import (
    MistralAttention,
    MistralDecoderLayer,
    MistralForCausalLM,
    MistralModel,
    MistralPreTrainedModel,
)

from .configuration import RewiredConfig, rewired_plan
from .mistral_family import MISTRAL
from .rewired_layer import RewiredLayer
from .rewired_model import (
    RewiredForCausalLM,
    RewiredModel,
    RewiredPreTrainedModel,
    gains_may_be_missing,
    recorded_outputs,
)


@strict
class RewiredMistralConfig(RewiredConfig, MistralConfig):
    model_type = MISTRAL.rewired_type
    family = MISTRAL
    base_model_tp_plan = rewired_plan(MISTRAL, MistralConfig.base_model_tp_plan)


class RewiredMistralDecoderLayer(RewiredLayer, MistralDecoderLayer):  # type: ignore[misc]  # our forward passes a stream
    family = MISTRAL


class RewiredMistralPreTrainedModel(RewiredPreTrainedModel, MistralPreTrainedModel):
    family = MISTRAL
    config_class = RewiredMistralConfig
    layer_class = RewiredMistralDecoderLayer
    _no_split_modules = ["RewiredMistralDecoderLayer"]
    _keys_to_ignore_on_load_missing = gains_may_be_missing(MISTRAL)
    _can_record_outputs = recorded_outputs(RewiredMistralDecoderLayer, MistralAttention)


class RewiredMistralModel(RewiredModel, RewiredMistralPreTrainedModel, MistralModel):
    pass


class RewiredMistralForCausalLM(RewiredForCausalLM, RewiredMistralPreTrainedModel, MistralForCausalLM):
    base_class = RewiredMistralModel


RewiredMistralConfig.register_for_auto_class()
RewiredMistralModel.register_for_auto_class("AutoModel")
RewiredMistralForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = ["RewiredMistralConfig", "RewiredMistralForCausalLM", "RewiredMistralModel", "RewiredMistralPreTrainedModel"]
