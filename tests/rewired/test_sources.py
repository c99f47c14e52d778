"""Checkpoints by the names that users give them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from rewired.cache import sha256
from rewired.checkpoint import provenance
from rewired.sources import checkpoint_folder, find_source, gguf, hub
from tests.convert.checkpoints import make_llama

from .release import make_wheel, use_as_index


def test_the_packaged_model_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for it, in a package that can then be had no more; a cached file that changed is not used."""
    use_as_index(tmp_path / "index", monkeypatch)
    monkeypatch.setattr(gguf, "_PACKAGE", make_wheel(tmp_path / "index", {gguf._MEMBER: "weights"}))
    (tmp_path / "weights").write_text("weights")
    monkeypatch.setattr(gguf, "_SHA256", sha256(tmp_path / "weights"))
    path = gguf.packaged_smollm2()
    assert (path, path.read_text()) == (tmp_path / "cache" / "SmolLM2-135M-Instruct.Q4_1.gguf", "weights")
    path.write_text("half")
    assert gguf.packaged_smollm2().read_text() == "weights"
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert gguf.packaged_smollm2() == path
    path.unlink()
    with pytest.raises(ValueError, match=r"parcel==1\.0"):
        gguf.packaged_smollm2()


@pytest.fixture
def dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are dequantised, by a stand-in that writes a config; the first one is cut in the middle."""
    files: list[Path] = []

    def dequantise(path: Path, folder: Path, dtype: str | None) -> None:
        files.append(path)
        (folder / "tokenizer.json").write_text("{}")
        if len(files) == 1:
            raise KeyboardInterrupt
        (folder / "config.json").write_text("{}")

    monkeypatch.setenv("REWIRED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf, "dequantise", dequantise)
    return files


def test_a_file_is_recorded_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.gguf").write_text("abc")
    monkeypatch.chdir(tmp_path)
    source = find_source("my.gguf")
    assert source.recorded_name == str(tmp_path / "my.gguf") and source.folder is None
    assert find_source("org/model").recorded_name == "org/model"


def test_a_gguf_file_is_dequantised_once(tmp_path: Path, dequantised: list[Path]) -> None:
    path, same, other = tmp_path / "my.gguf", tmp_path / "folder" / "my.gguf", tmp_path / "other" / "my.gguf"
    for file, content in {path: "abc", same: "abc", other: "abd"}.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
    with pytest.raises(KeyboardInterrupt):
        checkpoint_folder(str(path))
    models = tmp_path / "cache" / "models"
    assert list(models.iterdir()) == []
    folder = checkpoint_folder(str(path))
    assert folder == models / "my-ba7816bf8f01"  # SHA-256 of abc
    assert {file.name for file in folder.iterdir()} == {"config.json", "tokenizer.json"}
    assert checkpoint_folder(str(path)) == checkpoint_folder(str(same)) == folder
    assert checkpoint_folder(str(other)).name != folder.name
    assert dequantised == [path, path, other]


def test_the_packaged_model_is_dequantised_once_where_no_hub_answers(
    tmp_path: Path, dequantised: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packaged.gguf").write_text("abc")
    dequantised.append(Path("not the first"))
    monkeypatch.setattr(gguf, "packaged_smollm2", lambda: tmp_path / "packaged.gguf")
    assert checkpoint_folder("smollm2-135m").name == "packaged-ba7816bf8f01"
    assert checkpoint_folder("SmolLM2-135M").name == "packaged-ba7816bf8f01"
    assert len(dequantised) == 2


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        checkpoint_folder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_folder(str(tmp_path)) == tmp_path


def test_what_is_on_disk_has_no_revisions(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(ValueError, match=f"{path} is on disk, and has no revision 'main': leave --revision out"):
            find_source(str(path), "main")


def test_a_base_that_is_a_snapshot_on_disk_is_found(tmp_path: Path) -> None:
    """Its record says the commit, too."""
    folder = make_llama(tmp_path / "snapshots" / "5eed")
    base = provenance.record(find_source(str(folder)), folder)
    assert base["revision"] == "5eed"
    assert provenance.find(base, tmp_path) == folder


@pytest.mark.parametrize("name", ["llama-3.1-8b", "meta-llama/Llama-3.1-8B"])
def test_a_repository_comes_through_the_hub_s_cache(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(repo: str, revision: str | None, part: str) -> Path:
        assert (repo, revision, part) == ("meta-llama/Llama-3.1-8B", "main", "checkpoint")
        return tmp_path

    monkeypatch.setattr(hub, "fetch", fetch)
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_folder(name, "main") == tmp_path


@pytest.mark.parametrize("failure", [RuntimeError("Error while uploading 'model.safetensors'."), OSError("broken")])
def test_an_upload_that_fails_is_a_sentence(
    failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file of weights huggingface_hub says it by RuntimeError, its uploader by OSError."""

    def upload_folder(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(HfApi, "create_repo", lambda *_, **__: "url")
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    with pytest.raises(ValueError, match=f"me/model could not be written .{failure}.[.]"):
        hub.push(tmp_path, "me/model")


NOT_THERE = {
    "no file": ("nowhere.gguf", "There is no file nowhere.gguf"),
    "no folder": ("./nowhere", "'./nowhere' is not a folder here"),
    "no name": ("some/where/else", "There is no folder 'some/where/else' here"),
    "no short name": ("llama-3.1-9b", "the short names: llama-3.1-8b"),
    "no hub": ("llama-3.1-8b", "The hub does not answer, and meta-llama/Llama-3.1-8B could not be read"),
}


@pytest.mark.parametrize(("name", "sentence"), NOT_THERE.values(), ids=NOT_THERE)
def test_what_is_not_there_is_a_sentence(
    name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        checkpoint_folder(name)
