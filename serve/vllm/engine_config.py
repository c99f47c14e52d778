"""The settings of an engine that serves a rewired model: checked once, before any worker starts."""

from __future__ import annotations

from typing import Any

from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from .checks import check_shards, check_stages


class RewiredEngineConfig(VerifyAndUpdateConfig):
    """vLLM calls this for every model of our architecture."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Raise ValueError, in a sentence, where the model would compute something else than it should."""
        config, parallel = vllm_config.model_config.hf_config, vllm_config.parallel_config
        check_shards(config, parallel.tensor_parallel_size)
        stages = parallel.pipeline_parallel_size
        check_stages(config, [get_pp_indices(config.num_hidden_layers, i, stages)[0] for i in range(1, stages)])
