"""Text generation on one rank or many: the smallest real use of a rewired checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, TextStreamer, set_seed
from transformers.distributed import DistributedConfig
from transformers.utils import logging

import rewired  # noqa: F401 - registers the classes
from rewired.checkpoint.checkpoint import check_loadable
from rewired.checkpoint.quantised import knows_method
from rewired.families import family_of
from rewired.grid.parallel import tp_plan
from rewired.grid.size import TpSize
from rewired.loading import loading
from rewired.model.tensor_parallel import check_not_quantised, check_ranks
from rewired.ranks import choose_device, run_on_ranks
from rewired.text.tokenizer import check_needs_no_code, load_tokenizer

ONE = TpSize(1)


@dataclass(frozen=True)
class Prompt:
    """A text to continue and how to sample. `chat` None uses the chat template if the tokenizer has one.

    Without a text, each line of the standard input is a question, and all of them are one conversation.
    """

    text: str | None
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    chat: bool | None = None


def generate(folder: Path, prompt: Prompt, tp: TpSize = ONE, dtype: str = "auto", device: str = "auto") -> str:
    """Print the answer of the checkpoint in `folder` token by token, and return it.

    `tp` ranks share each layer. Raises ValueError where the model cannot be loaded or run on so many ranks here,
    RankError where a rank dies.
    """
    config = _checked_config(folder, tp)
    device_type = choose_device(device, int(tp))
    given = folder, config, prompt, tp, dtype, device_type
    if tp == 1:
        return _generate_on_rank(*given)
    return run_on_ranks(_generate_on_rank, int(tp), *given, device_type=device_type)[0]


def _generate_on_rank(folder: Path, config: Any, prompt: Prompt, tp: TpSize, dtype: str, device_type: str) -> str:
    is_first = tp == 1 or torch.distributed.get_rank() == 0
    if not is_first:
        logging.disable_progress_bar()
        logging.set_verbosity_error()
    tokenizer = load_tokenizer(folder)
    distributed = DistributedConfig(tp_size=int(tp), tp_plan=tp_plan(config, tp))
    with loading(f"{folder} cannot be loaded"):
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, use_safetensors=True, trust_remote_code=False, dtype=dtype, distributed_config=distributed
        )
    model = model if tp > 1 else model.to(device_type)
    set_seed(prompt.seed)  # all ranks draw the same token
    if prompt.text is None:
        return _converse(model, tokenizer, prompt)
    return _continue(model, tokenizer, _encode(tokenizer, prompt), prompt, is_first)


def _converse(model: Any, tokenizer: Any, prompt: Prompt) -> str:
    """Answer each line of the standard input; what was said before comes along. Returns the last answer."""
    messages, answer = list[dict[str, str]](), ""
    if tokenizer.chat_template is None:
        raise ValueError("This tokenizer has no chat template, which a conversation needs: give a --prompt.")
    for question in _questions():
        messages.append({"role": "user", "content": question})
        answer = _continue(model, tokenizer, _encode_chat(tokenizer, messages), prompt, prints=True)
        messages.append({"role": "assistant", "content": answer})
    return answer


def _questions() -> Iterator[str]:
    mark = "> " if sys.stdin.isatty() else ""
    with suppress(EOFError):
        while True:
            if question := input(mark).strip():
                yield question


def _continue(model: Any, tokenizer: Any, inputs: Any, prompt: Prompt, prints: bool) -> str:
    """What the model says after `inputs`; `prints` shows it token by token."""
    sampling = {"do_sample": True, "temperature": prompt.temperature} if prompt.temperature else {"do_sample": False}
    generated = model.generate(
        **inputs.to(model.device),
        **sampling,
        max_new_tokens=prompt.max_new_tokens,
        num_beams=1,  # whatever the checkpoint's generation_config says, whose stop strings need the tokenizer
        return_dict_in_generate=False,
        tokenizer=tokenizer,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if prints else None,
    )
    text: Any = tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def _checked_config(folder: Path, tp: TpSize) -> Any:
    check_needs_no_code(folder)
    check_loadable(folder)
    with loading(f"{folder} cannot be loaded"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    tp_plan(config, tp)
    if tp > 1 and knows_method(config.to_dict()):  # others, transformers may split
        check_not_quantised(config)
    if family := family_of(config.model_type):
        check_ranks(family, config, tp.x, "--tp")
    return config


def _encode(tokenizer: Any, prompt: Prompt) -> Any:
    has_template = tokenizer.chat_template is not None
    if prompt.chat and not has_template:
        raise ValueError("This tokenizer has no chat template: leave --chat out.")
    if prompt.chat is False or not has_template:
        return tokenizer(prompt.text, return_tensors="pt")
    return _encode_chat(tokenizer, [{"role": "user", "content": prompt.text}])


def _encode_chat(tokenizer: Any, messages: list[dict[str, Any]]) -> Any:
    with loading("The tokenizer's chat template cannot be used"):
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
