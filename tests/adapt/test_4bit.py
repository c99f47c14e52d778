"""LoRA beside frozen weights in 4 bits, by bitsandbytes on a CPU; trainer/test_ranks.py trains sharded ones."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from transformers import AutoModelForCausalLM
from trl import SFTConfig

from rewired.adapt.assemble import make_teacher
from rewired.adapt.model import four_bit
from rewired.adapt.model.student import in_4bit, load_student
from rewired.adapt.model.trainable import Changed
from rewired.adapt.recipe.keys import Recipe
from rewired.adapt.start import Start, outline
from rewired.checkpoint.provenance import record
from rewired.ranks import run_on_ranks
from rewired.sources import find_source
from tests.rewired.test_against_reference import assert_close
from tests.rewired.tiny import WIRINGS, rewired_model, tokens

from .world import LADDER, logged, make_chat, make_chat_of_4_bits, make_rewired, train, weights

LORA = {"train": "lora", "lora_r": 2, "learning_rate": 1e-2, "load_in_4bit": True}


@pytest.mark.parametrize("name", ["standard", "ladder-peek", "desync-2x", "mixed"])
def test_a_model_in_4_bits_is_the_model_of_the_numbers_that_these_stand_for(name: str, tmp_path: Path) -> None:
    rewired_model(WIRINGS[name], 4).save_pretrained(tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=in_4bit(torch.float32))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    quantised = {path: module for path, module in found.named_modules() if isinstance(module, Linear4bit)}
    assert len(quantised) == 7 * found.config.num_hidden_layers
    for path, module in quantised.items():
        weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
        expected.get_submodule(path).weight.data.copy_(weight)
    assert_close(found(tokens()).logits, expected(tokens()).logits, name)
    gradients = []
    for model in (found, expected):
        embedded = model.get_input_embeddings()(tokens()).detach().requires_grad_()
        model(inputs_embeds=embedded, labels=tokens()).loss.backward()
        gradients.append(embedded.grad)
    assert_close(gradients[0], gradients[1], name)


@pytest.fixture
def keys(dense: Path, rows: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model": str(dense), "wiring": LADDER, "tp_shards": 2, "refit": "none", "datasets": [str(rows)],
        "ce_weight": 0.5, "kd_weight": 1.0, "max_steps": 6, "logging_steps": 1, "save_steps": 4, "eval_steps": None,
        "output_dir": str(tmp_path / "out"),
    } | LORA  # fmt: skip


def test_adapters_are_merged_into_the_weights_in_16_bits(keys: dict[str, Any], tmp_path: Path) -> None:
    """And a training that was cut off goes on as the same."""
    made = train(tmp_path / "r.yaml", **keys)
    before, after = weights(tmp_path / "out" / "start"), weights(made)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.rpartition("_")[2] for name in changed} == {"proj.weight", "layernorm.weight"}
    for name in changed:
        if name.endswith("proj.weight"):
            singular = torch.linalg.svdvals((after[name] - before[name]).float())
            assert singular[2] < 1e-3 * singular[0], f"{name}: what is added has a rank of 2"
    again = shutil.copytree(tmp_path / "out", tmp_path / "again")
    for lost in ("final", "checkpoint-6"):
        shutil.rmtree(again / lost)
    resumed = train(tmp_path / "r.yaml", "--resume", **keys | {"output_dir": str(again)})
    assert logged(resumed, "loss") == logged(made, "loss")
    assert all(torch.equal(tensor, after[name]) for name, tensor in weights(resumed).items())


@pytest.mark.parametrize("changed", [(), (2, 3)])
def test_the_teacher_is_the_same_base(changed: tuple[int, ...], dense: Path, tmp_path: Path) -> None:
    """It holds no weights of its own but those of layers that a refit has changed, and these in 4 bits, too."""
    folder = tmp_path / "student"
    rewired_model([{"layers": "2-4", "preset": "ladder"}], 2).save_pretrained(folder)
    recipe = Recipe(str(folder), datasets=[{"path": "rows"}], kd_weight=1.0, train="lora", load_in_4bit=True)
    student = load_student(recipe, folder)
    config = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    start = Start(folder, record(find_source(str(folder)), folder), Changed(changed))
    teacher = make_teacher(student, recipe, config, start)
    own = {id(parameter) for parameter in student.parameters()}
    beside = [module for module in teacher.model.modules() if isinstance(module, Linear4bit)]
    assert len([module for module in beside if id(module.weight) not in own]) == 7 * len(changed)


def own_projections(folder: Path, out: Path) -> list[int]:
    """On a rank: how many projections in 4 bits a teacher has of its own, before and after a refit of two layers."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # accelerate asks for them, though nobody listens there
    start = Start(folder, record(find_source(str(folder)), folder))
    recipe = Recipe(
        str(folder), datasets=[{"path": "rows"}], kd_weight=1.0, train="lora", load_in_4bit=True, fsdp_size=2
    )
    student = load_student(recipe, folder)
    config = SFTConfig(output_dir=str(out), use_cpu=True, bf16=False)
    students = {id(module) for module in student.modules() if isinstance(module, four_bit.Linear4bit)}
    assert len(students) == 7 * student.config.num_hidden_layers
    counts = []
    for changed in ((), (2, 3)):
        teacher = make_teacher(student, recipe, config, replace(start, changed=Changed(changed)))
        modules = [module for module in teacher.model.modules() if isinstance(module, four_bit.Linear4bit)]
        counts.append(len([module for module in modules if id(module) not in students]))
    return counts


def test_a_sharded_teacher_is_the_same_base(tmp_path: Path) -> None:
    folder = make_rewired(make_chat_of_4_bits(tmp_path / "dense"), tmp_path / "m", LADDER)
    assert run_on_ranks(own_projections, 2, folder, tmp_path) == [[0, 7 * 2]] * 2


def test_without_bitsandbytes_nothing_is_begun(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match="load_in_4bit needs the package 'bitsandbytes', which is not installed"):
        train(tmp_path / "r.yaml", **keys)
    assert not (tmp_path / "out").exists()


def test_what_4_bits_are_not_for_is_refused() -> None:
    with pytest.raises(ValueError, match="load_in_4bit is for frozen weights beside adapters: say train: lora"):
        Recipe("a model", datasets=[{"path": "rows"}], train="all", load_in_4bit=True)


@pytest.mark.parametrize(
    ("width", "split", "sentence"),
    [
        (32, {"fsdp_size": 2}, "the 32 columns of self_attn.q_proj do not fill blocks of 64: hold"),
        (64, {"tp_size": 2}, "the 64 columns of self_attn.o_proj do not fill blocks of 64 on each of 2 ranks"),
        (128, {"tp_size": 2, "fsdp_size": 2}, None),
    ],
)
def test_a_block_of_a_row_is_on_one_rank(
    width: int, split: dict[str, int], sentence: str | None, tmp_path: Path
) -> None:
    folder = make_rewired(
        make_chat(tmp_path / "dense", hidden_size=width, intermediate_size=256), tmp_path / "m", LADDER
    )
    recipe = Recipe(str(folder), datasets=[{"path": "rows"}], train="lora", load_in_4bit=True, **split)
    with pytest.raises(ValueError, match=sentence) if sentence else nullcontext():
        outline([recipe])
