"""A refit on a GPU gives the weights that one on the CPU gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rewired.convert import Conversion, RefitRequest, Request, convert
from rewired.refit import run

pytestmark = pytest.mark.gpu
WIRINGS = {
    "ladder": [{"layers": "1-4", "preset": "ladder"}],
    "desync-2x": [{"layers": "1-4", "preset": "desync"}],
}
DIFFERS_BY = 1e-2  # of what the refit changes


@pytest.mark.parametrize("name", WIRINGS)
def test_weights_are_the_cpus(
    name: str, dense: Path, text: Path, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refit_on(kind: str, out: Path) -> Conversion:
        monkeypatch.setattr(run, "choose_device", lambda *_: kind)
        return convert(dense, out, request)

    request = Request(WIRINGS[name], refit=RefitRequest(str(text), 6144))
    expected, found = refit_on("cpu", tmp_path / "on-cpu"), refit_on(device, tmp_path / "on-device")
    before, on_cpu, on_device = (load_file(folder / "model.safetensors") for folder in (dense, expected.out, found.out))
    changed = [name for name in before if not torch.equal(before[name], on_cpu[name])]
    assert len(changed) > 6
    for each in changed:
        difference = (on_device[each] - on_cpu[each]).norm() / (on_cpu[each] - before[each]).norm()
        assert difference < DIFFERS_BY, f"{each}: {difference:.1e}"
    assert expected.refit is not None and found.refit is not None
    assert found.refit.after.kl == pytest.approx(expected.refit.after.kl, rel=1e-2)
