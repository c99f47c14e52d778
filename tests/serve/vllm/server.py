"""A `vllm serve` of the tests, in a process group of its own."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai

from .engine import environment, free_port
from .models import NEW_TOKENS

ROOM = 128  # tokens that a request and its answer may have
STARTS_WITHIN = 400.0  # seconds, on a busy machine


class Server:
    """A `vllm serve` that was started in a process group of its own."""

    def __init__(self, model: Path, folder: Path, *replicas: str) -> None:
        """`replicas` are options that say how many ranks there are."""
        self.model, self.log = model, folder / "log.txt"
        port = free_port()
        options = ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", *replicas]
        options += ["--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--max-model-len", str(ROOM)]
        options += ["--served-model-name", "tiny"]
        command = [Path(sys.executable).parent / "vllm", "serve", model, *options]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment(folder), stdout=log, stderr=subprocess.STDOUT, process_group=0
            )
        self.address = f"http://127.0.0.1:{port}"
        self.client: dict[str, Any] = {"base_url": f"{self.address}/v1", "api_key": "none", "max_retries": 0}

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + STARTS_WITHIN
        while not self.is_ready():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(1)

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def complete(self, prompt: Any, **options: Any) -> Any:
        extra = {"ignore_eos": True, "return_token_ids": True}
        arguments = {"model": "tiny", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "extra_body": extra}
        return openai.OpenAI(**self.client).completions.create(**(arguments | options))
