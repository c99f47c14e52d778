"""A rewired Qwen2: transformers' own, with another residual stream."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2Attention,
    Qwen2DecoderLayer,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen2PreTrainedModel,
)

from .configuration import RewiredConfig, rewired_plan
from .qwen2_family import QWEN2
from .rewired_layer import RewiredLayer
from .rewired_model import (
    RewiredForCausalLM,
    RewiredModel,
    RewiredPreTrainedModel,
    gains_may_be_missing,
    recorded_outputs,
)


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
    _no_split_modules = ["RewiredQwen2DecoderLayer"]
    _keys_to_ignore_on_load_missing = gains_may_be_missing(QWEN2)
    _can_record_outputs = recorded_outputs(RewiredQwen2DecoderLayer, Qwen2Attention)


class RewiredQwen2Model(RewiredModel, RewiredQwen2PreTrainedModel, Qwen2Model):
    pass


class RewiredQwen2ForCausalLM(RewiredForCausalLM, RewiredQwen2PreTrainedModel, Qwen2ForCausalLM):
    base_class = RewiredQwen2Model


RewiredQwen2Config.register_for_auto_class()
RewiredQwen2Model.register_for_auto_class("AutoModel")
RewiredQwen2ForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = ["RewiredQwen2Config", "RewiredQwen2ForCausalLM", "RewiredQwen2Model", "RewiredQwen2PreTrainedModel"]
