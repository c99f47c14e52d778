"""`convert --refit`, from the checkpoint on disk to the checkpoint on disk."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewired.convert import Conversion, RefitRequest, Request, convert
from rewired.divergence import divergence
from rewired.refit.calibration import load
from rewired.refit.fitting import Batch
from rewired.refit.sweep import Sweep
from tests.convert.checkpoints import broken_copy, snapshot
from tests.evaluate.world import make_dense
from tests.full_disk import full_disk
from tests.refit.models import INDEX, LADDER, PEEK, TOKENS, kl, logits


def test_what_it_tells_is_what_the_checkpoint_does(
    refitted: Conversion, dense: Path, text: Path, tmp_path: Path
) -> None:
    """KL and perplexity of the loaded models, on the windows that were held out."""
    converted = convert(dense, tmp_path / "converted", Request(LADDER)).out
    calibration = load(str(text), AutoTokenizer.from_pretrained(dense), 6144)
    windows = calibration.windows[torch.tensor(calibration.held_out)]
    assert refitted.refit is not None
    for folder, told in ((converted, refitted.refit.before), (refitted.out, refitted.refit.after)):
        measured = divergence(lambda ids: logits(dense, ids), lambda ids, f=folder: logits(f, ids), windows)
        assert told.kl == pytest.approx(measured.kl, rel=1e-3)
        assert told.perplexity == pytest.approx(measured.perplexity, rel=1e-3)
        assert told.tokens == measured.tokens
    assert refitted.refit.after.kl < 0.5 * refitted.refit.before.kl


def test_what_it_tells_is_of_the_head_that_transformers_reads(text: Path, request_of: Request, tmp_path: Path) -> None:
    """A config that ties it, beside a file that stores another."""
    source = make_dense(tmp_path / "tied", initializer_range=0.3, tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = 2 * tensors["model.embed_tokens.weight"].roll(1, 0)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    done = convert(source, tmp_path / "model", request_of)
    assert done.refit is not None and done.refit.after.kl == pytest.approx(kl(source, done.out, text), rel=1e-3)


def test_what_a_payload_rounds_off_is_fitted_too(dense: Path, text: Path, tmp_path: Path) -> None:
    """Of coarse parts and a coarse sum, what falls short on average: with and without another wiring below."""
    int4 = {"preset": "standard", "payload": "int4", "layers": "0-4"}
    done = convert(dense, tmp_path / "int4", Request([int4], tp_shards=2, refit=RefitRequest(str(text), 6144)))
    assert done.refit is not None
    assert 0 < done.refit.after.kl < done.refit.before.kl
    assert kl(dense, done.out, text) == pytest.approx(done.refit.after.kl, rel=0.01)


def test_above_the_last_rewired_layer_runs_only_what_measures(
    dense: Path, text: Path, request_of: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit_layer, texts_of = Sweep.fit_layer, dict[int, int]()

    def watched(self: Sweep, index: int, batches: list[Batch], *known: Any) -> Any:
        texts_of[index] = sum(batch.original.shape[0] for batch in batches)
        return fit_layer(self, index, batches, *known)

    monkeypatch.setattr(Sweep, "fit_layer", watched)
    done = convert(dense, tmp_path / "model", replace(request_of, wiring=[{"layers": "0-2", "preset": "ladder"}]))
    calibration = load(str(text), AutoTokenizer.from_pretrained(dense), 6144)
    windows = calibration.windows[torch.tensor(calibration.held_out)]
    assert texts_of[0] == texts_of[1] > len(calibration.windows)
    assert texts_of[2] == texts_of[3] == len(windows)
    measured = divergence(lambda ids: logits(dense, ids), lambda ids: logits(done.out, ids), windows)
    assert done.refit is not None
    assert done.refit.after.kl == pytest.approx(measured.kl, rel=1e-3)
    assert done.refit.passes is not None


def test_only_rewired_layers_change(refitted: Conversion, dense: Path) -> None:
    before, after = load_file(dense / "model.safetensors"), load_file(refitted.out / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert {re.match(r"model\.layers\.\d", name)[0] for name in changed} == {f"model.layers.{n}" for n in (1, 2, 3)}
    assert {name.split(".", 3)[3] for name in changed} >= {"self_attn.o_proj.weight", "mlp.down_proj.weight"}


def test_the_record_says_where_the_original_is(refitted: Conversion, dense: Path) -> None:
    record = json.loads((refitted.out / "config.json").read_text())["refit"]
    assert record["base"]["name"] == str(dense)
    assert len(record["base"]["weights"]["model.safetensors"]) == 64
    assert record["tokens"] == 6144
    assert record["kl"] < record["kl_converted"]
    card = (refitted.out / "README.md").read_text()
    assert "Refitted in closed form on 6,144 tokens" in card
    assert f"KL(original || fitted) {record['kl']:.3f}, and {record['kl_converted']:.3f} by conversion alone" in card
    assert "the weights are those of its source" not in card
    assert "Neurons" not in card, "all shards of a ladder see the same"
    assert refitted.refit is not None
    inputs = [fit.input.ridges[0] for fit in refitted.refit.fits if fit.input]
    assert len(inputs) == 6
    ridge = max(inputs, key=inputs.count)
    assert f"{ridge:g} ({inputs.count(ridge)} times)" in card.split("for what modules read")[1].split(";")[0]


def test_the_same_call_gives_the_same_bytes(
    refitted: Conversion, dense: Path, request_of: Request, tmp_path: Path
) -> None:
    """The card's, too: how long it took is printed only."""
    again = convert(dense, tmp_path / "model", request_of)
    found, expected = snapshot(again.out), snapshot(refitted.out)
    own_path = (str(refitted.out).encode(), str(again.out).encode())  # by which a card says how to load its model
    assert found == expected | {"README.md": expected["README.md"].replace(*own_path)}
    assert "That took" in again.plan.notes[-1]


