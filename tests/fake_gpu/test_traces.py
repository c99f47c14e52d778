"""Every wiring and payload as one of two CUDA ranks runs it, on tensors that are shapes alone.

Inference is on fake CUDA tensors. Autograd refuses these where no driver is, so training is on meta tensors, which take
the same ways: there, too, a tensor that is made on the CPU is seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from rewired.bench.contenders import STOCK, Contender
from rewired.bench.models import SharedWeights, build, mesh_of
from rewired.model import kernels
from rewired.model.sharding import on_this_rank
from rewired.model.wiring import ModuleWiring
from rewired.ranks import run_on_ranks
from tests.rewired.happens_before import streams_of_a_gpu
from tests.rewired.tiny import PAYLOADS, WIRINGS, llama_config, rewired_config

from .conftest import Report

RANKS, WIDE = 2, 128
INFERENCE, TRAINING = "cuda", "meta"
ALL = {STOCK: []} | WIRINGS | PAYLOADS
EMBEDDING, HEAD = 1, 1  # collectives of transformers' own
PLAIN = {torch.Tensor, torch.nn.Parameter, FakeTensor}
KINDS = ("sum", "scatter", "gather")
COLLECTIVES = {
    "c10d::allreduce_": "sum",
    "_c10d_functional::all_reduce": "sum",
    "_c10d_functional::all_to_all_single": "scatter",
    "_c10d_functional::all_gather_into_tensor": "gather",
}
WIDE_SUM = "rewired::start_wide_sum"


class Trace(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.of_cpu: Counter[str] = Counter()
        self.is_within = False  # a kernel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not {*types} <= PLAIN:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        is_one = bool(tensors) and not self.is_within and name != "prim::device"  # which only a fake tensor is asked
        self.calls[COLLECTIVES.get(name, name)] += is_one
        if name == WIDE_SUM:  # of which a meta tensor shows nothing
            self.calls.update(("scatter", "gather"))
        if any(each.device.type == "cpu" for each in tensors):
            self.of_cpu[name] += 1
        return result


def test_each_as_often_and_where_it_should(report: Report) -> None:
    (found,) = run_on_ranks(traces, 1)
    for device in (INFERENCE, TRAINING):
        stock = found[STOCK, device]
        for name, entries in (WIRINGS | PAYLOADS).items():
            trace, modules = found[name, device], modules_of(entries)
            assert trace.of_cpu == stock.of_cpu, name  # transformers' embedding assigns a number of Python's
            assert {kind: trace.calls[kind] for kind in KINDS} == collectives(modules, device), name
            dispatches = trace.calls.total() / stock.calls.total()
            assert dispatches < most_dispatches(modules), name
            report.add("dispatches", name, device, trace.calls.total(), f"{dispatches:.2f}")


def modules_of(entries: list[dict[str, Any]]) -> tuple[ModuleWiring, ...]:
    return rewired_config(entries, RANKS, hidden_size=WIDE).resolved_wiring.modules


def collectives(modules: tuple[ModuleWiring, ...], device: str) -> dict[str, int]:
    """That a pass takes, by the wiring alone. In training, an exchange adds 16 bits up in float32."""
    plain = sum(wiring.launches and not wiring.sections for wiring in modules)
    packed = sum(bool(wiring.sections) for wiring in modules)
    if device == INFERENCE:
        return {"sum": EMBEDDING + plain, "scatter": packed, "gather": HEAD + packed}
    layers = len(modules) // 2  # whose norms' gradients are summed in one
    exchanges = 2 * plain + layers + packed + EMBEDDING  # whose gradient the stream's entry sums
    return {"sum": EMBEDDING + HEAD + packed, "scatter": exchanges, "gather": HEAD + exchanges}


def most_dispatches(modules: tuple[ModuleWiring, ...]) -> float:
    """For one of stock's. To keep channels local takes some more, and so does a payload's way, in eager mode."""
    if any(wiring.sections for wiring in modules):
        return 1.45
    return 1.25 if any(wiring.leaves_channels for wiring in modules) else 1.1


def traces() -> dict[tuple[str, str], Trace]:
    distributed.destroy_process_group()
    distributed.init_process_group("fake", rank=1, world_size=RANKS, store=FakeStore())
    mesh = mesh_of(distributed.group.WORLD, "cuda")
    with streams_of_a_gpu(), kernels_are_one_call():
        return {(name, device): trace(name, device, mesh) for device in (INFERENCE, TRAINING) for name in ALL}


def trace(name: str, device: str, mesh: Any) -> Trace:
    with FakeTensorMode(allow_non_fake_inputs=True) if device == INFERENCE else nullcontext():
        model = build(Contender(name, ALL[name]), llama_config(hidden_size=WIDE), RANKS, mesh)
        EmptyWeights(torch.bfloat16, torch.device(device)).fill(model)
        tokens = torch.empty(2, 9, dtype=torch.long, device=device)
        options = {"use_cache": False, "attention_mask": torch.empty(2, 1, 9, 9, dtype=torch.bool, device=device)}
        with Trace() as found:
            if device == INFERENCE:
                with torch.no_grad():
                    model(tokens, **options)
            else:
                model.requires_grad_(True).train()(tokens, labels=tokens, **options).loss.backward()
    return found


class EmptyWeights(SharedWeights):
    def _made(self, parameter: torch.nn.Parameter, name: str) -> torch.Tensor:
        return torch.empty(on_this_rank(parameter).shape, dtype=self.dtype, device=self.device)


@contextmanager
def kernels_are_one_call() -> Iterator[None]:
    """Without what is in them, which runs compiled."""

    def compiled(function: Any, constants: Any) -> Any:
        def run(*tensors: torch.Tensor) -> Any:
            (mode,) = [each for each in _get_current_dispatch_mode_stack() if isinstance(each, Trace)]
            mode.calls["kernel"] += 1
            mode.is_within = True
            result = function(*tensors, **dict(constants))
            mode.is_within = False
            return result

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_DEVICES", {INFERENCE, TRAINING})
        patch.setattr(kernels, "_compiled", compiled)
        yield
