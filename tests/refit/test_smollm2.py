"""The refit of a real model: a good part of the damage is undone with 8 thousand tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewired.convert import RefitRequest, Request, convert


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wiring", "most"),
    [({"preset": "ladder"}, 0.3), ({"preset": "ladder", "peek": True}, 0.35), ({"preset": "desync"}, 0.3)],
    ids=["ladder", "ladder + peek", "desync-2x"],
)
def test_a_refit_undoes_most_of_the_damage(
    wiring: dict[str, object], most: float, smollm2: Path, tmp_path: Path
) -> None:
    """Measured when this was written: results/quality/README.md."""
    request = Request([wiring | {"layers": "15-30"}], refit=RefitRequest(tokens=8_192))
    done = convert(smollm2, tmp_path / "model", request).refit
    assert done is not None
    assert done.after.kl < most * done.before.kl
    assert done.after.agreement[1] > done.before.agreement[1]
    assert done.passes < 5
