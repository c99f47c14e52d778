"""The checkpoint that a conversion writes, from every kind of source, and the files that it leaves alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import rewired
from rewired.convert import Request, convert
from rewired.model.modeling_rewired_llama import RewiredLlamaForCausalLM
from rewired.model.wiring_text import region_name
from rewired.sources import checkpoint_folder, gguf
from tests.commands import run

from .checkpoints import INDEX, config_of, edit_json, logits, make_llama, snapshot


def test_the_output_is_a_complete_checkpoint(source: Path) -> None:
    before = snapshot(source)
    done = run("convert", "tiny-llama", "--ladder-layers", "2-4", cwd=source.parent)
    assert (done.returncode, done.stderr) == (0, "")
    out = source.parent / "tiny-llama-ladder-2-4"
    names = {path.name for path in out.iterdir()}
    weights = {path.name for path in source.glob("model*")}
    companions = {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    code = {path.name for path in out.glob("*.py")}
    assert "modeling_rewired_llama.py" in code
    assert names == weights - {"modeling_evil.py"} | companions | code | {"config.json", "README.md"}
    for name in weights - {"modeling_evil.py"} | companions:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    for name in code:
        assert (out / name).read_bytes() == (Path(rewired.__file__).parent / "model" / name).read_bytes()
    assert snapshot(source) == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("wiring.json", '[{"layers": "2-4", "preset": "ladder"}, {"layers": "5", "preset": "parallel"}]'),
        ("wiring.yaml", "- {layers: 2-4, preset: ladder}\n- layers: 5\n  preset: parallel\n"),
        ("recipe.yaml", "model: org/name\nwiring:\n- {layers: 2-4, preset: ladder}\n- {layers: 5, preset: parallel}\n"),
        ("text.yaml", "ladder@2-4, parallel@5\n"),
        ("recipe.yml", "model: org/name\nwiring: ladder@2-4, parallel@5\n"),
        ("ladder@2-4, parallel@5-", None),
        ("ladder@0-1", "ladder@2-4, parallel@5"),  # there is such a file
        ("config.json", '{"wiring": [{"layers": "2-4", "preset": "ladder"}, {"layers": "5-6", "preset": "parallel"}]}'),
    ],
)
def test_a_wiring_is_a_text_or_a_file_in_yaml_or_json(
    name: str, content: str | None, source: Path, tmp_path: Path
) -> None:
    if content:
        (tmp_path / name).write_text(content)
    done = run("convert", source, "out", "--wiring", name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    presets = {region["layers"]: region["preset"] for region in config_of(tmp_path / "out")["wiring"]}
    assert (presets["2-4"], presets["5-6"]) == ("ladder", "parallel")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("[", "w.yaml is neither YAML nor JSON"), ("model: x", "w.yaml holds no wiring"), ("", "holds no wiring")],
)
def test_a_broken_wiring_file_is_refused(content: str, sentence: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(content)
    done = run("convert", source, "out", "--wiring", "w.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert sentence in done.stderr


@pytest.mark.parametrize(
    ("front_matter", "bases"),
    [
        ("base_model:\n- org/one\n- org/two\ntags:\n- merge", ["org/one", "org/two"]),
        ("base_model: [org/one, ./local/two]", ["org/one"]),
        ("base_model: org/one", "org/one"),
        ("base_model: /models/one", None),
        ("base_model: [", None),
    ],
)
def test_the_bases_of_a_folder_are_those_that_its_card_names_on_the_hub(
    front_matter: str, bases: Any, source: Path
) -> None:
    (source / "README.md").write_text(f"---\n{front_matter}\n---\n# A merge\n")
    out = convert(source, source.parent / "out", Request([{"layers": "2-4", "preset": "ladder"}])).out
    assert yaml.safe_load((out / "README.md").read_text().split("---")[1]).get("base_model") == bases


def test_a_dry_run_needs_no_free_place(source: Path) -> None:
    request, taken = Request([{"layers": "2-4", "preset": "ladder"}]), source.parent / "taken"
    taken.mkdir()
    sentence = f"{taken} exists: choose another name, or replace it with --force."
    assert convert(source, taken, request, dry_run=True).plan.notes[-1] == sentence
    with pytest.raises(ValueError, match=r"taken exists"):
        convert(source, taken, request)


def test_a_taken_place_is_refused_before_a_gguf_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_text("no GGUF")
    (tmp_path / "taken").mkdir()
    with pytest.raises(ValueError, match="taken exists"):
        convert(tmp_path / "broken.gguf", tmp_path / "taken", Request([{"layers": "2-4", "preset": "ladder"}]))


def test_the_config_says_what_was_done_and_keeps_the_rest(source: Path) -> None:
    out = convert(source, source.parent / "out", Request([{"layers": "2-4", "preset": "ladder"}])).out
    before, after = config_of(source), config_of(out)
    changed = {"model_type", "architectures", "auto_map", "tp_shards", "wiring", "wiring_version", "pretraining_tp"}
    assert {name: value for name, value in after.items() if name not in changed} == {
        name: value for name, value in before.items() if name not in changed
    }
    assert after["model_type"] == "rewired_llama"
    assert after["architectures"] == ["RewiredLlamaForCausalLM"]
    assert after["tp_shards"] == 4  # 8 does not divide the 4 KV heads
    assert after["wiring"] == [
        {"layers": "0-2", "preset": "standard"},
        {"layers": "2-4", "preset": "ladder"},
        {"layers": "4-6", "preset": "standard"},
    ]


def test_it_loads_as_our_class_and_computes_the_new_wiring(source: Path) -> None:
    out = convert(source, source.parent / "out", Request([{"layers": "2-4", "preset": "ladder", "peek": True}])).out
    model = AutoModelForCausalLM.from_pretrained(out)
    assert type(model) is RewiredLlamaForCausalLM
    wiring = {region_name(attn.region) for attn, _ in model.config.resolved_wiring.layers}
    assert wiring == {"standard", "ladder+peek"}
    assert not torch.allclose(logits(out), logits(source))


def test_a_single_file_and_tied_weights_convert(tmp_path: Path) -> None:
    source = make_llama(tmp_path / "tied", sharded=False, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    out = convert(source, tmp_path / "out", Request([{"layers": "0-", "preset": "standard", "peek": True}])).out
    assert torch.equal(logits(out), logits(source))  # standard waits: there is nothing to peek at


OPTIONS = {
    "ladder-2-4": ["--ladder-layers", "2-4"],
    "ladder-4-6": ["--ladder-layers", "-2"],
    "ladder-3-6": ["--ladder-layers", "3-"],
    "ladder-5-6": ["--ladder-layers", "5"],
    "ladder-peek-2-4": ["--ladder-layers", "2-4", "--peek"],
    "ladder-0-2_4-6": ["--ladder-layers", "0-2,4-6"],
    "ladder-2-4-attn": ["--ladder-layers", "2-4:attn"],
    "desync-4x-2-6": ["--wiring", "desync-4x@2-6"],
    "desync-2x-mean-2-6": ["--wiring", "desync-2x(mean)@2-6"],
    "desync-2x-overlap-2-6": ["--wiring", "desync-2x+overlap@2-6"],
    "ladder-delay-2-2-6": ["--wiring", "ladder+delay-2@2-6"],
    "partial-0.5-2-6": ["--wiring", "partial-0.5@2-6"],
    "partial-0.5-no-peek-2-6": ["--wiring", "partial-0.5-peek@2-6"],
    "standard-int8-0-6": ["--wiring", "int8"],
    "ladder-peek-int4-int8-2-4": ["--wiring", "ladder+peek+int4/int8@2-4"],
    "standard-8-0.1-4-0.9-0-6": ["--wiring", "standard+8:0.1+4:0.9"],
    "parallel-0-2-ladder-4-6": ["--wiring", "parallel@0-2", "--ladder-layers", "4-6"],
}


@pytest.mark.parametrize("name, options", OPTIONS.items(), ids=OPTIONS)
def test_every_option_is_named_in_the_default_output_and_loads(name: str, options: list[str], source: Path) -> None:
    done = run("convert", "tiny-llama", *options, cwd=source.parent)
    assert done.returncode == 0, done.stderr
    assert torch.isfinite(logits(source.parent / f"tiny-llama-{name}")).all()


def test_a_dry_run_checks_everything_and_writes_nothing(source: Path) -> None:
    before = snapshot(source.parent)
    done = run("convert", "tiny-llama", "--ladder-layers", "2-4", "--dry-run", cwd=source.parent)
    assert done.returncode == 0
    assert "would write tiny-llama-ladder-2-4" in done.stdout
    (source / "model-00002-of-00004.safetensors").write_bytes(b"")
    broken = run("convert", "tiny-llama", "--ladder-layers", "2-4", "--dry-run", cwd=source.parent)
    assert broken.returncode == 2
    (source / "model-00002-of-00004.safetensors").write_bytes(before["tiny-llama/model-00002-of-00004.safetensors"])
    assert snapshot(source.parent) == before


@pytest.mark.parametrize("dtype, expected", [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_dtype_casts_the_weights(dtype: str, expected: torch.dtype, source: Path) -> None:
    done = run("convert", "tiny-llama", "out", "--ladder-layers", "2-4", "--dtype", dtype, cwd=source.parent)
    assert done.returncode == 0, done.stderr
    out = source.parent / "out"
    original = {name: t for file in source.glob("*.safetensors") for name, t in load_file(file).items()}
    for file in out.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert torch.equal(tensor, original[name].to(expected)), name
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in original.values())
    assert AutoModelForCausalLM.from_pretrained(out).dtype == expected


def test_the_same_dtype_links_and_reads_no_tensor(source: Path) -> None:
    out = convert(source, source.parent / "out", Request([{"layers": "2-4", "preset": "ladder"}], dtype="float32")).out
    assert all(file.stat().st_nlink == 2 for file in out.glob("*.safetensors"))


def test_a_wiring_that_the_weights_do_not_fit_is_said_with_what_mends_it(source: Path) -> None:
    """Not of a payload, which rounds only, nor of one that the source has already."""

    def said(*arguments: str, way: str = "run convert with --refit too") -> bool:
        printed = run("convert", *arguments, cwd=source.parent).stdout
        return f"To mend it, {way}, or train it: adapt RECIPE" in printed

    assert said("tiny-llama", "out", "--wiring", "ladder@2-4")
    fitted = shutil.copytree(source.parent / "out", source.parent / "fitted") / "config.json"
    config = json.loads(fitted.read_text())
    fitted.write_text(json.dumps(config | {"refit": {"base": {"name": "x"}, "wiring": config["wiring"], "notes": []}}))
    assert said("fitted", "more", "--wiring", "ladder@1-2", way="convert the original with --refit")
    assert not said("out", "--dtype", "bfloat16")
    assert not said("out", "dense", "--standard-layers", "0-")
    assert not said("tiny-llama", "--wiring", "int8")


def test_what_a_wiring_cost_where_it_was_measured_is_said(source: Path) -> None:
    def said(wiring: str) -> str:
        return run("convert", "tiny-llama", "--dry-run", "--wiring", wiring, cwd=source.parent).stdout

    known = "damaged (on SmolLM2, 50% of the layers, measured: KL 1.3 nats a token now, 0.23 after --refit)."
    assert known in said("ladder@3-6")
    assert "the model is damaged." in said("desync-3x@3-6"), "which nobody measured"
    assert "the model is damaged." in said("ladder@2-4"), "which are not the last layers"


def test_the_model_card_tells_what_it_is_and_how_it_was_made(source: Path) -> None:
    run("convert", "tiny-llama", "out", "--ladder-layers", "2-4", "--peek", cwd=source.parent)
    card = (source.parent / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n"), "no folder is a base that the hub knows"
    assert 'license: "llama3.1"\n' in card
    assert "| 2-4 | ladder+peek | 4 | 1 |" in card
    assert "    convert tiny-llama out --ladder-layers 2-4 --peek\n" in card


def test_a_source_card_can_put_nothing_but_its_licence_into_ours(source: Path) -> None:
    (source / "README.md").write_text("---\nlicense: other\nlicense_name: !!python/object:os.system\n---\n")
    out = convert(source, source.parent / "out", Request([{"layers": "2-4", "preset": "ladder"}])).out
    front_matter = yaml.safe_load((out / "README.md").read_text().split("---")[1])
    assert (front_matter["license"], front_matter["license_name"]) == ("other", "!!python/object:os.system")


def test_the_same_command_under_the_umbrella(source: Path) -> None:
    run("convert", "tiny-llama", "one", "--ladder-layers", "2-4", cwd=source.parent)
    run("rewired", "convert", "tiny-llama", "two", "--ladder-layers", "2-4", cwd=source.parent)
    one, two = snapshot(source.parent / "one"), snapshot(source.parent / "two")
    assert {name: data for name, data in one.items() if name != "README.md"} == {
        name: data for name, data in two.items() if name != "README.md"
    }


def test_info_prints_any_checkpoint_s_layers(source: Path) -> None:
    run("convert", "tiny-llama", "out", "--wiring", "desync@2-6", cwd=source.parent)
    for name, wirings in {"tiny-llama": ["standard"], "out": ["standard", "desync-2x"]}.items():
        report = json.loads(run("rewired", "info", name, "--json", cwd=source.parent).stdout)
        assert [row["wiring"] for row in report["layers"]] == wirings
        printed = run("rewired", "info", name, cwd=source.parent).stdout
        assert all(wiring in printed for wiring in wirings)
        assert ("so it is for 4 ranks" in printed) == (name == "out")


def test_a_conversion_imports_neither_torch_nor_transformers(source: Path) -> None:
    script = (
        "import sys; from rewired.cli import main; sys.argv = ['rewired', *sys.argv[1:]]\n"
        "try: main()\nexcept SystemExit as done: print(done.code, {'torch', 'transformers'} & set(sys.modules))"
    )
    for arguments in (["convert", "tiny-llama", "--ladder-layers", "2-4"], ["info", "tiny-llama"], ["--help"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], cwd=source.parent, capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == "0 set()"


def test_help_teaches_with_examples(tmp_path: Path) -> None:
    printed = run("convert", "--help", cwd=tmp_path).stdout
    assert "convert llama-3.1-8b --ladder-layers 16-32" in printed
    assert "half-open" in printed


def test_a_hub_cache_snapshot_s_links_into_its_blobs_are_followed(source: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--tiny"
    (repository / "blobs").mkdir(parents=True)
    snapshot_folder = repository / "snapshots" / "5eed"
    snapshot_folder.mkdir(parents=True)
    for number, path in enumerate(path for path in source.iterdir() if path.suffix != ".py"):
        path.rename(repository / "blobs" / str(number))
        (snapshot_folder / path.name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "cache").symlink_to(repository)  # the whole cache may be a link to a larger disk
    snapshot_folder = tmp_path / "cache" / "snapshots" / "5eed"
    out = convert(snapshot_folder, tmp_path / "out", Request([{"layers": "2-4", "preset": "ladder"}])).out
    assert not any(path.is_symlink() for path in out.iterdir())
    assert torch.isfinite(logits(out)).all()


class TestGguf:
    @pytest.mark.slow  # `make demo` does it too
    def test_smollm2_from_its_package_chats_and_is_a_rewired_model(self, smollm2_gguf: Path, tmp_path: Path) -> None:
        done = run("convert", smollm2_gguf, "out", "--ladder-layers", "28-30", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
        assert (type(model), model.dtype) == (RewiredLlamaForCausalLM, torch.bfloat16)
        prompt = tokenizer("The capital of France is", return_tensors="pt")
        answer = model.generate(**prompt, max_new_tokens=3, do_sample=False)[0]
        assert "Paris" in tokenizer.decode(answer)
        assert {path.name for path in tmp_path.iterdir()} == {"out"}
        assert "dequantised" in (tmp_path / "out" / "README.md").read_text()

    def test_it_is_dequantised_once_for_all_conversions(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A stand-in for the reader, which takes half a minute for the real model; `generate` takes the same copy."""
        (tmp_path / "my.gguf").write_bytes(b"GGUF")
        monkeypatch.setenv("REWIRED_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(gguf, "_load_config", lambda path: LlamaConfig.from_pretrained(source))
        monkeypatch.setattr(gguf, "dequantise", lambda path, folder, dtype: make_llama(folder))
        request = Request([{"layers": "2-4", "preset": "ladder"}])
        out = tmp_path / "hybrid"
        one = convert(tmp_path / "my.gguf", out, request)
        first = snapshot(one.out)
        for reader in ("_load_config", "dequantise"):
            monkeypatch.setattr(gguf, reader, lambda *_: pytest.fail("read again"))
        two = convert(tmp_path / "my.gguf", out, request, force=True)
        assert snapshot(two.out) == first
        assert checkpoint_folder(str(tmp_path / "my.gguf")).is_relative_to(tmp_path / "cache")
        assert any("dequantised" in note for note in two.plan.notes)

    def test_what_is_no_gguf_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "fake.gguf").write_bytes(b"GGUFnonsense")
        done = run("convert", "fake.gguf", "--ladder-layers", "2-4", cwd=tmp_path)
        assert done.returncode == 2
        assert "cannot be read as GGUF" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.slow  # `make demo` takes it too
    def test_the_short_name_takes_the_package_where_no_hub_answers(self, smollm2_gguf: Path, tmp_path: Path) -> None:
        environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
        done = run("convert", "smollm2-135m", "--ladder-layers", "15-30", "--dry-run", cwd=tmp_path, **environment)
        assert done.returncode == 0, done.stderr
        assert "would write smollm2-135m-ladder-15-30" in done.stdout
        assert done.stderr.count("No hub answers") == 1


def test_an_index_without_metadata_gets_some(source: Path) -> None:
    """Without it transformers loads no weights."""
    edit_json(source / "model.safetensors.index.json", metadata=None)
    out = convert(source, source.parent / "out", Request([{"layers": "2-4", "preset": "ladder"}])).out
    AutoModelForCausalLM.from_pretrained(out)
