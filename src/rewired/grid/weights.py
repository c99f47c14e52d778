"""How a layer's parameters are split over the ranks of a grid, as DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.distributed import fsdp

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


def split(module: nn.Module, placements: Split, mesh: DeviceMesh, blocks: int, fsdp_size: int) -> None:
    """Split a module's parameters; of one that PEFT has wrapped, its base layer's and the adapters'.

    Where Y takes its part of each of several blocks, FSDP2 has to share out these blocks: `split_fsdp2_in_blocks`.
    """
    for name, parameter in list(module.named_parameters()):
        path, _, attribute = name.rpartition(".")
        kind = path.split(".")[0] if path.startswith("lora_") else attribute
        over_y, over_x = placements[kind]
        side = over_y.dim if isinstance(over_y, Shard) and blocks > 1 else None
        first = over_y if side is None else _in_blocks(side, blocks)
        own = distribute_tensor(parameter, mesh, (first, over_x), src_data_rank=None)
        held = nn.Parameter(own, requires_grad=parameter.requires_grad)
        if side is not None:
            behind_fsdp2 = _in_blocks(side, blocks // fsdp_size), over_x
            held._spec = _InBlocks(mesh, behind_fsdp2, own._spec.tensor_meta)  # type: ignore[attr-defined]
        setattr(module.get_submodule(path), attribute, held)


def _in_blocks(dim: int, blocks: int) -> Placement:
    return _StridedShard(dim, split_factor=blocks) if blocks > 1 else Shard(dim)


class _InBlocks(DTensorSpec):
    """How Y splits a weight of which FSDP2 has given each rank some blocks: it takes its part of each.

    FSDP2 asks how many ranks split a side already. Of this side it is told none, as blocks come first.
    """

    @property
    def side(self) -> int:
        dim: int = self.placements[0].dim  # type: ignore[attr-defined]
        return dim

    @property
    def num_shards_map(self) -> list[int]:
        of_sides = list(super().num_shards_map)
        of_sides[self.side] = 1
        return of_sides


def split_fsdp2_in_blocks() -> None:
    """Have FSDP2 split the side of a weight that Y splits, where transformers applies it. Others it splits as ever.

    Torch 2.13 cannot gather a weight of which Y splits one side in blocks, and FSDP2 the other, which X splits, too.
    """
    fsdp.fully_shard = partial(fully_shard, shard_placement_fn=_side_in_blocks)  # type: ignore[assignment]


def _side_in_blocks(parameter: nn.Parameter) -> Shard | None:
    spec = getattr(parameter, "_spec", None)
    return Shard(spec.side) if isinstance(spec, _InBlocks) else None
