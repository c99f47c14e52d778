"""The user's cache: what is computed once, and what is not kept at all."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from rewired import cache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REWIRED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_small_file_is_hashed_anew_and_leaves_nothing_behind(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "small"
    file.write_bytes(b"weights")
    assert cache.digest(file) == hashlib.sha256(b"weights").hexdigest()
    assert not folder.exists()


def test_a_big_file_is_hashed_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = list[Path]()
    sha256 = cache.sha256
    monkeypatch.setattr(cache, "sha256", lambda file: (hashed.append(file), sha256(file))[1])
    monkeypatch.setattr(cache, "_SMALL", 0)
    file, link = tmp_path / "big", tmp_path / "link"
    file.write_bytes(b"weights")
    link.hardlink_to(file)
    assert cache.digest(file) == cache.digest(file) == cache.digest(link) == hashlib.sha256(b"weights").hexdigest()
    assert hashed == [file]
    file.write_bytes(b"other weights")
    assert cache.digest(link) == hashlib.sha256(b"other weights").hexdigest()
    assert hashed == [file, link]


def test_a_file_unpacked_anew_in_the_same_size_and_time_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its inode may be the deleted one's."""
    monkeypatch.setattr(cache, "_SMALL", 0)
    monkeypatch.setattr(cache, "_END", 4)
    file = tmp_path / "big"
    for content in (b"----weights----", b"----WEIGHTS----", b"!---WEIGHTS----", b"!---WEIGHTS---!"):
        file.write_bytes(content)  # the same inode
        os.utime(file, ns=(0, 0))
        assert cache.digest(file) == hashlib.sha256(content).hexdigest()


def test_a_sum_that_was_half_written_is_computed_again(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut, say."""
    monkeypatch.setattr(cache, "_SMALL", 0)
    file = tmp_path / "big"
    file.write_bytes(b"weights")
    checksum = cache.digest(file)
    [known] = (folder / "digests").iterdir()
    known.write_text("")
    assert cache.digest(file) == checksum == known.read_text()
