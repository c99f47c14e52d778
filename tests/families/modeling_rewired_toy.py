"""The toy family: stock classes as transformers would have them, and the rewired ones as a family of ours has them."""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn.functional import silu
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.utils.output_capturing import capture_outputs

from rewired.model.configuration import RewiredConfig, rewired_plan
from rewired.model.rewired_layer import RewiredLayer
from rewired.model.rewired_model import RewiredForCausalLM, RewiredModel, RewiredPreTrainedModel

from .toy_family import TOY


@strict
class ToyConfig(Qwen3Config):
    model_type = "toy"
    base_model_tp_plan = {
        "blocks.*.mixer.wq": "colwise",
        "blocks.*.mixer.wk": "colwise",
        "blocks.*.mixer.wv": "colwise",
        "blocks.*.mixer.q_scale": "replicated_with_grad_allreduce",
        "blocks.*.mixer.k_scale": "replicated_with_grad_allreduce",
        "blocks.*.mixer.wo": "rowwise",
        "blocks.*.feed_forward.w1": "colwise",
        "blocks.*.feed_forward.w3": "colwise",
        "blocks.*.feed_forward.w2": "rowwise",
    }


class ToyMixer(nn.Module):
    def __init__(self, config: ToyConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        heads, kv_heads = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.wq = nn.Linear(config.hidden_size, heads)
        self.wk = nn.Linear(config.hidden_size, kv_heads)
        self.wv = nn.Linear(config.hidden_size, kv_heads)
        self.wo = nn.Linear(heads, config.hidden_size, bias=False)
        self.q_scale = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_scale = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.is_causal = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = hidden_states.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        query = self.q_scale(self.wq(hidden_states).view(heads)).transpose(1, 2)
        key = self.k_scale(self.wk(hidden_states).view(heads)).transpose(1, 2)
        value = self.wv(hidden_states).view(heads).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        mixed, weights = attend(self, query, key, value, attention_mask, scaling=self.head_dim**-0.5, **kwargs)
        return self.wo(mixed.reshape(*shape, -1).contiguous()), weights


class ToyFeedForward(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.w2(silu(self.w1(hidden_states)) * self.w3(hidden_states))


class ToyDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: ToyConfig, layer_idx: int) -> None:
        super().__init__()
        self.mixer, self.feed_forward = ToyMixer(config, layer_idx), ToyFeedForward(config)
        self.mixer_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.feed_forward_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden_states = hidden_states + self.mixer(hidden_states=self.mixer_norm(hidden_states), **kwargs)[0]
        return hidden_states + self.feed_forward(self.feed_forward_norm(hidden_states))


class ToyPreTrainedModel(PreTrainedModel):
    config_class = ToyConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "tokens"
    _no_split_modules = ["ToyDecoderLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": ToyDecoderLayer, "attentions": ToyMixer}


class ToyModel(ToyPreTrainedModel):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.blocks = nn.ModuleList(ToyDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.final_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        embedded = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(seen, seen + embedded.shape[1], device=embedded.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=embedded,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        hidden_states, positions = embedded, self.rotary_emb(embedded, position_ids)
        for block in self.blocks:
            hidden_states = block(
                hidden_states,
                attention_mask=mask,
                position_embeddings=positions,
                past_key_values=past_key_values,
                **kwargs,
            )
        return BaseModelOutputWithPast(self.final_norm(hidden_states), past_key_values)


class ToyForCausalLM(ToyPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"output.weight": "model.tokens.weight"}
    _tp_plan = {"output": "colwise_gather_output"}

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.model = ToyModel(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def set_output_embeddings(self, output: nn.Module) -> None:
        self.output = output  # type: ignore[assignment]

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        outputs = self.model(input_ids=input_ids, **kwargs)
        logits = self.output(outputs.last_hidden_state[:, -logits_to_keep:])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss, logits, outputs.past_key_values, outputs.hidden_states)


@strict
class RewiredToyConfig(RewiredConfig, ToyConfig):
    model_type = TOY.rewired_type
    family = TOY
    base_model_tp_plan = rewired_plan(TOY, ToyConfig.base_model_tp_plan)


class RewiredToyDecoderLayer(RewiredLayer, ToyDecoderLayer):
    family = TOY


class RewiredToyPreTrainedModel(RewiredPreTrainedModel, ToyPreTrainedModel):
    family = TOY
    config_class = RewiredToyConfig
    layer_class = RewiredToyDecoderLayer


class RewiredToyModel(RewiredModel, RewiredToyPreTrainedModel, ToyModel):
    pass


class RewiredToyForCausalLM(RewiredForCausalLM, RewiredToyPreTrainedModel, ToyForCausalLM):
    base_class = RewiredToyModel


AutoConfig.register("toy", ToyConfig, exist_ok=True)
AutoModel.register(ToyConfig, ToyModel, exist_ok=True)
AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM, exist_ok=True)
