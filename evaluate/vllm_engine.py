"""vLLM as what runs tasks: lm-evaluation-harness's own backend for it, on a model as we have opened it.

vLLM starts its ranks itself, in processes of their own. It finds the plugin for rewired checkpoints by an entry point.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rewired.vllm_start import starting

from .harness import SEED
from .models import Model

_CPU_CACHE = 4 << 30  # bytes of a rank's keys and values; VLLM_CPU_KVCACHE_SPACE says otherwise
_ALL = str(1 << 30)
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM has kernels for


def check(models: Sequence[Model], device_type: str, dtype: str, ranks: int) -> None:
    """Raise ValueError, before anything is loaded, where vLLM refuses one of the models on so many ranks."""
    for model in models:
        with starting(model.name):
            from vllm.engine.arg_utils import EngineArgs

            EngineArgs(model=str(model.folder), **_options(model, dtype, ranks)).create_engine_config()
    from vllm.platforms import current_platform

    if current_platform.device_type != device_type:
        raise ValueError(f"This vLLM runs on {current_platform.device_type}, and not on {device_type}: see --device.")


@contextmanager
def askable(model: Model, tokenizer_of: Model, dtype: str, ranks: int, batch_size: str) -> Iterator[Any]:
    """The model as the harness asks it; vLLM's processes end with the context. Raises ValueError where vLLM
    refuses it.
    """
    with starting(model.name):
        from lm_eval.models.vllm_causallms import VLLM

        asked = VLLM(
            str(model.folder),
            tokenizer=str(tokenizer_of.folder),
            batch_size=_batch_size(batch_size),
            seed=SEED,
            lora_local_path=model.adapter and str(model.adapter),
            **_options(model, dtype, ranks),
        )
    try:
        yield asked
    finally:
        asked.model.llm_engine.engine_core.shutdown()


def _batch_size(asked: str) -> str:
    """`auto` is all requests at once, with vLLM's own bar, which divides by zero where bars are turned off."""
    return _ALL if asked == "auto" and "TQDM_DISABLE" in os.environ else asked


def _options(model: Model, dtype: str, ranks: int) -> dict[str, Any]:
    """Of vLLM's engine."""
    options: dict[str, Any] = {"dtype": dtype, "tensor_parallel_size": ranks}
    if not torch.cuda.is_available():  # where vLLM would take nearly all memory
        options["kv_cache_memory_bytes"] = _CPU_CACHE
    if model.adapter is not None:
        rank = json.loads((model.adapter / "adapter_config.json").read_text())["r"]
        options |= {"enable_lora": True, "max_lora_rank": next((each for each in _LORA_RANKS if each >= rank), rank)}
    return options
