"""The models of a bench: every wiring on one set of weights, each rank holding its part, as transformers shares it out.

Models are built without weights, split by transformers' own rules, and then given tensors that all of them share. So
eight wirings take the memory of one, and random weights of any shape are made on the ranks that hold them.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from rewired.families import classes, family_of, stock
from rewired.loading import loading
from rewired.model.family import Family
from rewired.model.residual_stream import PeekGain
from rewired.model.sharding import on_this_rank

from .contenders import STOCK, Contender

STD = 0.02  # of random weights: any that keep activations finite will do


class SharedWeights:
    """This rank's part of the weights, by name, made when they are first asked for: random, or a checkpoint's."""

    def __init__(self, dtype: torch.dtype, device: torch.device, rank: int) -> None:
        self.dtype, self.device, self.rank = dtype, device, rank
        self.tensors: dict[str, torch.Tensor] = {}

    def load(self, folder: Path, config: PreTrainedConfig, ranks: int) -> None:
        """Take those of the checkpoint in `folder`, of as many layers as `config` has; its gains stay what they are."""
        distributed = DistributedConfig(tp_size=ranks, tp_plan="auto") if ranks > 1 else None
        with loading(f"{folder} cannot be loaded"):
            model = stock(_family(config), "ForCausalLM").from_pretrained(
                folder, config=config, use_safetensors=True, dtype=self.dtype, distributed_config=distributed
            )
        model = model.to(self.device)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.tensors[name] = on_this_rank(parameter).detach()

    def fill(self, model: Any, mesh: DeviceMesh | None) -> None:
        """Give all parameters of `model`, which has none yet, their tensors."""
        tied: dict[int, nn.Parameter] = {}
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            module, _, attribute = name.rpartition(".")
            owner = model.get_submodule(module)
            if id(parameter) not in tied:
                tied[id(parameter)] = nn.Parameter(self._like(parameter, name, owner, mesh), requires_grad=False)
            setattr(owner, attribute, tied[id(parameter)])
        rotary = model.base_model.rotary_emb  # its buffers are in no state dict
        model.base_model.rotary_emb = type(rotary)(rotary.config).to(self.device)

    def _like(self, parameter: nn.Parameter, name: str, owner: nn.Module, mesh: DeviceMesh | None) -> torch.Tensor:
        shape = on_this_rank(parameter).shape
        if name not in self.tensors:
            if isinstance(owner, PeekGain):
                return _on_mesh(torch.ones(shape, dtype=self.dtype, device=self.device), parameter, mesh)
            self.tensors[name] = self._random(name, shape, isinstance(parameter, DTensor))
        return _on_mesh(self.tensors[name], parameter, mesh)

    def _random(self, name: str, shape: torch.Size, is_split: bool) -> torch.Tensor:
        if len(shape) == 1:  # norms, and biases, whose value takes no time
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        seed = zlib.crc32(name.encode()) + (1 + self.rank if is_split else 0)  # ranks agree on what is not split
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0, STD, generator=generator)


def build(contender: Contender, config: PreTrainedConfig, tp_shards: int, mesh: DeviceMesh | None) -> Any:
    """The model of a contender, split over `mesh` and without weights."""
    config = config_of(contender, config, tp_shards)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()
    if mesh is not None:
        plan = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size(), tp_plan="auto"))[0]
        apply_tensor_parallelism(model, mesh, plan)
    return model


def config_of(contender: Contender, config: PreTrainedConfig, tp_shards: int) -> PreTrainedConfig:
    """That of a contender, of the sizes of `config`."""
    if contender.name == STOCK:
        return config
    wired = {**config.to_dict(), "wiring": contender.entries, "tp_shards": tp_shards}
    rewired: PreTrainedConfig = classes(_family(config), "Config")(**wired)
    return rewired


def _family(config: PreTrainedConfig) -> Family:
    family = family_of(config.model_type)
    assert family is not None, "the checkpoint was opened"
    return family


def mesh_of(group: Any, device_type: str) -> DeviceMesh:
    """The ranks of a process group, as transformers takes them.

    Its name makes it another mesh than that of another link: DTensor takes equal ones for the same, and would send what
    is for the second over the first.
    """
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=(group.group_name,))


def silent_group() -> Any:
    """A process group whose collectives return at once and move nothing."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend

    return distributed.new_group(backend="fake")


def _on_mesh(tensor: torch.Tensor, parameter: nn.Parameter, mesh: DeviceMesh | None) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return tensor
    assert mesh is not None, "only a model on a mesh is split"
    return DTensor.from_local(
        tensor, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
