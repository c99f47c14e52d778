"""What the log says of a training's speed: model FLOPs as torch counts them, and the time of waits."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed._functional_collectives import all_reduce
from torch.utils.flop_counter import FlopCounterMode

from rewired.adapt.trainer import speed
from rewired.adapt.trainer.speed import Waits, flops_per_token, peak_flops
from rewired.adapt.trainer.trainer import AdaptTrainer
from rewired.model.modeling_rewired_llama import RewiredLlamaConfig, RewiredLlamaForCausalLM
from rewired.model.reductions import Reduction
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


def test_measuring_and_saving_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 16.0])
    monkeypatch.setattr("rewired.adapt.trainer.trainer.time.perf_counter", lambda: next(clock))
    trainer: Any = SimpleNamespace(_logged=(3.0, 500))
    with AdaptTrainer.paused(trainer):
        pass
    assert trainer._logged == (9.0, 500)


@pytest.mark.parametrize("compiled", [False, True])
def test_waits_are_timed_while_a_step_runs(compiled: bool) -> None:
    def reduce(given: torch.Tensor) -> torch.Tensor:
        return all_reduce(given, "sum", distributed.group.WORLD) + 1

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    run, waits = torch.compile(reduce) if compiled else reduce, Waits()
    with waits.during_step():
        assert run(torch.ones(2)).tolist() == [2, 2]
    waited = waits.waited
    assert run(torch.ones(2)).tolist() == [2, 2]
    distributed.destroy_process_group()
    assert waits.waited == waited and 0 < waits.share() < 1 and waits.waited == 0


def test_what_an_exchange_waits_for_within_a_wait_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(speed, "_now", lambda tensor: float(next(ticks)))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    assert distributed.group.WORLD is not None
    waits = Waits()
    with waits.during_step():
        (total,) = Reduction(distributed.group.WORLD.group_name, adds_in_float32=True).start(torch.ones(2).bfloat16())
        assert total.tolist() == [1, 1]
    distributed.destroy_process_group()
    assert waits.waited == 1 and next(ticks) == 2
