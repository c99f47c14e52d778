"""The machine and the software of a measurement."""

from __future__ import annotations

import os
import platform
from datetime import date
from importlib.metadata import version
from typing import Any

import torch

from rewired import __version__


def environment(device: str) -> dict[str, Any]:
    """As results.json records it."""
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU",
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "rewired": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        **(
            {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
            if device == "cuda"
            else {}
        ),
    }
