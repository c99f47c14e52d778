"""Keys of TRL's and transformers' that `adapt` does not honour and therefore refuses, each with the reason."""

from __future__ import annotations

ONE_WAY_TO_SHARD = "models are sharded by fsdp_size, dp_replicate_size and tp_size"
_MEASURES = "there is no evaluation loss: eval_steps alone measures the divergence from the original"
_REASONS = {
    "fsdp fsdp_config deepspeed parallelism_config": ONE_WAY_TO_SHARD,
    "dataset_text_field dataset_kwargs": "rows are read by their form, as docs/adapt.md says",
    "do_eval do_predict do_train eval_delay eval_on_start eval_packing eval_accumulation_steps": _MEASURES,
    "eval_strategy eval_do_concat_batches eval_use_gather_object batch_eval_metrics": _MEASURES,
    "bf16_full_eval fp16_full_eval per_device_eval_batch_size prediction_loss_only": _MEASURES,
    "include_for_metrics label_names load_best_model_at_end metric_for_best_model greater_is_better": _MEASURES,
    "push_to_hub hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token": (
        "what is to be uploaded is the folder `final`, when it is there"
    ),
    "completion_only_loss": "assistant_only_loss says what is learnt of a conversation",
    "eos_token": "a chat template or the tokenizer says how a document ends",
    "gradient_checkpointing gradient_checkpointing_kwargs": "its name begins with activation now",
    "ignore_data_skip": "--resume goes on with the rows that come next",
    "use_liger_kernel liger_kernel_config": "liger-kernel knows no rewired model, nor the losses against the original",
    "length_column_name": "the lengths of rows are known",
    "packing_strategy": "documents are packed whole, which is bfd",
    "padding_free": "packing leaves no padding",
    "resume_from_checkpoint": "--resume goes on from the last checkpoint",
    "router_aux_loss_coef": "a dense model routes nothing",
    "save_on_each_node": "all machines write to one folder of a file system that they share",
    "save_only_model": "a checkpoint that --resume goes on from has the optimizer's moments, too",
    "truncation_mode": "what is too long is cut at its end",
    "trust_remote_code": "a rewired model's code is installed, and nothing fetched is run",
    "use_cache": "nothing is cached where it trains",
}
UNSUPPORTED = {key: reason for keys, reason in _REASONS.items() for key in keys.split()}
