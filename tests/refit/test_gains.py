"""`convert --calibrate`: the gains of modules that peek, alone or before a refit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewired.convert import RefitRequest, Request, convert
from rewired.refit.calibration import load
from tests.evaluate.world import make_dense
from tests.refit.models import INDEX, PEEK, kl


def test_gains_alone_leave_every_weight(dense: Path, text: Path, tmp_path: Path) -> None:
    gains = RefitRequest(str(text), 6144, gains=True, matrices=False)
    done = convert(dense, tmp_path / "model", Request(PEEK, refit=gains))
    assert done.refit is not None and done.refit.after.kl < done.refit.before.kl
    linked, new = sorted(done.out.glob("*.safetensors"))
    assert linked.samefile(dense / "model.safetensors")
    # the first peeking module sees the whole update of layer 0's MLP in flight
    assert set(load_file(new)) == {
        f"model.layers.{layer}.{name}_gain.weight" for layer in (1, 2, 3) for name in ("input", "post_attention")
    }
    loaded = AutoModelForCausalLM.from_pretrained(done.out)
    assert torch.equal(loaded.model.layers[2].input_gain.weight, load_file(new)["model.layers.2.input_gain.weight"])
    assert "refit" not in json.loads((done.out / "config.json").read_text())
    with pytest.raises(ValueError, match=rf"name other layers, or convert {re.escape(str(dense))}, which it was made"):
        convert(done.out, tmp_path / "back", Request([{"layers": "0-", "preset": "standard"}], to_stock=True))
    assert "Gains calibrated by least squares, no other weight changed" in (done.out / "README.md").read_text()


@pytest.mark.parametrize("matrices", [False, True])
def test_gains_fitted_anew_are_told_of_alone(matrices: bool, dense: Path, text: Path, tmp_path: Path) -> None:
    """What they were before is forgotten, but not which base the first ones were fitted on."""
    first = RefitRequest(str(text), 2048, gains=True, matrices=False)
    calibrated = convert(dense, tmp_path / "first", Request(PEEK, refit=first))
    again = convert(calibrated.out, tmp_path / "again", Request(refit=replace(first, tokens=4096, matrices=matrices)))
    config, card = (json.loads((again.out / "config.json").read_text()), (again.out / "README.md").read_text())
    found = {kind: config[kind] for kind in ("refit", "calibrated") if kind in config}
    assert list(found) == ["refit" if matrices else "calibrated"]
    assert [record["base"]["name"] for record in found.values()] == [str(dense)]
    assert calibrated.refit is not None and again.refit is not None
    assert all(fact in card for fact in again.refit.facts())
    assert not any(fact in card for fact in calibrated.refit.facts())


def test_gains_are_the_designs_quotient(dense: Path, text: Path, tmp_path: Path) -> None:
    """Of the first module that peeks: one shard's part of a standard layer's MLP update, for the whole of it."""
    gains = RefitRequest(str(text), 6144, gains=True, matrices=False)
    out = convert(dense, tmp_path / "model", Request(PEEK, refit=gains)).out
    found = AutoModelForCausalLM.from_pretrained(out).model.layers[1].input_gain.weight
    calibration = load(str(text), AutoTokenizer.from_pretrained(dense), 6144)
    model = AutoModelForCausalLM.from_pretrained(dense)
    seen: dict[str, list[torch.Tensor]] = {"hidden": [], "stream": []}  # [1, N, ...] of each text
    layer = model.model.layers[0]
    layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: seen["hidden"].append(args[0].flatten(0, 1)[None]))
    after = model.model.layers[1].post_attention_layernorm  # tokens count by the original's stream after the module
    after.register_forward_pre_hook(lambda _, args: seen["stream"].append(args[0].flatten(0, 1)[None]))
    with torch.no_grad():
        for texts in calibration.texts(held_out=False):
            model(texts)
    scale = torch.cat(seen["stream"], 1).square().mean(-1, keepdim=True).rsqrt()
    hidden = (scale * torch.cat(seen["hidden"], 1)).double()
    update = hidden @ layer.mlp.down_proj.weight.double().T
    for k, (part, columns) in enumerate(
        zip(hidden.chunk(4, -1), layer.mlp.down_proj.weight.double().chunk(4, 1), strict=True)
    ):
        own = part @ columns.T
        torch.testing.assert_close(
            found[k].double(), (update * own).sum((0, 1)) / own.square().sum((0, 1)), rtol=1e-3, atol=1e-3
        )


def test_a_channel_that_is_nearly_silent_keeps_its_gain(text: Path, tmp_path: Path) -> None:
    """A quotient of what is next to nothing would be huge, and too large for float16."""
    source = make_dense(tmp_path / "dense", initializer_range=0.3)
    tensors = load_file(source / "model.safetensors")
    width = tensors["model.layers.1.self_attn.o_proj.weight"].shape[1]
    tensors["model.layers.1.self_attn.o_proj.weight"][0, : width // 4] *= 1e-7
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    gains = RefitRequest(str(text), 6144, gains=True, matrices=False)
    out = convert(source, tmp_path / "model", Request(PEEK, refit=gains)).out
    found = AutoModelForCausalLM.from_pretrained(out).model.layers[1].post_attention_gain.weight
    assert float(found[0, 0]) == pytest.approx(1, abs=0.2)
    assert found.abs().max() < 1000


def test_gains_that_nobody_fitted_are_not_written(dense: Path, text: Path, tmp_path: Path) -> None:
    done = convert(dense, tmp_path / "model", Request(PEEK, refit=RefitRequest(str(text), 6144)))
    assert [path.name for path in done.out.glob("*.safetensors*")] == ["model.safetensors"]
    assert done.refit is not None and done.refit.after.kl == pytest.approx(kl(dense, done.out, text), rel=1e-4)


def test_gains_and_matrices_together(dense: Path, text: Path, tmp_path: Path) -> None:
    """Of a source in many files: gains get a file of their own, and an index that names them."""
    source = make_dense(tmp_path / "dense", initializer_range=0.3)
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(source, max_shard_size="60KB")
    (source / "model.safetensors").unlink(missing_ok=True)
    done = convert(source, tmp_path / "model", Request(PEEK, refit=RefitRequest(str(text), 6144, gains=True)))
    assert done.refit is not None and done.refit.after.kl < 0.5 * done.refit.before.kl
    assert done.refit.after.kl == pytest.approx(kl(source, done.out, text), rel=1e-4)
    places = json.loads((done.out / INDEX).read_text())["weight_map"]
    assert sum("_gain" in name for name in places) == 6
    assert {name for file in set(places.values()) for name in load_file(done.out / file)} == places.keys()
    assert {fit.gain is None for fit in done.refit.fits} == {False}
    assert [fit.module for fit in done.refit.fits if fit.placement] == ["MLP"] * 3
    assert "Neurons of 3 MLPs moved" in (done.out / "README.md").read_text()
