"""A training on many ranks is the same as on one: losses, tokens, weights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig
from trl import SFTConfig

from rewired.adapt.losses.distillation import add_losses
from rewired.adapt.losses.token_loss import TokenLoss
from rewired.adapt.model import lora
from rewired.adapt.model.teacher import sharded
from rewired.adapt.recipe.keys import Recipe
from rewired.adapt.recipe.reading import read
from rewired.adapt.run import adapt
from rewired.adapt.trainer.sharded import ShardedTrainer
from rewired.adapt.trainer.trainer import AdaptTrainer
from rewired.ranks import run_on_ranks
from tests.adapt.world import (
    LADDER,
    conversations,
    load,
    logged,
    make_chat,
    make_chat_of_4_bits,
    make_rewired,
    train,
    weights,
    write_recipe,
    write_rows,
)

from . import on_cpus

STEPS, ROWS = 8, 4
CONFIGS = Path(__file__).parents[3] / "recipes" / "accelerate"
ADAPT, ON_CPUS = ["-m", "rewired.adapt"], [str(Path(__file__).parent / "on_cpus.py")]
LAUNCHERS = {
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node"],
    "one node": ["accelerate", "launch", "--config_file", str(CONFIGS / "one-node.yaml"), "--num_processes"],
    "many nodes": [
        *["accelerate", "launch", "--config_file", str(CONFIGS / "many-nodes.yaml")],
        *["--num_machines", "1", "--main_process_port", "0", "--num_processes"],
    ],
}
SPLITS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "DDP": ("torchrun", 2, {}),
    "FSDP2": ("one node", 2, {"fsdp_size": 2}),
    "HSDP": ("many nodes", 4, {"fsdp_size": 2, "dp_replicate_size": 2}),
    "TP": ("torchrun", 2, {"tp_size": 2}),
    "TP x FSDP2": ("torchrun", 4, {"tp_size": 2, "fsdp_size": 2}),
}


def launch(launcher: str, ranks: int, recipe: Path, *flags: str, what: Sequence[str] = ADAPT) -> None:
    program, *options = LAUNCHERS[launcher]
    command = [str(Path(sys.executable).parent / program), *options, str(ranks)]
    done = subprocess.run([*command, *what, str(recipe), *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def fork(ranks: int, recipe: Path, *overrides: str, resume: bool = False) -> None:
    """As `adapt` does under a launcher, on ranks that have imported it."""
    run_on_ranks(adapt_on_this_rank, ranks, recipe, overrides, resume)


def adapt_on_this_rank(recipe: Path, overrides: Sequence[str], resume: bool) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # accelerate asks for them, though nobody listens there
    on_cpus.allow()
    adapt(read(recipe, overrides), resume)


def test_a_launcher_that_shards_the_model_itself_is_refused(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"models are sharded by fsdp_size.*launch with one of recipes/accelerate"):
        train(tmp_path / "r.yaml", **keys | {"output_dir": str(tmp_path / "out")})
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def keys(dense: Path, rows: Path) -> dict[str, Any]:
    return {
        "model": str(dense),
        "wiring": [*LADDER, {"layers": "1-2", "preset": "desync", "every": 2}],
        "tp_shards": 4,
        "refit": "none",
        "datasets": [str(rows)],
        "train": "rewired",
        "ce_weight": 0.5,
        "kd_weight": 1.0,
        "hidden_weight": 0.1,
        "max_steps": STEPS,
        "eval_steps": 25,
        "logging_steps": 2,
        "save_steps": 6,
    }


@pytest.fixture(
    scope="module",
    params=["FSDP2", *(pytest.param(name, marks=pytest.mark.slow) for name in SPLITS if name != "FSDP2")],
)
def split(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(split: str, keys: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A recipe, and what one process makes of it. Under FSDP2 all of it learns, an embedding that is the head, too."""
    folder = tmp_path_factory.mktemp("alone")
    if "FSDP2" in split:
        tied = make_chat(folder / "tied", tie_word_embeddings=True)
        keys = keys | {"model": str(tied), "train": "all"}
    changes = {"per_device_train_batch_size": ROWS, "output_dir": str(folder / "out")}
    return keys, train(folder / "r.yaml", **keys | changes)


