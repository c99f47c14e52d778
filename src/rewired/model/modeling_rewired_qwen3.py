"""A rewired Qwen3: transformers' own, with another residual stream."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3PreTrainedModel,
)

from .configuration import RewiredConfig, rewired_plan
from .family import QWEN3
from .rewired_layer import RewiredLayer
from .rewired_model import RewiredForCausalLM, RewiredModel, RewiredPreTrainedModel


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


class RewiredQwen3Model(RewiredModel, RewiredQwen3PreTrainedModel, Qwen3Model):
    pass


class RewiredQwen3ForCausalLM(RewiredForCausalLM, RewiredQwen3PreTrainedModel, Qwen3ForCausalLM):
    base_class = RewiredQwen3Model
