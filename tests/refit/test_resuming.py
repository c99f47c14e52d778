"""A refit that was interrupted: what it leaves, and who goes on with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rewired.convert import Conversion, Request, convert
from tests.convert.checkpoints import snapshot
from tests.refit.models import PEEK


def test_a_plain_conversion_leaves_what_a_refit_kept(dense: Path, request_of: Request, tmp_path: Path) -> None:
    def stop(layer: int, layers: int, fits: list[Any]) -> None:
        if fits:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(dense, tmp_path / "model", request_of, on_layer=stop)
    before = snapshot(tmp_path / ".model.refit")
    convert(dense, tmp_path / "model", replace(request_of, refit=None))
    assert snapshot(tmp_path / ".model.refit") == before


def test_an_interrupted_refit_goes_on(refitted: Conversion, dense: Path, request_of: Request, tmp_path: Path) -> None:
    done: list[int] = []

    def stop_after_layer_two(layer: int, layers: int, fits: list[Any]) -> None:
        done.append(layer)
        if layer == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(dense, tmp_path / "model", request_of, on_layer=stop_after_layer_two)
    work = tmp_path / ".model.refit"
    assert sorted(tmp_path.iterdir()) == [work]
    kept = {path.name: path.stat().st_mtime_ns for path in work.glob("layer-*")}
    assert kept.keys() == {f"layer-0000{layer}.safetensors" for layer in (1, 2)}

    def check_kept(layer: int, layers: int, fits: list[Any]) -> None:
        done.append(layer)
        assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in work.glob("layer-*")}.items()
        assert len(fits) == (0 if layer == 0 else 2)

    whole = convert(dense, tmp_path / "model", request_of, on_layer=check_kept)
    out = whole.out
    assert done == [0, 1, 2, 0, 1, 2, 3]
    assert whole.refit is not None
    assert whole.refit.passes is None, "what it took is known of this process alone"
    assert not any("That took" in note for note in whole.plan.notes)
    assert (out / "model.safetensors").read_bytes() == (refitted.out / "model.safetensors").read_bytes()
    assert sorted(tmp_path.iterdir()) == [out]


def without_metadata(path: Path) -> None:
    save_file(load_file(path), path)


@pytest.mark.parametrize(
    "break_it",
    [lambda path: path.write_bytes(b""), without_metadata],
    ids=["empty", "bare"],
)
def test_a_kept_layer_that_is_broken_is_fitted_again(
    break_it: Callable[[Path], Any], refitted: Conversion, dense: Path, request_of: Request, tmp_path: Path
) -> None:
    def stop(layer: int, layers: int, fits: list[Any]) -> None:
        if layer == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(dense, tmp_path / "model", request_of, on_layer=stop)
    break_it(tmp_path / ".model.refit" / "layer-00002.safetensors")
    out = convert(dense, tmp_path / "model", request_of).out
    assert (out / "model.safetensors").read_bytes() == (refitted.out / "model.safetensors").read_bytes()


def test_settings_that_cannot_be_read_are_those_of_another_call(
    refitted: Conversion, dense: Path, request_of: Request, tmp_path: Path
) -> None:
    (tmp_path / ".model.refit").mkdir()
    (tmp_path / ".model.refit" / "settings.json").write_bytes(b"\xff\xfe")
    out = convert(dense, tmp_path / "model", request_of).out
    assert (out / "model.safetensors").read_bytes() == (refitted.out / "model.safetensors").read_bytes()


@pytest.mark.parametrize("other", ["wiring", "tokens", "gains", "dtype"])
def test_what_another_call_left_is_not_gone_on_with(
    other: str, refitted: Conversion, dense: Path, request_of: Request, tmp_path: Path
) -> None:
    assert request_of.refit is not None
    requests = {
        "wiring": replace(request_of, wiring=PEEK),
        "tokens": replace(request_of, refit=replace(request_of.refit, tokens=request_of.refit.tokens // 2)),
        "gains": replace(request_of, wiring=PEEK, refit=replace(request_of.refit, gains=True)),
        "dtype": replace(request_of, dtype="bfloat16"),
    }

    def stop(layer: int, layers: int, fits: list[Any]) -> None:
        if layer == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(dense, tmp_path / "model", requests[other], on_layer=stop)
    assert (tmp_path / ".model.refit" / "layer-00002.safetensors").is_file()
    out = convert(dense, tmp_path / "model", request_of).out
    assert (out / "model.safetensors").read_bytes() == (refitted.out / "model.safetensors").read_bytes()
