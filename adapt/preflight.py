"""Checks of a stage before hours of work: its model, its data, and the packages that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.integrations import get_reporting_integration_callbacks

from rewired import extras, quantities
from rewired.model.rewired_model import RewiredForCausalLM
from rewired.text.tokenizer import load_tokenizer

from .data.corpus import Corpus, load
from .data.steps import TrainingSteps
from .data.tokens import check_padding, set_chat_template
from .recipe.keys import Stage
from .start import outline


class CheckedStage(NamedTuple):
    """A stage that can be run.

    `student` has no weights; `held_out` are the texts, each [T], that `eval_steps` measures on, none without it.
    """

    student: RewiredForCausalLM
    tokenizer: Any
    corpus: Corpus
    held_out: list[torch.Tensor]


def check_stage(stages: Sequence[Stage], tokenizer_folder: Path, elsewhere: bool = False) -> CheckedStage:
    """Check the last of `stages`, and read its data.

    Raises ValueError for a stage that cannot be run. One that is to run `elsewhere` may need packages and devices that
    are not here.
    """
    recipe, config = stages[-1].recipe, stages[-1].config
    student = outline([stage.recipe for stage in stages])
    if recipe.distills:
        _check_dropout(student, config)
    missing = _missing_for_attention(student, config)
    if recipe.load_in_4bit and find_spec("bitsandbytes") is None:
        missing = extras.missing("qlora", "load_in_4bit", "bitsandbytes")
    if missing and not elsewhere:
        raise ValueError(missing)
    _check_reporting(config)
    tokenizer = load_tokenizer(tokenizer_folder)
    set_chat_template(tokenizer, config)
    check_padding(tokenizer, config)
    if recipe.from_scratch and len(tokenizer) > (words := student.config.vocab_size):
        raise ValueError(
            f"The tokenizer has {len(tokenizer):,} tokens, and {recipe.model} has a vocabulary of {words:,}: give "
            "another tokenizer."
        )
    corpus = load(recipe, config, tokenizer)
    longest = config.max_length or student.config.max_position_embeddings
    held_out = corpus.held_out_texts(longest) if config.eval_steps else []
    if config.eval_steps and not held_out:
        raise ValueError("eval_steps measures held-out rows, and none has two tokens: leave it out.")
    if missing:
        corpus.notes.append(f"Not to be trained here: {missing}")
    if config.dataloader_drop_last or config.warmup_steps:
        steps = TrainingSteps.of(recipe, config, corpus.train).count  # raises if dropping leaves none
        if warning := _warmup_warning(config, steps):
            corpus.notes.append(warning)
    return CheckedStage(student, tokenizer, corpus, held_out)


def _check_dropout(student: Any, config: Any) -> None:
    """Raise ValueError for dropout in the layers that student and teacher share, which run once for both."""
    dropout = (config.model_init_kwargs or {}).get("attention_dropout", student.config.attention_dropout)
    if dropout:
        raise ValueError(
            f"attention_dropout is {dropout}, and the original would read noise of layers that both share: give 0 in "
            "model_init_kwargs."
        )


def _missing_for_attention(student: Any, config: Any) -> str | None:
    """The reason why the attention implementation of `config` does not run here, if so. Raises ValueError if there is
    none of that name."""
    implementation = (config.model_init_kwargs or {}).get("attn_implementation")
    if not isinstance(implementation, str | None):
        raise ValueError(f"attn_implementation: {implementation!r} is not the name of one, such as sdpa.")
    try:
        if implementation:
            student.set_attn_implementation(implementation)
    except ImportError as error:
        return f"attn_implementation: {str(error).strip().splitlines()[0]}"
    except ValueError as error:
        raise ValueError(f"attn_implementation: {str(error).strip().splitlines()[0]}") from None
    return None


def _warmup_warning(config: Any, steps: int) -> str | None:
    """A sentence if the learning rate is still warming up at the last of `steps`."""
    warmup = config.get_warmup_steps(steps)
    if warmup < max(steps, 1):
        return None
    return (
        f"The learning rate warms up for {quantities.count(warmup, 'step')}, and the training has only "
        f"{quantities.count(steps, 'step')}: it never reaches {config.learning_rate:g}. Give fewer warmup_steps."
    )


def _check_reporting(config: Any) -> None:
    try:
        for callback in get_reporting_integration_callbacks(config.report_to):
            callback()
    except RuntimeError as error:
        raise ValueError(f"report_to: {error}") from None