def test_ranks_learn_what_one_process_does(split: str, alone: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    """And a training that was cut off goes on as the same, bit for bit: each rank finds its part again."""
    keys, expected = alone
    launcher, ranks, changes = SPLITS[split]
    shares = changes.get("tp_size", 1)  # a layer, and so the rows
    what = ON_CPUS if shares > 1 else ADAPT
    changes = changes | {"per_device_train_batch_size": ROWS * shares // ranks, "output_dir": str(tmp_path / "whole")}
    recipe = write_recipe(tmp_path / "r.yaml", **keys | changes)
    launch(launcher, ranks, recipe, what=what)
    whole = tmp_path / "whole" / "final"
    for name in ("loss", "ce", "kd", "hidden", "num_tokens", "held_out_kl"):
        assert logged(whole, name) == pytest.approx(logged(expected, name), rel=2e-4) != [], name
    assert [0 < share < 1 for share in logged(whole, "waits")] == [True] * len(logged(whole, "loss")) * (shares > 1)
    found = weights(whole)
    for name, tensor in weights(expected).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4, msg=name)

    cut = shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for lost in ("final", f"checkpoint-{STEPS}"):
        shutil.rmtree(cut / lost)
    fork(ranks, recipe, "--output_dir", str(cut), resume=True)
    again = cut / "final"
    for name in ("loss", "kd", "num_tokens", "held_out_kl", "learning_rate"):
        assert logged(again, name) == logged(whole, name), name
    resumed = weights(again)
    assert all(torch.equal(found[name], resumed[name]) for name in found)


def test_adapters_on_weights_in_16_bits_learn_from_the_original_without_autocast(
    rows: Path, keys: dict[str, Any], tmp_path: Path
) -> None:
    """Norms in float32 hand projections what they read; of layers that do not learn, and of the teacher, too."""
    changes = {"train": "lora", "lora_r": 2, "model_init_kwargs": {"dtype": "bfloat16"}, "max_steps": 2}
    changes |= {"save_strategy": "no", "logging_steps": 1}
    alone = {"per_device_train_batch_size": ROWS, "output_dir": str(tmp_path / "alone")}
    expected = train(tmp_path / "a.yaml", **keys | changes | alone)
    on_two = {"per_device_train_batch_size": ROWS // 2, "fsdp_size": 2, "output_dir": str(tmp_path / "two")}
    fork(2, write_recipe(tmp_path / "r.yaml", **keys | changes | on_two))
    for name in ("kd", "hidden"):
        assert logged(tmp_path / "two" / "final", name) == pytest.approx(logged(expected, name), rel=0.02) != []


def test_tokens_of_all_ranks_count_where_an_epoch_ends_with_a_few_rows(keys: dict[str, Any], tmp_path: Path) -> None:
    """Five rows in batches of four: accelerate fills the second with rows from the beginning."""
    rows = write_rows(tmp_path / "rows.jsonl", conversations(1) * 5)
    sft = {"ce_weight": 1.0, "kd_weight": 0.0, "hidden_weight": 0.0, "eval_steps": None, "save_strategy": "no"}
    changes = {
        "datasets": [str(rows)],
        "held_out": 0,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
    }
    recipe = keys | sft | changes | {"output_dir": str(tmp_path / "two")}
    fork(2, write_recipe(tmp_path / "r.yaml", **recipe))
    first, both = logged(tmp_path / "two" / "final", "num_tokens")
    assert both == 2 * first > 0


@pytest.mark.parametrize("tp_size", ["2", "1x2"])
def test_a_tied_model_goes_on_from_its_checkpoint_without_fsdp2(
    tp_size: str, rows: Path, keys: dict[str, Any], tmp_path: Path
) -> None:
    """Loaded from one, the head and the embedding are one tensor, which safetensors stores under one name only."""
    tied = make_chat(tmp_path / "tied", tie_word_embeddings=True)
    changes = {"model": str(tied), "train": "all", "tp_size": tp_size, "max_steps": 4, "save_steps": 2, "eval_steps": 2}
    recipe = write_recipe(tmp_path / "r.yaml", **keys | changes | {"output_dir": str(tmp_path / "whole")})
    fork(2, recipe)
    cut = shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for lost in ("final", "checkpoint-4"):
        shutil.rmtree(cut / lost)
    fork(2, recipe, "--output_dir", str(cut), resume=True)
    resumed = weights(cut / "final")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in weights(tmp_path / "whole" / "final").items())


@pytest.mark.parametrize(("trainer", "caches"), [(AdaptTrainer, True), (ShardedTrainer, False)])
def test_what_is_gathered_for_a_layer_is_not_kept_in_another_dtype(
    trainer: type[AdaptTrainer], caches: bool, dense: Path, rows: Path, tmp_path: Path
) -> None:
    """A cast copy of every layer, whole, would stay in the memory of each rank until forward ends."""
    model, seen = AutoModelForCausalLM.from_pretrained(make_rewired(dense, tmp_path / "m", LADDER)), set[bool]()
    model.model.norm.register_forward_pre_hook(lambda *_: seen.add(torch.is_autocast_cache_enabled()))
    config = SFTConfig(output_dir=str(tmp_path / "out"), max_steps=1, use_cpu=True, bf16=True, save_strategy="no")
    before, data = config.to_dict(), load(str(rows)).train
    trainer(model=model, args=config, train_dataset=data, processing_class=AutoTokenizer.from_pretrained(dense)).train()
    assert seen == {caches}
    assert config.to_dict() == before


def dtypes_of_what_is_trained(folder: Path, saved: Path) -> set[torch.dtype]:
    """In a sharded model with adapters, before and after it was saved; its projections are in 16 bits, and it runs."""
    recipe = Recipe("a model", datasets=[{"path": "rows"}], train="lora", lora_target_modules=["q_proj", "down_proj"])
    options = {"distributed_config": DistributedConfig(fsdp_size=2), "dtype": torch.bfloat16}
    model = lora.load_sharded(folder, recipe, **options)
    ids = torch.arange(3, 20)[None]
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, labels=ids).loss.backward()
    model.save_pretrained(saved, distributed_checkpoint=True)
    both = [*model.named_parameters(), *lora.load_sharded(saved, recipe, **options).named_parameters()]
    others = [
        parameter for name, parameter in both if "lora_" not in name and "norm." not in name and "gain." not in name
    ]
    assert {parameter.dtype for parameter in others} == {torch.bfloat16}
    assert {name.rpartition(".")[0].rpartition("_")[2] for name, parameter in both if parameter.requires_grad} > {
        "gain"
    }
    return {parameter.dtype for _, parameter in both if parameter.requires_grad}


