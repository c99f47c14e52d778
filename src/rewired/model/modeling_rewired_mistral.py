"""A rewired Mistral: transformers' own, with another residual stream."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import MistralConfig
from transformers.models.mistral.modeling_mistral import (
    MistralDecoderLayer,
    MistralForCausalLM,
    MistralModel,
    MistralPreTrainedModel,
)

from .configuration import RewiredConfig, rewired_plan
from .family import MISTRAL
from .rewired_layer import RewiredLayer
from .rewired_model import RewiredForCausalLM, RewiredModel, RewiredPreTrainedModel


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


class RewiredMistralModel(RewiredModel, RewiredMistralPreTrainedModel, MistralModel):
    pass


class RewiredMistralForCausalLM(RewiredForCausalLM, RewiredMistralPreTrainedModel, MistralForCausalLM):
    base_class = RewiredMistralModel
