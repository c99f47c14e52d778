"""The models of a bench: every wiring on the same weights, the same function as its converted checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from rewired.bench.contenders import STANDARD, Contender, contenders
from rewired.bench.models import SharedWeights, build, mesh_of, meshes_of, silent_group
from rewired.bench.request import BenchRequest
from rewired.checkpoint.shape import Shape
from rewired.convert import Request, convert
from rewired.grid.size import TpSize
from rewired.ranks import run_on_ranks
from tests.rewired.tiny import llama_config

WIRINGS = ("ladder", "ladder+peek@1-5", "parallel", "desync-2x", "partial-0.5")
RANKS = 2
TOKENS = torch.arange(24).view(2, 12)


def rivals(config: LlamaConfig) -> list[Contender]:
    return contenders([*WIRINGS, "none"], Shape.from_config(config.to_dict()), [])


@pytest.mark.parametrize("is_tied", [False, True])
def test_every_wiring_computes_what_its_checkpoint_does(is_tied: bool, tmp_path: Path) -> None:
    checkpoint = tmp_path / "dense"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(llama_config(tie_word_embeddings=is_tied)).save_pretrained(checkpoint)
    logits = run_on_ranks(logits_of_a_bench, RANKS, checkpoint)
    for name in ("stock", "standard", *WIRINGS):
        folder = checkpoint
        if name in WIRINGS:
            entries = next(each.entries for each in rivals(llama_config()) if each.name == name)
            folder = tmp_path / name
            convert(checkpoint, folder, Request(entries, tp_shards=RANKS))
        expected = AutoModelForCausalLM.from_pretrained(folder)(TOKENS).logits.detach()
        for of_rank in logits:
            torch.testing.assert_close(torch.from_numpy(of_rank[name]), expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def logits_of_a_bench(folder: Path) -> dict[str, Any]:
    config = LlamaConfig.from_pretrained(folder)
    weights = SharedWeights(torch.float32, torch.device("cpu"), folder)
    mesh = mesh_of(distributed.group.WORLD, "cpu")
    logits = {}
    for contender in rivals(config):
        model = build(contender, config, RANKS, mesh)
        weights.fill(model)
        logits[contender.name] = model(TOKENS).logits.numpy()
    return logits


def test_models_share_random_weights_of_which_each_rank_holds_its_own() -> None:
    (first, first_sum), (second, second_sum) = run_on_ranks(random_weights, RANKS)
    assert first
    assert second
    assert first_sum != second_sum


def random_weights() -> tuple[bool, float]:
    """Whether three models hold the same memory; and the sum of this rank's part of the head."""
    weights = SharedWeights(torch.bfloat16, torch.device("cpu"))
    mesh = mesh_of(distributed.group.WORLD, "cpu")
    models = [build(contender, llama_config(), RANKS, mesh) for contender in rivals(llama_config())[:3]]
    for model in models:
        weights.fill(model)
    addresses = [{p.to_local().data_ptr() for p in split_parameters(model)} for model in models]
    shared = addresses[0] == addresses[1] == addresses[2]
    return shared, models[0].lm_head.weight.to_local().float().sum().item()


def split_parameters(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if hasattr(parameter, "to_local")]


def test_a_tied_head_is_the_embedding_in_one_process() -> None:
    config = llama_config(tie_word_embeddings=True)
    weights = SharedWeights(torch.float32, torch.device("cpu"))
    for contender in contenders(["ladder"], Shape.from_config(config.to_dict()), []):
        model = build(contender, config, 4, None)
        weights.fill(model)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.isfinite(model(TOKENS).logits).all()


def test_none_runs_without_the_other_rank() -> None:
    """If it communicated, it would wait for a rank that never comes."""
    assert run_on_ranks(run_none_on_the_first_rank, RANKS, timeout_seconds=120) == [True, False]


@torch.no_grad()
def run_none_on_the_first_rank() -> bool:
    mesh = mesh_of(silent_group(), "cpu")
    model = build(rivals(llama_config())[-1], llama_config(), RANKS, mesh)
    SharedWeights(torch.float32, torch.device("cpu")).fill(model)
    if distributed.get_rank() == 1:
        return False
    return bool(torch.isfinite(model(TOKENS).logits).all())


def test_every_group_s_sums_go_over_it() -> None:
    """Also those that DTensor starts, as stock's do in training: two links have the same ranks."""
    for used in run_on_ranks(groups_of_sums, RANKS):
        assert used == [["first"], ["second"]]


def groups_of_sums() -> list[list[str]]:
    groups = {name: distributed.new_group() for name in ("first", "second")}
    names = {group.group_name: name for name, group in groups.items()}
    used = []
    for group in groups.values():
        columns = DTensor.from_local(torch.ones(2, 2), mesh_of(group, "cpu"), [Shard(1)])
        with Sums() as sums:
            linear(columns, columns).redistribute(placements=[Replicate()]).to_local()
        used.append([names[name] for name in sums.groups])
    return used


def test_nor_do_grids_on_two_links_share_one() -> None:
    for first, second in run_on_ranks(groups_of_grids, RANKS):
        assert first
        assert second
        assert not first & second


def groups_of_grids() -> list[set[str]]:
    used = []
    for _ in range(2):
        request, size = BenchRequest("tiny", (), device="cpu"), TpSize.parse("1x2")
        mesh, _ = meshes_of(distributed.new_group(), request, size)
        model = build(Contender(STANDARD, []), llama_config(), 1, mesh, size)
        SharedWeights(torch.float32, torch.device("cpu")).fill(model)
        with Sums() as sums:
            model(TOKENS).logits.sum()
        used.append(set(sums.groups))
    return used


class Sums(TorchDispatchMode):
    """Notes which group each collective is of."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("_c10d_functional::all_"):
            self.groups.append(args[2])
        return func(*args, **(kwargs or {}))