def test_a_dense_model_is_not_changed(dense: Path, request_of: Request, tmp_path: Path) -> None:
    done = convert(dense, tmp_path / "same", Request(refit=request_of.refit))
    assert "nothing to refit" in " ".join(done.plan.notes)
    assert torch.equal(logits(done.out, TOKENS), logits(dense, TOKENS))


def test_a_wiring_that_lacks_nothing_is_only_the_original_again(
    dense: Path, request_of: Request, tmp_path: Path
) -> None:
    """A ladder that waits for every update is the standard wiring: nothing is left to fit but rounding."""
    waiting = [{"layers": "1-4", "preset": "ladder", "overlap": False}]
    done = convert(dense, tmp_path / "waiting", replace(request_of, wiring=waiting))
    torch.testing.assert_close(logits(done.out, TOKENS), logits(dense, TOKENS), rtol=1e-3, atol=1e-3)


def test_files_without_a_fitted_layer_are_linked(request_of: Request, tmp_path: Path) -> None:
    source = make_dense(tmp_path / "dense")
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(source, max_shard_size="60KB")
    (source / "model.safetensors").unlink(missing_ok=True)
    out = convert(source, tmp_path / "model", replace(request_of, wiring=[{"layers": "3-4", "preset": "ladder"}])).out
    files = sorted(path.name for path in source.glob("*.safetensors"))
    assert files == sorted(path.name for path in out.glob("*.safetensors"))
    same = [name for name in files if (source / name).samefile(out / name)]
    assert 0 < len(same) < len(files)
    held = {name for file in set(files) - set(same) for name in load_file(out / file)}
    assert any(name.startswith("model.layers.3.") for name in held)
    assert json.loads((out / INDEX).read_text()) == json.loads((source / INDEX).read_text())
    assert not any(name.startswith("model.layers.3.") for file in same for name in load_file(out / file))
    AutoModelForCausalLM.from_pretrained(out)


