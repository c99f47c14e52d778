"""Checkpoints that were refitted, on their way through every later conversion."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rewired.convert import Conversion, RefitRequest, Request, convert
from tests.refit.models import PEEK, TOKENS, logits

CHANGED = "More was changed after that KL was measured"


def test_a_second_refit_changes_nothing(refitted: Conversion, request_of: Request, tmp_path: Path) -> None:
    again = convert(refitted.out, tmp_path / "again", Request(refit=request_of.refit))
    assert again.refit is None
    assert "refitted already" in " ".join(again.plan.notes)
    assert torch.equal(logits(again.out, TOKENS), logits(refitted.out, TOKENS))
    assert CHANGED not in (again.out / "README.md").read_text()
    assert json.loads((again.out / "config.json").read_text())["refit"]["base"]["name"].endswith("dense")


def test_a_second_refit_fits_no_gains(refitted: Conversion, dense: Path, request_of: Request, tmp_path: Path) -> None:
    assert request_of.refit is not None
    for matrices in (False, True):
        gains = replace(request_of.refit, gains=True, matrices=matrices)
        with pytest.raises(ValueError, match=f"--calibrate the base that it was made from, {re.escape(str(dense))}"):
            convert(refitted.out, tmp_path / "again", Request(refit=gains))


def test_what_is_made_of_it_still_says_how_it_was_fitted(refitted: Conversion, tmp_path: Path) -> None:
    """A ladder computes the same for any number of shards."""
    assert refitted.refit is not None
    other = Request([{"layers": "0-1", "preset": "ladder"}], tp_shards=2, dtype="bfloat16")
    card = (convert(refitted.out, tmp_path / "more", other).out / "README.md").read_text()
    assert all(fact in card for fact in refitted.refit.facts())
    assert CHANGED in card
    assert "the weights of layers 1-4, which were fitted to what these layers now read" in card


@pytest.mark.parametrize(
    "request_again",
    [
        Request([{"layers": "0-", "preset": "standard"}], to_stock=True),
        Request([{"layers": "2-3", "preset": "standard"}]),
        Request([{"layers": "1-4", "preset": "desync"}]),
        Request(PEEK),
        Request([{"layers": "0-1", "preset": "ladder"}], refit=RefitRequest("mix")),
    ],
    ids=["to llama", "one layer back", "another wiring", "a modifier", "more layers, refitted"],
)
def test_another_wiring_is_refused_with_a_pointer_to_the_original(
    request_again: Request, refitted: Conversion, dense: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ValueError, match=rf"convert the base that they were made from instead, {re.escape(str(dense))}"
    ):
        convert(refitted.out, tmp_path / "no", request_again)
    assert list(tmp_path.iterdir()) == []


def test_a_fit_of_what_lacks_nothing_leaves_the_way_back_open(dense: Path, text: Path, tmp_path: Path) -> None:
    waiting = [{"layers": "1-4", "preset": "ladder", "overlap": False}]
    fitted = convert(dense, tmp_path / "fitted", Request(waiting, refit=RefitRequest(str(text), 2048))).out
    back = convert(fitted, tmp_path / "back", Request([{"layers": "0-", "preset": "standard"}], to_stock=True)).out
    config = json.loads((back / "config.json").read_text())
    assert config["model_type"] == "llama" and not {"refit", "calibrated"} & config.keys()
    torch.testing.assert_close(logits(back, TOKENS), logits(dense, TOKENS), rtol=1e-4, atol=1e-4)


def test_other_layers_may_still_be_rewired(refitted: Conversion, tmp_path: Path) -> None:
    """They are not fitted then: they may go back, and no refit takes the whole for fitted."""
    more = convert(refitted.out, tmp_path / "more", Request([{"layers": "0-1", "preset": "ladder"}])).out
    record = json.loads((more / "config.json").read_text())["refit"]
    assert record["base"]["name"].endswith("dense")
    assert record["wiring"] == json.loads((refitted.out / "config.json").read_text())["wiring"]
    with pytest.raises(ValueError, match="convert the base that they were made from instead"):
        convert(more, tmp_path / "fitted", Request(refit=RefitRequest("mix")))
    back = convert(more, tmp_path / "back", Request([{"layers": "0-1", "preset": "standard"}])).out
    config = (json.loads((folder / "config.json").read_text()) for folder in (back, refitted.out))
    assert next(config) == next(config)


def test_retrain_takes_the_weights_along_and_leaves_their_fit_behind(
    refitted: Conversion, request_of: Request, dense: Path, tmp_path: Path
) -> None:
    desync = Request([{"layers": "1-4", "preset": "desync"}], retrain=True)
    made = convert(refitted.out, tmp_path / "made", desync).out
    config = json.loads((made / "config.json").read_text())
    assert "refit" not in config
    record = config["rewired_again"]
    assert record["base"]["name"] == str(dense) and record["layers"] == [1, 2, 3] and not record["ends"]
    assert record["before"] == ["ladder@1-4 on 4 shards, refitted"]
    card = (made / "README.md").read_text()
    assert "made for another wiring (ladder@1-4 on 4 shards, refitted): train them for this one" in card
    with pytest.raises(ValueError, match="leave one out"):
        convert(refitted.out, tmp_path / "no", replace(desync, refit=request_of.refit))
