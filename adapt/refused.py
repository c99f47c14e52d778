"""Keys that are TRL's or transformers', and that `adapt` would not honour: refused, each with why."""

from __future__ import annotations

import os

from trl import SFTConfig

_ONE_WAY_TO_SHARD = "models are sharded by fsdp_size, dp_replicate_size and tp_size"
_OWN_DATA = "rows are read by their form, as docs/adapt.md says"
_MEASURES = "there is no evaluation loss: eval_steps alone measures the divergence from the original"

NEVER: dict[str, str] = {
    "fsdp": _ONE_WAY_TO_SHARD,
    "fsdp_config": _ONE_WAY_TO_SHARD,
    "deepspeed": _ONE_WAY_TO_SHARD,
    "parallelism_config": _ONE_WAY_TO_SHARD,
    "dataset_text_field": _OWN_DATA,
    "dataset_kwargs": _OWN_DATA,
    "completion_only_loss": "assistant_only_loss says what is learnt of a conversation",
    "eos_token": "a chat template or the tokenizer says how a document ends",
    "eval_packing": _MEASURES,
    "eval_strategy": _MEASURES,
    "eval_on_start": _MEASURES,
    "load_best_model_at_end": _MEASURES,
    "packing_strategy": "documents are packed whole, which is bfd",
    "truncation_mode": "what is too long is cut at its end",
    "push_to_hub": "what is to be uploaded is the folder `final`, when it is there",
    "resume_from_checkpoint": "--resume goes on from the last whole checkpoint",
    "save_only_model": "a checkpoint that --resume goes on from has the optimizer's moments, too",
    "save_on_each_node": "all machines write to one folder of a file system that they share",
}


def check_launch() -> None:
    """Raise ValueError where `accelerate launch` was told to shard the model: the original would be left out of it."""
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_PARALLELISM_CONFIG"):
        if os.environ.get(name, "false").lower() == "true":
            raise ValueError(
                f"accelerate's config shards the model ({name}), and {_ONE_WAY_TO_SHARD}: launch with one of "
                "recipes/accelerate, and give these."
            )


def check(config: SFTConfig) -> None:
    """Raise ValueError for what is no part of losses against the original, or would spoil them."""
    if config.loss_type != "nll":
        raise ValueError(
            f"loss_type is '{config.loss_type}', and the losses against the original are not: leave it out."
        )
    if config.label_smoothing_factor:
        raise ValueError("label_smoothing_factor is no part of the losses against the original: leave it out.")
    if config.neftune_noise_alpha:
        raise ValueError("neftune_noise_alpha: the original would read the noise, too: leave it out.")
