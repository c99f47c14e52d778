"""Recipes: what a file says, what it inherits, what the command line puts over it, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rewired.adapt.recipe.reading import read

LEAST: dict[str, Any] = {"model": "some/model", "datasets": ["some/data"]}


def write(path: Path, **keys: Any) -> Path:
    path.write_text(yaml.safe_dump(keys))
    return path


def test_keys_are_ours_and_trls(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", **LEAST, kd_weight=0.5, train="rewired", max_steps=7, packing=True)
    (stage,) = read(path, [])
    assert (stage.recipe.kd_weight, stage.recipe.train) == (0.5, "rewired")
    assert (stage.config.max_steps, stage.config.packing) == (7, True)
    assert stage.given == LEAST | {"kd_weight": 0.5, "train": "rewired", "max_steps": 7, "packing": True}


def test_steps_are_whole_numbers(tmp_path: Path) -> None:
    """Some are floats to transformers, for which less than 1 is a share."""
    path = write(tmp_path / "r.yaml", **LEAST, warmup_steps=20, save_steps=0.5)
    given = read(path, ["--logging_steps", "5"])[0].given
    assert repr([given[key] for key in ("warmup_steps", "logging_steps", "save_steps")]) == "[20, 5, 0.5]"


def test_what_was_given_can_be_written_again(tmp_path: Path) -> None:
    """Though TRL's config makes an object of it."""
    path = write(tmp_path / "r.yaml", **LEAST, accelerator_config={"even_batches": False})
    assert yaml.safe_load(yaml.safe_dump(read(path, [])[0].given))["accelerator_config"] == {"even_batches": False}
    path = write(tmp_path / "r.yaml", **LEAST, debug="underflow_overflow")
    assert yaml.safe_load(yaml.safe_dump(read(path, [])[0].given))["debug"] == ["underflow_overflow"]


def test_a_number_that_yaml_takes_for_text_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("model: a/b\ndatasets: [c/d]\nlearning_rate: 5e-6\n")
    assert read(tmp_path / "r.yaml", [])[0].config.learning_rate == 5e-6


def test_the_command_line_is_put_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", **LEAST, max_steps=7, learning_rate=1e-3)
    (stage,) = read(path, ["--max_steps", "9", "--kd_weight=2"])
    assert (stage.config.max_steps, stage.config.learning_rate, stage.recipe.kd_weight) == (9, 1e-3, 2.0)
    assert stage.given["max_steps"] == 9 and stage.given["kd_weight"] == 2.0


def test_a_flag_may_have_hyphens(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", **LEAST)
    for flag in ("--activation-checkpointing", "--activation_checkpointing"):
        assert not read(path, [flag, "false"])[0].config.activation_checkpointing


def test_one_target_of_lora_may_be_written_as_a_word(tmp_path: Path) -> None:
    recipe = read(write(tmp_path / "r.yaml", **LEAST, train="lora", lora_target_modules="q_proj"), [])[0].recipe
    assert recipe.lora_target_modules == ["q_proj"]


@pytest.mark.parametrize("where", ["file", "command line"])
def test_what_is_nested_too_deep_is_refused(where: str, tmp_path: Path) -> None:
    nested = "[" * 900 + "]" * 900
    path = tmp_path / "r.yaml"
    path.write_text(f"wiring: {nested if where == 'file' else 'ladder'}\nmodel: a/b\ndatasets: [c/d]\n")
    with pytest.raises(ValueError, match="is not YAML"):
        read(path, [] if where == "file" else ["--wiring", nested])


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path} is a folder: give a recipe, which is a YAML file."):
        read(tmp_path, [])


def test_a_name_that_is_nearly_right_is_told(tmp_path: Path) -> None:
    write(tmp_path / "ladder-distill.yaml", **LEAST)
    with pytest.raises(ValueError, match=r"no recipe .*ladder-distil\.yaml: did you mean ladder-distill\.yaml\?"):
        read(tmp_path / "ladder-distil.yaml", [])


@pytest.mark.parametrize("name", ["smollm2-135m-ladder-distill", "smollm2-135m-ladder-distill.yaml"])
def test_a_recipe_of_the_package_goes_by_its_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless there is a file of that name; a folder does not count."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    (stage,) = read(Path(name), [])
    assert stage.recipe.model == "smollm2-135m" and stage.config.output_dir == "out/smollm2-135m-ladder-distill"
    (child,) = read(write(tmp_path / "r.yaml", extends=name, max_steps=7), [])
    assert (child.recipe, child.config.max_steps) == (stage.recipe, 7)
    (tmp_path / name).rmdir()
    write(tmp_path / name, **LEAST)
    assert read(Path(name), [])[0].recipe.model == "some/model"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("smollm2-135m-ladder-distil", "smollm2-135m-ladder-distill"),
        ("recipes/smollm2-135m-ladder-distill.yaml", "smollm2-135m-ladder-distill"),
        ("llama-3.1-8b-lader-16l-sft", "llama-3.1-8b-ladder-16l-sft"),
    ],
)
def test_a_name_that_is_nearly_one_of_the_packages_is_told(
    name: str, near: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"no recipe {name}: did you mean {near}.$"):
        read(Path(name), [])
    with pytest.raises(ValueError, match="no recipe zzz: `adapt --list` shows those that come with the package"):
        read(Path("zzz"), [])


