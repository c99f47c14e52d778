"""A model's communication, as a recipe's `comm` says: what stands in the place of FSDP2's own, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

from .gradients import GradientScatter
from .nodes import Nodes
from .options import DIFFERENCES, Comm
from .packing import Layout, Packing
from .weights import DifferenceGather, WeightGather


class Communication:
    """Sends the weights and gradients of a model that transformers has sharded by FSDP2.

    What ranks that share a layer send each other, and replicas of the model, goes its own way.
    """

    def __init__(self, model: nn.Module, comm: Comm, nodes: Nodes) -> None:
        self.trained = dict[str, WeightGather]()
        self.gradients = dict[str, GradientScatter]()
        layers = list(_layers(model))
        for name, module, group in layers:
            parameters = [_entry(parameter) for parameter in group.fsdp_params]
            is_trained = any(parameter.requires_grad for parameter, _, _ in parameters)
            gather = _gather(comm, nodes, _layout(parameters), is_trained)
            module.set_custom_all_gather(gather)
            if is_trained:
                trained = [entry for entry in parameters if entry[0].requires_grad]
                self.trained[name] = gather
                self.gradients[name] = GradientScatter(nodes, _layout(trained), comm, partial(_read_at_once, group))
                module.set_custom_reduce_scatter(self.gradients[name])
        gather_ahead([module for _, module, group in layers if group.device.type == "cpu"])

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Gather weights anew after each of the optimizer's steps."""
        optimizer.register_step_post_hook(lambda *_: self.weights_changed())

    def at(self, done: float) -> None:
        """So much of the training is done."""
        for scatter in self.gradients.values():
            scatter.done = done

    def weights_changed(self) -> None:
        for gather in self.trained.values():
            gather.forget()

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """What error feedback and differences remember on this rank; a training is resumed with it."""
        errors = {name: one.error.clone() for name, one in self.gradients.items() if one.error is not None}
        replicas = {name: one.state() for name, one in self._differences().items()}
        return {"errors": errors, "replicas": {name: one for name, one in replicas.items() if one is not None}}

    def load_state_dict(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """All ranks have to call this."""
        for name, error in state["errors"].items():
            self.gradients[name].error = error
        for name, replica in state["replicas"].items():
            self._differences()[name].resume(replica)

    def _differences(self) -> dict[str, DifferenceGather]:
        return {name: one for name, one in self.trained.items() if isinstance(one, DifferenceGather)}


def _gather(comm: Comm, nodes: Nodes, layout: Layout, is_trained: bool) -> WeightGather:
    if not is_trained:
        return WeightGather(nodes, None, comm.gather_frozen == "once")
    if comm.weights != DIFFERENCES:
        kept = Packing("bf16", layout) if comm.secondary_shard == "bf16" else None
        return WeightGather(nodes, Packing(comm.weights, layout), comm.secondary_shard != "none", kept)
    if nodes.count == 1:  # what would come of differences between nodes
        return WeightGather(nodes, Packing("bf16", layout), keeps=True)
    return DifferenceGather(nodes, layout)


def gather_ahead(modules: Sequence[Any]) -> None:
    """Let each module begin the gather of the next one, in the order of execution, before it computes (AxoNN's OAG).

    On GPUs FSDP2's streams do so. On CPUs it waits for each gather, unless it is asked for asynchronous ones.
    """
    for module in modules:
        module._set_unshard_async_op(True)
    for module, following in pairwise(modules):
        module.set_modules_to_forward_prefetch([following])


def _read_at_once(group: Any, dtype: torch.dtype) -> bool:
    """Whether FSDP2 reads a layer's reduced gradients, of this dtype, before backward ends: to cast them, to add them
    to others, for hooks or for replicas. It divides them only where it asks for their plain sum."""
    weights = [parameter.sharded_param for parameter in group.fsdp_params]
    has_replicas = isinstance(group.mesh_info, DDPMeshInfo)
    if torch._C._current_graph_task_id() == -1 or dtype != group._orig_dtype or has_replicas:
        return True
    return any(weight.grad is not None or weight._post_accumulate_grad_hooks for weight in weights)


_Entry = tuple[nn.Parameter, int, bool]  # a parameter, the numbers of its padded shard, whether it is a matrix


def _layers(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """The modules that FSDP2 gathers one by one, in the order of execution, as models register them, and its group of
    the parameters of each.

    Only FSDP2's own list of them has modules that were grouped.
    """
    seen = set[int]()
    for name, module in model.named_modules():
        for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ():
            if id(group) not in seen:
                seen.add(id(group))
                yield name, module, group


def _entry(parameter: Any) -> _Entry:
    """FSDP2 learns only in the first forward of weights that took the place of those that it sharded, as loading does:
    whether one is trained, the module knows."""
    owner, name = parameter._module_info.module, parameter._module_info.param_name
    is_matrix = isinstance(owner, nn.Linear | nn.Embedding) and name == "weight"
    return getattr(owner, name), parameter.padded_sharded_param_size.numel(), is_matrix


def _layout(entries: list[_Entry]) -> Layout:
    return Layout(tuple(numbers for _, numbers, _ in entries), tuple(is_matrix for _, _, is_matrix in entries))
