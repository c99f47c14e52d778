"""What a stage trains and what on: looked at, and all that can be wrong refused, before hours of work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer
from transformers.integrations import get_reporting_integration_callbacks

from rewired.model.modeling_rewired_llama import RewiredLlamaForCausalLM

from . import corpus, liger
from .recipe.keys import Stage
from .start import outline
from .steps import Steps
from .tokens import check_padding, set_chat_template


class Inputs(NamedTuple):
    """`student` has no weights; `judges`, each [T], are what `eval_steps` measures on, none without it."""

    student: RewiredLlamaForCausalLM
    tokenizer: Any
    data: corpus.Corpus
    judges: list[torch.Tensor]


def inputs(stages: Sequence[Stage], tokenizer: Path, elsewhere: bool = False) -> Inputs:
    """Of the last of `stages`; its `tokenizer` is in that folder. Raises ValueError for a stage that cannot be run, or,
    if it is to run `elsewhere`, not even where all packages are."""
    recipe, config = stages[-1].recipe, stages[-1].config
    student = outline([stage.recipe for stage in stages])
    missing = _missing_for_attention(student, config) or (
        liger.missing(config.device) if config.use_liger_kernel else None
    )
    if missing and not elsewhere:
        raise ValueError(missing)
    _check_reporting(config)
    own = AutoTokenizer.from_pretrained(tokenizer)
    set_chat_template(own, config)
    check_padding(own, config)
    data = corpus.load(recipe, config, own)
    longest = config.max_length or student.config.max_position_embeddings
    judges = data.judges(longest) if config.eval_steps else []
    if config.eval_steps and not judges:
        raise ValueError("eval_steps measures on what is held out, which has no two tokens: leave it out.")
    if missing:
        data.notes.append(f"Not to be trained here: {missing}")
    if config.dataloader_drop_last:
        Steps.of(recipe, config, data.train)  # it may leave none
    return Inputs(student, own, data, judges)


def _missing_for_attention(student: Any, config: Any) -> str | None:
    """Why the attention that is asked for does not run here. Raises ValueError where there is none of that name."""
    given = (config.model_init_kwargs or {}).get("attn_implementation")
    if not isinstance(given, str | None):
        raise ValueError(f"attn_implementation: {given!r} is no name of one, such as sdpa.")
    try:
        if given:
            student.set_attn_implementation(given)
    except ImportError as error:
        return f"attn_implementation: {str(error).strip().splitlines()[0]}"
    except ValueError as error:
        raise ValueError(f"attn_implementation: {str(error).strip().splitlines()[0]}") from None
    return None


def _check_reporting(config: Any) -> None:
    try:
        for callback in get_reporting_integration_callbacks(config.report_to):
            callback()
    except RuntimeError as error:
        raise ValueError(f"report_to: {error}") from None
