"""A new wiring is one entry of the table: text, config, name, table and function follow from it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rewired.convert import Request, convert
from rewired.convert.cli import main
from rewired.model.modeling_rewired_llama import RewiredLlamaForCausalLM
from rewired.model.presets import PRESETS, Option, Preset
from rewired.model.wiring_text import parse_wiring
from tests.rewired.reference import reference_logits

from .checkpoints import config_of, logits

WALTZ = Preset(
    peek=True,
    share=lambda position, options: position % options["beats"] == options["beats"] - 1,
    options=(
        Option(
            name="beats",
            type=int,
            is_valid=lambda value: type(value) is int and value >= 2,
            wanted="an integer of at least 2",
            metavar="N",
            default=3,
            text="-in-{}",
        ),
    ),
)


@pytest.fixture(autouse=True)
def one_more_preset(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "waltz", WALTZ)
    monkeypatch.chdir(source.parent)


def run_convert(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["convert", *arguments])
    with pytest.raises(SystemExit) as done:
        main()
    return done.value.code


def test_it_converts_loads_and_runs(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_convert("tiny-llama", "--wiring", "waltz@1-5", "--json", monkeypatch=monkeypatch) == 0
    out = source.parent / "tiny-llama-waltz-in-3-1-5"
    report = json.loads(capsys.readouterr().out)
    assert report["layers"][1] == {"layers": "1-5", "wiring": "waltz-in-3", "all_reduces": 3, "exposed": 3} | {
        "bytes_sent": 3 * 32 * 4 * 3 // 2
    }
    assert config_of(out)["wiring"][1] == {"layers": "1-5", "preset": "waltz", "beats": 3}
    assert parse_wiring("waltz-in-3@1-5") == [config_of(out)["wiring"][1]]
    assert type(AutoModelForCausalLM.from_pretrained(out)) is RewiredLlamaForCausalLM

    desync = [{"layers": "1-5", "preset": "desync", "every": 3}]
    assert torch.equal(logits(out), logits(convert(source, source.parent / "desync", Request(desync)).out))
    stock = AutoModelForCausalLM.from_pretrained(source)
    expected = reference_logits(stock.state_dict(), stock.config, desync, 4, torch.arange(12).view(2, 6))
    torch.testing.assert_close(logits(out), expected, rtol=1e-4, atol=1e-4)


def test_its_options_are_given_and_checked(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_convert("tiny-llama", "--wiring", "waltz-in-4+overlap-peek", monkeypatch=monkeypatch) == 0
    assert config_of(source.parent / "tiny-llama-waltz-in-4-no-peek-overlap-0-6")["wiring"] == [
        {"layers": "0-6", "preset": "waltz", "beats": 4, "peek": False, "overlap": True}
    ]
    capsys.readouterr()
    for text, sentence in (
        ("waltz-in-1", "'beats' of layers 0- is 1: it must be an integer"),
        ("ladder-in-3", "'-in-3' in 'ladder-in-3' means nothing"),
    ):
        assert run_convert("tiny-llama", "out", "--wiring", text, monkeypatch=monkeypatch) == 2
        assert sentence in capsys.readouterr().err