def test_what_it_tells_counts_rounding_in(dense: Path, text: Path, request_of: Request, tmp_path: Path) -> None:
    """A checkpoint in bfloat16 stays one, and later modules correct what rounding earlier ones left."""
    source = tmp_path / "bfloat16"
    convert(dense, source, Request([{"layers": "0-", "preset": "standard"}], to_stock=True, dtype="bfloat16"))
    done = convert(source, tmp_path / "model", request_of)
    tensors = load_file(done.out / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert done.refit is not None
    assert done.refit.after.kl == pytest.approx(kl(source, done.out, text), rel=1e-4)
    exact = convert(source, tmp_path / "exact", replace(request_of, dtype="float32"))
    assert exact.refit is not None
    assert exact.refit.after.kl != pytest.approx(done.refit.after.kl, rel=1e-4)  # so rounding shows


def test_a_short_context_is_not_exceeded(request_of: Request, tmp_path: Path) -> None:
    source = make_dense(tmp_path / "dense", initializer_range=0.3, max_position_embeddings=128)
    done = convert(source, tmp_path / "model", request_of)
    assert done.refit is not None and done.refit.calibration.windows.shape == (48, 128)


def test_every_tensor_keeps_its_own_type(dense: Path, request_of: Request, tmp_path: Path) -> None:
    """As where norms are kept in float32."""
    source = make_dense(tmp_path / "dense", initializer_range=0.3)
    tensors = load_file(source / "model.safetensors")
    mixed = {name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(mixed, source / "model.safetensors", {"format": "pt"})
    out = convert(source, tmp_path / "model", request_of).out
    found = load_file(out / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {name: t.dtype for name, t in mixed.items()}
    assert any(not torch.equal(found[name], mixed[name]) for name in mixed if "proj" in name)


def test_a_token_whose_embedding_is_zero_does_no_harm(request_of: Request, tmp_path: Path) -> None:
    source = make_dense(tmp_path / "dense", initializer_range=0.3)
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"][ord("r")] = 0.0  # of any letter that the text has
    tensors["model.embed_tokens.weight"][:] *= (torch.arange(259) % 7 != 0)[:, None]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    done = convert(source, tmp_path / "model", replace(request_of, wiring=[{"layers": "0-4", "preset": "ladder"}]))
    assert done.refit is not None and done.refit.after.kl < done.refit.before.kl
    assert all(tensor.isfinite().all() for tensor in load_file(done.out / "model.safetensors").values())


def test_broken_weights_are_said(dense: Path, request_of: Request, tmp_path: Path) -> None:
    source = broken_copy(dense, tmp_path / "dense", layer=2)
    with pytest.raises(ValueError, match="original's layer 2 gives no finite numbers: are the checkpoint's weights"):
        convert(source, tmp_path / "out", request_of)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"], "nothing is kept that could be gone on with"


def test_weights_too_large_for_a_dtype_are_said(dense: Path, request_of: Request, tmp_path: Path) -> None:
    source = tmp_path / "dense"
    shutil.copytree(dense, source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.2.mlp.gate_proj.weight"][0, 0] = 1e5
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="Layer 2 holds numbers that are too large for what it is stored in"):
        convert(source, tmp_path / "out", replace(request_of, dtype="float16"))
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_a_broken_embedding_is_said(dense: Path, text: Path, request_of: Request, tmp_path: Path) -> None:
    """Of a token that only one window has, and that one does not judge."""
    source = tmp_path / "dense"
    shutil.copytree(dense, source)
    words = text.read_text()
    (tmp_path / "words.txt").write_text(words[: len(words) // 2] + "~" + words[len(words) // 2 :])
    (token,) = AutoTokenizer.from_pretrained(dense)("~", add_special_tokens=False)["input_ids"]
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="gives no finite numbers: are the checkpoint's weights whole"):
        convert(source, tmp_path / "out", replace(request_of, refit=RefitRequest(str(tmp_path / "words.txt"), 6144)))


def test_a_config_without_a_context_is_said(dense: Path, request_of: Request, tmp_path: Path) -> None:
    """Not as a tokenizer that does not load, which reads that config, too."""
    source = tmp_path / "dense"
    shutil.copytree(dense, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"max_position_embeddings": None}))
    with pytest.raises(ValueError, match=r"config\.json describes no model that can be run"):
        convert(source, tmp_path / "out", request_of)


def test_a_broken_last_norm_is_said(dense: Path, request_of: Request, tmp_path: Path) -> None:
    source = tmp_path / "dense"
    shutil.copytree(dense, source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="gives no finite KL: are the checkpoint's weights whole"):
        convert(source, tmp_path / "out", request_of)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_a_gpu_that_is_too_small_is_said(
    dense: Path, request_of: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Sweep, "run", fail)
    with pytest.raises(ValueError, match="memory is too small for this refit: hide it with CUDA_VISIBLE_DEVICES="):
        convert(dense, tmp_path / "out", request_of)


def test_a_machine_that_is_too_small_is_said(
    dense: Path, request_of: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sweep, "start", lambda self: torch.empty(1 << 48))
    with pytest.raises(ValueError, match="machine's memory is too small for this refit: give it fewer tokens"):
        convert(dense, tmp_path / "out", request_of)


def test_too_little_space_for_another_dtype_is_said_before_it_begins(
    dense: Path, request_of: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result fits, but not with the fitted layers that are kept meanwhile."""
    size = (dense / "model.safetensors").stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size))
    request = replace(request_of, dtype="float32")
    with pytest.raises(ValueError, match="No space left"):
        convert(dense, tmp_path / "out", request, on_layer=lambda *_: pytest.fail("it has begun"))


@pytest.mark.parametrize(("share", "at"), [(0.9, "out.partial/model.safetensors"), (0.01, "out.refit/writing")])
def test_a_disk_that_fills_up_is_said_with_the_file(
    share: float, at: str, dense: Path, request_of: Request, tmp_path: Path
) -> None:
    size = int(share * (dense / "model.safetensors").stat().st_size)
    with full_disk(size), pytest.raises(OSError, match=rf"{at} cannot be written \(.*File too large"):
        convert(dense, tmp_path / "out", request_of)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_weights_in_other_types_are_cast_or_said(
    dtype: torch.dtype, dense: Path, request_of: Request, tmp_path: Path
) -> None:
    source = tmp_path / "dense"
    shutil.copytree(dense, source)
    tensors = load_file(source / "model.safetensors")
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, source / "model.safetensors")
    is_double = dtype == torch.float64
    advice = "convert with --dtype bfloat16" if is_double else "take weights that are not quantised"
    with pytest.raises(ValueError, match=f"Weights in F.* cannot be fitted: {advice}"):
        convert(source, tmp_path / "out", request_of)
    request = replace(request_of, dtype="bfloat16")
    if is_double:
        out = convert(source, tmp_path / "out", request).out
        assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    else:
        with pytest.raises(ValueError, match=advice):
            convert(source, tmp_path / "out", request)


def test_copies_and_replaces_as_every_conversion(
    refitted: Conversion, dense: Path, request_of: Request, tmp_path: Path
) -> None:
    convert(dense, tmp_path / "model", Request(LADDER))
    with pytest.raises(ValueError, match="exists: choose another name"):
        convert(dense, tmp_path / "model", request_of)
    peeking = RefitRequest(request_of.refit.text, 6144, gains=True, matrices=False) if request_of.refit else None
    convert(dense, tmp_path / "model", Request(PEEK, copy=True, refit=peeking), force=True)
    kept = next(path for path in (tmp_path / "model").glob("*.safetensors") if "gains" not in path.name)
    assert not kept.samefile(dense / "model.safetensors")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "model"]
    convert(dense, tmp_path / "model", request_of, force=True)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (refitted.out / "model.safetensors").read_bytes()
