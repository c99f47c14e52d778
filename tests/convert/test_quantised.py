"""Quantised checkpoints: converting them is metadata, and each shard computes what its rank would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rewired.convert import RefitRequest, Request, convert
from rewired.grid.size import TpSize
from rewired.ranks import run_on_ranks
from rewired.serve.generate import Prompt, generate
from tests.commands import run
from tests.quantised_models import GROUP, SCHEMES, dequantised, quantise
from tests.rewired import reference
from tests.rewired.sharded import load

from .checkpoints import edit_json, make_llama

SIZES = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3}
SHARDS = 3
TOKENS = torch.arange(1, 41).view(2, 20)
WIRINGS: dict[str, list[dict[str, Any]]] = {
    "ladder": [{"layers": "0-6", "preset": "ladder"}],
    "ladder-peek": [{"layers": "1-6", "preset": "ladder", "peek": True}],
    "parallel": [{"layers": "0-6", "preset": "parallel"}],
    "desync": [{"layers": "0-6", "preset": "desync"}],
    "partial": [{"layers": "0-6", "preset": "partial", "shared_fraction": 0.5}],
}
MIXED = [{"layers": "0-2", "preset": "desync"}, {"layers": "2-6", "preset": "ladder", "peek": True}]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "dense", sharded=False, attention_bias=True, **SIZES)


@pytest.fixture(scope="module", params=SCHEMES)
def quantised(request: pytest.FixtureRequest, dense: Path) -> Path:
    return quantise(dense, dense.parent / request.param, request.param)


def logits(folder: Path) -> Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(TOKENS).logits


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
@pytest.mark.parametrize("name", WIRINGS)
def test_each_shard_rounds_what_its_rank_would(
    name: str, scheme: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference's ranks multiply with unpacked weights, and round the activations that each of them has; where no
    module gives partial sums there is one rank, as in a stock model.

    A number between two others may be rounded to either, and changes all after it: most tokens are compared. Not of
    int8, where compressed-tensors scales the largest of a token's numbers to 127.5, between two.
    """
    quantised = quantise(dense, tmp_path / scheme, scheme)
    out = convert(quantised, tmp_path / "out", Request(WIRINGS[name], tp_shards=SHARDS)).out
    if scheme == "FP8_DYNAMIC":
        for product in ("column_parallel", "row_parallel"):
            plain = getattr(reference, product)
            monkeypatch.setattr(reference, product, lambda x, *rest, plain=plain: plain(rounded(x), *rest))
    weights = {name: tensor.double() for name, tensor in dequantised(quantised).items()}
    ranks = 1 if name == "ladder" else SHARDS
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64).eval()(TOKENS).logits
        expected = reference.reference_logits(weights, AutoConfig.from_pretrained(out), WIRINGS[name], ranks, TOKENS)
    assert (found - expected).abs().amax(-1).median() < 1e-5


@pytest.mark.parametrize("name", ["standard", "ladder-peek", "desync"])
def test_nvfp4_is_the_model_of_the_numbers_that_it_stands_for(name: str, dense: Path, tmp_path: Path) -> None:
    """In bfloat16, in which alone compressed-tensors multiplies it."""
    wiring = WIRINGS.get(name, [{"layers": "0-6", "preset": "standard"}])
    quantised = quantise(dense, tmp_path / "quantised", "NVFP4A16")
    folders = [
        convert(each, tmp_path / f"{at}", Request(wiring, tp_shards=SHARDS)).out
        for at, each in enumerate((quantised, dense))
    ]
    found, expected = (AutoModelForCausalLM.from_pretrained(each, dtype=torch.bfloat16).eval() for each in folders)
    weights = dequantised(quantised, torch.bfloat16)
    assert not torch.equal(weights["model.layers.0.mlp.up_proj.weight"], expected.model.layers[0].mlp.up_proj.weight)
    expected.load_state_dict(weights, strict=False)
    with torch.no_grad():
        logits = [model(TOKENS).logits.double() for model in (found, expected)]
    assert (logits[0] - logits[1]).abs().amax(-1).median() < 0.05 * logits[1].abs().max()


