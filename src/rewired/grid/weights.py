"""How a layer's parameters are split over the ranks of a grid, as DTensors."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from rewired.model.family import Module

Split = dict[str, tuple[Placement, Placement]]  # how each parameter of a module is split, over Y and over X
READER: Split = {
    "weight": (Shard(1), Shard(0)),
    "bias": (Replicate(), Shard(0)),
    "lora_A": (Shard(1), Replicate()),
    "lora_B": (Replicate(), Shard(0)),
}
WRITER: Split = {
    "weight": (Shard(0), Shard(1)),
    "bias": (Shard(0), Replicate()),
    "lora_A": (Replicate(), Shard(1)),
    "lora_B": (Shard(0), Replicate()),
}
NORM: Split = {"weight": (Shard(0), Replicate())}
GAIN: Split = {"weight": (Shard(1), Shard(0))}


def parts(layer: nn.Module, names: Module) -> Iterator[tuple[nn.Module, Split]]:
    """The modules of a layer whose parameters are split, and how. What is inside an attention, ranks hold whole."""
    stock = layer.get_submodule(names.path)
    yield layer.get_submodule(names.norm), NORM
    yield stock.get_submodule(names.writer.name), WRITER
    for reader in names.readers:
        yield stock.get_submodule(reader.name), READER
    if (gain := getattr(layer, names.gain)) is not None:
        yield gain, GAIN


def split(module: nn.Module, placements: Split, mesh: DeviceMesh, blocks: int) -> None:
    """Split a module's parameters; of one that PEFT has wrapped, its base layer's and the adapters'."""
    for name, parameter in list(module.named_parameters()):
        path, _, attribute = name.rpartition(".")
        kind = path.split(".")[0] if path.startswith("lora_") else attribute
        over_y, over_x = placements[kind]
        if isinstance(over_y, Shard) and blocks > 1:
            over_y = _StridedShard(over_y.dim, split_factor=blocks)
        own = distribute_tensor(parameter, mesh, (over_y, over_x), src_data_rank=None)
        held = nn.Parameter(own, requires_grad=parameter.requires_grad)
        if blocks > 1:
            held._spec = _InBlocks(mesh, own.placements, own._spec.tensor_meta)  # type: ignore[attr-defined]
        setattr(module.get_submodule(path), attribute, held)


class _InBlocks(DTensorSpec):
    """Hides from FSDP2 that a weight is split already.

    FSDP2 keeps replicas, too. Then it notes its one rank as another split, after Y's, and transformers would read other
    rows.
    """

    @property
    def num_shards_map(self) -> list[int]:
        return [1] * self.ndim
