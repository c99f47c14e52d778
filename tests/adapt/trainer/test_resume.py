"""A training that was cut off goes on as if it had not been: the same losses, the same rows, the same weights."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapt.world import (
    command,
    conversations,
    distillation,
    logged,
    make_chat,
    train,
    weights,
    write_recipe,
    write_rows,
)
from tests.commands import run

SFT = pytest.param({"ce_weight": 1.0, "kd_weight": 0.0}, marks=pytest.mark.slow, id="SFT")


@pytest.fixture(scope="module")
def trained(dense: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `keys` make: of four steps, of which two are in a checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    return train(folder / "r.yaml", **distillation(dense, rows, folder / "out")).parent


@pytest.fixture
def out(trained: Path, tmp_path: Path) -> Path:
    """It as it was before its model was written, where `keys` expect it."""
    return shutil.copytree(trained, tmp_path / "out", ignore=shutil.ignore_patterns("final"))


@pytest.mark.parametrize("weights_of_loss", [pytest.param({"kd_weight": 1.0}, id="distillation"), SFT])
def test_a_training_that_is_gone_on_with_is_the_same(
    weights_of_loss: dict[str, float], keys: dict[str, Any], tmp_path: Path
) -> None:
    """Bit for bit: the losses, the order of data, the weights."""
    keys |= weights_of_loss | {"max_steps": 6, "lr_scheduler_type": "cosine", "warmup_steps": 2}
    check_goes_on(keys, tmp_path, "checkpoint-6", "checkpoint-4")


@pytest.mark.parametrize("logs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_training_that_was_killed_before_its_model_was_written_takes_no_step_more(
    logs: int, keys: dict[str, Any], tmp_path: Path
) -> None:
    """And counts the tokens of steps that were not logged."""
    keys |= {"max_steps": 6, "lr_scheduler_type": "constant", "logging_steps": logs, "save_steps": 3}
    whole = train(tmp_path / "r.yaml", **keys | {"output_dir": str(tmp_path / "whole")})
    cut = shutil.copytree(whole.parent, tmp_path / "cut")
    for lost in ([], ["checkpoint-6"]):
        for name in ["final", *lost]:
            shutil.rmtree(cut / name)
        again = train(tmp_path / "r.yaml", resume=True, **keys | {"output_dir": str(cut)})
        first, second = weights(whole), weights(again)
        assert all(torch.equal(first[name], second[name]) for name in first)
        records = [json.loads((folder / "config.json").read_text())["adapted"] for folder in (whole, again)]
        assert records[0] == records[1]


@pytest.mark.usefixtures("out")
def test_another_recipe_is_not_gone_on_with(keys: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="begun with another wiring"):
        train(tmp_path / "r.yaml", resume=True, **keys | {"wiring": [{"layers": "1-4", "preset": "ladder"}]})


@pytest.mark.usefixtures("out")
@pytest.mark.parametrize(
    "changed",
    [{"seed": 1}, {"learning_rate": 1e-6}, {"per_device_train_batch_size": 3}, {"dataset_num_proc": 2}],
    ids=lambda changed: next(iter(changed)),
)
def test_nor_with_another_order_of_rows_or_another_rate(
    changed: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    """The optimizer's states would bring the old rate back, and rows would be read twice or never: processes pack
    their parts of them."""
    name = next(iter(changed))
    with pytest.raises(ValueError, match=f"begun with another {name}: choose another output_dir"):
        train(tmp_path / "r.yaml", resume=True, **keys | changed)


def test_what_a_training_tells_may_change(trained: Path, out: Path, keys: dict[str, Any], tmp_path: Path) -> None:
    expected = weights(trained / "final")
    shutil.rmtree(out / "checkpoint-4")
    told = {
        "run_name": "again",
        "logging_steps": 3,
        "logging_first_step": True,
        "save_steps": 4,
        "dataloader_num_workers": 1,
    }
    found = weights(train(tmp_path / "r.yaml", resume=True, **keys | told))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_it_is_saved_and_logged_as_often_as_is_asked_for_now(out: Path, keys: dict[str, Any], tmp_path: Path) -> None:
    """Not as often as when it was begun, which a checkpoint says."""
    shutil.rmtree(out / "checkpoint-4")
    made = train(tmp_path / "r.yaml", resume=True, **keys | {"save_steps": 4, "logging_steps": 3, "max_steps": 8})
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4", "checkpoint-8"}
    history = json.loads((made / "training.json").read_text())
    assert [entry["step"] for entry in history if "loss" in entry] == [1, 2, 3, 4, 6, 8], "and before it is saved"


def test_nor_on_another_number_of_ranks(out: Path, keys: dict[str, Any], tmp_path: Path) -> None:
    """Which makes other steps of the same rows."""
    recipe = out / "recipe.json"
    recipe.write_text(recipe.read_text().replace('"number of ranks": 1', '"number of ranks": 2'))
    with pytest.raises(ValueError, match="begun with another number of ranks: choose another output_dir"):
        train(tmp_path / "r.yaml", resume=True, **keys)


def test_nor_on_other_rows(keys: dict[str, Any], tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", conversations())
    keys |= {"datasets": [str(path)]}
    shutil.rmtree(train(tmp_path / "r.yaml", **keys))
    write_rows(path, conversations()[::-1])
    with pytest.raises(ValueError, match="begun with another set of rows: choose another output_dir"):
        train(tmp_path / "r.yaml", resume=True, **keys)


def test_nor_in_other_stages(keys: dict[str, Any], tmp_path: Path) -> None:
    """A stage more would be left out silently, since the model of the last one is there."""
    keys |= {"max_steps": 1}
    one, two = [{**keys, "output_dir": str(tmp_path / name)} for name in ("one", "two")]
    stages = [{"learning_rate": rate} for rate in (1e-3, 1e-4, 1e-5)]
    train(tmp_path / "r.yaml", **one)
    train(tmp_path / "r.yaml", **two, stages=stages[:2])
    for before, after in ((one, stages[:2]), (two, stages), (two, None)):
        with pytest.raises(ValueError, match="begun with another number of stages: choose another output_dir"):
            train(tmp_path / "r.yaml", resume=True, **before, stages=after)


def test_what_a_finished_stage_told_may_change(keys: dict[str, Any], tmp_path: Path) -> None:
    keys |= {"max_steps": 2, "stages": [{}, {"learning_rate": 1e-4}]}
    shutil.rmtree(train(tmp_path / "r.yaml", **keys))
    assert train(tmp_path / "r.yaml", resume=True, **keys | {"save_steps": 1, "logging_steps": 2}).is_dir()


def test_nor_is_what_nobody_knows(keys: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoint-7").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"has no recipe\.json"):
        train(tmp_path / "r.yaml", resume=True, **keys)


@pytest.mark.parametrize("content", ["{", "[]", '{"model": "a/b"}'])
def test_nor_is_what_another_tool_wrote(content: str, keys: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "recipe.json").write_text(content)
    (tmp_path / "out" / "checkpoint-7").mkdir()
    with pytest.raises(ValueError, match=r"recipe\.json cannot be read: choose another output_dir"):
        train(tmp_path / "r.yaml", resume=True, **keys)


@pytest.mark.parametrize(
    "spoil", [lambda file: file.write_bytes(file.read_bytes()[:-9]), Path.unlink], ids=["cut off", "gone"]
)
@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors"])
def test_a_broken_checkpoint_is_named(name: str, spoil: Any, out: Path, keys: dict[str, Any], tmp_path: Path) -> None:
    spoil(out / "checkpoint-4" / name)
    spoil(out / "checkpoint-2" / name)
    with pytest.raises(
        ValueError, match=r"has no checkpoint that is whole: delete .*checkpoint-4, .*checkpoint-2, and"
    ):
        train(tmp_path / "r.yaml", resume=True, **keys | {"max_steps": 6})


def test_the_last_whole_checkpoint_is_gone_on_from(
    trained: Path, out: Path, keys: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A newer one that is broken is made anew."""
    expected = weights(trained / "final")
    (out / "checkpoint-4" / "optimizer.pt").unlink()
    found = weights(train(tmp_path / "r.yaml", resume=True, **keys))
    told = capsys.readouterr().out
    assert "checkpoint-4: broken, so this goes on from " in told and "checkpoint-2." in told
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (out / "checkpoint-4" / "optimizer.pt").is_file()


