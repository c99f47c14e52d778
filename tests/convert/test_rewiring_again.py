"""A rewired checkpoint as SOURCE: further layers, other wirings, and back to dense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from rewired.checkpoint import provenance
from rewired.convert import RefitRequest, Request, convert

from .checkpoints import config_of, logits


def again(source: Path, *entries: dict[str, Any], out: str = "again", **options: Any) -> Path:
    """`source` converted, beside itself."""
    return convert(source, source.parent / out, Request(list(entries), **options)).out


def test_named_layers_change_and_the_others_keep_their_wiring(source: Path) -> None:
    first = again(source, {"layers": "1-5", "preset": "ladder", "peek": True}, out="first", tp_shards=2)
    second = again(first, {"layers": "2-3", "preset": "parallel"})
    assert config_of(second)["wiring"] == [
        {"layers": "0-1", "preset": "standard"},
        {"layers": "1-2,3-5", "preset": "ladder", "peek": True},
        {"layers": "2-3", "preset": "parallel"},
        {"layers": "5-6", "preset": "standard"},
    ]
    assert config_of(second)["tp_shards"] == 2


def test_back_to_dense_and_to_a_stock_llama(source: Path) -> None:
    first = again(source, {"layers": "1-5", "preset": "desync"}, out="first")
    dense = again(first, {"layers": "0-", "preset": "standard"}, out="dense")
    assert torch.equal(logits(dense), logits(source))
    stock = again(dense, to_stock=True, out="stock")
    assert config_of(stock) == config_of(source)
    assert not list(stock.glob("*.py"))
    ids = torch.arange(6)[None]
    llamas = (LlamaForCausalLM.from_pretrained(folder) for folder in (stock, source))
    assert torch.equal(*(llama(ids).logits for llama in llamas))


def test_a_payload_is_taken_and_taken_off_again(source: Path) -> None:
    first = again(source, {"layers": "0-", "preset": "standard", "payload": "int8"}, out="first")
    assert not torch.equal(logits(first), logits(source))
    dense = again(first, {"layers": "0-", "preset": "standard"}, out="dense")
    assert torch.equal(logits(dense), logits(source))


def test_trained_gains_are_never_carried_into_another_wiring(source: Path) -> None:
    first = again(source, {"layers": "2-6", "preset": "ladder", "peek": True}, out="first")
    AutoModelForCausalLM.from_pretrained(first).save_pretrained(source.parent / "trained")
    trained = source.parent / "trained"
    assert any(name.endswith("_gain.weight") for name in load_file(trained / "model.safetensors"))
    with pytest.raises(ValueError, match=r"gains .* of its present wiring"):
        again(trained, {"layers": "2-6", "preset": "desync"})
    with pytest.raises(ValueError, match="gains"):
        again(trained, tp_shards=2)
    more = again(trained, {"layers": "0-2", "preset": "parallel"})
    assert torch.isfinite(logits(more)).all()


@pytest.mark.parametrize("layers", ["1-6", "1-2"])
def test_more_layers_may_peek_beside_those_whose_gains_were_trained(layers: str, source: Path) -> None:
    """As progressive conversion does it: trained gains stay, and those of new layers are new."""
    first = again(source, {"layers": "2-6", "preset": "ladder", "peek": True}, out="first")
    model: Any = AutoModelForCausalLM.from_pretrained(first)
    with torch.no_grad():
        model.model.layers[3].input_gain.weight.fill_(0.5)
    model.save_pretrained(source.parent / "trained")
    more = again(source.parent / "trained", {"layers": layers, "preset": "ladder", "peek": True})
    grown: Any = AutoModelForCausalLM.from_pretrained(more)
    assert (grown.model.layers[3].input_gain.weight == 0.5).all()
    fresh: Any = AutoModelForCausalLM.from_pretrained(
        again(source, {"layers": "1-6", "preset": "ladder", "peek": True}, out="fresh")
    )
    expected = fresh.model.layers[1].post_attention_gain.weight
    assert torch.equal(grown.model.layers[1].post_attention_gain.weight, expected)


def trained(made: Path, folder: Path) -> Path:
    """The checkpoint `made` as training leaves it: its record, stored gains, and weights that have moved."""
    model: Any = AutoModelForCausalLM.from_pretrained(made)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gain.weight", "layers.3.mlp.down_proj.weight")):
                parameter.mul_(0.5)
    model.save_pretrained(folder)
    record = {"base": {"name": "the-original"}, "layers": [2, 3], "ends": False, "tokens": 300}
    (folder / "config.json").write_text(json.dumps(config_of(folder) | {"adapted": record}))
    return folder


def test_retrain_takes_trained_weights_into_another_wiring(source: Path, tmp_path: Path) -> None:
    """Another share, other layers, back towards dense: the weights stay, gains where their modules still peek, and the
    config records the original and every wiring."""
    first = again(source, {"layers": "2-4", "preset": "partial", "shared_fraction": 0.5}, out="first")
    half = trained(first, tmp_path / "half")
    entry = {"layers": "2-3", "preset": "partial", "shared_fraction": 0.75}
    rest = {"layers": "3-4", "preset": "standard"}
    with pytest.raises(ValueError, match=r"was trained as it is wired.*Or pass --retrain, and train the result\."):
        again(half, entry, rest, out="refused")
    raised = again(half, entry, rest, out="raised", retrain=True)
    before, after = (load_file(folder / "model.safetensors") for folder in (half, raised))
    lost = {f"model.layers.3.{name}_gain.weight" for name in ("input", "post_attention")}
    assert before.keys() - after.keys() == lost
    assert all(torch.equal(after[name], before[name]) for name in after)
    record = config_of(raised)["rewired_again"]
    assert record["layers"] == [2, 3] and record["base"]["name"] == "the-original"
    assert record["before"] == ["partial-0.5@2-4 on 4 shards, trained on 300 tokens by then"]
    dense = again(raised, {"layers": "0-", "preset": "standard"}, out="dense", retrain=True, to_stock=True)
    assert not [name for name in load_file(dense / "model.safetensors") if "gain" in name]
    assert len(config_of(dense)["rewired_again"]["before"]) == 2
    LlamaForCausalLM.from_pretrained(dense)


@pytest.mark.parametrize(
    ("entry", "options", "sentence"),
    [
        (
            {"layers": "0-", "preset": "standard"},
            {"to_stock": True},
            "was fitted or trained to an earlier wiring.*instead",
        ),
        (
            {"layers": "2-4", "preset": "partial", "shared_fraction": 0.5},
            {"refit": RefitRequest("text.txt")},
            "was fitted or trained to an",
        ),
        (
            {"layers": "2-4", "preset": "partial", "shared_fraction": 0.5},
            {"rotate": "hadamard"},
            "was fitted or trained in the basis that it has",
        ),
    ],
    ids=["dense again", "a refit", "a rotation"],
)
def test_weights_that_were_fitted_before_are_not_taken_for_the_original_s(
    entry: dict[str, Any], options: dict[str, Any], sentence: str, source: Path
) -> None:
    fitted = again(source, {"layers": "2-4", "preset": "ladder"}, out="fitted")
    record = {"base": {"name": "the-original"}, "wiring": config_of(fitted)["wiring"], "notes": []}
    (fitted / "config.json").write_text(json.dumps(config_of(fitted) | {"refit": record}))
    other = again(fitted, {"layers": "2-4", "preset": "partial", "shared_fraction": 0.5}, out="other", retrain=True)
    assert "refit" not in config_of(other) and config_of(other)["rewired_again"]["layers"] == [2, 3]
    with pytest.raises(ValueError, match=sentence + ".*the-original"):
        again(other, entry, out="refused", **options)
    third = again(other, {"layers": "2-4", "preset": "parallel"}, out="third")
    assert config_of(third)["rewired_again"]["before"] == [
        "ladder@2-4 on 4 shards, refitted",
        "partial-0.5@2-4 on 4 shards, not trained",
    ]


def test_a_refusal_over_gains_names_the_original(source: Path, tmp_path: Path) -> None:
    entry = {"layers": "2-4", "preset": "partial", "shared_fraction": 0.5}
    half = trained(again(source, entry, out="first"), tmp_path / "half")
    raised = again(half, entry | {"shared_fraction": 0.75}, out="raised", retrain=True)
    config = config_of(raised)
    del config["adapted"]
    (raised / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"holds gains .* or convert the-original, which it was made from\."):
        again(raised, entry, out="refused")


def test_a_payload_is_nothing_that_trained_weights_have_to_learn(source: Path, tmp_path: Path) -> None:
    ladder = {"layers": "2-4", "preset": "ladder"}
    made_of = trained(again(source, ladder, out="first"), tmp_path / "trained")
    made = convert(made_of, tmp_path / "made", Request([ladder | {"payload": "int8"}]))
    assert "rewired_again" not in config_of(made.out)
    assert not any("train them for this one" in note for note in made.plan.notes)
    assert not made.plan.is_damaged


def test_the_original_is_the_first_fit_s_where_the_second_began_with_a_rewired_model() -> None:
    calibrated, refit = {"base": {"name": "original"}}, {"base": {"name": "calibrated", "is_rewired": True}}
    base = provenance.base_of({"calibrated": calibrated, "refit": refit})
    assert provenance.original(base) == "original"
    assert provenance.original(provenance.base_of({"refit": refit})) is None
