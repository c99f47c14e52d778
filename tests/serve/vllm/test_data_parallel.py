"""Two replicas of a model behind one server: `vllm serve --data-parallel-size 2`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm")
import psutil

from .engine import end
from .models import PROMPTS, WIRINGS, add_tokenizer, greedy, save
from .server import Server

pytestmark = pytest.mark.slow


def test_both_replicas_answer_with_the_same_tokens(tmp_path: Path) -> None:
    model = save(tmp_path / "model", WIRINGS["ladder"], tp_shards=1)
    add_tokenizer(model)
    expected = greedy(model)
    server = Server(model, tmp_path, "--data-parallel-size", "2")
    try:
        server.wait_until_ready()
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(server.complete, 16 * PROMPTS))
        assert [answer.choices[0].token_ids for answer in found] == 16 * expected
        names = [child.name() for child in psutil.Process(server.process.pid).children(recursive=True)]
        assert sum("EngineCore" in name for name in names) == 2, names
    finally:
        end([server.process])