def test_broken_checkpoints_do_not_push_whole_ones_out(out: Path, keys: dict[str, Any], tmp_path: Path) -> None:
    """Where few are kept: the newest would stay, whatever is in it."""
    (out / "checkpoint-4").rename(out / "checkpoint-9")
    (out / "checkpoint-9" / "optimizer.pt").unlink()
    train(tmp_path / "r.yaml", resume=True, **keys | {"save_total_limit": 1})
    kept = {path.name for path in out.glob("checkpoint-*")}
    assert kept == {"checkpoint-2", "checkpoint-4"}, "the last one, and one that a later loss has told to be good"


def test_more_epochs_are_trained(keys: dict[str, Any], tmp_path: Path) -> None:
    """transformers rounds half an epoch up to one."""
    keys |= {"max_steps": -1, "num_train_epochs": 0.5}
    shutil.rmtree(train(tmp_path / "r.yaml", **keys))
    again = train(tmp_path / "r.yaml", resume=True, **keys | {"num_train_epochs": 1.0})
    assert json.loads((again / "config.json").read_text())["adapted"]["steps"] == 18


@pytest.mark.filterwarnings("error::FutureWarning")
def test_nothing_is_warned_of_that_a_user_could_not_mend(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Names that libraries use among themselves, and a tied head that no checkpoint holds."""
    keys |= {"model": str(make_chat(tmp_path / "tied", tie_word_embeddings=True)), "activation_checkpointing": True}
    recipe = write_recipe(tmp_path / "r.yaml", **keys)
    assert command(monkeypatch, recipe) == 0
    expected = weights(tmp_path / "out" / "final")
    shutil.rmtree(tmp_path / "out" / "final")
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    capfd.readouterr()
    assert command(monkeypatch, recipe, "--resume") == 0
    assert "missing keys" not in capfd.readouterr().err
    found = weights(tmp_path / "out" / "final")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_killed_training_goes_on(keys: dict[str, Any], tmp_path: Path) -> None:
    keys = keys | {"max_steps": 12, "save_steps": 1, "save_total_limit": 2}
    whole = train(tmp_path / "whole.yaml", **keys | {"output_dir": str(tmp_path / "whole")})
    recipe = write_recipe(tmp_path / "cut.yaml", **keys | {"output_dir": str(tmp_path / "cut")})
    command = [str(Path(sys.executable).parent / "adapt"), str(recipe)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not list((tmp_path / "cut").glob("checkpoint-*")) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "cut" / "final").exists(), "it was killed in time"
    done = run("adapt", recipe, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = weights(whole), weights(tmp_path / "cut" / "final")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_streamed_training_that_is_gone_on_with_is_the_same(keys: dict[str, Any], tmp_path: Path) -> None:
    rows = conversations(60)
    rows[1] = {"conversations": []}
    keys |= {"streaming": True, "skip_bad": True, "datasets": [str(write_rows(tmp_path / "rows.jsonl", rows))]}
    whole = check_goes_on(keys, tmp_path, "checkpoint-4")
    assert "1 bad row left out, the first because" in (whole / "README.md").read_text()


def test_a_stream_that_a_bad_row_stopped_goes_on_without_it(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it had been left out from the beginning."""
    # with a larger one, all rows would be read before the first step
    monkeypatch.setattr("rewired.adapt.data.corpus._SHUFFLE_BUFFER", 2)
    rows = conversations(60)
    rows[20] = {"conversations": []}
    keys |= {"streaming": True, "datasets": [str(write_rows(tmp_path / "rows.jsonl", rows))], "max_steps": 12}
    with pytest.raises(ValueError, match="row 21 is an empty conversation"):
        train(tmp_path / "r.yaml", **keys)
    assert (tmp_path / "out" / "checkpoint-2").is_dir()
    found = weights(train(tmp_path / "r.yaml", resume=True, **keys | {"skip_bad": True}))
    whole = weights(train(tmp_path / "r.yaml", **keys | {"skip_bad": True, "output_dir": str(tmp_path / "whole")}))
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_a_stream_is_read_again_from_where_it_was(keys: dict[str, Any], tmp_path: Path) -> None:
    """Its second pass, too, though transformers knows of epochs only."""
    keys |= {"streaming": True, "held_out": 2, "save_steps": 4, "max_steps": 6}
    keys |= {"datasets": [str(write_rows(tmp_path / "rows.jsonl", conversations(8)))]}
    check_goes_on(keys, tmp_path, "checkpoint-6")


def test_what_is_logged_does_not_hang_on_where_it_was_cut_off(keys: dict[str, Any], tmp_path: Path) -> None:
    """Checkpoints between two logs."""
    check_goes_on(keys | {"logging_steps": 2, "save_steps": 3, "max_steps": 6}, tmp_path, "checkpoint-6")


def check_goes_on(keys: dict[str, Any], folder: Path, *lost: str) -> Path:
    """A training without its end, gone on with, is the whole one; the model that the whole one made."""
    whole = train(folder / "r.yaml", **keys | {"output_dir": str(folder / "whole")})
    shutil.copytree(folder / "whole", folder / "cut")
    for name in ("final", *lost):
        shutil.rmtree(folder / "cut" / name)
    (folder / "cut" / ".saving" / lost[-1]).mkdir(parents=True, exist_ok=True)  # as a kill while saving leaves it
    again = train(folder / "r.yaml", resume=True, **keys | {"output_dir": str(folder / "cut")})
    for name in ("step", "loss", "ce", "kd", "num_tokens"):
        assert logged(again, name) == logged(whole, name), name
    assert logged(whole, "loss")
    first, second = weights(whole), weights(again)
    assert all(torch.equal(first[name], second[name]) for name in first)
    return whole


@pytest.mark.usefixtures("out")
def test_what_is_there_is_not_overwritten(keys: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--resume"):
        train(tmp_path / "r.yaml", **keys)


def test_what_cannot_be_begun_can_be_mended(keys: dict[str, Any], tmp_path: Path) -> None:
    """The text to refit on is missing: with another one, the same folder will do."""
    text = tmp_path / "text.txt"
    with pytest.raises(ValueError, match=r"no calibration text .*text\.txt"):
        train(tmp_path / "r.yaml", **keys | {"refit": str(text)})
    text.write_text("A river runs. " * 400)
    assert train(tmp_path / "r.yaml", resume=True, **keys | {"refit": str(text), "refit_tokens": 600}).is_dir()


def test_what_was_killed_before_its_first_checkpoint_can_be_mended(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of memory, for example, which leaves it no time to clean up."""

    def kill(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("rewired.adapt.run.make_trainer", kill)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "r.yaml", **keys)
    assert (tmp_path / "out" / "start" / "config.json").is_file()
    with pytest.raises(ValueError, match="begun with another wiring"):
        train(tmp_path / "r.yaml", resume=True, **keys | {"wiring": [{"layers": "1-4", "preset": "ladder"}]})
    assert train(tmp_path / "r.yaml", resume=True, **keys | {"per_device_train_batch_size": 1}).is_dir()


def test_what_failed_before_its_first_checkpoint_can_be_mended(keys: dict[str, Any], tmp_path: Path) -> None:
    """And the model that it starts from is there already; only for another one it is too late."""
    with pytest.raises(ValueError, match="no checkpoint was saved before"):
        train(tmp_path / "r.yaml", **keys | {"learning_rate": 1e30, "max_grad_norm": 0.0})
    start = (tmp_path / "out" / "start" / "config.json").stat()
    with pytest.raises(ValueError, match="begun with another wiring"):
        train(tmp_path / "r.yaml", resume=True, **keys | {"wiring": [{"layers": "1-4", "preset": "ladder"}]})
    assert train(tmp_path / "r.yaml", resume=True, **keys).is_dir()
    assert (tmp_path / "out" / "start" / "config.json").stat() == start
