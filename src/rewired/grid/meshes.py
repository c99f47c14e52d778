"""The ranks of a mesh in several dimensions: those of a grid, and those that FSDP2 and tensor parallelism share."""

from __future__ import annotations

from functools import cache

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh


def grid_of(mesh: DeviceMesh, x: int, y: int) -> DeviceMesh:
    """Rank x + X * y of a mesh at (y, x), in two dimensions."""
    return _unfolded(mesh, y=y, x=x)


def unfold(mesh: DeviceMesh, **sizes: int) -> tuple[DeviceMesh, ...]:
    """The mesh of each dimension of so many ranks, the outermost first."""
    return axes(_unfolded(mesh, **sizes))


def axes(mesh: DeviceMesh) -> tuple[DeviceMesh, ...]:
    return tuple(mesh[name] for name in mesh.mesh_dim_names or ())


@cache
def _unfolded(mesh: DeviceMesh, **sizes: int) -> DeviceMesh:
    """Dimensions are named after the mesh's own. Its groups talk as the mesh's own does, and are made once."""
    (own,) = mesh.mesh_dim_names or ("ranks",)
    names = tuple(f"{own}_{name}" for name in sizes)
    backend = distributed.get_backend(mesh.get_group())
    return mesh._unflatten(0, tuple(sizes.values()), names, backend_override=dict.fromkeys(names, backend))
