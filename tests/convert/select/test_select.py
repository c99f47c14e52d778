"""`rewired select`, from a dense checkpoint to a choice of its layers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rewired.convert import RefitRequest, Request, convert
from rewired.convert.checkpoint import Checkpoint
from rewired.convert.plan import LayerTable
from rewired.convert.select import SelectRequest, select
from rewired.convert.select.picker import WIRINGS
from tests.convert.checkpoints import run, snapshot
from tests.evaluate.world import make_dense

TOKENS = 4096


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWIRED_CACHE", str(tmp_path / "cache"))


def scored(dense: Path, text: Path, out: Path, wiring: str = "ladder", **changes: Any) -> Any:
    settings = {"budget": 2} | changes
    return select(str(dense), out, SelectRequest(wiring, text=str(text), tokens=TOKENS, measure=False, **settings))


@pytest.mark.parametrize("wiring", WIRINGS)
def test_scores_are_what_refits_of_these_layers_alone_tell(
    wiring: str, dense: Path, text: Path, tmp_path: Path
) -> None:
    """Whole refits from the checkpoint, which share no prefix: of one layer, of two, of the first and of the last."""
    found = scored(dense, text, tmp_path / "choice", wiring).scores.found[wiring]

    def refitted(layers: str) -> float:
        entry = WIRINGS[wiring] | {"layers": layers}
        done = convert(dense, tmp_path / layers, Request([entry], refit=RefitRequest(str(text), TOKENS)))
        assert done.refit is not None
        return done.refit.after.kl

    assert sorted(found) == [0, 1, 2, 3]
    for layer in (0, 2, 3):
        assert found[layer].single == pytest.approx(refitted(f"{layer}-{layer + 1}"), rel=1e-5)
    for layer in (0, 2):
        assert found[layer].pair == pytest.approx(refitted(f"{layer}-{layer + 2}"), rel=1e-5)
    assert found[3].pair is None


def test_the_choice_is_the_best_pair_of_layers(dense: Path, text: Path, tmp_path: Path) -> None:
    done = scored(dense, text, tmp_path / "choice")
    scores = done.scores.found["ladder"]
    sums = {
        (one, other): scores[one].single + scores[other].single if other > one + 1 else scores[one].pair
        for one in range(4)
        for other in range(one + 1, 4)
    }
    best = min(sums, key=lambda pair: sums[pair])
    assert [layer for layer, name in enumerate(done.choice) if name == "ladder"] == list(best)
    assert done.candidates[0].predicted == pytest.approx(sums[best])


def test_another_budget_needs_no_second_scoring(dense: Path, text: Path, tmp_path: Path) -> None:
    heard: list[tuple[str, int, int]] = []
    scored(dense, text, tmp_path / "two")
    request = SelectRequest("ladder", budget=3, text=str(text), tokens=TOKENS, measure=False)
    again = select(str(dense), tmp_path / "three", request, on_score=lambda *score: heard.append(score))
    assert heard == []
    assert again.candidates[0].layers == 3


def test_an_interrupted_scoring_goes_on(dense: Path, text: Path, tmp_path: Path) -> None:
    heard: list[int] = []

    def stop_at_two(name: str, layer: int, layers: int) -> None:
        heard.append(layer)
        if heard == [0, 1, 2]:
            raise KeyboardInterrupt

    request = SelectRequest("ladder", budget=2, text=str(text), tokens=TOKENS, measure=False)
    with pytest.raises(KeyboardInterrupt):
        select(str(dense), tmp_path / "choice", request, on_score=stop_at_two)
    assert not (tmp_path / "choice").exists()
    resumed = select(str(dense), tmp_path / "choice", request, on_score=stop_at_two)
    assert heard == [0, 1, 2, 2, 3]
    fresh_cache = tmp_path / "cache"
    fresh_cache.rename(tmp_path / "old")
    assert scored(dense, text, tmp_path / "again").scores.found == resumed.scores.found


def test_what_is_measured_is_what_convert_makes_of_it(dense: Path, text: Path, tmp_path: Path) -> None:
    request = SelectRequest("ladder", budget=1, text=str(text), tokens=TOKENS)
    done = select(str(dense), tmp_path / "choice", request)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "choice"]
    told = json.loads((tmp_path / "choice" / "selection.json").read_text())["candidates"]
    assert [each["refitted"] for each in told] == [each.refitted for each in done.candidates]
    wiring = json.loads((tmp_path / "choice" / "wiring.json").read_text())
    made = convert(dense, tmp_path / "made", Request(wiring, refit=RefitRequest(str(text), TOKENS))).refit
    assert made is not None
    assert (told[0]["converted"], told[0]["refitted"]) == (made.before.kl, made.after.kl)
    assert told[0]["refitted"] == pytest.approx(told[0]["predicted"], rel=1e-5)  # one layer has nothing to add to


@pytest.mark.parametrize("exposed", [1, 3, 5, 7])
def test_a_mix_waits_for_no_more_than_it_may(exposed: int, dense: Path, text: Path, tmp_path: Path) -> None:
    done = scored(dense, text, tmp_path / "choice", "mix", budget=None, exposed=exposed)
    out = convert(dense, tmp_path / "made", Request(done.candidates[0].wiring)).out
    checkpoint = Checkpoint.open(out)
    table = LayerTable.of(checkpoint.regions, checkpoint.shape, 4, "float32")
    assert table.total.exposed == done.candidates[0].exposed <= exposed
    rest = [exposure for exposure in (1, 3, 5, 7) if exposure > exposed]
    for more in rest[:1]:
        looser = scored(dense, text, tmp_path / "looser", "mix", budget=None, exposed=more)
        assert looser.candidates[0].predicted <= done.candidates[0].predicted


def test_the_command(dense: Path, text: Path, tmp_path: Path) -> None:
    options = ["--wiring", "spd", "--budget", "1", "--text", text, "--tokens", "2048"]
    done = run("rewired", "select", dense, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    out = tmp_path / "dense-select-spd-1"
    assert sorted(path.name for path in out.iterdir()) == ["scores.json", "scores.png", "selection.json", "wiring.json"]
    assert f"convert {dense} --wiring {out.name}/wiring.json --refit" in done.stdout
    made = run("convert", dense, "made", "--wiring", f"{out.name}/wiring.json", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    wiring = json.loads((tmp_path / "made" / "config.json").read_text())["wiring"]
    assert [entry["preset"] for entry in wiring].count("desync") == 1


BAD = {
    "wiring": (["--wiring", "laddr", "--budget", "2"], "'laddr' is no wiring whose layers stand for themselves: did"),
    "partial": (["--wiring", "partial", "--budget", "2"], "choose one of ladder, "),
    "no budget": ([], "Say what the choice may take"),
    "two budgets": (["--budget", "2", "--exposed", "4"], "Say what the choice may take"),
    "mix": (["--wiring", "mix", "--budget", "2"], "give it --exposed instead of --budget"),
    "too many": (["--budget", "5"], "--budget 5 does not fit: the model has 4 layers"),
    "too exposed": (["--exposed", "8"], "--exposed 8 does not fit"),
    "tokens": (["--budget", "2", "--tokens", "0"], "--tokens 0 makes no sense"),
    "text": (["--budget", "2", "--text", "nowhere.txt"], "There is no calibration text nowhere.txt"),
    "short": (["--budget", "2", "--text", "short.txt"], "short.txt is too short to calibrate on"),
    "spill": (["--budget", "2", "--spill", "nowhere"], "There is no folder nowhere to spill to"),
    "shards": (["--budget", "2", "--tp-shards", "3"], "tp_shards 3 does not divide"),
    "out": (["--budget", "2", "--out", "there"], "there exists"),
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


def test_parallel_layers_cannot_wait_for_less_than_one_each(dense: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="with all of them rewired it is 4"):
        scored(dense, text, tmp_path / "choice", "parallel", budget=None, exposed=3)
    assert not (tmp_path / "choice").exists()


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
        scored(dense, tmp_path / "nowhere.txt", tmp_path / "choice")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not JSON that can be read"),
        ("{}", "holds no list of regions"),
        ("[1]", "A wiring entry needs 'layers' and 'preset', this one has 1"),
        ('[{"layers": "0-9", "preset": "ladder"}]', "0-9"),
    ],
)
def test_a_broken_wiring_file_is_said(content: str, sentence: str, dense: Path, tmp_path: Path) -> None:
    (tmp_path / "wiring.json").write_text(content)
    done = run("convert", dense, "out", "--wiring", "wiring.json", cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
