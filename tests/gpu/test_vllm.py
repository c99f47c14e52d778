"""vLLM on GPUs: its tokens are transformers' but for ties, in CUDA graphs, overlapped by vLLM's sums and by NCCL's.

Never run on a GPU yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.serve.vllm.models import WIRINGS, answers, regret, save

pytestmark = pytest.mark.gpu
BFLOAT16 = {"dtype": "bfloat16", "enforce_eager": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "overlap by NCCL": {"hf_overrides": {"overlap": "nccl"}},
    "no overlap": {"hf_overrides": {"overlap": False}},
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_those_that_transformers_prefers(ranks: int, device: str, tmp_path: Path) -> None:
    if device == "cpu" or torch.cuda.device_count() < ranks:
        pytest.skip(f"needs as many GPUs as ranks: {ranks}")
    names = ("standard", "ladder", "ladder-peek", "desync-3x-overlap", "mixed")
    models = {name: save(tmp_path / name, WIRINGS[name], ranks, dtype=torch.bfloat16) for name in names}
    jobs = {
        f"{name}, {setting}": {"model": str(model)} | BFLOAT16 | options
        for name, model in models.items()
        for setting, options in SETTINGS.items()
    }
    for job, found in answers(jobs, tmp_path / "engine", ranks).items():
        assert not isinstance(found, str), f"{job}: {found}"
        assert regret(models[job.partition(",")[0]], found) < 0.1, job
