"""Files taken out of a package: the wanted ones of the very file expected, and nothing of it is run."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from rewired.cache import cache_folder, made_once
from rewired.packages import unpack

from .release import make_sdist, make_wheel, use_as_index

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
    package = make_wheel(index, MEMBERS)
    unpack(package, lambda name: name.endswith(".json"), folder)
    assert texts(folder) == {"parcel/tasks/one.json": "1", "parcel/tasks/two.json": "2"}
    assert capfd.readouterr().err == "Taking a parcel from the PyPI package parcel==1.0 (12 MB) ...\n"
    assert list(cache_folder().iterdir()) == []


def test_another_file_than_the_one_expected_is_not_used(index: Path, folder: Path) -> None:
    package = replace(make_wheel(index, MEMBERS), sha256="0" * 64)
    with pytest.raises(ValueError, match=r"parcel==1\.0 is not the expected file"):
        unpack(package, lambda name: True, folder)
    assert texts(folder) == {}


def test_no_file_leaves_the_folder(index: Path, folder: Path) -> None:
    unpack(make_wheel(index, {"parcel/../../out.json": "out"}), lambda name: name.endswith(".json"), folder)
    assert not (folder.parent / "out.json").exists()


def test_what_cannot_be_downloaded_is_a_sentence(index: Path, folder: Path) -> None:
    package = replace(make_wheel(index, MEMBERS), requirement="parcel==2.0")
    with pytest.raises(ValueError, match=r"^pip could not download parcel==2\.0 \(.*\)\.$"):
        unpack(package, lambda name: True, folder)


class TestSdist:
    def test_the_wanted_files_come_and_no_code_runs(self, index: Path, folder: Path) -> None:
        link, hard, pipe = (tarfile.TarInfo(f"parcel-1.0/{name}.json") for name in ("link", "hard", "pipe"))
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        hard.type, hard.linkname = tarfile.LNKTYPE, "parcel-1.0/one.json"
        pipe.type = tarfile.FIFOTYPE
        members = {"parcel-1.0/one.json": "1", "parcel-1.0/setup.py": f"open({str(folder / 'ran')!r}, 'w')"}
        unpack(make_sdist(index, members, link, hard, pipe), lambda name: name.endswith(".json"), folder)
        assert texts(folder) == {"parcel-1.0/one.json": "1"}
        assert list(cache_folder().iterdir()) == []

    def test_no_file_leaves_the_folder(self, index: Path, folder: Path) -> None:
        with pytest.raises(tarfile.OutsideDestinationError):
            unpack(make_sdist(index, {"/../out.json": "out"}), lambda name: True, folder)

    def test_another_file_than_the_one_expected_is_not_used(self, index: Path, folder: Path) -> None:
        with pytest.raises(ValueError, match=r"parcel==1\.0 is not the expected file"):
            unpack(replace(make_sdist(index, MEMBERS), sha256="0" * 64), lambda name: True, folder)
        assert texts(folder) == {}

    def test_pip_is_not_let_near_it(self, index: Path, folder: Path) -> None:
        """Where a wheel is expected and a source archive is all there is."""
        marker = folder / "ran"
        package = make_sdist(index, {"parcel-1.0/setup.py": f"open({str(marker)!r}, 'w')"})
        with pytest.raises(ValueError, match="pip could not download"):
            unpack(replace(package, is_sdist=False), lambda name: True, folder)
        assert not marker.exists()

    def test_it_comes_from_the_index_that_pip_is_told(
        self, index: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = make_sdist(index, MEMBERS)
        (index / "simple" / "parcel").mkdir(parents=True)
        others = "".join(f'<a href="../../{name}">{name}</a>' for name in ("parcel-1.0.1.tar.gz", "parcel-1.0.zip"))
        (index / "simple" / "parcel" / "index.html").write_text(
            f'<html><body>{others}<a href="../../Parcel-1.0.tar.gz#sha256=0" data-requires-python="&gt;=3">it</a>'
        )
        with serve(index) as url:
            monkeypatch.delenv("PIP_NO_INDEX")
            monkeypatch.setenv("PIP_FIND_LINKS", "")
            for place in (url, index.as_uri()):
                monkeypatch.setenv("PIP_INDEX_URL", f"{place}/simple/")
                unpack(package, lambda name: name in MEMBERS, folder / place[:4])
        assert texts(folder) == {f"{kind}/{name}": text for kind in ("http", "file") for name, text in MEMBERS.items()}

    def test_what_cannot_be_downloaded_is_a_sentence(
        self, index: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = replace(make_sdist(index, MEMBERS), requirement="parcel==2.0")
        with pytest.raises(
            ValueError, match=r"^The source archive of parcel==2\.0 could not .* \(none is there\): .*\.$"
        ):
            unpack(package, lambda name: True, folder)
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
        for address in ("http://127.0.0.1:9/simple", "no-address", "http://user:word@127.0.0.1:9/simple"):
            monkeypatch.setenv("PIP_INDEX_URL", address)
            with pytest.raises(ValueError, match=r"^The source archive of parcel==2\.0 could not .*\.$"):
                unpack(package, lambda name: True, folder)


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """The folder's files by HTTP."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder))) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


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
