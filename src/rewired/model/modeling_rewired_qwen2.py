"""A rewired Qwen2: transformers' own, with another residual stream."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2DecoderLayer,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen2PreTrainedModel,
)

from .configuration import RewiredConfig, rewired_plan
from .family import QWEN2
from .rewired_layer import RewiredLayer
from .rewired_model import RewiredForCausalLM, RewiredModel, RewiredPreTrainedModel


@strict
class RewiredQwen2Config(RewiredConfig, Qwen2Config):
    model_type = QWEN2.rewired_type
    family = QWEN2
    base_model_tp_plan = rewired_plan(QWEN2, Qwen2Config.base_model_tp_plan)


class RewiredQwen2DecoderLayer(RewiredLayer, Qwen2DecoderLayer):  # type: ignore[misc]  # our forward passes a stream
    family = QWEN2


class RewiredQwen2PreTrainedModel(RewiredPreTrainedModel, Qwen2PreTrainedModel):
    family = QWEN2
    config_class = RewiredQwen2Config
    layer_class = RewiredQwen2DecoderLayer


class RewiredQwen2Model(RewiredModel, RewiredQwen2PreTrainedModel, Qwen2Model):
    pass


class RewiredQwen2ForCausalLM(RewiredForCausalLM, RewiredQwen2PreTrainedModel, Qwen2ForCausalLM):
    base_class = RewiredQwen2Model
