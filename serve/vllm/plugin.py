"""What vLLM calls in each of its processes before it looks at a model: rewired checkpoints are known from then on."""

from __future__ import annotations

from rewired.families import FAMILIES  # importing rewired lets AutoConfig know our configs, without trust_remote_code

from .checks import TESTED, is_tested


def register() -> None:
    """Name the model, and what checks its engine's settings. The model itself is imported where it is served.

    In an untested vLLM it stays unknown, and our transformers model refuses vLLM's Transformers backend.
    """
    import vllm
    from vllm.logger import init_logger

    if not is_tested(vllm.__version__):
        init_logger("vllm.plugins.rewired").warning(
            "This is vLLM %s: rewired models are served by vLLM %s only, and not by this one.",
            vllm.__version__,
            " and ".join(TESTED),
        )
        return
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from .engine_config import RewiredEngineConfig

    for family in FAMILIES.values():
        architecture = f"Rewired{family.architecture}"
        ModelRegistry.register_model(architecture, f"rewired.serve.vllm.families:{architecture}")
        MODELS_CONFIG_MAP[architecture] = RewiredEngineConfig
