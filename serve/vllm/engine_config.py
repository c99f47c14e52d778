"""The settings of an engine that serves a rewired model: checked once, before any worker starts."""

from __future__ import annotations

from typing import Any

from vllm.config import CUDAGraphMode
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from .checks import check_features, check_shards, check_stages, check_windows, overlaps


class RewiredEngineConfig(VerifyAndUpdateConfig):
    """vLLM calls this for every model of our architecture."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Raise ValueError, in a sentence, where the model would compute something else than it should."""
        config, parallel = vllm_config.model_config.hf_config, vllm_config.parallel_config
        check_shards(config, parallel.tensor_parallel_size)
        check_windows(config)
        stages = parallel.pipeline_parallel_size
        check_stages(config, [get_pp_indices(config.num_hidden_layers, i, stages)[0] for i in range(1, stages)])
        check_features(
            config,
            parallel.tensor_parallel_size,
            drafts=vllm_config.speculative_config and vllm_config.speculative_config.method,
            quantization=vllm_config.model_config.quantization,
            loras=bool(vllm_config.lora_config),
            fully_sharded_loras=bool(vllm_config.lora_config and vllm_config.lora_config.fully_sharded_loras),
        )
        if overlaps(config) and any(module.overlapped for module in config.resolved_wiring.modules):
            _keep_reductions_in_one_graph(vllm_config.compilation_config)


def _keep_reductions_in_one_graph(compilation: Any) -> None:
    """Reductions are in flight across attention, where vLLM cuts a piecewise CUDA graph. Never run on a GPU.

    Without places to cut, vLLM falls back to no graphs at all where an attention backend or a KV connector can have no
    full ones, instead of to pieces.
    """
    if not current_platform.is_cuda_alike():
        return
    compilation.splitting_ops = []
    mode = compilation.cudagraph_mode
    if mode is None or mode.has_piecewise_cudagraphs():
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
