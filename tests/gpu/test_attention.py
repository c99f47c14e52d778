"""Flash attention is eager attention, for every wiring."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.utils import is_flash_attn_2_available

from tests.rewired.tiny import WIRINGS, rewired_model, tokens

pytestmark = pytest.mark.gpu
# torch's own, which raises where the flash kernel cannot run, and that of the package flash-attn
IMPLEMENTATIONS: dict[str, Any] = {
    "sdpa": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "flash_attention_2": nullcontext,
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("wiring", WIRINGS.values(), ids=WIRINGS)
def test_flash_is_as_close_to_float32_as_eager_is(
    wiring: list[dict[str, Any]], implementation: str, device: str
) -> None:
    if implementation == "flash_attention_2" and not (device == "cuda" and is_flash_attn_2_available()):
        pytest.skip("needs a GPU and the package flash-attn")
    model = rewired_model(wiring, head_dim=64).to(device)
    prompt = tokens(2, 100).to(device)
    logits = {"float32": logits_of(model, prompt, "eager")}
    model.bfloat16()
    logits["eager"] = logits_of(model, prompt, "eager")
    with IMPLEMENTATIONS[implementation]():
        logits["flash"] = logits_of(model, prompt, implementation)
    eager, flash = ((logits[name] - logits["float32"]).norm() for name in ("eager", "flash"))
    assert eager > 0
    assert flash < 1.3 * eager


@torch.no_grad()
def logits_of(model: Any, prompt: torch.Tensor, implementation: str) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    return model(prompt).logits.float()
