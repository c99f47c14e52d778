"""What vLLM cannot be asked of a rewired model is refused in a sentence. Without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rewired.serve.vllm.checks import (
    check_features,
    check_shards,
    check_stages,
    check_windows,
    is_tested,
    overlaps,
    overlaps_by_engine,
)
from tests.rewired.tiny import WIRINGS, rewired_config


@pytest.mark.parametrize(
    ("version", "tested"),
    [("0.31.0", True), ("0.32.1+cpu", True), ("0.30.0", False), ("0.33.0", False), ("1.0", False)],
)
def test_only_tested_versions_are_served(version: str, tested: bool) -> None:
    assert is_tested(version) == tested


def test_ranks_hold_as_many_shards_where_the_function_depends_on_shards() -> None:
    config = rewired_config(WIRINGS["desync-2x"], tp_shards=4)
    for ranks in (1, 2, 4):
        check_shards(config, ranks)
    with pytest.raises(ValueError, match=r"--tensor-parallel-size is 3 and must divide 4: .* its 4 logical shards"):
        check_shards(config, 3)


def test_adapters_need_a_rank_for_each_shard() -> None:
    config = rewired_config(WIRINGS["desync-2x"], tp_shards=4)
    check_features(config, **NOTHING | {"ranks": 4, "loras": True})
    with pytest.raises(ValueError, match=r"^LoRA adapters need a rank for each of the 4 shards .*size 4, or merge"):
        check_features(config, **NOTHING | {"ranks": 2, "loras": True})


@pytest.mark.parametrize("name", ["standard", "parallel", "ladder"])
def test_other_wirings_run_on_any_number_of_ranks(name: str) -> None:
    check_shards(rewired_config(WIRINGS[name], tp_shards=4), 2)


LADDER_IN_THE_MIDDLE = [{"layers": "2-4", "preset": "ladder"}]  # of six layers


@pytest.mark.parametrize(
    ("wiring", "layer"),
    [
        (LADDER_IN_THE_MIDDLE, 1),
        (LADDER_IN_THE_MIDDLE, 4),
        (LADDER_IN_THE_MIDDLE, 5),
        (WIRINGS["parallel"], 2),
        ([{"layers": "0-6", "preset": "desync", "every": 4}], 2),
    ],
)
def test_a_stage_may_begin_where_the_stream_is_that_of_a_dense_model(wiring: Any, layer: int) -> None:
    check_stages(rewired_config(wiring, tp_shards=4), [layer])


@pytest.mark.parametrize(
    ("wiring", "layer"),
    [
        (LADDER_IN_THE_MIDDLE, 2),  # the first ladder layer reads the stream without the update before it
        (LADDER_IN_THE_MIDDLE, 3),
        ([{"layers": "0-6", "preset": "desync", "every": 4}], 1),
        (WIRINGS["partial"], 3),
    ],
)
def test_a_stage_may_not_begin_with_something_local_or_in_flight(wiring: Any, layer: int) -> None:
    with pytest.raises(ValueError, match=f"would begin with layer {layer}, where layer {layer - 1} has left something"):
        check_stages(rewired_config(wiring, tp_shards=4), [layer])


LADDER = rewired_config(WIRINGS["ladder"])
PEEK = rewired_config(WIRINGS["ladder-peek"])
NOTHING: dict[str, Any] = {
    "ranks": 4,
    "loras": False,
    "drafts": None,
    "quantization": None,
    "fully_sharded_loras": False,
}


@pytest.mark.parametrize("bias", ["attention_bias", "mlp_bias"])
def test_biases_of_outputs_beside_quantised_weights_are_refused(bias: str) -> None:
    """Where shards have parts of them. Elsewhere vLLM adds them."""
    config = rewired_config(WIRINGS["ladder"], **{bias: True})
    check_features(config, **NOTHING)
    config.quantization_config = {"quant_method": "compressed-tensors"}
    check_features(config, **NOTHING | {"ranks": 1})
    with pytest.raises(ValueError, match="this quantised model have biases, which vLLM's kernels rewrite"):
        check_features(config, **NOTHING)


@pytest.mark.parametrize(
    "features", [{}, {"drafts": "draft_model"}, {"drafts": "eagle3"}, {"drafts": "ngram", "fully_sharded_loras": True}]
)
def test_features_that_change_nothing_are_taken(features: dict[str, Any]) -> None:
    check_features(LADDER, **(NOTHING | features))


@pytest.mark.parametrize(
    ("features", "sentence"),
    [
        ({"drafts": "medusa"}, "Speculative decoding by 'medusa' was never tried with a rewired model"),
        ({"quantization": "fp8"}, "Rewired models are not quantised while they load: leave out fp8"),
        ({"fully_sharded_loras": True}, "Fully sharded LoRA adapters give other partial sums than the ranks' own"),
    ],
)
def test_other_features_are_refused(features: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_features(PEEK, **(NOTHING | features))


def test_a_quantised_checkpoint_is_taken() -> None:
    quantised = rewired_config(WIRINGS["ladder-peek"], quantization_config={"quant_method": "compressed-tensors"})
    check_features(quantised, **(NOTHING | {"quantization": "compressed-tensors"}))


def test_overlap_is_on_unless_the_config_turns_it_off() -> None:
    assert overlaps(LADDER)
    assert not overlaps(rewired_config(WIRINGS["ladder"], overlap=False))


def test_sums_that_hide_are_the_engine_s_own_unless_the_config_leaves_them_to_nccl() -> None:
    assert overlaps_by_engine(LADDER)
    with_nccl = rewired_config(WIRINGS["ladder"], overlap="nccl")
    assert overlaps(with_nccl) and not overlaps_by_engine(with_nccl)


def test_windows_are_served_in_all_layers_or_in_none() -> None:
    kinds = ["full_attention", "sliding_attention"]
    for alike in (None, kinds[:1] * 4, kinds[1:] * 4):
        check_windows(SimpleNamespace(layer_types=alike))
    check_windows(SimpleNamespace())
    with pytest.raises(ValueError, match="Only some layers of this model have a sliding window"):
        check_windows(SimpleNamespace(layer_types=kinds * 2))
