"""A rewired Qwen3: transformers' own, with another residual stream."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3PreTrainedModel,
)

from .configuration import RewiredConfig, rewired_plan
from .qwen3_family import QWEN3
from .rewired_layer import RewiredLayer
from .rewired_model import (
    RewiredForCausalLM,
    RewiredModel,
    RewiredPreTrainedModel,
    gains_may_be_missing,
    recorded_outputs,
)


@strict
class RewiredQwen3Config(RewiredConfig, Qwen3Config):
    model_type = QWEN3.rewired_type
    family = QWEN3
    base_model_tp_plan = rewired_plan(QWEN3, Qwen3Config.base_model_tp_plan)


class RewiredQwen3DecoderLayer(RewiredLayer, Qwen3DecoderLayer):  # type: ignore[misc]  # our forward passes a stream
    family = QWEN3


class RewiredQwen3PreTrainedModel(RewiredPreTrainedModel, Qwen3PreTrainedModel):
    family = QWEN3
    config_class = RewiredQwen3Config
    layer_class = RewiredQwen3DecoderLayer
    _no_split_modules = ["RewiredQwen3DecoderLayer"]
    _keys_to_ignore_on_load_missing = gains_may_be_missing(QWEN3)
    _can_record_outputs = recorded_outputs(RewiredQwen3DecoderLayer, Qwen3Attention)


class RewiredQwen3Model(RewiredModel, RewiredQwen3PreTrainedModel, Qwen3Model):
    pass


class RewiredQwen3ForCausalLM(RewiredForCausalLM, RewiredQwen3PreTrainedModel, Qwen3ForCausalLM):
    base_class = RewiredQwen3Model


RewiredQwen3Config.register_for_auto_class()
RewiredQwen3Model.register_for_auto_class("AutoModel")
RewiredQwen3ForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = ["RewiredQwen3Config", "RewiredQwen3ForCausalLM", "RewiredQwen3Model", "RewiredQwen3PreTrainedModel"]
