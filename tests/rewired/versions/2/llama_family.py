"""The family of Llamas."""

from __future__ import annotations

from .family import Family, usual_modules

LLAMA = Family(
    model_type="llama",
    name="Llama",
    modeling="rewired.model.modeling_rewired_llama",
    unread="pretraining_tp",
    modules=usual_modules("attention_bias", "attention_bias", "mlp_bias"),
)
