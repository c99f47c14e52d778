"""Helpers of the tensor-parallel tests: models on several ranks, and a record of what the ranks say to each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import rewired  # noqa: F401 - registers the classes

from .tiny import rewired_model


def saved(wiring: list[dict[str, Any]], folder: Path, tp_shards: int = 4, **changes: Any) -> Path:
    """A checkpoint of a tiny model with biases and norm weights that cannot be forgotten."""
    model = rewired_model(wiring, tp_shards, **({"attention_bias": True, "mlp_bias": True} | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1, 0.2)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, ranks: int = 1, **options: Any) -> Any:
    """The checkpoint on `ranks` ranks, of which this process is one."""
    distributed = DistributedConfig(tp_size=ranks, tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=distributed, **options)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor of which this rank may hold a part."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(model: torch.nn.Module) -> dict[str, Any]:
    """As numpy arrays, which travel between processes."""
    return {
        name.removeprefix("base_model.model."): whole(parameter.grad).float().cpu().numpy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


class Payload(NamedTuple):
    """What an all-reduce carries."""

    channels: int  # its last dimension
    bytes: int
    dtype: torch.dtype


class Events(TorchDispatchMode):
    """Records what this rank does, in order: ("start", i) and ("wait", i) of its i-th all-reduce, ("product", -1) for
    a matrix product, ("other", -1) for any other communication."""

    products = ("mm", "addmm", "bmm", "baddbmm")

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, int]] = []
        self.payloads: list[Payload] = []
        self.index_of: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        result = func(*args, **(kwargs or {}))
        if name == "all_reduce":
            self.index_of[result.data_ptr()] = len(self.payloads)
            self.log.append(("start", len(self.payloads)))
            self.payloads.append(Payload(args[0].shape[-1], args[0].nbytes, args[0].dtype))
        elif name == "allreduce_":  # in place and at once, where nothing hides it
            (summed,), *_ = args
            self.log += [("start", len(self.payloads)), ("wait", len(self.payloads))]
            self.payloads.append(Payload(summed.shape[-1], summed.nbytes, summed.dtype))
        elif name == "wait_tensor":
            self.log.append(("wait", self.index_of.get(args[0].data_ptr(), -1)))
        elif name in self.products:
            self.log.append(("product", -1))
        elif any(part in name for part in ("all_gather", "reduce_scatter", "all_to_all", "broadcast")):
            self.log.append(("other", -1))
        return result

    def count(self, kind: str) -> int:
        return sum(event == kind for event, _ in self.log)

    def hidden(self) -> int:
        """How many all-reduces were under way while a matrix product ran."""
        started = {index: at for at, (kind, index) in enumerate(self.log) if kind == "start"}
        waited = {index: at for at, (kind, index) in reversed(list(enumerate(self.log))) if kind == "wait"}
        return sum(("product", -1) in self.log[at : waited[index]] for index, at in started.items())