def rounded(x: Tensor) -> Tensor:
    """The numbers of each token to FP8's, whose largest is 448."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def test_wired_standard_it_is_the_stock_model(quantised: Path, tmp_path: Path) -> None:
    out = convert(quantised, tmp_path / "out", Request([{"layers": "0-6", "preset": "standard"}], tp_shards=SHARDS)).out
    assert torch.equal(logits(out), logits(quantised))


def test_weights_are_linked_and_the_way_back_is_the_source(quantised: Path, tmp_path: Path) -> None:
    done = convert(quantised, tmp_path / "out", Request(MIXED, tp_shards=SHARDS))
    assert all(file.stat().st_nlink > 1 for file in done.out.glob("*.safetensors"))
    assert any(note.startswith("The weights stay as they are: ") for note in done.plan.notes)
    dense = [{"layers": "0-6", "preset": "standard"}]
    back = convert(done.out, tmp_path / "back", Request(dense, to_stock=True)).out
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (quantised, back))
    assert after == before


def test_what_is_saved_is_what_was_loaded(quantised: Path, tmp_path: Path) -> None:
    out = convert(quantised, tmp_path / "out", Request(MIXED, tp_shards=SHARDS)).out
    AutoModelForCausalLM.from_pretrained(out).save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(tmp_path / "saved"), logits(out))


def test_info_says_it(quantised: Path) -> None:
    words = {"W8A8": "int8 weights, int8 activations", "W4A16": f"int4 weights in groups of {GROUP}"}
    assert (
        words.get(quantised.name, "fp8 weights, fp8 activations")
        in run("rewired", "info", quantised, cwd=quantised).stdout
    )


@pytest.mark.parametrize(
    "command",
    [
        ["rewired", "plan", "model", "--gpus", "3"],
        ["rewired", "bench", "model", "--tp", "1", "--out", "out"],
        ["rewired", "select", "model", "--exposed", "2"],
        ["adapt", "recipe.yaml", "--dry-run"],
    ],
    ids=["plan", "bench", "select", "adapt"],
)
def test_what_needs_the_original_says_so(command: list[str], quantised: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(quantised)
    (tmp_path / "recipe.yaml").write_text("model: model\ndatasets: [rows.jsonl]\nwiring: ladder@0-6\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "a river"}\n')
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "weights are quantised" in done.stderr and "take the original for this" in done.stderr


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_other_formats_are_metadata_too(method: str, dense: Path, tmp_path: Path) -> None:
    source = packed(dense, tmp_path / method, method)
    out = convert(source, tmp_path / "out", Request(MIXED, tp_shards=SHARDS)).out
    assert (out / "model.safetensors").stat().st_nlink > 1
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == method


def packed(dense: Path, out: Path, method: str) -> Path:
    """A checkpoint of the layout that GPTQ and AWQ write, of zeros."""
    weights = load_file(dense / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        rows, columns = weights.pop(name).shape
        path, groups = name.removesuffix("weight"), columns // GROUP
        size = (columns // 8, rows) if method == "gptq" else (columns, rows // 8)
        weights[f"{path}qweight"] = torch.zeros(size, dtype=torch.int32)
        weights[f"{path}qzeros"] = torch.zeros(groups, rows // 8, dtype=torch.int32)
        weights[f"{path}scales"] = torch.zeros(groups, rows, dtype=torch.float16)
        if method == "gptq":
            weights[f"{path}g_idx"] = torch.arange(columns, dtype=torch.int32) // GROUP
    out.mkdir()
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": GROUP}
    (out / "config.json").write_text(json.dumps(config))
    return out


CHANGES = {
    "refit": (Request(MIXED, refit=RefitRequest()), "--refit changes weights"),
    "rotate": (Request(MIXED, rotate="hadamard"), "--rotate changes weights"),
    "dtype": (Request(MIXED, dtype="bfloat16"), "--dtype changes weights"),
    "copies": (Request(MIXED, tp_shards=6), r"--tp-shards \(KV heads copied\) changes weights"),
}


@pytest.mark.parametrize(("request_", "sentence"), CHANGES.values(), ids=CHANGES)
def test_what_would_change_weights_is_refused(
    request_: Request, sentence: str, quantised: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}.* convert the original so, and quantise the result"):
        convert(quantised, tmp_path / "out", request_)
    assert not (tmp_path / "out").exists()


UNKNOWN = {
    "method": ({"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes', which is not known here"),
    "nothing": ({"bits": 4}, "quantised by None, which is not known here"),
    "bits": ({"quant_method": "gptq", "bits": 5}, "gptq of 5 bits"),
    "format": (
        {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"group_0": {"weights": {}}}},
        "compressed-tensors that is not known here",
    ),
    "groups": ({"quant_method": "compressed-tensors", "config_groups": [1]}, "compressed-tensors that is not known"),
    "list": ({"quant_method": ["gptq"]}, "quantised by ['gptq'], which is not known here"),
    "formats": (
        {"quant_method": "compressed-tensors", "format": [], "config_groups": {"group_0": {"weights": {}}}},
        "compressed-tensors that is not known here",
    ),
    "number": (7, "quantised by None"),
}


@pytest.mark.parametrize(("entry", "sentence"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_quantisation_is_one_sentence(entry: Any, sentence: str, dense: Path, tmp_path: Path) -> None:
    source = packed(dense, tmp_path / "source", "gptq")
    edit_json(source / "config.json", quantization_config=entry)
    done = run("convert", source, tmp_path / "out", "--ladder-layers", "0-6", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and sentence in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("model.layers.1.mlp.up_proj.weight_scale", "its quantised weights need"),
        ("model.layers.1.mlp.up_proj.weight_packed", "its quantised weights need"),
        ("model.embed_tokens.weight", "its config.json implies"),
    ],
)
def test_a_part_that_is_missing_is_named(name: str, why: str, dense: Path, tmp_path: Path) -> None:
    source = quantise(dense, tmp_path / "source", "W4A16")
    weights = load_file(source / "model.safetensors")
    save_file({key: tensor for key, tensor in weights.items() if key != name}, source / "model.safetensors")
    with pytest.raises(ValueError, match=f"lacks the tensor '{name}', which {why}"):
        convert(source, tmp_path / "out", Request(MIXED, tp_shards=SHARDS))


def test_groups_that_shards_would_cut_are_refused(dense: Path, tmp_path: Path) -> None:
    source = packed(dense, tmp_path / "source", "gptq")
    edit_json(source / "config.json", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 64})
    with pytest.raises(ValueError, match="32 inputs of o_proj on each of 3 shards are not whole groups of 64"):
        convert(source, tmp_path / "out", Request(MIXED, tp_shards=SHARDS))


def test_ranks_are_refused(dense: Path, tmp_path: Path) -> None:
    source = quantise(dense, tmp_path / "source", "W8A8")
    out = convert(source, tmp_path / "out", Request(MIXED, tp_shards=SHARDS)).out
    with pytest.raises(ValueError, match="does not split quantised weights over ranks"):
        run_on_ranks(load, 3, out, 3)
    for folder in (source, out):
        with pytest.raises(ValueError, match="does not split quantised weights over ranks"):
            generate(folder, Prompt("x", 1), TpSize(3), device="cpu")
