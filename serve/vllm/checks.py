"""What vLLM cannot be asked of a rewired model, in sentences. Without vLLM, so that they are tested where it is not."""

from __future__ import annotations

from typing import Any

from rewired.model.wiring import ModuleWiring

TESTED = "0.32"  # vLLM promises models no stable interface


def is_tested(version: str) -> bool:
    """Whether the plugin was tested with a vLLM of this version."""
    return version.split(".")[:2] == TESTED.split(".")


def check_shards(config: Any, ranks: int) -> None:
    """Raise ValueError unless a rank can hold exactly one of the shards that the model's function depends on."""
    if config.depends_on_shards and ranks != config.tp_shards:
        raise ValueError(
            f"--tensor-parallel-size is {ranks} and must be {config.tp_shards}: what this model computes depends on "
            f"its {config.tp_shards} logical shards (tp_shards in config.json), and in vLLM a rank holds one."
        )


def check_stages(config: Any, first_layers: list[int]) -> None:
    """Raise ValueError where a pipeline stage would begin in the midst of something that is local or in flight.

    `first_layers` are the layers that the stages after the first begin with.
    """
    for layer in first_layers:
        if not ends_dense(config.resolved_wiring.layers[layer - 1][1]):
            raise ValueError(
                f"A pipeline stage would begin with layer {layer}, where layer {layer - 1} has left something local or "
                "in flight that does not pass from stage to stage: cut elsewhere, with VLLM_PP_LAYER_PARTITION, or use "
                "--tensor-parallel-size alone."
            )


def ends_dense(wiring: ModuleWiring) -> bool:
    """Whether the stream after a module is what it is in a dense model: nothing is local, and nobody reads it stale."""
    return wiring.reduce == "all" and not wiring.overlapped
