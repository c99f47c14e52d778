"""vLLM's server on two ranks, by the OpenAI API: answers, streams, bad requests, load, and the end of a rank."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
import openai
import psutil

from .engine import end
from .models import NEW_TOKENS, PROMPTS, WIRINGS, add_tokenizer, greedy, save
from .server import ROOM, Server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(tmp_path_factory.mktemp("model"), WIRINGS["mixed"], tp_shards=2)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return greedy(model)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(model, tmp_path_factory.mktemp("server"), "--tensor-parallel-size", "2")
    try:
        server.wait_until_ready()
        yield server
    finally:
        end([server.process])


def words(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def test_completions_are_transformers_tokens(server: Server, expected: list[list[int]]) -> None:
    answer = server.complete(PROMPTS)
    assert [choice.token_ids for choice in answer.choices] == expected
    assert server.complete(words(PROMPTS[0])).choices[0].text.split() == words(expected[0]).split()


def test_chat_answers_what_it_was_told(server: Server, expected: list[list[int]]) -> None:
    answer = openai.OpenAI(**server.client).chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": words(PROMPTS[0])}],
        max_tokens=NEW_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert (answer.choices[0].message.content or "").split() == words(expected[0]).split()


def test_a_stream_gives_the_same_words(server: Server, expected: list[list[int]]) -> None:
    pieces = [chunk.choices[0].text for chunk in server.complete(PROMPTS[1], stream=True)]
    assert len(pieces) > 3
    assert "".join(pieces).split() == words(expected[1]).split()


def test_logprobs_are_those_of_the_tokens(server: Server) -> None:
    found = server.complete(PROMPTS[0], logprobs=2).choices[0].logprobs
    assert len(found.token_logprobs) == NEW_TOKENS
    for own, best in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert own == max(best.values()) < 0  # greedy


def test_a_request_that_is_too_long_is_refused_and_the_server_serves_on(
    server: Server, expected: list[list[int]]
) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        server.complete([5] * (ROOM + 1))
    assert server.complete(PROMPTS[0]).choices[0].token_ids == expected[0]


def test_a_malformed_request_is_refused_and_the_server_serves_on(server: Server, expected: list[list[int]]) -> None:
    request = urllib.request.Request(
        f"{server.address}/v1/completions", b'{"model": "tiny", "prompt', {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=60)
    assert refusal.value.code in (400, 422)
    assert "error" in json.loads(refusal.value.read())
    assert server.complete(PROMPTS[0]).choices[0].token_ids == expected[0]


def test_a_request_that_is_cancelled_leaves_the_server_serving(server: Server, expected: list[list[int]]) -> None:
    stream = server.complete(PROMPTS[2], stream=True, max_tokens=100)
    next(stream)
    stream.close()
    assert server.complete(PROMPTS[0]).choices[0].token_ids == expected[0]


def test_two_hundred_requests_at_a_time_for_a_minute_are_all_right(server: Server, expected: list[list[int]]) -> None:
    found = asyncio.run(load(server, at_a_time=200, seconds=60))
    assert len(found) >= 400
    for prompt, tokens in found:
        assert tokens == expected[prompt]


async def load(server: Server, at_a_time: int, seconds: float) -> list[tuple[int, list[int]]]:
    """The answers to all requests of so many users, each of whom asks again and again; with the prompt's number."""
    client = openai.AsyncOpenAI(**server.client, timeout=600)
    end_of_load = time.monotonic() + seconds
    found: list[tuple[int, list[int]]] = []

    async def ask(user: int) -> None:
        for prompt in itertools.islice(itertools.cycle(range(len(PROMPTS))), user % len(PROMPTS), None):
            answer: Any = await client.completions.create(
                model="tiny",
                prompt=PROMPTS[prompt],
                max_tokens=NEW_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            found.append((prompt, answer.choices[0].token_ids))
            if time.monotonic() > end_of_load:
                return

    await asyncio.gather(*map(ask, range(at_a_time)))
    return found


def test_a_rank_that_is_killed_ends_the_server_with_a_sentence(server: Server) -> None:
    """The last test: no server is left after it."""
    ranks = [child for child in psutil.Process(server.process.pid).children(recursive=True) if "Worker" in child.name()]
    assert len(ranks) == 2
    ranks[1].kill()
    server.process.wait(timeout=120)  # with exit status 0, in vLLM 0.32
    assert "died unexpectedly" in server.log.read_text()
    _, left = psutil.wait_procs(ranks, timeout=30)
    assert not left
