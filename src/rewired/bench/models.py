"""The models of a bench: every wiring on one set of weights, each rank holding its part, as transformers shares it out.

Models are built without weights, split by transformers' own rules, and then given tensors that all of them share. So
eight wirings take the memory of one, and each rank makes one weight at a time and keeps its part. On a grid, the stock
model is split in one dimension, as transformers can do it, and wirings in as many ways as they have blocks of channels.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.distributed import DistributedConfig
from transformers.distributed.fsdp import apply_fully_sharded_data_parallelism
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.initialization import no_tie_weights

from rewired.checkpoint.checkpoint import Checkpoint
from rewired.checkpoint.rewired_config import stock_config
from rewired.checkpoint.shape import family_in
from rewired.checkpoint.tensors import read_tensor
from rewired.families import classes, stock
from rewired.grid.meshes import grid_of, unfold
from rewired.grid.parallel import tp_plan
from rewired.grid.size import TpSize
from rewired.model.family import Family
from rewired.model.residual_stream import PeekGain
from rewired.model.sharding import on_this_rank

from .contenders import STOCK, Contender
from .request import BenchRequest

STD = 0.02  # of random weights: any that keep activations finite will do


class SharedWeights:
    """This rank's part of the weights, made when they are first asked for: random, or those of the checkpoint in
    `folder`, but for gains, which are ones.

    Raises ValueError for a checkpoint whose weights are not whole, or are quantised.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, folder: Path | None = None) -> None:
        self.dtype, self.device = dtype, device
        self.files = (
            {name: folder / info.file for name, info in Checkpoint.open(folder).tensors().items()} if folder else {}
        )
        self.tensors: dict[tuple[str, Any], torch.Tensor] = {}  # by name, and how they are split

    def fill(self, model: Any) -> None:
        """Give all parameters of `model`, which has none yet, their tensors."""
        tied: dict[int, nn.Parameter] = {}
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            module, _, attribute = name.rpartition(".")
            owner = model.get_submodule(module)
            if id(parameter) not in tied:
                tied[id(parameter)] = nn.Parameter(self._like(parameter, name, owner), requires_grad=False)
            setattr(owner, attribute, tied[id(parameter)])
        rotary = model.base_model.rotary_emb  # its buffers are in no state dict
        model.base_model.rotary_emb = type(rotary)(rotary.config).to(self.device)

    def _like(self, parameter: nn.Parameter, name: str, owner: nn.Module) -> torch.Tensor:
        key = name, _placements(parameter)
        if key not in self.tensors:
            if isinstance(owner, PeekGain):
                shape = on_this_rank(parameter).shape
                return split_as(parameter, torch.ones(shape, dtype=self.dtype, device=self.device))
            self.tensors[key] = self._made(parameter, name)
        return split_as(parameter, self.tensors[key])

    def _made(self, parameter: nn.Parameter, name: str) -> torch.Tensor:
        """This rank's part of the whole, which is the same however it is split."""
        whole = self._whole(name, parameter.shape)
        if not isinstance(parameter, DTensor):
            return whole
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local().clone()

    def _whole(self, name: str, shape: torch.Size) -> torch.Tensor:
        if self.files:
            tensor: torch.Tensor = read_tensor(self.files[name], name)
            return tensor.to(self.device, self.dtype)
        empty = torch.empty(shape, dtype=self.dtype, device=self.device)
        if len(shape) == 1:  # norms, and biases, whose value takes no time
            return empty.fill_(1)
        return empty.normal_(0, STD, generator=torch.Generator(self.device).manual_seed(zlib.crc32(name.encode())))


def build(
    contender: Contender,
    config: PreTrainedConfig,
    tp_shards: int,
    mesh: DeviceMesh | None,
    size: TpSize | None = None,
    fsdp: int = 1,
) -> Any:
    """The model of a contender, split over `mesh`, on a grid where `size` is one, and without weights.

    `fsdp` is how many ranks `shard` will then share the weights out over.
    """
    config = config_of(contender, config, tp_shards)
    with torch.device("meta"), no_tie_weights():  # a plan has the head's, too
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()
    if mesh is not None:
        plan = tp_plan(config, size, fsdp) if size and contender.name != STOCK else "auto"
        resolved = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size(), tp_plan=plan))[0]
        apply_tensor_parallelism(model, mesh, resolved)
    model.tie_weights()
    return model


def config_of(contender: Contender, config: PreTrainedConfig, tp_shards: int) -> PreTrainedConfig:
    """That of a contender, of the sizes of `config`."""
    if contender.name == STOCK:
        return config
    wired = {**config.to_dict(), "wiring": contender.entries, "tp_shards": tp_shards}
    rewired: PreTrainedConfig = classes(family(config), "Config")(**wired)
    return rewired


def sizes_of(config: Mapping[str, Any]) -> PreTrainedConfig:
    """The stock model's config, of that of a shape or of a checkpoint, rewired or not."""
    sizes: PreTrainedConfig = stock(family_in(config), "Config").from_dict(stock_config(config))
    return sizes


def family(config: PreTrainedConfig) -> Family:
    return family_in(config.to_dict())


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Share the weights out over `mesh`, as transformers does it by FSDP2; contenders no longer have them in common."""
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach())  # FSDP2 takes no tied one, which is tied again
    plan = model._resolve_parallel_plans(DistributedConfig(fsdp_size=mesh.size()))[2]
    meshes: Any = SimpleNamespace(get_mesh=lambda names: mesh)
    apply_fully_sharded_data_parallelism(model, meshes, plan, {})
    model.tie_weights()


def meshes_of(group: Any, request: BenchRequest, tp: TpSize) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Of tensor parallelism, and of FSDP2. Their groups, and those of a grid, are made once for a group."""
    mesh, fsdp_mesh = mesh_of(group, request.device), None
    if request.fsdp > 1:
        fsdp_mesh, mesh = unfold(mesh, fsdp=request.fsdp, tp=int(tp))
    if tp.y > 1:
        grid_of(mesh, tp.x, tp.y)
    return mesh if tp > 1 else None, fsdp_mesh


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


def _placements(parameter: torch.Tensor) -> Any:
    return parameter.placements if isinstance(parameter, DTensor) else None


def split_as(parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return tensor
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        tensor, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
