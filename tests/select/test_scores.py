"""The score cache of a selection: its scores and measurements, and who goes on with them."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rewired.select.request import SelectRequest
from rewired.select.scores import LayerScore, ScoreCache
from rewired.select.select import select
from tests.convert.checkpoints import broken_copy
from tests.select.asking import ask, scored


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

    def stop_after_one(name: str, layer: int, layers: int, score: LayerScore) -> None:
        heard.append(layer)
        if heard == [0, 1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        select(str(dense), tmp_path / "choice", ask(text), on_score=stop_after_one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]
    resumed = select(str(dense), tmp_path / "choice", ask(text), on_score=stop_after_one).cache.read("ladder")
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


def test_two_runs_keep_each_others_scores() -> None:
    """Whenever they write."""
    runs = ScoreCache({}, 100), ScoreCache({}, 100)
    assert all(run.read("ladder") == {} for run in runs)

    def add(number: int) -> None:
        for layer in range(number, 99, 2):
            runs[number].add("ladder", layer, LayerScore(0.1 * layer, 0.2))

    with ThreadPoolExecutor() as pool:
        list(pool.map(add, range(2)))
    assert ScoreCache({}, 100).read("ladder") == {layer: LayerScore(0.1 * layer, 0.2) for layer in range(99)}


def test_neighbours_that_mend_each_other_are_no_cheaper_for_it() -> None:
    cache = ScoreCache({"test": "a price"}, 3)
    for layer, score in enumerate((LayerScore(0.2, 0.3), LayerScore(0.2, 0.5), LayerScore(0.1, None))):
        cache.add("ladder", layer, score)
    price = cache.price(["ladder"])
    assert price.of(("ladder", "ladder", "standard")) == pytest.approx(0.4), "not 0.3"
    assert price.of(("standard", "ladder", "ladder")) == pytest.approx(0.5)


def test_broken_weights_are_said_and_not_kept(dense: Path, text: Path, tmp_path: Path) -> None:
    source = broken_copy(dense, tmp_path / "dense", layer=1)
    with pytest.raises(ValueError, match="gives no finite KL: are the checkpoint's weights whole"):
        select(str(source), tmp_path / "choice", ask(text))
    assert not list((tmp_path / "cache").glob("scores/*/*"))


@pytest.fixture(scope="module")
def kept(dense: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of a whole scoring."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REWIRED_CACHE", str(folder / "cache"))
        select(str(dense), folder / "choice", ask(text))
    return folder / "cache"


@pytest.mark.parametrize(
    ("layer", "content"),
    [
        *((0, content) for content in ("", "{", "[]", "1", '{"scores": []}', '{"single": 1}')),
        *((0, f'{{"single": {single}, "pair": 1}}') for single in ('"x"', "null", "NaN")),
        (1, '{"single": 1, "pair": null}'),
        (3, '{"single": 1, "pair": 1}'),
    ],
)
def test_a_broken_cache_is_said(layer: int, content: str, kept: Path, dense: Path, text: Path, tmp_path: Path) -> None:
    (score,) = shutil.copytree(kept, tmp_path / "cache").glob(f"scores/*/ladder-{layer}.json")
    score.write_text(content)
    with pytest.raises(ValueError, match=r"ladder-.\.json is broken .*: remove it, and what it held is scored again"):
        select(str(dense), tmp_path / "again", ask(text))


def test_a_broken_measurement_is_said(dense: Path, text: Path, tmp_path: Path) -> None:
    cache = select(str(dense), tmp_path / "choice", ask(text, measure=True)).cache
    for path in cache.folder.glob("measured-*.json"):
        path.write_text('{"converted": "a", "refitted": 1.0, "standard_error": null}')
    with pytest.raises(ValueError, match=r"measured-.*.json is broken .*: remove it"):
        select(str(dense), tmp_path / "again", ask(text, measure=True))
