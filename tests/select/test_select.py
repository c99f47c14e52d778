"""`rewired select`, from a dense checkpoint to a choice of its layers."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rewired.checkpoint.checkpoint import Checkpoint
from rewired.convert import RefitRequest, Request, convert
from rewired.convert.traffic import LayerTable
from rewired.model.wiring_text import parse_wiring
from rewired.refit.sweep import Sweep
from rewired.select.choice import BYTES_MIX, EXPOSED_MIX, STANDARD, sent
from rewired.select.choice import exposed as waits
from rewired.select.scores import LayerScore
from rewired.select.select import select
from tests.evaluate.world import make_dense
from tests.select.asking import TOKENS, ask, scored

WIRINGS = dict.fromkeys([*EXPOSED_MIX, *BYTES_MIX, "parallel+overlap"])
QUICK = ("ladder+peek", "standard+int4")


def refitted_kl(dense: Path, text: Path, out: Path, wiring: list[dict[str, Any]], **options: Any) -> float:
    done = convert(dense, out, Request(wiring, refit=RefitRequest(str(text), TOKENS), **options)).refit
    assert done is not None
    return done.after.kl


@pytest.mark.parametrize(
    "wiring",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in WIRINGS],
)
def test_scores_are_what_refits_of_these_layers_alone_tell(
    wiring: str, dense: Path, text: Path, tmp_path: Path
) -> None:
    """Whole refits from the checkpoint, which share no prefix: of one layer, of two, of the first and of the last."""
    found = scored(dense, text, tmp_path / "choice", wiring)

    def refitted(layers: str) -> float:
        return refitted_kl(dense, text, tmp_path / layers, parse_wiring(f"{wiring}@{layers}"))

    assert sorted(found) == [0, 1, 2, 3]
    for layer in (0, 2, 3):
        assert found[layer].single == pytest.approx(refitted(f"{layer}-{layer + 1}"), rel=1e-5)
    for layer in (0, 2):
        assert found[layer].pair == pytest.approx(refitted(f"{layer}-{layer + 2}"), rel=1e-5)
    assert found[3].pair is None


def test_wirings_that_are_scored_together_score_as_alone(dense: Path, text: Path, tmp_path: Path) -> None:
    together = select(str(dense), tmp_path / "mix", ask(text, "mix", budget=None, exposed=4)).cache
    (tmp_path / "cache").rename(tmp_path / "old")
    assert scored(dense, text, tmp_path / "alone", "ladder+peek") == together.read("ladder+peek")


def test_the_choice_is_the_best_pair_of_layers(dense: Path, text: Path, tmp_path: Path) -> None:
    """Of which neighbours may cost more than both alone, and count no less."""
    done = select(str(dense), tmp_path / "choice", ask(text))
    scores = done.cache.read("ladder")
    sums = {
        (one, other): max(scores[one].single + scores[other].single, (scores[one].pair or 0.0) * (other == one + 1))
        for one in range(4)
        for other in range(one + 1, 4)
    }
    best = min(sums, key=lambda pair: sums[pair])
    assert [layer for layer, name in enumerate(done.choice) if name == "ladder"] == list(best)
    assert done.candidates[0].price == pytest.approx(sums[best])


def test_a_gpu_that_is_too_small_is_said(
    dense: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Sweep, "fit_layer", fail)
    with pytest.raises(ValueError, match="memory is too small for this refit: hide it with CUDA_VISIBLE_DEVICES="):
        select(str(dense), tmp_path / "choice", ask(text))


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
    table = LayerTable.of(checkpoint.wiring, 4, "float32")
    assert table.total.exposed == done.candidates[0].exposed <= exposed
    price = done.cache.price(EXPOSED_MIX)
    choices = product((STANDARD, *EXPOSED_MIX), repeat=4)
    assert price.of(done.choice) == pytest.approx(min(price.of(one) for one in choices if waits(one) <= exposed))


def test_a_mix_that_may_send_less_chooses_payloads(dense: Path, text: Path, tmp_path: Path) -> None:
    done = select(str(dense), tmp_path / "choice", ask(text, "mix", budget=None, bytes=0.6))
    chosen, price = done.candidates[0], done.cache.price(BYTES_MIX)
    hidden_size = Checkpoint.open(dense).shape.hidden_size
    whole = sent((STANDARD,) * 4, hidden_size)
    assert chosen.bytes == sent(done.choice, hidden_size) / whole <= 0.6
    within = (one for one in product((STANDARD, *BYTES_MIX), repeat=4) if sent(one, hidden_size) <= 0.6 * whole)
    assert price.of(done.choice) == pytest.approx(min(map(price.of, within)))
    assert any("int" in name for name in done.choice)


def test_the_papers_choice_stands_beside_it(dense: Path, text: Path, tmp_path: Path) -> None:
    """Made the worst one: the last layer is scored as costing most."""
    request = ask(text, budget=1)
    cache = select(str(dense), tmp_path / "choice", request).cache
    cache.add("ladder", 3, LayerScore(9.0, None))
    cache.add("ladder", 0, LayerScore(0.0, 1.0))
    done = select(str(dense), tmp_path / "again", request)
    assert [(each.name, each.wiring[0]["layers"]) for each in done.candidates] == [
        ("chosen", "0-1"),
        ("the last 1", "3-4"),
    ]


def test_where_the_first_wiring_alone_is_not_enough_a_mix_stands_alone(dense: Path, text: Path, tmp_path: Path) -> None:
    done = select(str(dense), tmp_path / "choice", ask(text, "desync-2x; ladder", budget=None, exposed=1))
    assert [(each.name, each.exposed) for each in done.candidates] == [("chosen", 1)]


def test_weights_that_cannot_be_fitted_are_said_before_they_are_scored(dense: Path, text: Path, tmp_path: Path) -> None:
    source = tmp_path / "dense"
    shutil.copytree(dense, source)
    weights = load_file(source / "model.safetensors")
    save_file({name: tensor.int() for name, tensor in weights.items()}, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="Weights in I32 cannot be fitted"):
        select(str(source), tmp_path / "choice", ask(text))


def test_a_rewired_model_is_refused(text: Path, tmp_path: Path) -> None:
    hybrid = convert(
        make_dense(tmp_path / "dense"), tmp_path / "hybrid", Request([{"layers": "1-", "preset": "ladder"}])
    )
    with pytest.raises(ValueError, match="is rewired already"):
        scored(hybrid.out, text, tmp_path / "choice")
