"""What the log says of a training's speed: model FLOPs as torch counts them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rewired.adapt.trainer.speed import flops_per_token, peak_flops
from rewired.model.modeling_rewired_llama import RewiredLlamaConfig, RewiredLlamaForCausalLM
from tests.adapt.world import logged, train
from tests.rewired.tiny import SIZES


@pytest.mark.parametrize("first", [0, 2])
def test_flops_are_those_that_torch_counts(first: int) -> None:
    """The layers from `first` on are trained, all of them with the ends. The teacher is the last two."""
    model = RewiredLlamaForCausalLM(RewiredLlamaConfig(**SIZES))
    for part in (*model.base.decoder_layers[:first], *([model.model.embed_tokens, model.lm_head] if first else [])):
        part.requires_grad_(False)
    ids = torch.randint(SIZES["vocab_size"], (2, 9))
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm] / ids.numel()
    hidden, width = SIZES["hidden_size"], SIZES["intermediate_size"]
    assert flops_per_token(model, None) == counted
    of_teacher = 2 * (2 * (3 * hidden * hidden + 3 * hidden * width) + SIZES["vocab_size"] * hidden)
    teacher: Any = SimpleNamespace(first=4)
    assert flops_per_token(model, teacher) == counted + of_teacher


def test_the_share_of_the_peak_is_logged_where_it_is_known(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not logged(train(tmp_path / "r.yaml", **keys), "mfu")
    monkeypatch.setattr("rewired.adapt.trainer.trainer.peak_flops", lambda device: 1e6)
    made = train(tmp_path / "r.yaml", **keys | {"output_dir": str(tmp_path / "2")})
    ratios = [mfu / speed for mfu, speed in zip(logged(made, "mfu"), logged(made, "tokens_per_second"), strict=True)]
    assert ratios and ratios == pytest.approx([ratios[0]] * len(ratios), rel=1e-2)
    for name, peak in {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": None}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda")) == peak
