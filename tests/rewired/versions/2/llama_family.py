"""The family of Llamas."""

from __future__ import annotations

from .family import HEADS, KV_HEADS, NEURONS, Family, Linear, Module

LLAMA = Family(
    model_type="llama",
    name="Llama",
    modeling="rewired.model.modeling_rewired_llama",
    modules=(
        Module(
            path="self_attn",
            norm="input_layernorm",
            gain="input_gain",
            readers=(
                Linear("q_proj", HEADS, "attention_bias"),
                Linear("k_proj", KV_HEADS, "attention_bias"),
                Linear("v_proj", KV_HEADS, "attention_bias"),
            ),
            writer=Linear("o_proj", HEADS, "attention_bias"),
        ),
        Module(
            path="mlp",
            norm="post_attention_layernorm",
            gain="post_attention_gain",
            readers=(Linear("gate_proj", NEURONS, "mlp_bias"), Linear("up_proj", NEURONS, "mlp_bias")),
            writer=Linear("down_proj", NEURONS, "mlp_bias"),
        ),
    ),
)