def test_what_learns_beside_frozen_weights_in_16_bits_is_in_float32(dense: Path, tmp_path: Path) -> None:
    folder = make_rewired(dense, tmp_path / "m", [{"layers": "1-4", "preset": "ladder", "peek": True}])
    assert run_on_ranks(dtypes_of_what_is_trained, 2, folder, tmp_path / "saved") == [{torch.float32}] * 2


def kd_from_itself(folder: Path, in_4bit: bool) -> float:
    """The divergence of a student in `folder` from its own weights, as a teacher in 16 or 4 bits; both sharded."""
    distributed = DistributedConfig(fsdp_size=2)
    student = AutoModelForCausalLM.from_pretrained(folder, distributed_config=distributed, dtype=torch.float32)
    teacher = sharded(student, folder, dtype=torch.bfloat16, distributed=distributed, in_4bit=in_4bit)
    add_losses(student, teacher, TokenLoss(kd=1), 0, [])
    ids = torch.randint(3, 259, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        return float(student(input_ids=ids, labels=ids, distils=True).kd)


@pytest.mark.parametrize(("is_tied", "in_4bit"), [(False, False), (True, True)])
def test_a_sharded_teacher_in_few_bits_has_nothing_to_teach_where_nothing_is_rewired(
    is_tied: bool, in_4bit: bool, tmp_path: Path
) -> None:
    dense = make_chat_of_4_bits(tmp_path / "dense", tie_word_embeddings=is_tied)
    folder = make_rewired(dense, tmp_path / "m", [{"layers": "0-", "preset": "standard"}])
    assert run_on_ranks(kd_from_itself, 2, folder, in_4bit) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_hangs_ends_the_others_in_a_sentence(stopped: int, keys: dict[str, Any], tmp_path: Path) -> None:
    """After ddp_timeout, though they wait for hours where the first one refits alone."""
    long = {"max_steps": 100_000, "logging_steps": 100_000, "save_steps": 5, "save_total_limit": 1, "eval_steps": None}
    out = tmp_path / "out"
    recipe = write_recipe(tmp_path / "r.yaml", **keys | long | {"ddp_timeout": 3, "output_dir": str(out)})
    program, *options = LAUNCHERS["torchrun"]
    command = [str(Path(sys.executable).parent / program), *options, "2", *ADAPT, str(recipe)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as launcher:
        while not list(out.glob("checkpoint-*")) and launcher.poll() is None:
            time.sleep(0.1)
        ranks = psutil.Process(launcher.pid).children()
        (rank,) = [rank for rank in ranks if rank.environ()["RANK"] == str(stopped)]
        rank.suspend()
        assert launcher.stderr is not None
        told = next(line for line in launcher.stderr if line.startswith("adapt: "))
        rank.kill()  # as torchrun does, in half a minute
    assert told.startswith("adapt: Another rank hangs or has ended (") and "--resume goes on" in told
    assert launcher.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"ce_weight": 1.0, "kd_weight": 0.0, "hidden_weight": 0.0, "eval_steps": None},
        {"gradient_accumulation_steps": 2, "packing": True, "max_length": 64},
        {"train": "lora", "hidden_weight": 0.0},
    ],
    ids=["SFT", "packed and accumulated", "LoRA"],
)
def test_ranks_learn_the_same_in_every_way(changes: dict[str, Any], keys: dict[str, Any], tmp_path: Path) -> None:
    keys = keys | changes | {"max_steps": 10, "logging_steps": 2}
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    train(tmp_path / "r.yaml", **keys | {"per_device_train_batch_size": ROWS, "output_dir": str(alone)})
    changes = {"per_device_train_batch_size": ROWS // 2, "output_dir": str(shared)}
    launch("torchrun", 2, write_recipe(tmp_path / "r.yaml", **keys | changes))
    for name in ("loss", "num_tokens"):
        assert logged(shared / "final", name) == pytest.approx(logged(alone / "final", name), rel=2e-4) != [], name
    expected = weights(alone / "final")
    for name, tensor in weights(shared / "final").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("in_4bit", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "split",
    [name if name == "FSDP2" else pytest.param(name, marks=pytest.mark.slow) for name in SPLITS if name != "DDP"],
)
def test_adapters_of_a_sharded_model_learn_what_one_process_does(
    split: str, in_4bit: bool, keys: dict[str, Any], tmp_path: Path
) -> None:
    """Which holds in full what they have in 4 bits. They are merged into what is saved, and a training that was cut off
    goes on as the same."""
    lora = {"train": "lora", "lora_r": 2, "learning_rate": 1e-2, "max_steps": 10, "logging_steps": 2, "save_steps": 6}
    # where gradients are next to nothing, Adam would make steps of how they are rounded
    changes = {"model": str(make_chat_of_4_bits(tmp_path / "dense")), "adam_epsilon": 1e-4}
    keys, alone, shared = keys | lora | changes, tmp_path / "alone", tmp_path / "shared"
    train(tmp_path / "r.yaml", **keys | {"per_device_train_batch_size": ROWS, "output_dir": str(alone)})
    _, ranks, changes = SPLITS[split]
    shares = changes.get("tp_size", 1)
    changes = changes | {"per_device_train_batch_size": ROWS * shares // ranks, "output_dir": str(shared)}
    changes |= {"load_in_4bit": in_4bit}
    recipe = write_recipe(tmp_path / "r.yaml", **keys | changes)
    fork(ranks, recipe)
    for name in ("loss", "ce", "kd", "hidden", "num_tokens"):
        assert logged(shared / "final", name) == pytest.approx(logged(alone / "final", name), rel=2e-4) != [], name
    saved = {name for file in (shared / "checkpoint-6").glob("*.safetensors") for name in load_file(file)}
    assert sum("packed" in name for name in saved) == 7 * 4 * in_4bit
    before, expected, found = (weights(folder) for folder in (alone / "start", alone / "final", shared / "final"))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
    changed = {name for name in before if not torch.equal(found[name], before[name])}
    assert {name.rpartition("_")[2].rpartition(".")[0] for name in changed} == {"proj", "layernorm"}
    shutil.rmtree(shared / "final")
    shutil.rmtree(shared / "checkpoint-10")
    fork(ranks, recipe, resume=True)
    resumed = weights(shared / "final")
    assert all(torch.equal(resumed[name], found[name]) for name in found)


@pytest.mark.slow
def test_ranks_share_a_stream_as_one_process_reads_it(keys: dict[str, Any], tmp_path: Path) -> None:
    """Of two files, as many as there are ranks, of which one is small."""
    (tmp_path / "rows").mkdir()
    write_rows(tmp_path / "rows" / "big.jsonl", conversations(40))
    write_rows(tmp_path / "rows" / "small.jsonl", conversations(3))
    keys = keys | {"datasets": [str(tmp_path / "rows")], "streaming": True, "max_steps": 12, "logging_steps": 1}
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    train(tmp_path / "r.yaml", **keys | {"per_device_train_batch_size": ROWS, "output_dir": str(alone)})
    changes = {"per_device_train_batch_size": ROWS // 2, "output_dir": str(shared)}
    launch("torchrun", 2, write_recipe(tmp_path / "r.yaml", **keys | changes))
    for name in ("loss", "kd", "num_tokens"):
        assert logged(shared / "final", name) == pytest.approx(logged(alone / "final", name), rel=2e-4) != [], name
