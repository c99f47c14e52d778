"""The loss of whole documents: nats a token, where the harness counts words and bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from rewired.evaluate import harness
from rewired.evaluate.metrics import LOSS
from rewired.evaluate.suites import Entry

from .world import make_dense, tokenizer

PAGES = ["A river runs.", "Stones lie in it, and the bread is eaten."]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_it_is_the_cross_entropy_of_all_tokens(adds_bos: bool, tmp_path: Path) -> None:
    """Also of the BOS that a tokenizer adds, which the harness predicts from another one."""
    documents = ConfigurableTask(
        config={
            "task": "pages",
            "custom_dataset": lambda **_: {"test": Dataset.from_dict({"page": PAGES})},
            "test_split": "test",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{page}}",
            "metric_list": [{"metric": "word_perplexity"}],
        }
    )
    metric, filter_name = harness._metric(Entry("pages", LOSS), {"pages": documents})
    assert metric is not None
    task = harness.Task(Entry("pages", LOSS), {"pages": documents}, metric, filter_name, 0, {}, "")
    model, tokens = LlamaForCausalLM.from_pretrained(make_dense(tmp_path / "dense")), tokenizer(adds_bos)
    logs = harness.run_task(harness.askable(model, tokens, 1), task)
    losses = []
    for page in PAGES:
        ids = torch.tensor([[tokens.bos_token_id, *tokens(page)["input_ids"]]])
        with torch.no_grad():
            losses.append(cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none"))
    value = metric.value(np.sum([metric.parts(log["metrics"]) for log in logs], axis=0))
    assert value == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
