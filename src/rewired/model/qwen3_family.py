"""The family of dense Qwen3."""

from __future__ import annotations

from .family import HEAD_DIM, Family, Replicated, usual_modules

QWEN3 = Family(
    model_type="qwen3",
    name="Qwen3",
    modeling="rewired.model.modeling_rewired_qwen3",
    modules=usual_modules(
        "attention_bias",
        "attention_bias",
        inside_attention=(Replicated("q_norm", HEAD_DIM), Replicated("k_norm", HEAD_DIM)),
    ),
    head_dim=128,
    has_windows=True,
)
