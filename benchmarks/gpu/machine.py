"""The machine and its packages: what they are, and why they may not do."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "accelerate", "trl", "datasets", "liger-kernel", "flash-attn")
NEEDED = (5, 23)  # of transformers


def problem(device: str) -> str | None:
    """Why nothing can be run here, None if it can."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU here; make gpu DEVICE=cpu tries everything with tiny shapes."
    found = installed("transformers")
    if found is None or tuple(map(int, found.split(".")[:2])) < NEEDED:
        wanted = ".".join(map(str, NEEDED))
        return f"transformers {wanted} is needed and {found or 'none'} is here: CONTRIBUTING.md says how to bring it."
    return None


def environment(device: str) -> dict[str, Any]:
    """Without touching the GPU, whose memory is the parts'."""
    import torch

    facts: dict[str, Any] = {"date": date.today().isoformat(), "device": f"{platform.machine()} CPU"}
    if device == "cuda":
        names = ("name", "driver_version", "memory.total")
        query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
        if shutil.which("nvidia-smi"):
            told = subprocess.run(query, capture_output=True, text=True).stdout.strip().split(", ")
            facts |= dict(zip(("device", "driver", "memory"), told, strict=False))
        facts |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    packages = {name: installed(name) or "not installed" for name in PACKAGES}
    return {**facts, "cpus": os.cpu_count(), "python": platform.python_version(), **packages}


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
