"""Packed rows: a document reads nothing of its neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tests.adapt.world import make_rewired

WIRINGS: dict[str, list[dict[str, Any]]] = {
    "ladder": [{"layers": "1-4", "preset": "ladder"}],
    "desync": [{"layers": "0-4", "preset": "desync", "every": 2}],
}


@pytest.mark.parametrize("wiring", WIRINGS)
def test_a_packed_documents_logits_are_its_own(wiring: str, dense: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(make_rewired(dense, tmp_path / "m", WIRINGS[wiring])).eval()
    documents = [torch.randint(3, 259, (length,)) for length in (5, 9, 2)]
    packed = {"input_ids": torch.cat(documents).tolist(), "seq_lengths": [len(one) for one in documents]}
    inputs = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([packed])
    labels = inputs.pop("labels")
    with torch.no_grad():
        together = model(**inputs, use_cache=False).logits[0]
        alone = torch.cat([model(one[None]).logits[0] for one in documents])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert (labels[0][[0, 5, 14]] == -100).all(), "nothing foretells another document's first token"
