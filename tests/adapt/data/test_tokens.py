"""Tokens and labels: the model's own text to the letter, and the assistant's turns to learn."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given
from hypothesis import strategies as st

from rewired.adapt.data.tokens import IGNORED, Encoder, _one_at_a_time, training_template
from rewired.text.conversations import Conversation
from rewired.text.tokenizer import DAY
from tests.adapt.world import CHATML
from tests.evaluate.world import tokenizer

THEIRS = Path(trl.__file__).parent / "chat_templates"
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}"
)
# as Mistral's instruct models from v0.3 on write a chat, without their tools
MISTRAL = """\
{{{{- bos_token -}}}}
{{%- set has_system = messages[0]['role'] == 'system' -%}}
{{%- for turn in (messages[1:] if has_system else messages) -%}}
    {{%- if turn['role'] == 'user' and loop.last and has_system -%}}
        {{{{- '[INST]{space}' + messages[0]['content'] + '\\n\\n' + turn['content'] + '[/INST]' -}}}}
    {{%- elif turn['role'] == 'user' -%}}
        {{{{- '[INST]{space}' + turn['content'] + '[/INST]' -}}}}
    {{%- else -%}}
        {{{{- '{space}' + turn['content']{trim} + eos_token -}}}}
    {{%- endif -%}}
{{%- endfor -%}}"""
MODELS = {
    "SmolLM2": SMOLLM2,
    "ChatML": CHATML,
    "Qwen2.5": (THEIRS / "qwen2_5.jinja").read_text(),
    "Qwen3": (THEIRS / "qwen3.jinja").read_text(),
    "Mistral 7B": MISTRAL.format(space=" ", trim=" | trim"),
    "Mistral Nemo": MISTRAL.format(space="", trim=""),
    "Llama 3": (THEIRS / "llama3.jinja").read_text(),
    "Llama 3.1": (THEIRS / "llama3_1.jinja").read_text(),
    "Llama 3.2": (THEIRS / "llama3_2.jinja").read_text(),
}


def conversation(system: str | None, pairs: list[tuple[str, str]]) -> Conversation:
    first = [{"role": "system", "content": system}] if system else []
    return first + [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


words = st.text(st.sampled_from("ab \n'{%"), min_size=1, max_size=8).filter(str.strip)
turns = st.lists(st.tuples(words, words), min_size=1, max_size=3)
conversations = st.builds(conversation, st.none() | words, turns)


def made(template: str) -> Any:
    found = tokenizer(adds_bos=True)
    found.chat_template = template
    return found


@pytest.mark.parametrize("model", MODELS)
@given(document=conversations)
def test_a_training_template_writes_what_the_models_own_does(model: str, document: Conversation) -> None:
    tokens = made(MODELS[model])
    own = tokens.apply_chat_template(document, tokenize=False, date_string=DAY)
    found = Encoder.of(tokens).encode(document, "row 1")
    assert tokens.decode(found["input_ids"]) == own
    assert found["input_ids"] == tokens(own, add_special_tokens=False)["input_ids"], "no second BOS, none lost"


@pytest.mark.parametrize("model", MODELS)
@given(document=conversations)
def test_what_the_assistant_says_is_learnt_with_its_end_and_nothing_else_is(model: str, document: Conversation) -> None:
    tokens = made(MODELS[model])
    found = Encoder.of(tokens).encode(document, "row 1")
    runs, last = list[list[int]](), IGNORED
    for label in found["labels"]:
        if label != IGNORED:
            runs = [*runs, []] if last == IGNORED else runs
            runs[-1].append(label)
        last = label
    ends = {"Llama": "<|eot_id|>", "Mistral": tokens.eos_token}
    end = ends.get(model.split()[0], "<|im_end|>")
    begin, trims = " " * (model == "Mistral 7B"), "Llama" in model or model == "Mistral 7B"
    said = [turn["content"] for turn in document if turn["role"] == "assistant"]
    answers = [begin + (answer.strip() if trims else answer) + end for answer in said]
    if model == "Qwen3":
        answers[-1] = answers[-1].lstrip("\n")
    assert [tokens.decode(run) for run in runs] == answers
    assert all(label in (token, IGNORED) for token, label in zip(found["input_ids"], found["labels"], strict=True))


def test_qwen3_learns_thoughts_where_there_are_some_and_never_to_leave_them_out() -> None:
    """Without thinking, the prompt ends in an empty block of thoughts: it is written, and nothing of it is learnt."""
    tokens = made(MODELS["Qwen3"])
    encoder = Encoder.of(tokens)
    for answer, block in (("b", ""), ("<think>\nt\n</think>\n\nb", "<think>\nt\n</think>\n\n")):
        found = encoder.encode(conversation(None, [("a", answer)]), "row 1")
        learnt = [label for label in found["labels"] if label != IGNORED]
        assert tokens.decode(learnt) == f"{block}b<|im_end|>"
        assert ("<think>\n\n</think>" in tokens.decode(found["input_ids"])) is not bool(block)


@pytest.mark.parametrize("answer", ["b", "<think>\nt\n</think>\n\nb"])
@pytest.mark.parametrize("system", [None, "s"])
def test_qwen3_writes_no_thoughts_where_nothing_was_asked(system: str | None, answer: str) -> None:
    tokens, document = made(MODELS["Qwen3"]), conversation(system, [("a", answer)])
    document = [turn for turn in document if turn["role"] != "user"]
    found = Encoder.of(tokens).encode(document, "row 1")
    assert tokens.decode(found["input_ids"]) == tokens.apply_chat_template(document, tokenize=False)


@pytest.mark.parametrize("fault", ["{{ 1 / 0 }}", "{{ messages[0]['content'] + 1 }}"])
def test_a_template_that_breaks_is_a_sentence(fault: str) -> None:
    tokens = made(f"{fault}{{% generation %}}{{% endgeneration %}}")
    with pytest.raises(ValueError, match="row 1 is a conversation that the chat template does not take"):
        Encoder.of(tokens).encode(conversation(None, [("a", "b")]), "row 1")


def test_threads_do_not_disturb_each_other() -> None:
    """datasets reads the streams of a mix in threads; transformers keeps what marks turns for all of them."""
    encoder = Encoder.of(made(SMOLLM2))
    turns = [(f"Is it {number}? " * 9, f"It is {number}. " * 9) for number in range(12)]
    documents = [conversation(str(number), turns) for number in range(60)]
    expected = [encoder.encode(document, "row") for document in documents]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(lambda document: encoder.encode(document, "row"), documents)) == expected
    finally:
        sys.setswitchinterval(interval)


def test_a_fork_waits_for_no_thread_of_its_parents() -> None:
    encoder, document = Encoder.of(made(SMOLLM2)), conversation(None, [("a", "b")])
    with _one_at_a_time:
        child = get_context("fork").Process(target=encoder.encode, args=(document, "row"))
        child.start()
        child.join(30)
        assert child.exitcode == 0


@pytest.mark.parametrize("template", [SMOLLM2, "{% for m in messages %}{{ m.role }} says {{ m.content }}{% endfor %}"])
def test_all_turns_are_learnt_where_that_is_asked_for_with_any_template(template: str) -> None:
    tokens, document = made(template), conversation("s", [("a", "b")])
    found = Encoder.of(tokens, assistant_only=False).encode(document, "row 1")
    assert found["labels"] == found["input_ids"]
    assert tokens.decode(found["input_ids"]) == tokens.apply_chat_template(document, tokenize=False)


def test_a_text_is_learnt_whole_and_ends() -> None:
    tokens = made(CHATML)
    found = Encoder.of(tokens).encode("some text", "row 1")
    assert found["labels"] == found["input_ids"]
    assert tokens.decode(found["input_ids"]) == "<s>some text</s>"


def test_a_text_that_brings_its_own_bos_and_eos_gets_no_second_ones() -> None:
    tokens = made(CHATML)
    found = Encoder.of(tokens).encode("<s>some text</s>", "row 1")
    assert tokens.decode(found["input_ids"]) == "<s>some text</s>"


def test_where_a_tokenizer_has_no_eos_a_text_just_ends() -> None:
    tokens = made(CHATML)
    tokens.eos_token = None
    assert tokens.decode(Encoder.of(tokens).encode("some text", "row 1")["input_ids"]) == "<s>some text"


def test_a_template_that_asks_the_clock_writes_the_same_day_always() -> None:
    """As Llama 3.1's may, by `strftime_now`."""
    turns = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    tokens = made("{{ strftime_now('%d %b %Y') }}" + turns)
    found = Encoder.of(tokens).encode(conversation(None, [("a", "b")]), "row 1")
    assert tokens.decode(found["input_ids"]) == f"{DAY}ab"
    assert tokens.decode([token for token in found["labels"] if token != IGNORED]) == "ab"


def test_a_template_that_marks_turns_itself_is_taken() -> None:
    own = "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert training_template(made(own)) == own


def test_a_template_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="chat_template_path"):
        Encoder.of(made("{% for m in messages %}{{ m.role }} says {{ m.content }}{% endfor %}"))


def test_without_a_template_conversations_are_refused_and_texts_are_not() -> None:
    tokens = tokenizer()
    tokens.chat_template = None
    encoder = Encoder.of(tokens)
    assert encoder.encode("text", "row 1")["input_ids"]
    with pytest.raises(ValueError, match=r"row 2 is a conversation.*chat_template_path"):
        encoder.encode(conversation(None, [("a", "b")]), "row 2")
