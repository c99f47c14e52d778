"""Bad input gets one sentence on stderr, exit status 2, no traceback, and nothing written. One case a line."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rewired.convert import Request, convert
from tests.commands import run

from .checkpoints import INDEX, broken_copy, edit_json, edit_tensors, make_llama, snapshot

FIRST, LAST = "model-00001-of-00004.safetensors", "model-00004-of-00004.safetensors"
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


def corrupt_header(folder: Path, edit: Callable[[dict], None]) -> None:
    """Rewrite the first shard's header, its data left as it is."""
    path = folder / FIRST
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


def name_twice(folder: Path) -> None:
    """Give another tensor's place the name of the embedding, too."""
    path = folder / FIRST
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    text = raw[8 : 8 + size]
    other = next(name for name in json.loads(text) if name not in (EMBEDDING, "__metadata__"))
    text = text.replace(json.dumps(other).encode(), json.dumps(EMBEDDING).encode())
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


def shift_offsets(header: dict) -> None:
    header[EMBEDDING]["data_offsets"] = [end + 10**6 for end in header[EMBEDDING]["data_offsets"]]


def name_base(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


def only_pickle(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never read")


def point_index(folder: Path, target: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][NORM] = target
    (folder / INDEX).write_text(json.dumps(index))


def link_out(folder: Path) -> None:
    outside = folder.parent / "elsewhere.safetensors"
    (folder / LAST).rename(outside)
    (folder / LAST).symlink_to(outside)


def truncate(folder: Path, keep: int) -> None:
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:keep])


