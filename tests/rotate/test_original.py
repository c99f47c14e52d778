"""The original of a rotated checkpoint, in its basis."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from transformers import LlamaForCausalLM

from rewired.convert import Request, convert
from rewired.rotate.original import as_made
from tests.rewired.tiny import tokens


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWIRED_CACHE", str(tmp_path / "cache"))


def test_it_has_the_original_s_function_and_a_stream_in_the_basis(source: Path, tmp_path: Path) -> None:
    made = convert(source, tmp_path / "made", Request([{"layers": "2-4", "preset": "ladder"}], rotate="hadamard")).out
    folder = as_made(made, source)
    assert as_made(made, source) == folder, "made once"
    basis = torch.from_numpy(numpy.load(made / "rotation.npy"))
    with torch.no_grad():
        before, after = (
            LlamaForCausalLM.from_pretrained(each)(tokens(), output_hidden_states=True) for each in (source, folder)
        )
    torch.testing.assert_close(after.logits, before.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(after.hidden_states[3], before.hidden_states[3] @ basis, rtol=0, atol=1e-5)


def test_where_nothing_was_rotated_since_it_is_itself(source: Path, tmp_path: Path) -> None:
    ladder = [{"layers": "2-4", "preset": "ladder"}]
    plain = convert(source, tmp_path / "plain", Request(ladder)).out
    assert as_made(plain, source) == source
    rotated = convert(source, tmp_path / "rotated", Request(rotate="hadamard")).out
    made = convert(rotated, tmp_path / "made", Request(ladder)).out
    assert as_made(made, rotated) == rotated
    assert (made / "rotation.npy").read_bytes() == (rotated / "rotation.npy").read_bytes()


def test_a_basis_that_does_not_fit_is_refused(source: Path, tmp_path: Path) -> None:
    made = convert(source, tmp_path / "made", Request(rotate="hadamard")).out
    numpy.save(made / "rotation.npy", numpy.eye(8))
    with pytest.raises(ValueError, match=r"rotation.npy has shape \[8, 8\], and the original's stream has 32 channels"):
        as_made(made, source)
    (made / "rotation.npy").unlink()
    with pytest.raises(ValueError, match=r"rotation.npy is missing"):
        as_made(made, source)
