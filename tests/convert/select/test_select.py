"""`rewired select`, from a dense checkpoint to a choice of its layers."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rewired.convert import RefitRequest, Request, convert
from rewired.convert.checkpoint import Checkpoint
from rewired.convert.plan import LayerTable
from rewired.convert.refit.sweep import Sweep
from rewired.convert.select import SelectRequest, select
from rewired.convert.select.choice import STANDARD
from rewired.convert.select.scores import Kept, Score
from rewired.convert.select.wirings import NAMES, WIRINGS
from rewired.convert.select.wirings import exposed as waits
from tests.convert.checkpoints import broken_copy, run, snapshot
from tests.evaluate.world import make_dense

TOKENS = 4096


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWIRED_CACHE", str(tmp_path / "cache"))


def ask(text: Path, wiring: str = "ladder", **changes: Any) -> SelectRequest:
    return SelectRequest(wiring, **({"budget": 2, "text": str(text), "tokens": TOKENS, "measure": False} | changes))


def scored(dense: Path, text: Path, out: Path, wiring: str = "ladder", **changes: Any) -> dict[int, Score]:
    return select(str(dense), out, ask(text, wiring, **changes)).kept.read(wiring)


def refitted_kl(dense: Path, text: Path, out: Path, wiring: list[dict[str, Any]], **options: Any) -> float:
    done = convert(dense, out, Request(wiring, refit=RefitRequest(str(text), TOKENS), **options)).refit
    assert done is not None
    return done.after.kl


@pytest.mark.parametrize(
    "wiring",
    [pytest.param(name, marks=() if name == "ladder-peek" else pytest.mark.slow) for name in WIRINGS],
)
def test_scores_are_what_refits_of_these_layers_alone_tell(
    wiring: str, dense: Path, text: Path, tmp_path: Path
) -> None:
    """Whole refits from the checkpoint, which share no prefix: of one layer, of two, of the first and of the last."""
    found = scored(dense, text, tmp_path / "choice", wiring)

    def refitted(layers: str) -> float:
        return refitted_kl(dense, text, tmp_path / layers, [WIRINGS[wiring] | {"layers": layers}])

    assert sorted(found) == [0, 1, 2, 3]
    for layer in (0, 2, 3):
        assert found[layer].single == pytest.approx(refitted(f"{layer}-{layer + 1}"), rel=1e-5)
    for layer in (0, 2):
        assert found[layer].pair == pytest.approx(refitted(f"{layer}-{layer + 2}"), rel=1e-5)
    assert found[3].pair is None


def test_wirings_that_are_scored_together_score_as_alone(dense: Path, text: Path, tmp_path: Path) -> None:
    together = select(str(dense), tmp_path / "mix", ask(text, "mix", budget=None, exposed=4)).kept
    (tmp_path / "cache").rename(tmp_path / "old")
    assert scored(dense, text, tmp_path / "alone", "ladder-peek") == together.read("ladder-peek")


def test_the_choice_is_the_best_pair_of_layers(dense: Path, text: Path, tmp_path: Path) -> None:
    done = select(str(dense), tmp_path / "choice", ask(text))
    scores = done.kept.read("ladder")
    sums = {
        (one, other): scores[one].single + scores[other].single if other > one + 1 else scores[one].pair
        for one in range(4)
        for other in range(one + 1, 4)
    }
    best = min(sums, key=lambda pair: sums[pair] or 0.0)
    assert [layer for layer, name in enumerate(done.choice) if name == "ladder"] == list(best)
    assert done.candidates[0].price == pytest.approx(sums[best])


def test_what_is_kept_needs_no_second_scoring_and_no_second_measuring(dense: Path, text: Path, tmp_path: Path) -> None:
    heard: list[Any] = []

    def once_more(name: str, request: SelectRequest) -> list[Any]:
        heard.clear()
        select(str(dense), tmp_path / name, request, on_score=heard_one, on_layer=heard_one)
        return list(heard)

    def heard_one(*what: Any) -> None:
        heard.append(what[:2])

    layers = [("ladder", layer) for layer in range(4)]
    assert once_more("two", ask(text)) == layers
    assert once_more("three", ask(text, budget=3)) == []
    assert len(once_more("measured", ask(text, budget=1, measure=True))) in (4, 8)
    assert once_more("measured again", ask(text, budget=1, measure=True)) == []
    assert once_more("other shards", ask(text, tp_shards=2)) == layers
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[::-1])
    assert once_more("other text", ask(other)) == layers
    assert once_more("other wiring", ask(text, "parallel"))[0] == ("parallel", 0)


def test_other_weights_are_scored_anew(dense: Path, text: Path, tmp_path: Path) -> None:
    before = scored(dense, text, tmp_path / "before")
    weights = load_file(dense / "model.safetensors")
    shutil.copytree(dense, tmp_path / "dense")
    (tmp_path / "dense" / "model.safetensors").unlink()
    weights["model.layers.3.mlp.down_proj.weight"] *= 2
    save_file(weights, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    assert scored(tmp_path / "dense", text, tmp_path / "after") != before


def test_an_interrupted_scoring_goes_on(dense: Path, text: Path, tmp_path: Path) -> None:
    heard: list[int] = []

    def stop_after_one(name: str, layer: int, layers: int, score: Score) -> None:
        heard.append(layer)
        if heard == [0, 1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        select(str(dense), tmp_path / "choice", ask(text), on_score=stop_after_one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]
    resumed = select(str(dense), tmp_path / "choice", ask(text), on_score=stop_after_one).kept.read("ladder")
    assert heard == [0, 1, 2, 3]
    (tmp_path / "cache").rename(tmp_path / "old")
    assert scored(dense, text, tmp_path / "again") == resumed


def test_an_interrupted_measurement_goes_on(dense: Path, text: Path, tmp_path: Path) -> None:
    heard: list[tuple[str, int]] = []
    worst = ask(text, budget=1, measure=True)

    def stop_at_the_end(name: str, layer: int, layers: int) -> None:
        heard.append((name, layer))
        if len(heard) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        select(str(dense), tmp_path / "choice", worst, on_layer=stop_at_the_end)
    done = select(str(dense), tmp_path / "choice", worst, on_layer=stop_at_the_end)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "choice"]
    assert all(candidate.measured for candidate in done.candidates)


def test_an_interrupted_measurement_may_be_given_up(dense: Path, text: Path, tmp_path: Path) -> None:
    def stop_at_the_end(name: str, layer: int, layers: int) -> None:
        if layer == layers - 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        select(str(dense), tmp_path / "choice", ask(text, measure=True), on_layer=stop_at_the_end)
    assert (tmp_path / ".choice.refit").is_dir()
    select(str(dense), tmp_path / "choice", ask(text))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "choice"]


def test_a_gpu_that_is_too_small_is_said(
    dense: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Sweep, "fit_layer", fail)
    with pytest.raises(ValueError, match="memory is too small for this refit: hide it with CUDA_VISIBLE_DEVICES="):
        select(str(dense), tmp_path / "choice", ask(text))


def test_two_runs_keep_each_others_scores() -> None:
    """Whenever they write."""
    runs = Kept({}, 100), Kept({}, 100)
    assert all(run.read("ladder") == {} for run in runs)

    def add(number: int) -> None:
        for layer in range(number, 99, 2):
            runs[number].add("ladder", layer, Score(0.1 * layer, 0.2))

    with ThreadPoolExecutor() as pool:
        list(pool.map(add, range(2)))
    assert Kept({}, 100).read("ladder") == {layer: Score(0.1 * layer, 0.2) for layer in range(99)}


def test_what_is_measured_is_what_convert_makes_of_it(dense: Path, text: Path, tmp_path: Path) -> None:
    done = select(str(dense), tmp_path / "choice", ask(text, budget=1, measure=True))
    told = json.loads((tmp_path / "choice" / "selection.json").read_text())
    assert [each["measured"] for each in told["candidates"]] == [asdict(each.measured) for each in done.candidates]
    assert (told["tp_shards"], told["tokens"], told["tokens_that_judge"]) == (4, TOKENS, TOKENS // 8)
    chosen = told["candidates"][0]
    wiring = json.loads((tmp_path / "choice" / "wiring.json").read_text())
    assert chosen["measured"]["refitted"] == refitted_kl(dense, text, tmp_path / "made", wiring)
    assert chosen["measured"]["refitted"] == pytest.approx(chosen["price"], rel=1e-5)  # one layer has no neighbour
    assert chosen["measured"]["refitted"] < chosen["measured"]["converted"]


@pytest.mark.parametrize("exposed", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_mix_waits_for_no_more_than_it_may(exposed: int, dense: Path, text: Path, tmp_path: Path) -> None:
    done = select(str(dense), tmp_path / "choice", ask(text, "mix", budget=None, exposed=exposed))
    out = convert(dense, tmp_path / "made", Request(done.candidates[0].wiring)).out
    checkpoint = Checkpoint.open(out)
    table = LayerTable.of(checkpoint.regions, checkpoint.shape, 4, "float32")
    assert table.total.exposed == done.candidates[0].exposed <= exposed
    price = done.kept.price(NAMES["mix"])
    choices = product((STANDARD, *NAMES["mix"]), repeat=4)
    assert price.of(done.choice) == pytest.approx(min(price.of(one) for one in choices if waits(one) <= exposed))


def test_the_papers_choice_stands_beside_it(dense: Path, text: Path, tmp_path: Path) -> None:
    """Made the worst one: the last layer is scored as costing most."""
    request = ask(text, budget=1)
    kept = select(str(dense), tmp_path / "choice", request).kept
    kept.add("ladder", 3, Score(9.0, None))
    kept.add("ladder", 0, Score(0.0, 1.0))
    done = select(str(dense), tmp_path / "again", request)
    assert [(each.name, each.wiring[0]["layers"]) for each in done.candidates] == [
        ("chosen", "0-1"),
        ("the last 1", "3-4"),
    ]


def test_activations_in_files_give_the_same_scores(dense: Path, text: Path, tmp_path: Path) -> None:
    in_memory = scored(dense, text, tmp_path / "choice")
    (tmp_path / "cache").rename(tmp_path / "old")
    (tmp_path / "spill").mkdir()
    assert scored(dense, text, tmp_path / "again", spill=tmp_path / "spill") == in_memory
    assert list((tmp_path / "spill").iterdir()) == []


def test_a_selection_is_replaced_when_forced(dense: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "deep" / "choice"
    select(str(dense), out, ask(text))
    with pytest.raises(ValueError, match="exists: choose another name"):
        select(str(dense), out, ask(text, budget=3))
    picture = (out / "scores.png").read_bytes()
    select(str(dense), out, ask(text, budget=3), force=True)
    assert json.loads((out / "selection.json").read_text())["request"]["budget"] == 3
    assert (out / "scores.png").read_bytes() != picture  # other bars are filled


def test_force_replaces_nothing_but_a_selection(dense: Path, text: Path, tmp_path: Path) -> None:
    out = select(str(dense), tmp_path / "choice", ask(text)).out
    shutil.copytree(dense, out / "base")
    with pytest.raises(ValueError, match="is, or holds, the source"):
        select(str(out / "base"), out, ask(text), force=True)
    with pytest.raises(ValueError, match="holds more than a selection, base for example"):
        select(str(dense), out, ask(text), force=True)
    assert (out / "base" / "model.safetensors").is_file()


def test_what_came_meanwhile_is_not_replaced(dense: Path, text: Path, tmp_path: Path) -> None:
    def somebody_else(*_: Any) -> None:
        (tmp_path / "choice").mkdir(exist_ok=True)
        (tmp_path / "choice" / "precious.txt").write_text("mine")

    with pytest.raises(ValueError, match="exists: choose another name"):
        select(str(dense), tmp_path / "choice", ask(text), on_score=somebody_else)
    assert [path.name for path in (tmp_path / "choice").iterdir()] == ["precious.txt"]


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", '{"scores": []}', '{"0": {"single": 1}}', '{"0": {"single": "x", "pair": 1}}', '{"0": 1}'),
        *(
            '{"0": {"single": null, "pair": 1}}',
            '{"1": {"single": 1, "pair": null}}',
            '{"4": {"single": 1, "pair": 1}}',
        ),
    ],
)
def test_a_broken_cache_is_said(content: str, dense: Path, text: Path, tmp_path: Path) -> None:
    kept = select(str(dense), tmp_path / "choice", ask(text)).kept
    (kept.folder / "ladder.json").write_text(content)
    with pytest.raises(ValueError, match=r"ladder.json is broken .*: remove it, and what it held is scored again"):
        select(str(dense), tmp_path / "again", ask(text))


def test_a_broken_measurement_is_said(dense: Path, text: Path, tmp_path: Path) -> None:
    kept = select(str(dense), tmp_path / "choice", ask(text, measure=True)).kept
    for path in kept.folder.glob("measured-*.json"):
        path.write_text('{"converted": "a", "refitted": 1.0, "standard_error": null}')
    with pytest.raises(ValueError, match=r"measured-.*.json is broken .*: remove it"):
        select(str(dense), tmp_path / "again", ask(text, measure=True))


def test_broken_weights_are_said_and_not_kept(dense: Path, text: Path, tmp_path: Path) -> None:
    source = broken_copy(dense, tmp_path / "dense", layer=1)
    with pytest.raises(ValueError, match="gives no finite KL: are the checkpoint's weights whole"):
        select(str(source), tmp_path / "choice", ask(text))
    assert not list((tmp_path / "cache").glob("scores/*/*"))


def test_weights_that_cannot_be_fitted_are_said_before_they_are_scored(dense: Path, text: Path, tmp_path: Path) -> None:
    source = tmp_path / "dense"
    shutil.copytree(dense, source)
    weights = load_file(source / "model.safetensors")
    save_file({name: tensor.int() for name, tensor in weights.items()}, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="Weights in I32 cannot be fitted"):
        select(str(source), tmp_path / "choice", ask(text))


def test_the_command(dense: Path, text: Path, tmp_path: Path) -> None:
    """And the one that it prints makes the model that was measured."""
    options = ["--wiring", "spd", "--budget", "1", "--text", text, "--tokens", "2048", "--tp-shards", "2"]
    done = run("rewired", "select", dense, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^desync-2x, layer \d: KL \d\.\d{4}", done.stderr, re.MULTILINE)) == 4
    out = tmp_path / "dense-select-spd-1"
    assert sorted(path.name for path in out.iterdir()) == ["scores.json", "scores.png", "selection.json", "wiring.json"]
    command = shlex.split(done.stdout.split("To make it:")[1])
    made = run(*command, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    config = json.loads(next(tmp_path.glob("dense-desync*/config.json")).read_text())
    told = json.loads((out / "selection.json").read_text())["candidates"][0]
    assert config["refit"]["kl"] == pytest.approx(told["measured"]["refitted"], abs=1e-6)


BAD = {
    "wiring": (
        ["--wiring", "laddr", "--budget", "2"],
        "Layers cannot be selected for a wiring 'laddr': did you mean 'ladder'?",
    ),
    "partial": (["--wiring", "partial", "--budget", "2"], "choose one of ladder, "),
    "no budget": ([], "Say what the choice may take"),
    "two budgets": (["--budget", "2", "--exposed", "4"], "Say what the choice may take"),
    "mix": (["--wiring", "mix", "--budget", "2"], "give it --exposed instead of --budget"),
    "too many": (["--budget", "5"], "--budget 5 does not fit: the model has 4 layers"),
    "too exposed": (["--exposed", "8"], "--exposed 8 does not fit"),
    "not exposed enough": (["--wiring", "parallel", "--exposed", "3"], "and with all layers parallel for 4"),
    "no shards": (["--budget", "2", "--tp-shards", "0"], "tp_shards is 0: it must be an integer of at least 1"),
    "tokens": (["--budget", "2", "--tokens", "0"], "--tokens 0 makes no sense"),
    "text": (["--budget", "2", "--text", "nowhere.txt"], "There is no calibration text nowhere.txt"),
    "short": (["--budget", "2", "--text", "short.txt"], "short.txt is too short to calibrate on"),
    "spill": (["--budget", "2", "--spill", "nowhere"], "There is no folder nowhere to spill to"),
    "shards": (["--budget", "2", "--tp-shards", "3"], "tp_shards 3 does not divide"),
    "out": (["--budget", "2", "--out", "there"], "there exists"),
    "a link": (["--budget", "2", "--out", "link"], "link exists"),
    "out, forced": (["--budget", "2", "--out", "there", "--force"], "there exists"),
}


@pytest.mark.parametrize(("arguments", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence(
    arguments: list[str], sentence: str, dense: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rewired.cli import main

    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "precious.txt").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    before = snapshot(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["rewired", "select", str(dense), *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    printed = capfd.readouterr()
    assert printed.err.startswith("rewired select: ") and printed.err.count("\n") == 1
    assert sentence in printed.err
    assert snapshot(tmp_path) == before


def test_a_rewired_model_is_refused(text: Path, tmp_path: Path) -> None:
    hybrid = convert(
        make_dense(tmp_path / "dense"), tmp_path / "hybrid", Request([{"layers": "1-", "preset": "ladder"}])
    )
    with pytest.raises(ValueError, match="is rewired already"):
        scored(hybrid.out, text, tmp_path / "choice")


def test_a_missing_package_is_said_before_anything_is_scored(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="matplotlib is not installed"):
        select(str(dense), tmp_path / "choice", ask(tmp_path / "nowhere.txt"))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "There is no file nothing.json: --wiring takes a JSON list of regions."),
        ("{", "is not JSON that can be read"),
        ("{}", "holds no list of regions"),
        ("[1]", "A wiring entry needs 'layers' and 'preset', this one has 1"),
        ('[{"layers": "0-9", "preset": "ladder"}]', "0-9"),
        ('[{"layers": "0-2", "preset": "ladder", "num_layers": 3}]', "'num_layers' is no option of layers 0-2"),
    ],
)
def test_a_broken_wiring_file_is_said(content: str, sentence: str, dense: Path, tmp_path: Path) -> None:
    (tmp_path / "wiring.json").write_text(content)
    done = run("convert", dense, "out", "--wiring", "wiring.json" if content else "nothing.json", cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