BROKEN_SOURCES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "holds no config.json"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
    "config is nested without end": (lambda f: (f / "config.json").write_text("[" * 10**6), "is not JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "is not a JSON object"),
    "not a Llama": (lambda f: edit_json(f / "config.json", model_type="gpt2"), "model_type 'gpt2'"),
    "no model_type": (lambda f: edit_json(f / "config.json", model_type=None), "model_type 'None'"),
    "a size is missing": (lambda f: edit_json(f / "config.json", hidden_size=None), "hidden_size None"),
    "a size is no number": (lambda f: edit_json(f / "config.json", vocab_size="61"), "vocab_size '61'"),
    "a reward model": (
        lambda f: edit_json(f / "config.json", architectures=["LlamaForSequenceClassification"]),
        'architectures ["LlamaForSequenceClassification"]',
    ),
    "an adapter": (
        lambda f: [(f / "config.json").rename(f / "adapter_config.json"), name_base(f)],
        "source holds a PEFT adapter of org/base, and no model: merge it into its base first",
    ),
    "an adapter beside its base": (name_base, "source holds a PEFT adapter of org/base beside its weights"),
    "quantised": (lambda f: edit_json(f / "config.json", quantization_config={"bits": 4}), "quantised by None"),
    "pickle only": (only_pickle, "pickled weights (pytorch_model.bin)"),
    "other weights": (
        lambda f: edit_json(f / "config.json", transformers_weights="other.safetensors"),
        "takes the weights from 'other.safetensors'",
    ),
    "no weights": (lambda f: [p.unlink() for p in f.glob("model*")], "holds no weights"),
    "truncated in the data": (lambda f: truncate(f, -100), "not a whole safetensors file"),
    "truncated in the header": (lambda f: truncate(f, 20), "not a whole safetensors file"),
    "empty file": (lambda f: truncate(f, 0), "not a whole safetensors file"),
    "header is not JSON": (lambda f: (f / FIRST).write_bytes(struct.pack("<Q", 4) + b"oops"), "JSON in header"),
    "header claims too much": (lambda f: (f / FIRST).write_bytes(struct.pack("<Q", 1 << 60)), "header too large"),
    "offsets beyond the file": (lambda f: corrupt_header(f, shift_offsets), "not a whole safetensors file"),
    "a malformed entry": (lambda f: corrupt_header(f, lambda h: h[EMBEDDING].pop("dtype")), "missing field `dtype`"),
    "a negative shape": (lambda f: corrupt_header(f, lambda h: h[EMBEDDING].update(shape=[-61, -32])), "integer `-61`"),
    "a tensor twice in a file": (name_twice, "invalid offset for tensor"),
    "a missing shard": (lambda f: (f / LAST).unlink(), "is missing"),
    "index points to a parent": (
        lambda f: point_index(f, "../other.safetensors"),
        "not a .safetensors file of its folder",
    ),
    "index points to an absolute path": (
        lambda f: point_index(f, "/etc/hostname"),
        "not a .safetensors file of its folder",
    ),
    "index points to another kind of file": (lambda f: point_index(f, "README.md"), "names 'README.md'"),
    "a link leads out": (link_out, "is a link that leaves its folder"),
    "a single file beside an index": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        "holds model.safetensors, which transformers would load, and model.safetensors.index.json of other files",
    ),
    "index is not JSON": (lambda f: (f / INDEX).write_text("nope"), "is not JSON"),
    "index without a map": (lambda f: (f / INDEX).write_text("{}"), "has no weight_map"),
    "index misplaces a tensor": (lambda f: point_index(f, FIRST), "places 'model.norm.weight'"),
    "a tensor in two files": (
        lambda f: edit_tensors(f / FIRST, {NORM: torch.ones(32)}),
        "'model.norm.weight' is in both",
    ),
    "a tensor is missing": (lambda f: edit_tensors(f / FIRST, {EMBEDDING: None}), "model.embed_tokens.weight"),
    "a wrong shape": (lambda f: edit_tensors(f / FIRST, {EMBEDDING: torch.ones(61, 31)}), "has shape [61, 31]"),
    "a tokenizer that is a link out": (
        lambda f: [(f / "tokenizer.json").unlink(), (f / "tokenizer.json").symlink_to("/etc/hostname")],
        "is a link that leaves its folder",
    ),
    "a wiring that is no list": (
        lambda f: edit_json(f / "config.json", model_type="rewired_llama", wiring=7),
        "wiring 7",
    ),
    "a preset that is no name": (
        lambda f: edit_json(f / "config.json", model_type="rewired_llama", wiring=[{"layers": "0-2", "preset": ["x"]}]),
        "is not a wiring",
    ),
    "a refit record that is none": (lambda f: edit_json(f / "config.json", refit=3), "config.json's record 'refit'"),
    "a refit record without notes": (
        lambda f: edit_json(f / "config.json", refit={"base": {"name": "a/b"}, "wiring": []}),
        "config.json's record 'refit' is not as convert and adapt write it",
    ),
    "a training's record of no layers": (
        lambda f: edit_json(f / "config.json", adapted={"base": {"name": "a/b"}, "layers": "x"}),
        "config.json's record 'adapted'",
    ),
    "a rotation record without its kind": (
        lambda f: edit_json(f / "config.json", rotation={"base": "a/b", "untied_head": 0}),
        "config.json's record 'rotation'",
    ),
    "a rotation of no kind that there is": (
        lambda f: edit_json(f / "config.json", rotation={"base": "a/b", "untied_head": 0, "kind": "upside down"}),
        "'upside down' is not a rotation",
    ),
    "no rope type that there is": (
        lambda f: edit_json(f / "config.json", rope_scaling={"type": "spiral", "factor": 2.0}),
        "it takes a rope_type, default, linear",
    ),
    "a rope_theta that is no number": (lambda f: edit_json(f / "config.json", rope_theta="x"), "number as rope_theta"),
    "a rope type that is no name": (lambda f: edit_json(f / "config.json", rope_scaling=[2.0]), "it takes a rope_type"),
    "a rope type without its numbers": (
        lambda f: edit_json(f / "config.json", rope_parameters={"rope_type": "llama3", "factor": 8.0}),
        "rope_type 'llama3' takes a number as low_freq_factor",
    ),
    "metadata that is no table": (
        lambda f: corrupt_header(f, lambda h: h.update(__metadata__=[])),
        "JSON in header",
    ),
    "metadata that is no text": (
        lambda f: corrupt_header(f, lambda h: h.update(__metadata__={"format": 1})),
        "JSON in header",
    ),
    "more layers than any model": (
        lambda f: edit_json(f / "config.json", num_hidden_layers=10**8),
        "num_hidden_layers 100000000",
    ),
    "a wiring that is none": (
        lambda f: edit_json(f / "config.json", model_type="rewired_llama", wiring=[{"layers": "0-2"}]),
        "needs 'layers' and 'preset'",
    ),
}


@pytest.mark.parametrize("break_it, sentence", BROKEN_SOURCES.values(), ids=BROKEN_SOURCES)
def test_broken_source(break_it: Callable[[Path], object], sentence: str, tmp_path: Path) -> None:
    break_it(make_llama(tmp_path / "source"))
    assert_refused(tmp_path, ["source", "out", "--ladder-layers", "2-4"], sentence)


