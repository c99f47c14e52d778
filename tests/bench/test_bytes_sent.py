"""Bytes on the wire, against a count by hand."""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from transformers import LlamaConfig

from rewired.bench.communication import bytes_sent
from rewired.bench.contenders import STANDARD, Contender, contenders
from rewired.bench.emulated import join
from rewired.bench.models import SharedWeights, build, mesh_of, meshes_of, shard
from rewired.bench.request import BenchRequest, Emulation
from rewired.bench.runs import TrainingSteps
from rewired.checkpoint.named_shapes import named_shapes
from rewired.grid.size import TpSize
from rewired.ranks import run_on_ranks

TINY = named_shapes()["tiny"]  # 4 layers, hidden size 64, a vocabulary of 512
TOKENS, RANKS = 10, 2

# updates of 64 channels that are reduced, the embedding's among them
REDUCED = {"stock": 9.0, "standard": 9.0, "ladder": 9.0, "desync-2x": 5.0, "desync-4x": 3.0, "partial-0.5": 2 + 7 / 2}


LOGITS = (RANKS - 1) * 512 / RANKS * 4  # of the last token, gathered
INT8 = [{"layers": "0-", "preset": "standard", "payload": "int8"}]


def test_bytes_of_a_prefill() -> None:
    counted = run_on_ranks(bytes_of_a_prefill, RANKS)
    for name, updates in REDUCED.items():
        all_reduces = 2 * (RANKS - 1) / RANKS * updates * TOKENS * 64 * 4
        assert [of_rank[name] for of_rank in counted] == [pytest.approx(all_reduces + LOGITS)] * RANKS
    embedding = TOKENS * 64 * 4
    # of 8 modules: a byte a channel and a scale. It is one group, which one rank adds up, and both send as much: to the
    # other rank first a part of it and then the sum
    packed = 8 * TOKENS * 2 * (64 + 2)
    assert [of_rank["own"] for of_rank in counted] == [pytest.approx(embedding + packed + LOGITS)] * RANKS
    # and where a rank holds two of four shards, a part of each
    assert [of_rank["of 4 shards"] for of_rank in counted] == [pytest.approx(embedding + 1.5 * packed + LOGITS)] * RANKS
    assert run_on_ranks(bytes_of_a_lone_prefill, 1) == counted[:1]


def test_bytes_of_a_training_step_under_fsdp2() -> None:
    """Weights are gathered in forward and in backward, and gradients scattered; the head, and the norm before it, stay
    whole between them."""
    layer = 4 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)  # of float32: queries to output, the MLP, norms
    embedding, head = 4 * 512 * 64, 4 * (512 * 64 + 64)
    gathered = 2 * (TINY.num_hidden_layers * layer + embedding) + head
    scattered = TINY.num_hidden_layers * layer + embedding + head
    assert run_on_ranks(bytes_of_a_step, RANKS) == [(gathered + scattered) * (RANKS - 1) / RANKS] * RANKS


def bytes_of_a_step() -> float:
    request, size = BenchRequest("tiny", (), trains=True, fsdp=RANKS, device="cpu"), TpSize(1)
    _, fsdp_mesh = meshes_of(distributed.group.WORLD, request, size)
    model = build(Contender(STANDARD, []), LlamaConfig(**TINY.config()), 1, None, size)
    SharedWeights(torch.float32, torch.device("cpu")).fill(model)
    model.requires_grad_()
    assert fsdp_mesh is not None
    shard(model, fsdp_mesh)
    (step,) = TrainingSteps(torch.ones(1, TOKENS, dtype=torch.long)).passes(model).values()
    return bytes_sent(step)


def bytes_of_a_lone_prefill() -> dict[str, float]:
    """By a rank whose others are emulated."""
    distributed.destroy_process_group()
    join(RANKS, "h100:nccl", torch.device("cpu"), Emulation())
    return bytes_of_a_prefill()


@torch.no_grad()
def bytes_of_a_prefill() -> dict[str, float]:
    config = LlamaConfig(**TINY.config())
    weights = SharedWeights(torch.float32, torch.device("cpu"))
    mesh = mesh_of(distributed.group.WORLD, "cpu")
    tokens = torch.ones(1, TOKENS, dtype=torch.long)
    counted = {}
    models = {
        each.name: (each, RANKS)
        for each in contenders(["ladder", "desync-2x", "desync-4x", "partial-0.5", "own"], TINY, INT8)
    }
    for name, (contender, tp_shards) in {**models, "of 4 shards": (models["own"][0], 4)}.items():
        model = build(contender, config, tp_shards, mesh)
        weights.fill(model)
        counted[name] = bytes_sent(lambda model=model: model(tokens, logits_to_keep=1))  # type: ignore[misc]
    return counted
