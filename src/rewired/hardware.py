"""Machines: what their data sheets say, one TOML file each in the folder `hardware`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU and the nodes it comes in. Rates are per second and GPU, sizes in bytes."""

    name: str
    title: str
    flops: float  # 16-bit, dense
    memory_bandwidth: float
    memory: float
    gpus_per_node: int
    link_bandwidth: float  # within a node, in one direction
    network_bandwidth: float  # between nodes, in one direction
    computes_fp8: bool = True  # else it reads FP8 weights and multiplies in 16 bits
    measured: str | None = None  # its name in plan's collectives.csv
    device: str | None = None  # the GPU's name in CUDA


def names() -> list[str]:
    folder = files("rewired") / "hardware"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


@cache
def load(name: str) -> Hardware:
    """Raises ValueError for an unknown machine."""
    if name not in names():
        raise ValueError(f"There is no hardware '{name}': choose one of {', '.join(names())}.")
    sheet = tomllib.loads((files("rewired") / "hardware" / f"{name}.toml").read_text("utf-8"))
    link, network = sheet.pop("link"), sheet.pop("network")
    return Hardware(name, link_bandwidth=link["bandwidth"], network_bandwidth=network["bandwidth"], **sheet)


def of_device(device: str) -> Hardware | None:
    """The machine of the GPU that CUDA calls so; None of one that has no data sheet here."""
    return next((sheet for sheet in map(load, names()) if sheet.device == device), None)
