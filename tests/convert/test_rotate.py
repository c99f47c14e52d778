"""`convert --rotate`: the same function in another basis, which is said, and refused where weights do not fit it."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from rewired.checkpoint import Checkpoint
from rewired.convert import RefitRequest, Request, convert
from tests.commands import run
from tests.convert.checkpoints import config_of, edit_json, edit_tensors, logits, make_llama, snapshot
from tests.refit.models import TOKENS
from tests.refit.models import logits as logits_of

LADDER = [{"layers": "2-4", "preset": "ladder"}]
PARTIAL = [{"layers": "1-4", "preset": "partial", "shared_fraction": 0.5}]


def test_the_command_says_what_it_did_and_so_do_info_and_the_card(tmp_path: Path) -> None:
    source = make_llama(tmp_path / "tied", tie_word_embeddings=True)
    before = snapshot(source)
    done = run("convert", source, "out", "--ladder-layers", "2-4", "--rotate", "hadamard", cwd=tmp_path)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert snapshot(source) == before
    told = run("rewired", "info", "out", cwd=tmp_path).stdout
    card = (tmp_path / "out" / "README.md").read_text()
    for sentence in (
        "The residual stream is in another basis (Hadamard matrices within groups of channels)",
        "such as an adapter, does not fit",
        "The head, which was tied to the embedding, is a matrix of its own: 7.8 kB more.",
    ):
        assert sentence in done.stdout
        assert sentence in told
        assert sentence in card
    assert "the weights are its source's, in another basis" in card
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tied"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "rotation.npy" in names
    assert not {name for name in names if name.startswith(".rotated")}


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize(("wiring", "options"), [(LADDER, {}), ([], {"to_stock": True}), ([], {"dtype": "float32"})])
def test_the_function_stays(
    wiring: list[dict[str, Any]], options: dict[str, Any], sharded: bool, tmp_path: Path
) -> None:
    source = make_llama(tmp_path / "source", sharded, attention_bias=True, tie_word_embeddings=not sharded)
    plain = convert(source, tmp_path / "plain", Request([*wiring, {"layers": "5", "preset": "standard"}])).out
    out = convert(source, tmp_path / "out", Request(wiring, rotate="hadamard", **options)).out
    torch.testing.assert_close(logits(out), logits(plain), rtol=0, atol=1e-5)
    config = config_of(out)
    assert (config["rotation"]["kind"], config["rotation"]["base"]) == ("hadamard", str(source))
    assert config["tie_word_embeddings"] is False
    basis = torch.from_numpy(numpy.load(out / "rotation.npy"))
    torch.testing.assert_close(basis @ basis.T, torch.eye(32))


def test_weights_are_written_once(source: Path) -> None:
    """They are linked from where they were rotated, with --copy too."""
    out = convert(source, source.parent / "out", Request(LADDER, rotate="hadamard", copy=True)).out
    written = list(out.glob("*.safetensors"))
    assert len(written) > 1
    assert {path.stat().st_nlink for path in written} == {1}
    assert not any(path.samefile(source / path.name) for path in written)


def test_space_is_counted_for_the_weights_and_for_an_untied_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_llama(tmp_path / "source", tie_word_embeddings=True)
    needed = sum(info.size for info in Checkpoint.open(source).tensors().values()) + 61 * 32 * 4
    for free, fits in ((needed - 1, False), (needed, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        with nullcontext() if fits else pytest.raises(ValueError, match="No space left"):
            convert(source, tmp_path / "out", Request(rotate="hadamard"))
        assert (tmp_path / "out").exists() == fits


def test_a_refit_fits_to_the_original_in_the_basis(dense: Path, text: Path, tmp_path: Path) -> None:
    """No ridge knows one basis from another: where no single channel counts, the fits are the same."""
    wiring = [{"layers": "1-4", "preset": "ladder", "peek": True}]
    refit = RefitRequest(str(text), 6144)
    plain = convert(dense, tmp_path / "plain", Request(wiring, refit=refit))
    rotated = convert(dense, tmp_path / "rotated", Request(wiring, refit=refit, rotate="hadamard"))
    assert plain.refit is not None
    assert rotated.refit is not None
    assert rotated.refit.before.kl == pytest.approx(plain.refit.before.kl, rel=1e-3)
    assert rotated.refit.after.kl == pytest.approx(plain.refit.after.kl, rel=2e-2)
    assert rotated.refit.after.kl < rotated.refit.before.kl / 2
    torch.testing.assert_close(logits_of(rotated.out, TOKENS), logits_of(plain.out, TOKENS), rtol=0, atol=0.05)
    assert config_of(rotated.out)["refit"]["base"] == config_of(plain.out)["refit"]["base"]


def test_an_interrupted_refit_goes_on_in_the_same_basis(dense: Path, text: Path, tmp_path: Path) -> None:
    request, fitted = Request(PARTIAL, rotate="missing", refit=RefitRequest(str(text), 6144)), list[int]()

    def stop(layer: int, layers: int, fits: list[Any]) -> None:
        if layer == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(dense, tmp_path / "out", request, on_layer=stop)
    assert [path.name for path in tmp_path.iterdir()] == [".out.refit"]
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / ".out.refit").iterdir()}
    assert len(kept) > 1

    def look(layer: int, layers: int, fits: list[Any]) -> None:
        fitted.append(sum(path.stat().st_mtime_ns == time for path, time in kept.items()))

    convert(dense, tmp_path / "out", request, on_layer=look)
    assert set(fitted) == {len(kept)}


def test_missing_puts_first_what_shards_miss(dense: Path, text: Path, tmp_path: Path) -> None:
    done = convert(dense, tmp_path / "out", Request(PARTIAL, rotate="missing", refit=RefitRequest(str(text), 6144)))
    record = config_of(done.out)["rotation"]
    [[channels, before, after]] = record["shares"]
    assert channels == 16
    assert before < after < 1
    assert f"the first 16 channels hold {after:.2f}, and {before:.2f} before (6,144 tokens of {text})" in " ".join(
        done.plan.notes
    )
    assert done.refit is not None
    plain = convert(dense, tmp_path / "plain", Request(PARTIAL, refit=RefitRequest(str(text), 6144)))
    assert plain.refit is not None
    assert done.refit.before.kl < plain.refit.before.kl


def test_missing_is_spread_where_channels_are_quantised(dense: Path, text: Path, tmp_path: Path) -> None:
    """Among those that have as many bits: no others change places."""

    def basis_of(payload: str) -> torch.Tensor:
        wiring = [PARTIAL[0] | {"payload": payload}]
        request = Request(wiring, rotate="missing", refit=RefitRequest(str(text), 6144, matrices=False, gains=True))
        return torch.from_numpy(numpy.load(convert(dense, tmp_path / payload, request).out / "rotation.npy"))

    turned = basis_of("full").T @ basis_of("int4")
    assert float(turned[:16, 16:].abs().max()) < 1e-5
    torch.testing.assert_close(turned[:16, :16].abs(), torch.full((16, 16), 0.25), rtol=0, atol=1e-4)


FIT = {"base": {"name": "b"}, "wiring": [], "notes": []}
REFUSED: dict[str, tuple[dict[str, Any], Request, str]] = {
    "rotated": (
        {"rotation": {"kind": "hadamard", "base": "org/model", "untied_head": 0}},
        Request(LADDER, rotate="hadamard"),
        "was rotated in the basis that it has: --rotate the base that it was made from, org/model.",
    ),
    "trained": (
        {"adapted": {"base": {"name": "b"}, "layers": [], "ends": False, "tokens": 0}},
        Request(LADDER, rotate="hadamard"),
        "was trained in the basis",
    ),
    "refitted": ({"refit": FIT}, Request(LADDER, rotate="hadamard"), "was refitted in the basis"),
    "calibrated": ({"calibrated": FIT}, Request(LADDER, rotate="hadamard"), "was calibrated in the basis"),
    "nothing is missing": (
        {},
        Request(LADDER, rotate="missing"),
        "no module of this wiring sends only some: take --rotate hadamard",
    ),
}


@pytest.mark.parametrize(("changes", "request_", "sentence"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_where_it_cannot_be(
    changes: dict[str, Any], request_: Request, sentence: str, source: Path
) -> None:
    edit_json(source / "config.json", **changes)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        convert(source, source.parent / "out", request_)
    assert [path.name for path in source.parent.iterdir()] == [source.name]


def test_gains_and_quantised_weights_are_refused(tmp_path: Path) -> None:
    source = make_llama(tmp_path / "source", sharded=False)
    peek = convert(source, tmp_path / "peek", Request([{"layers": "2-4", "preset": "ladder", "peek": True}])).out
    (peek / "model.safetensors").unlink()
    weights = load_file(source / "model.safetensors")
    weights["model.layers.2.post_attention_gain.weight"] = torch.ones(4, 32)
    save_file(weights, peek / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"holds gains \(\*_gain.weight\) of its channels, and --rotate would change"):
        convert(peek, tmp_path / "out", Request(rotate="hadamard"))
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(source / "model.safetensors", {name: weights[name].to(torch.float8_e4m3fn)})
    with pytest.raises(ValueError, match="F8_E4M3 cannot be rotated: take weights that are not quantised"):
        convert(source, tmp_path / "out", Request(rotate="hadamard"))
    assert not (tmp_path / "out").exists()


def test_another_word_is_refused(source: Path) -> None:
    done = run("convert", source, "out", "--rotate", "random", cwd=source.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "convert: 'random' is not a rotation: choose one of hadamard, missing.\n"
    done = run("convert", "nowhere", "out", "--rotate", "random", cwd=source.parent)  # before anything is fetched
    assert done.stderr == "convert: 'random' is not a rotation: choose one of hadamard, missing.\n"


def test_a_dry_run_says_it_too_and_the_name_has_it(source: Path) -> None:
    done = convert(source, None, Request(LADDER, rotate="hadamard"), dry_run=True)
    assert done.out.name == "tiny-llama-ladder-2-4-hadamard"
    assert "The residual stream is in another basis" in " ".join(done.plan.notes)


def test_a_rotated_model_can_be_rewired_and_refitted_later(dense: Path, text: Path, tmp_path: Path) -> None:
    rotated = convert(dense, tmp_path / "rotated", Request(rotate="hadamard", to_stock=True)).out
    assert isinstance(AutoModelForCausalLM.from_pretrained(rotated), LlamaForCausalLM)
    later = convert(rotated, tmp_path / "later", Request(PARTIAL, refit=RefitRequest(str(text), 6144)))
    assert later.refit is not None
    assert later.refit.after.kl < later.refit.before.kl
    assert json.loads((later.out / "config.json").read_text())["rotation"]["kind"] == "hadamard"