def test_a_recipe_extends_another_one(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    write(tmp_path / "base.yaml", **LEAST, max_steps=7, seed=3)
    write(tmp_path / "below" / "middle.yaml", extends="../base.yaml", max_steps=8)
    (stage,) = read(write(tmp_path / "below" / "r.yaml", extends="middle.yaml", seed=4), [])
    assert (stage.recipe.model, stage.config.max_steps, stage.config.seed) == ("some/model", 8, 4)


def test_stages_change_the_recipe_one_after_the_other(tmp_path: Path) -> None:
    stages = [{"max_steps": 1, "kd_weight": 1.0}, {"max_steps": 2}]
    first, second = read(write(tmp_path / "r.yaml", **LEAST, seed=5, stages=stages), ["--learning_rate", "1e-4"])
    assert (first.config.max_steps, first.recipe.kd_weight) == (1, 1.0)
    assert (second.config.max_steps, second.recipe.kd_weight) == (2, 0.0)
    assert all((stage.config.seed, stage.config.learning_rate) == (5, 1e-4) for stage in (first, second))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lerning_rate": 1e-3}, "'lerning_rate' is not a key of recipes: did you mean 'learning_rate'"),
        ({"kd_wieght": 1}, "did you mean 'kd_weight'"),
        ({"zzz": 1}, "'zzz' is not a key of recipes"),
        ({"fsdp": "full_shard"}, "'fsdp' is not for adapt: models are sharded by fsdp_size"),
        ({"deepspeed": "zero3.json"}, "'deepspeed' is not for adapt: models are sharded by fsdp_size"),
        ({"gradient_checkpointing": False}, "its name begins with activation now"),
        ({"truncation_mode": "keep_end"}, "'truncation_mode' is not for adapt: what is too long is cut at its end"),
        ({"kd_weight": 1, "loss_type": "dft"}, "loss_type is not part of the losses against the original"),
        ({"hidden_weight": 1, "label_smoothing_factor": 0.1}, "label_smoothing_factor is not part of the losses"),
        ({"kd_weight": 1, "neftune_noise_alpha": 5}, "neftune_noise_alpha is not part of the losses"),
        ({"fsdp_size": 2, "optim": "adafactor"}, "optim is 'adafactor', which cannot step on sharded weights"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config: split_batches would change how many"),
        ({"accelerator_config": {"dispatch_batches": True}}, "accelerator_config: dispatch_batches would change"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}},
            "gradient_accumulation_kwargs would change how many",
        ),
        ({"max_steps": 0}, "max_steps is 0: give one above 0, or leave it out"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1: give 0 or more"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "'constant', which has no warm-up: give constant_with"),
        ({"model_init_kwargs": {"quantization_config": {}}}, "quantization_config is not for adapt: give load_in_4bit"),
        ({"refit": "mix"}, "a refit is for a model that is rewired first: give a wiring"),
        ({"tp_shards": 4}, "tp_shards is for a model that is rewired first: give a wiring"),
        ({"stages": [{}, {"refit": "mix"}]}, "a refit fits the original's weights, which only the first stage has"),
        ({"save_only_model": True}, "'save_only_model' is not for adapt"),
        ({"save_strategy": "best"}, "save_strategy is 'best'"),
        ({"model": ""}, "names no model"),
        ({"datasets": []}, "names no datasets"),
        ({"ce_weight": 0}, "nothing to minimise"),
        ({"kd_weight": -1}, "kd_weight is -1"),
        ({"temperature": 0}, "temperature"),
        ({"stages": 3}, "stages"),
        ({"stages": [{"output_dir": "other"}]}, "all stages have one output_dir: name it beside `stages`"),
        ({"stages": [{}, {"model": "other"}]}, "all stages have one model: name it beside `stages`"),
        ({"extends": "r.yaml"}, "extends itself"),
        ({"extends": "gone.yaml"}, "There is no recipe"),
        ({"train": "some"}, "train"),
        (
            {"train": "lora", "lora_target_modules": ["q_proj", "upp_proj"]},
            "the unknown projection 'upp_proj': did you mean 'up_proj'",
        ),
        ({"train": "lora", "lora_target_modules": ["lm_head"]}, "'lm_head': there are q_proj"),
        ({"divergence": "kl"}, "divergence"),
        ({"max_steps": [1]}, r"Field 'max_steps' expected int, got list \(value: \[1\]\)"),
        ({"max_steps": "many"}, "max_steps"),
        ({"learning_rate": {"a": 1}}, "Field 'learning_rate' expected float, got dict"),
        ({"max-steps": 5}, "'max-steps' is not a key of recipes: did you mean 'max_steps'"),
        ({"help": True}, "'help' is not a key"),
        ({"streaming": True}, "give max_steps"),
        (
            {"streaming": True, "max_steps": 1, "dataloader_num_workers": 1},
            "where it trains: leave dataloader_num_workers",
        ),
        ({"packing": 3}, "packing: Truthy value expected: got 3"),
        ({"datasets": 3}, "3 is no dataset"),
        ({"wiring": 16}, "wiring is 16: give a text, such as ladder@16-32, or a list"),
        ({"wiring": "lader"}, "'lader' is no wiring: begin with ladder"),
        ({"model_init_kwargs": "x"}, "model_init_kwargs is 'x': give a mapping"),
        ({"model_init_kwargs": "{x"}, "{x is not JSON"),
        ({"model_init_kwargs": {"torch_dtype": "bfloat16"}}, "torch_dtype is called dtype now"),
        ({"model_init_kwargs": {"dtype": "bogus"}}, "dtype is 'bogus'"),
        ({"ce_weight": float("nan")}, "ce_weight is nan"),
        ({"lora_alpha": 0}, "lora_alpha is 0: give 1 or more"),
        ({"fsdp_size": 0}, "fsdp_size is 0: give 1 or more"),
        ({"tp_size": -2}, "tp_size is '-2': give a number of ranks"),
        ({"dp_replicate_size": 0}, "dp_replicate_size is 0: give 1 or more"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of is 0: give one above 0"),
        ({"num_train_epochs": float("inf")}, "num_train_epochs is inf: give one above 0 and below"),
        ({"max_length": 2**40}, "max_length is 1099511627776: give one above 0 and below"),
        ({"seed": -1}, "seed is -1: give one from 0 to"),
        ({"seed": 2**40}, "seed is 1099511627776: give one from 0 to"),
        ({"datasets": [""]}, "'' is no dataset"),
        ({"datasets": [{"path": ""}]}, "its path is empty"),
        ({"model_init_kwargs": {"dtype": "int8"}}, "dtype is 'int8': choose auto, float32, bfloat16, float16"),
        ({"hub_token": "secret"}, "'hub_token' is not for adapt: what is to be uploaded is the folder `final`"),
        ({"per_device_eval_batch_size": 2}, "'per_device_eval_batch_size' is not for adapt: there is no evaluation"),
        ({"ignore_data_skip": True}, "'ignore_data_skip' is not for adapt: --resume goes on with the rows"),
        ({"padding_free": True}, "'padding_free' is not for adapt: packing leaves no padding"),
        ({"max_length": 0}, "max_length is 0: give one above 0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0: give one above 0"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size is 0: give one above 0"),
        ({"eval_steps": 0.5}, "eval_steps is 0.5: give a number of whole steps"),
        ({"eval_steps": 2, "held_out": 0}, "give held_out"),
        ({"packing": True, "max_length": None}, "packing fills rows of max_length tokens"),
        ({"optim": "galore_adamw"}, "optim is 'galore_adamw': .*galore_torch"),
        ({"optim_args": "bogus"}, "optim is"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_type is 'cosine_with_min_lr'"),
        ({"use_liger_kernel": True}, "'use_liger_kernel' is not for adapt: liger-kernel knows no rewired model"),
        ({"activation_offloading": True}, "activation_offloading needs a GPU"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        read(write(tmp_path / "r.yaml", **LEAST | changes), [])


@pytest.mark.parametrize(
    "flags",
    [
        ["--lerning_rate", "1"],
        ["--max_steps", "many"],
        ["--train", "some"],
        ["--skip_bad", "maybe"],
        ["--wiring", "[{"],
    ],
    ids=str,
)
def test_flags_that_make_no_sense_are_refused(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=flags[0].lstrip("-")) as refused:
        read(write(tmp_path / "r.yaml", **LEAST), flags)
    assert not str(refused.value).endswith("..")


@pytest.mark.parametrize("content", ["[1, 2]", "a: [", ""])
def test_a_file_that_is_no_recipe_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"r.yaml is no"):
        read(tmp_path / "r.yaml", [])


def test_lists_are_written_in_yaml_on_the_command_line(tmp_path: Path) -> None:
    wiring = "[{layers: 3-6, preset: ladder, peek: true}]"
    (stage,) = read(write(tmp_path / "r.yaml", **LEAST), ["--wiring", wiring, "--datasets", "some/folder"])
    assert stage.recipe.wiring == [{"layers": "3-6", "preset": "ladder", "peek": True}]
    assert [source.path for source in stage.recipe.mix] == ["some/folder"]


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_recipe_that_is_shipped_is_read(path: Path) -> None:
    for stage in read(path, ["--bf16", "false"]):
        assert stage.recipe.mix and stage.recipe.wiring
        assert path.stem.endswith(("-sft", "-scratch")) != stage.recipe.distills
