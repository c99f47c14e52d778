"""CUDA graphs of a model whose reductions are in flight across attention: whole, or none. By vLLM's own rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

from rewired.serve.vllm import engine_config


@pytest.fixture
def compilation(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As vLLM has it on a GPU, after our check of it."""
    monkeypatch.setattr(engine_config, "current_platform", SimpleNamespace(is_cuda_alike=lambda: True))
    made = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    engine_config._keep_reductions_in_one_graph(made)
    return made


def test_decoding_is_one_graph(compilation: Any) -> None:
    compilation.set_splitting_ops_for_v1(all2all_backend="naive", data_parallel_size=1)
    assert compilation.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
    assert compilation.splitting_ops == []


def test_where_there_can_be_no_whole_graph_there_is_none(compilation: Any) -> None:
    """A KV connector, say, asks for pieces after our check."""
    compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
    compilation.set_splitting_ops_for_v1(all2all_backend="naive", data_parallel_size=1)
    assert compilation.cudagraph_mode == CUDAGraphMode.NONE
