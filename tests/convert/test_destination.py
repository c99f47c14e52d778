"""OUT is whole or not there, whatever happens to the command; and nothing is replaced that should not be."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rewired.convert import Request, convert
from rewired.convert.destination import check_free, check_space, staged_folder

from .checkpoints import make_llama, snapshot

WIRING = [{"layers": "2-4", "preset": "ladder"}]
COPY = Request(wiring=WIRING, copy=True)
LINK = Request(wiring=WIRING)


# The staging folder by itself


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A place, without neighbours, for a checkpoint."""
    (tmp_path / "outs").mkdir()
    return tmp_path / "outs" / "out"


def test_the_staging_folder_takes_outs_place_at_the_end(out: Path) -> None:
    with staged_folder(out) as staging:
        (staging / "config.json").write_text("new")
        assert not out.exists()
    assert snapshot(out.parent) == {"out/config.json": b"new"}


def test_missing_parents_of_out_are_made(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "a" / "b" / "out"):
        pass
    assert (tmp_path / "a" / "b" / "out").is_dir()


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt])
def test_an_error_removes_the_staging_folder_and_leaves_out_as_it_was(out: Path, error: type[BaseException]) -> None:
    out.mkdir()
    (out / "config.json").write_text("old")
    with pytest.raises(error), staged_folder(out) as staging:
        (staging / "deep").mkdir()
        (staging / "deep" / "config.json").write_text("new")
        raise error
    assert list(out.parent.iterdir()) == [out]
    assert snapshot(out) == {"config.json": b"old"}


def test_an_error_in_the_swap_leaves_out_as_it_was(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out.mkdir()
    (out / "config.json").write_text("old")
    rename = Path.rename

    def refuse_the_new_one(self: Path, target: Path) -> Path:
        if self.name == ".out.partial":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_the_new_one)
    with pytest.raises(OSError, match="Input/output error"), staged_folder(out):
        pass
    assert snapshot(out.parent) == {"out/config.json": b"old"}


def test_what_a_killed_run_left_is_removed(out: Path) -> None:
    for leftover in (".out.partial/model.safetensors", ".out.partial/.source/config.json", ".out.replaced/config.json"):
        (out.parent / leftover).parent.mkdir(parents=True, exist_ok=True)
        (out.parent / leftover).write_text("left")
    with staged_folder(out) as staging:
        (staging / "config.json").write_text("new")
    assert snapshot(out.parent) == {"out/config.json": b"new"}


