"""The config for DeepSpeed, read as accelerate reads it; DeepSpeed itself is not installed here."""

from __future__ import annotations

from pathlib import Path

from accelerate.utils.deepspeed import HfDeepSpeedConfig

CONFIG = Path(__file__).parents[2] / "recipes" / "deepspeed" / "zero-plus-plus.json"


def test_the_config_for_deepspeed_turns_on_all_three_parts_of_zero_plus_plus() -> None:
    config = HfDeepSpeedConfig(str(CONFIG))
    assert config.is_zero3() and not config.is_offload()
    assert config.is_true("zero_optimization.zero_quantized_weights")
    assert config.is_true("zero_optimization.zero_quantized_gradients")
    assert config.get_value("zero_optimization.zero_hpz_partition_size") == 8  # GPUs of a node
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    assert all(config.get_value(name) == "auto" for name in sizes)  # TRL's
