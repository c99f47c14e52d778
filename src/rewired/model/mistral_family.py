"""The family of dense Mistrals: 7B, Nemo, Small."""

from __future__ import annotations

from .family import Family, usual_modules

MISTRAL = Family(
    model_type="mistral",
    name="Mistral",
    modeling="rewired.model.modeling_rewired_mistral",
    modules=usual_modules(),
    has_windows=True,
)
