"""vLLM's settings beside a rewired model: the same tokens, or a refusal in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from transformers import AutoModelForCausalLM

from tests.rewired.tiny import stock_twin

from .models import WIRINGS, answers, greedy, save

ALIKE = [[*range(2, 66), last] for last in (7, 8, 9)]  # prompts that share all tokens but the last
PREFIX_CACHING = {"prompts": ALIKE, "enable_prefix_caching": True, "block_size": 32, "max_num_seqs": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "ladder", WIRINGS["ladder"], tp_shards=1)


@pytest.fixture(scope="module")
def draft(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dense original of the model, which continues otherwise."""
    folder = tmp_path_factory.mktemp("draft") / "original"
    stock_twin(AutoModelForCausalLM.from_pretrained(model)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def found(model: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    peeking = save(tmp_path_factory.mktemp("peek") / "model", WIRINGS["ladder-peek"], tp_shards=2)
    ngrams = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    drafts = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    settings: dict[str, dict[str, Any]] = {
        "draft model": {"speculative_config": drafts},  # before n-grams, whose numba vLLM 0.32 then trips over
        "fewer shards": {"model": str(peeking), "hf_overrides": {"tp_shards": 1}},
        "prefix caching": PREFIX_CACHING,
        "cached tokens": PREFIX_CACHING | {"count_cached": True},
        "chunked prefill": {"enable_chunked_prefill": True, "max_num_batched_tokens": 8, "max_num_seqs": 4},
        "n-grams": {"speculative_config": ngrams},
        "transformers": {"model_impl": "transformers", "trust_remote_code": True},
        "quantised": {"quantization": "fp8"},
    }
    jobs = {name: {"model": str(model)} | options for name, options in settings.items()}
    return answers(jobs, tmp_path_factory.mktemp("engine"), ranks=1)


@pytest.mark.parametrize("name", ["draft model", "chunked prefill", "n-grams"])
def test_the_same_tokens(name: str, model: Path, found: dict[str, Any]) -> None:
    assert found[name] == greedy(model)


def test_the_same_tokens_out_of_the_prefix_cache(model: Path, found: dict[str, Any]) -> None:
    assert found["prefix caching"] == greedy(model, ALIKE)
    assert found["cached tokens"] == [0, 64, 64]


def test_vllm_s_own_transformers_backend_is_refused(found: dict[str, Any]) -> None:
    assert "its extra 'vllm', which brings a plugin" in found["transformers"]


def test_quantisation_is_refused(found: dict[str, Any]) -> None:
    assert "Rewired models are not quantised while they load: leave out fp8" in found["quantised"]


def test_gains_of_another_number_of_shards_are_refused(found: dict[str, Any]) -> None:
    assert "tp_shards is 1, and the gains are those of 2." in found["fewer shards"]


def test_a_dense_draft_proposes_other_tokens(model: Path, draft: Path) -> None:
    """So the test above would fail if vLLM took them unseen."""
    assert greedy(draft) != greedy(model)
