"""A Llama whose layers are wired as its config says: transformers' own Llama, with another residual stream.

A decoder layer reads the stream, runs a stock module, and writes to the stream, twice. The wiring decides what a read
sees and a write reduces; no wiring has a layer class of its own.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import initialization as init
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder

from .configuration_rewired_llama import RewiredLlamaConfig
from .late_gradients import NONE_LATE, LateLinears, late_linears
from .residual_stream import PeekGain, ResidualStream
from .sharding import OnShards, Shards, pack_shards
from .tensor_parallel import RewiredLayerParallel
from .wiring import ModuleWiring


class RewiredLlamaDecoderLayer(LlamaDecoderLayer):
    """Read, norm, module, write; twice."""

    shards: Shards

    def __init__(self, config: RewiredLlamaConfig, layer_idx: int, attn: ModuleWiring, mlp: ModuleWiring) -> None:
        GradientCheckpointingLayer.__init__(self)  # LlamaDecoderLayer's own would build the modules twice
        self.hidden_size = config.hidden_size
        self.attn_wiring, self.mlp_wiring = attn, mlp
        self.is_last = layer_idx == config.num_hidden_layers - 1
        self.self_attn = RewiredLlamaAttention(config, layer_idx, attn)
        self.mlp = RewiredLlamaMLP(config, mlp)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_gain = _peek_gain(config, attn)
        self.post_attention_gain = _peek_gain(config, mlp)
        self.place(Shards(config.tp_shards, config.tp_shards))

    def place(self, shards: Shards) -> None:
        """Say which of the logical shards this process holds; all of them, unless tensor parallelism says otherwise."""
        for module in (self, self.self_attn, self.mlp):
            module.shards = shards

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor | ResidualStream, **kwargs: Any
    ) -> torch.Tensor | ResidualStream:
        """The stream in, the stream out; the model's first layer takes the embedding, its last gives hidden states."""
        shards = self.shards
        stream = ResidualStream.open(hidden_states, shards)

        late = late_linears(self.self_attn, self.attn_wiring, shards)
        view, stream = stream.read(self.attn_wiring, self.input_gain, shards)  # [B, T, H] or [r, B, T, H]
        output, _ = self.self_attn(hidden_states=self.input_layernorm(view), late=late, **kwargs)
        stream = stream.write(output, self.attn_wiring, shards)

        late = late_linears(self.mlp, self.mlp_wiring, shards)
        view, stream = stream.read(self.mlp_wiring, self.post_attention_gain, shards)
        output = self.mlp(self.post_attention_layernorm(view), late)
        stream = stream.write(output, self.mlp_wiring, shards)

        return stream.total(shards) if self.is_last else stream