BAD_REQUESTS = {
    "no such source": (["nowhere", "--ladder-layers", "2-4"], "There is no folder 'nowhere'"),
    "a short name misspelled": (["smollm2-135n", "--ladder-layers", "2-4"], "the short names: smollm2-135m"),
    "no such file": (["model.gguf", "--ladder-layers", "2-4"], "There is no file model.gguf"),
    "a file as source": (["source/config.json", "--ladder-layers", "2-4"], "is a file"),
    "nothing to do": (["source"], "Nothing to rewire"),
    "an empty range": (["source", "--ladder-layers", "3-3"], "name no layer"),
    "a reversed range": (["source", "--ladder-layers", "4-2"], "name no layer"),
    "a range beyond the model": (
        ["source", "--ladder-layers", "4-7"],
        "lie beyond the model, which has layers 0 to 5.",
    ),
    "more last layers than there are": (["source", "--ladder-layers", "-7"], "lie beyond the model"),
    "no range": (["source", "--ladder-layers", "upper"], "is not a range of layers"),
    "a bare dash": (["source", "--ladder-layers", "-"], "is not a range of layers"),
    "an unknown module": (["source", "--ladder-layers", "2-4:norm"], "is not a range of layers"),
    "a layer twice": (["source", "--ladder-layers", "2-4", "--wiring", "desync@3-5"], "Layer 3 is named twice"),
    "a layer twice in one option": (["source", "--ladder-layers", "2-4,3-5"], "Layer 3 is named twice"),
    "n of 1": (["source", "--wiring", "desync-1x@2-4"], "'every' of layers 2-4 is 1"),
    "p above 1": (["source", "--wiring", "partial-1.5@2-4"], "'shared_fraction' of layers"),
    "p below 0": (["source", "--wiring", "partial--0.1@2-4"], "'--0.1' in 'partial--0.1@2-4' means nothing"),
    "p is nan": (["source", "--wiring", "partial-nan@2-4"], "'-nan' in 'partial-nan@2-4' means nothing"),
    "no p": (
        ["source", "--wiring", "partial@2-4"],
        "need a shared fraction: give a number from 0 to 1, as shared_fraction in a file, or as partial-P in a text",
    ),
    "an unknown merge": (["source", "--wiring", "desync(max)@2-4"], "'(max)' in 'desync(max)@2-4' means nothing"),
    "parallel for one module": (["source", "--wiring", "parallel@2-4:mlp"], "cannot cover only one of them"),
    "r that does not divide": (["source", "--ladder-layers", "2-4", "--tp-shards", "3"], "does not divide"),
    "r of 0": (["source", "--ladder-layers", "2-4", "--tp-shards", "0"], "at least 1"),
    "an unknown dtype": (["source", "--ladder-layers", "2-4", "--dtype", "int8"], "'int8' is not a dtype"),
    "to-stock of a rewired": (["source", "--ladder-layers", "2-4", "--to-stock"], "some layers are rewired"),
    "peek without layers": (["source", "--standard-layers", "0-", "--peek"], "--peek goes with"),
    "out exists": (["source", "taken", "--ladder-layers", "2-4"], "taken exists"),
    "force on what is no checkpoint": (
        ["source", "taken", "--ladder-layers", "2-4", "--force"],
        "not a checkpoint folder",
    ),
    "out is the source": (["source", "source", "--ladder-layers", "2-4", "--force"], "is, or holds, the source"),
    "out holds the source": (["source", ".", "--ladder-layers", "2-4", "--force"], "is, or holds, the source"),
}


@pytest.mark.parametrize("arguments, sentence", BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_bad_request(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    make_llama(tmp_path / "source")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("precious")
    assert_refused(tmp_path, arguments, sentence)


def assert_refused(folder: Path, arguments: list[str], sentence: str) -> None:
    before = snapshot(folder)
    done = run("convert", *arguments, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert done.stderr.startswith("convert: ")
    assert done.stderr.count("\n") == 1, "one sentence, on one line"
    assert done.stdout == ""
    assert snapshot(folder) == before
    assert {path.name for path in folder.iterdir()} <= {"source", "taken", "elsewhere.safetensors"}


def test_parents_of_out_that_were_made_are_removed_again(tmp_path: Path) -> None:
    only_pickle(make_llama(tmp_path / "source"))
    assert_refused(tmp_path, ["source", "a/b/out", "--ladder-layers", "2-4"], "pickled weights")


def test_an_unknown_option_is_a_usage_error(tmp_path: Path) -> None:
    done = run("convert", "source", "--lader-layers", "2-4", cwd=tmp_path)
    assert done.returncode == 2
    assert "--ladder-layers" in done.stderr, "names what was meant"
    assert "Traceback" not in done.stderr


def test_info_refuses_shards_that_are_no_number(tmp_path: Path) -> None:
    edit_json(make_llama(tmp_path / "source") / "config.json", model_type="rewired_llama", tp_shards="four")
    done = run("rewired", "info", "source", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "rewired info: tp_shards is 'four': it must be an integer of at least 1.\n"


def test_info_refuses_in_one_sentence_too(tmp_path: Path) -> None:
    done = run("rewired", "info", "nowhere", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rewired info: There is no folder 'nowhere'")


def test_weights_that_are_no_numbers_are_said_wherever_weights_are_read(tmp_path: Path) -> None:
    source = broken_copy(make_llama(tmp_path / "whole", sharded=False), tmp_path / "source", layer=2)
    sentence = "Tensor 'model.layers.2.mlp.down_proj.weight' holds no finite numbers in"
    ladder = Request([{"layers": "2-6", "preset": "ladder"}])
    for request in (replace(ladder, dtype="bfloat16"), replace(ladder, rotate="hadamard")):
        with pytest.raises(ValueError, match=sentence):
            convert(source, tmp_path / "out", request)
    assert run("rewired", "info", "whole", "--check-weights", cwd=tmp_path).returncode == 0
    done = run("rewired", "info", "source", "--check-weights", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(f"rewired info: {sentence}")
