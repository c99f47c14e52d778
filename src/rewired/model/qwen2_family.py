"""The family of dense Qwen2 and Qwen2.5, and of what was distilled into them."""

from __future__ import annotations

from .family import Family, usual_modules

QWEN2 = Family(
    model_type="qwen2",
    name="Qwen2",
    modeling="rewired.model.modeling_rewired_qwen2",
    modules=usual_modules(reader_bias=True),
    has_windows=True,
)