class RewiredLlamaAttention(LlamaAttention):
    """Stock attention; its projections carry the shard axis where the wiring asks for one."""

    shards: Shards

    def __init__(self, config: RewiredLlamaConfig, layer_idx: int, wiring: ModuleWiring) -> None:
        super().__init__(config, layer_idx)
        self.wiring = wiring

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, late: LateLinears = NONE_LATE, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[B, T, H] or [r, B, T, H] in; [B, T, H] or, if the wiring gives partials, [r, B, T, H] out."""
        module, hidden_states = _on_shards(self, hidden_states, late)
        return LlamaAttention.forward(module, hidden_states, **kwargs)


class RewiredLlamaMLP(LlamaMLP):
    """Stock MLP; its projections carry the shard axis where the wiring asks for one."""

    shards: Shards

    def __init__(self, config: RewiredLlamaConfig, wiring: ModuleWiring) -> None:
        super().__init__(config)
        self.wiring = wiring

    def forward(self, hidden_states: torch.Tensor, late: LateLinears = NONE_LATE) -> torch.Tensor:
        """[B, T, H] or [r, B, T, H] in; [B, T, H] or, if the wiring gives partials, [r, B, T, H] out."""
        module, hidden_states = _on_shards(self, hidden_states, late)
        return LlamaMLP.forward(module, hidden_states)


def _on_shards(
    module: RewiredLlamaAttention | RewiredLlamaMLP, hidden_states: torch.Tensor, late: LateLinears
) -> tuple[Any, torch.Tensor]:
    """The module and its input as stock code should see them: untouched where no shard axis is involved."""
    wiring, shards = module.wiring, module.shards
    if shards.group is None and not (wiring.reads_shards or wiring.gives_partials):
        return module, hidden_states
    packed = pack_shards(hidden_states) if wiring.reads_shards else hidden_states
    return OnShards(module, shards, wiring.reads_shards, wiring.gives_partials, late), packed


def _peek_gain(config: RewiredLlamaConfig, wiring: ModuleWiring) -> PeekGain | None:
    if not wiring.reads_shards:
        return None
    return PeekGain(config.tp_shards, config.hidden_size, wiring.initial_gain(config.tp_shards))


class RewiredLlamaPreTrainedModel(LlamaPreTrainedModel):
    config_class = RewiredLlamaConfig
    _no_split_modules = ["RewiredLlamaDecoderLayer"]
    # conversion writes no tensors: gains that a checkpoint does not hold are at their initial value
    _keys_to_ignore_on_load_missing = [r"_gain\.weight$"]
    _can_record_outputs = {
        # a layer's output is the whole stream; RewiredLlamaModel makes hidden states of it
        "hidden_states": OutputRecorder(RewiredLlamaDecoderLayer, index=slice(None)),  # type: ignore[arg-type]
        "attentions": LlamaAttention,
    }

    @classmethod
    def is_backend_compatible(cls) -> bool:
        """Raise ValueError: an engine that splits this model by transformers' plan alone would lose its wiring."""
        raise ValueError(
            "A rewired model cannot be served through an engine's Transformers backend, which does not know its "
            "all-reduces: for vLLM, pip install 'rewired[vllm]' brings a plugin that does."
        )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PeekGain):
            init.constant_(module.weight, module.initial)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError(
                "Re-entrant gradient checkpointing does not see the tensors inside the residual stream and would give "
                "wrong gradients: use gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        options = {"use_reentrant": False} | (gradient_checkpointing_kwargs or {})  # torch would be re-entrant
        super().gradient_checkpointing_enable(options, **kwargs)


class RewiredLlamaModel(RewiredLlamaPreTrainedModel, LlamaModel):
    """LlamaModel, its layers passing a residual stream along."""

    def __init__(self, config: RewiredLlamaConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)  # LlamaModel's own would build dense layers first
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            RewiredLlamaDecoderLayer(config, layer_idx, attn, mlp)
            for layer_idx, (attn, mlp) in enumerate(config.resolved_wiring.layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        """LlamaModel's forward. `hidden_states[i]` is all that was contributed before layer i, reduced or not."""
        outputs = super().forward(*args, **kwargs)
        if outputs.hidden_states is not None:
            shards = cast(RewiredLlamaDecoderLayer, self.layers[0]).shards
            outputs.hidden_states = tuple(
                ResidualStream(*state).total(shards) if isinstance(state, tuple) else state
                for state in outputs.hidden_states
            )
        return outputs


class RewiredLlamaForCausalLM(RewiredLlamaPreTrainedModel, LlamaForCausalLM):
    """LlamaForCausalLM on a RewiredLlamaModel."""

    def __init__(self, config: RewiredLlamaConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)  # LlamaForCausalLM's own would build a dense model first
        self.model = RewiredLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


ALL_PARALLEL_STYLES.register("rewired_layer", RewiredLayerParallel())  # type: ignore[arg-type]
RewiredLlamaModel.register_for_auto_class("AutoModel")
RewiredLlamaForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = ["RewiredLlamaForCausalLM", "RewiredLlamaModel", "RewiredLlamaPreTrainedModel"]
