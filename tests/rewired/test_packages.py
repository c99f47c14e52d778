"""What is taken out of a package: the wanted files of the very file expected, and nothing of it is run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rewired.cache import cache_folder, made_once
from rewired.packages import unpack

from .release import make_wheel, use_as_index

MEMBERS = {"parcel/tasks/one.json": "1", "parcel/tasks/two.json": "2", "parcel/__init__.py": "raise SystemExit"}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_as_index(tmp_path / "index", monkeypatch)
    return tmp_path / "index"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where to unpack."""
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def texts(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_the_wanted_files_keep_their_paths(index: Path, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    package = make_wheel(index, MEMBERS, link="parcel/tasks/link.json")
    unpack(package, lambda name: name.endswith(".json"), folder)
    assert texts(folder) == {"parcel/tasks/one.json": "1", "parcel/tasks/two.json": "2"}
    assert capfd.readouterr().err == "Taking a parcel from the PyPI package parcel==1.0 (12 MB) ...\n"
    assert list(cache_folder().iterdir()) == []


def test_another_file_than_the_one_expected_is_not_used(index: Path, folder: Path) -> None:
    package = replace(make_wheel(index, MEMBERS), sha256="0" * 64)
    with pytest.raises(ValueError, match=r"parcel==1\.0 is not the file expected"):
        unpack(package, lambda name: True, folder)
    assert texts(folder) == {}


def test_no_file_leaves_the_folder(index: Path, folder: Path) -> None:
    package = make_wheel(index, {"parcel/../../out.json": "out"})
    with pytest.raises(ValueError, match="leads out of its folder"):
        unpack(package, lambda name: name.endswith(".json"), folder)
    assert not (folder.parent / "out.json").exists()


def test_what_cannot_be_downloaded_is_a_sentence(index: Path, folder: Path) -> None:
    package = replace(make_wheel(index, MEMBERS), requirement="parcel==2.0")
    with pytest.raises(ValueError, match=r"^pip could not download parcel==2\.0 \(.*\)\.$"):
        unpack(package, lambda name: True, folder)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"REWIRED_CACHE": "~/mine", "XDG_CACHE_HOME": "/xdg"}, "/home/me/mine"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/rewired"),
        ({"XDG_CACHE_HOME": ""}, "/home/me/.cache/rewired"),
        ({}, "/home/me/.cache/rewired"),
    ],
)
def test_the_cache_folder(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REWIRED_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)


class TestMadeOnce:
    def test_a_second_call_makes_nothing(self, folder: Path) -> None:
        def make(made: Path) -> None:
            (made / "file").write_text("made")

        assert made_once(folder / "a" / "b", make) == folder / "a" / "b"
        assert made_once(folder / "a" / "b", lambda made: pytest.fail("made again")) == folder / "a" / "b"
        assert texts(folder) == {"a/b/file": "made"}

    def test_an_interruption_leaves_nothing(self, folder: Path) -> None:
        def make(made: Path) -> None:
            (made / "file").write_text("half")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            made_once(folder / "b", make)
        assert list(folder.iterdir()) == []

    def test_who_comes_second_takes_what_is_there(self, folder: Path) -> None:
        def make(made: Path) -> None:
            (made / "file").write_text("second")
            (folder / "b").mkdir()
            (folder / "b" / "file").write_text("first")

        made_once(folder / "b", make)
        assert texts(folder) == {"b/file": "first"}