def test_a_link_in_the_staging_folders_place_is_not_followed(out: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years")
    out.with_name(".out.partial").symlink_to(tmp_path / "home")
    with suppress(OSError, ValueError), staged_folder(out):
        pass
    assert snapshot(tmp_path / "home") == {"thesis.txt": b"years"}


def test_a_second_writer_is_refused_and_does_not_disturb_the_first(out: Path) -> None:
    with staged_folder(out) as staging:
        (staging / "config.json").write_text("the first's")
        with pytest.raises(ValueError, match=f"Another conversion is writing {out}"), staged_folder(out):
            pytest.fail("two writers at once")
        assert snapshot(staging) == {"config.json": b"the first's"}
    assert snapshot(out.parent) == {"out/config.json": b"the first's"}


# Links, copies and space


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small checkpoint, alone in its folder."""
    return make_llama(tmp_path / "sources" / "source")


def weights(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in snapshot(folder).items() if name.endswith(".safetensors")}


def test_weights_are_hard_links_unless_copies_are_asked_for(source: Path, tmp_path: Path) -> None:
    before = snapshot(source)
    for request, links in ((LINK, 2), (COPY, 1)):
        convert(source, tmp_path / "out", request)
        assert {path.stat().st_nlink for path in (tmp_path / "out").glob("*.safetensors")} == {links}
        assert weights(tmp_path / "out") == weights(source)
        shutil.rmtree(tmp_path / "out")
    assert snapshot(source) == before


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK], ids=errno.errorcode.get)
def test_where_a_link_fails_a_copy_is_made(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*paths: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    counts: list[int] = []
    convert(source, tmp_path / "out", LINK, on_bytes=lambda count, total: counts.append(count))
    assert {path.stat().st_nlink for path in (tmp_path / "out").glob("*.safetensors")} == {1}
    assert weights(tmp_path / "out") == weights(source)
    assert sum(counts) == size_of_weights(source)


def size_of_weights(folder: Path) -> int:
    return sum(map(len, weights(folder).values()))


def leave_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 50, used=0, free=free))


def test_too_little_space_is_told_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_free(monkeypatch, 2_500_000_000)
    check_space(tmp_path / "out", 2_500_000_000)
    with pytest.raises(ValueError, match=r"out needs 16\.1 GB and 2\.5 GB are free"):
        check_space(tmp_path / "out", 16_060_000_000)


def test_too_little_space_for_copies_is_found_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_free(monkeypatch, size_of_weights(source) - 1)
    with pytest.raises(ValueError, match="No space left"):
        convert(source, tmp_path / "out", COPY, on_bytes=lambda *_: pytest.fail("weights were written"))
    assert list(tmp_path.iterdir()) == [source.parent]
    convert(source, tmp_path / "out", LINK)  # takes no space


def test_a_cast_to_a_larger_type_needs_the_space_of_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_llama(tmp_path / "source", dtype=torch.bfloat16)
    leave_free(monkeypatch, size_of_weights(source) * 3 // 2)
    with pytest.raises(ValueError, match="No space left"):
        convert(source, tmp_path / "out", Request(wiring=WIRING, dtype="float32"))
    assert list(tmp_path.iterdir()) == [source]


def test_a_cast_to_a_smaller_type_needs_no_more_than_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_llama(tmp_path / "source", dtype=torch.float32)
    leave_free(monkeypatch, size_of_weights(source) * 3 // 4)
    convert(source, tmp_path / "out", Request(wiring=WIRING, dtype="bfloat16"))


# What may be replaced


def test_an_existing_out_is_kept_unless_forced(source: Path, tmp_path: Path) -> None:
    out = make_llama(tmp_path / "out")
    before = snapshot(out)
    with pytest.raises(ValueError, match="out exists: choose another name, or replace it with --force"):
        convert(source, out, LINK)
    assert snapshot(out) == before


def test_a_file_on_the_way_to_out_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=f"{tmp_path / 'file'} is a file: choose another folder for the result."):
        convert(source, tmp_path / "file" / "out", LINK)


def test_force_replaces_all_of_a_checkpoint(source: Path, tmp_path: Path) -> None:
    (make_llama(tmp_path / "out") / "stale.safetensors").write_text("of the old one")
    convert(source, tmp_path / "out", LINK, force=True)
    convert(source, tmp_path / "fresh", LINK)
    assert set(snapshot(tmp_path / "out")) == set(snapshot(tmp_path / "fresh"))


def test_force_replaces_an_empty_folder(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", LINK, force=True)
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize("kind", ["other files", "file", "link", "dangling link"])
def test_force_replaces_nothing_but_a_checkpoint_folder(source: Path, tmp_path: Path, kind: str) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    if kind == "other files":
        out.mkdir()
        (out / "thesis.txt").write_text("years")
    elif kind == "file":
        out.write_text("years")
    else:
        out.symlink_to(elsewhere)
        if kind == "link":
            make_llama(elsewhere)
    before, link = snapshot(tmp_path), out.is_symlink()
    with pytest.raises(ValueError, match="out is not a checkpoint folder"):
        convert(source, out, LINK, force=True)
    assert (snapshot(tmp_path), out.is_symlink()) == (before, link)


@pytest.mark.parametrize("place", ["sources/source", "sources", ".", "sources/source/../source", "link"])
def test_out_may_not_be_or_hold_the_source(source: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "link").symlink_to(source)
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match="is, or holds, the source"):
        convert(source, tmp_path / place, LINK, force=True)
    assert snapshot(tmp_path) == before


def test_what_appears_at_out_meanwhile_is_not_replaced_unasked(source: Path, tmp_path: Path) -> None:
    """Copying takes minutes, in which the user, or another conversion, may write there."""
    out = tmp_path / "out"

    def write_there(count: int, total: int) -> None:
        out.mkdir(exist_ok=True)
        (out / "thesis.txt").write_text("years")

    with suppress(ValueError):
        convert(source, out, COPY, on_bytes=write_there)
    assert snapshot(out) == {"thesis.txt": b"years"}


@pytest.mark.parametrize("letters", [241, 300])
def test_a_name_that_no_folder_can_have_is_refused(letters: int, tmp_path: Path) -> None:
    """That of the folder that is written first is longer by a few letters."""
    with pytest.raises(ValueError, match=f"has a name of {letters} bytes: take one of at most 240"):
        check_free(tmp_path / ("x" * letters), None, force=False)
    check_free(tmp_path / ("x" * 240), None, force=False)
