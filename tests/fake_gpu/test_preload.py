"""What ranks preload leaves CUDA alone: a process that is forked from one that has initialised it cannot use it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from rewired.ranks import PRELOADED


def who_asks_for_a_driver(program: str) -> set[str]:
    """Libraries that ask the loader for CUDA's driver, which need not be there."""
    environment = {**os.environ, "LD_DEBUG": "files"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # which hides GPUs from torch before it asks
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return set(re.findall(r"file=libcuda\.so\.1 .*/(\S+)", found.stderr))


def test_what_ranks_preload_asks_for_no_more_than_torch() -> None:
    ours = PRELOADED[0]  # behind it stands what tests need
    assert who_asks_for_a_driver(f"import {ours}") == who_asks_for_a_driver("import torch")


def test_counting_gpus_asks_for_more() -> None:
    assert who_asks_for_a_driver("import torch; torch.cuda.device_count()") > who_asks_for_a_driver("import torch")
