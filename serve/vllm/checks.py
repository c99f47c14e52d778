"""What vLLM cannot be asked of a rewired model, in sentences. Without vLLM, so that they are tested where it is not."""

from __future__ import annotations

from typing import Any

from rewired.model.family import Linear
from rewired.model.wiring import ModuleWiring

TESTED = ("0.31", "0.32")  # vLLM promises models no stable interface


# methods of speculative decoding that read tokens only, or hidden states that a rewired model gives
SAFE_DRAFTS = ("draft_model", "ngram", "ngram_gpu", "suffix", "eagle3")


def is_tested(version: str) -> bool:
    """Whether the plugin was tested with a vLLM of this version."""
    return ".".join(version.split(".")[:2]) in TESTED


def overlaps(config: Any) -> bool:
    """Whether all-reduces hide behind the next module where the wiring lets them: a switch to compare speeds with.

    `hf_overrides={"overlap": False}` turns it off, "nccl" leaves them to NCCL; what the model computes stays the same.
    """
    return bool(getattr(config, "overlap", True))


def overlaps_by_engine(config: Any) -> bool:
    """Whether those that hide are the engine's own on a GPU, rather than NCCL's."""
    return getattr(config, "overlap", True) is True


def check_shards(config: Any, ranks: int) -> None:
    """Raise ValueError unless each rank can hold as many of the shards that the model's function depends on."""
    if config.depends_on_shards and config.tp_shards % ranks:
        raise ValueError(
            f"--tensor-parallel-size is {ranks} and must divide {config.tp_shards}: what this model computes depends "
            f"on its {config.tp_shards} logical shards (tp_shards in config.json), and every rank holds as many."
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


def check_windows(config: Any) -> None:
    """Raise ValueError where only some layers see a window of tokens; vLLM's own Qwen models assert that none does."""
    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        raise ValueError(
            "Only some layers of this model have a sliding window, which is not served in vLLM: run it with "
            "transformers, by rewired generate."
        )


def check_features(
    config: Any, ranks: int, drafts: str | None, quantization: str | None, loras: bool, fully_sharded_loras: bool
) -> None:
    """Raise ValueError for what would make another model of a rewired one, or was never tried with one.

    `drafts` is the method of speculative decoding, None without.
    """
    if loras and config.depends_on_shards and ranks != config.tp_shards:
        raise ValueError(
            f"LoRA adapters need a rank for each of the {config.tp_shards} shards that this model's function depends "
            f"on: give --tensor-parallel-size {config.tp_shards}, or merge the adapter."
        )
    if drafts not in (None, *SAFE_DRAFTS):
        raise ValueError(
            f"Speculative decoding by '{drafts}' was never tried with a rewired model: use a draft model of its own, "
            f"or one of {', '.join(SAFE_DRAFTS[1:])}."
        )
    is_quantised = getattr(config, "quantization_config", None) is not None
    if quantization is not None and not is_quantised:
        raise ValueError(
            f"Rewired models are not quantised while they load: leave out {quantization}, and quantise the checkpoint "
            "first (docs/quantise.md)."
        )
    if is_quantised and (ranks > 1 or config.depends_on_shards) and _writers_with_bias(config):
        raise ValueError(
            "The modules' outputs of this quantised model have biases, which vLLM's kernels rewrite: run it with "
            "transformers, by rewired generate."
        )
    if fully_sharded_loras and config.depends_on_shards:
        raise ValueError(
            "Fully sharded LoRA adapters give other partial sums than the ranks' own, and what this model computes "
            "depends on those: leave out --fully-sharded-loras."
        )


def has_bias(config: Any, linear: Linear) -> bool:
    return bool(getattr(config, linear.bias, False) if isinstance(linear.bias, str) else linear.bias)


def _writers_with_bias(config: Any) -> list[Linear]:
    return [module.writer for module in config.family.modules if has_bias(config, module.writer)]


def ends_dense(wiring: ModuleWiring) -> bool:
    """Whether the stream after a module is what it is in a dense model: nothing is local, and nobody reads it stale."""
    return wiring.reduce == "all" and not (wiring.overlapped or wiring.keeps or wiring.keeps_rest)
