"""A checkpoint that is broken is a ValueError with one sentence, whatever runs it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rewired.adapt.recipe.keys import Recipe
from rewired.adapt.start import prepare
from rewired.bench.request import BenchRequest
from rewired.bench.run import bench
from rewired.convert import RefitRequest, Request, convert
from rewired.evaluate.models import check_together, open_model
from rewired.serve.generate import Prompt, generate
from tests.convert.checkpoints import edit_json, edit_tensors
from tests.evaluate.world import LADDER, make_dense, make_rewired

WEIGHTS = "model.safetensors"
Break = Callable[[Path], object]


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return make_rewired(make_dense(folder / "dense"), folder / "ladder", LADDER)


def by_generate(folder: Path) -> None:
    generate(folder, Prompt("x", max_new_tokens=1), device="cpu")


def by_evaluate(folder: Path) -> None:
    check_together([open_model(str(folder), folder.name)], 1)


def by_bench(folder: Path) -> None:
    bench(BenchRequest(str(folder), ("ladder",), device="cpu", dtype="float32"), [1], [1], folder / "out")


def by_adapt(folder: Path) -> None:
    prepare(Recipe(model=str(folder), datasets=["unused"]), folder / "unused")


def by_refit(folder: Path) -> None:
    convert(folder, folder.parent / "refitted", Request(refit=RefitRequest()))


def pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def link_to_itself(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(WEIGHTS)


# by what is wrong: how it comes about, and what the sentence says
BROKEN: dict[str, tuple[Break, str]] = {
    "truncated": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-9]), "is not a whole safetensors"),
    "no header": (lambda f: (f / WEIGHTS).write_bytes(b""), "header too small"),
    "pickled": (pickle, "holds only pickled weights"),
    "other weights": (
        lambda f: edit_json(f / "config.json", transformers_weights="adapter_model.bin"),
        "takes the weights from 'adapter_model.bin'",
    ),
    "a link to itself": (link_to_itself, f"{WEIGHTS} is missing"),
    "no tensor": (lambda f: edit_tensors(f / WEIGHTS, {"model.norm.weight": None}), "lacks the tensor"),
    "another shape": (lambda f: edit_tensors(f / WEIGHTS, {"model.norm.weight": torch.ones(3)}), r"has shape \[3\]"),
    "no table": (lambda f: (f / "config.json").write_text("[]"), "config.json is not a JSON object"),
    "no size": (lambda f: edit_json(f / "config.json", hidden_size="x"), "hidden_size 'x'"),
    "no rope": (lambda f: edit_json(f / "config.json", rope_parameters={"rope_type": "x"}), "takes a rope_type"),
    "a wiring that is not run": (lambda f: edit_json(f / "config.json", model_type="llama"), " a dense "),
}
# what transformers does not make a model of
NO_MODEL: dict[str, tuple[Break, str]] = {
    "no activation": (lambda f: edit_json(f / "config.json", hidden_act="x"), "(loaded|be run): KeyError: 'x'"),
    "no type": (lambda f: edit_json(f / "config.json", rms_norm_eps="x"), "'rms_norm_eps': TypeError: "),
}
# what only those meet that take text
BROKEN_FOR_TEXT: dict[str, tuple[Break, str]] = {
    "no generation": (lambda f: (f / "generation_config.json").write_text("[]"), "config.json is not a JSON object"),
    "no end": (
        lambda f: edit_json(f / "generation_config.json", eos_token_id="x"),
        "generation_config.json has eos_token_id 'x': it must be the number of a token",
    ),
    "no tokens": (lambda f: (f / "tokenizer.json").write_text('{"version": "1.0"}'), "no tokenizer that can be loaded"),
    "no template": (lambda f: (f / "chat_template.jinja").write_text("{% for %}"), "template cannot be used: Template"),
}


@pytest.mark.parametrize("run", [by_generate, by_evaluate, by_bench, by_adapt])
@pytest.mark.parametrize(("make", "sentence"), BROKEN.values(), ids=BROKEN)
def test_every_command_says_what_is_broken(
    run: Callable[[Path], None], make: Break, sentence: str, ladder: Path, tmp_path: Path
) -> None:
    check(run, make, sentence, shutil.copytree(ladder, tmp_path / "broken"))


@pytest.mark.parametrize("run", [by_generate, by_adapt, by_refit])
@pytest.mark.parametrize(("make", "sentence"), NO_MODEL.values(), ids=NO_MODEL)
def test_a_config_of_no_model_is_said(
    run: Callable[[Path], None], make: Break, sentence: str, ladder: Path, tmp_path: Path
) -> None:
    check(run, make, sentence, shutil.copytree(ladder, tmp_path / "broken"))


@pytest.mark.parametrize(("make", "sentence"), BROKEN_FOR_TEXT.values(), ids=BROKEN_FOR_TEXT)
def test_generate_says_what_transformers_does_not_take(
    make: Break, sentence: str, ladder: Path, tmp_path: Path
) -> None:
    check(by_generate, make, sentence, shutil.copytree(ladder, tmp_path / "broken"))


def check(run: Callable[[Path], None], make: Break, sentence: str, folder: Path) -> None:
    make(folder)
    with pytest.raises(ValueError, match=sentence) as failure:
        run(folder)
    assert len(str(failure.value).splitlines()) == 1
