"""Models are called what tells them apart, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewired.evaluate.names import as_file_name, base_and_adapter, names_of


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["dense", "out/ladder"], ["dense", "ladder"]),
        (["sft/final", "kd/final"], ["sft/final", "kd/final"]),
        (["sft/final"], ["sft/final"]),
        (["sft/checkpoint-10"], ["sft/checkpoint-10"]),
        (["a/ladder", "b/ladder", "b/desync"], ["a/ladder", "b/ladder", "desync"]),
        (["a/x/final", "b/x/final"], ["a/x/final", "b/x/final"]),
        (["ladder", "ladder"], ["ladder", "ladder"]),
    ],
)
def test_folders_are_called_by_the_end_of_their_path(
    folders: list[str], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert names_of(folders) == names
    assert names_of([f"./{folder}/" for folder in folders]) == names


def test_a_model_of_the_hub_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert names_of(["meta-llama/Llama-3.1-8B", "llama-3.1-8b"]) == ["meta-llama/Llama-3.1-8B", "llama-3.1-8b"]


def test_an_adapter_is_called_after_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("kd/final", "one/checkpoint-5", "two/checkpoint-5", "lora", "with+plus"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    given = ["kd/final", "kd/final+lora", "org/model+one/checkpoint-5", "org/model+two/checkpoint-5", "with+plus"]
    assert names_of(given) == [
        *("kd/final", "kd/final+lora"),
        *("org/model+one/checkpoint-5", "org/model+two/checkpoint-5"),
        "with+plus",
    ]


def test_a_file_s_own_name_may_have_a_plus(tmp_path: Path) -> None:
    (tmp_path / "with+plus.gguf").touch()
    assert base_and_adapter(f"{tmp_path}/with+plus.gguf") == (f"{tmp_path}/with+plus.gguf", "")
    assert base_and_adapter(f"{tmp_path}/with+plus") == (f"{tmp_path}/with", "plus")


@pytest.mark.parametrize(("name", "file"), [("org/model", "org--model"), ("..", "--.."), ("plain", "plain")])
def test_a_name_is_one_file(name: str, file: str) -> None:
    assert as_file_name(name) == file
