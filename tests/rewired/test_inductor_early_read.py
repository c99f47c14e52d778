"""Why a module's output goes through `rewired::own` where it is added later than at once."""

from __future__ import annotations

import pytest

from .inductor_early_read import added_at_once, added_later, added_later_owned, error


@pytest.mark.slow
def test_inductor_adds_at_once_rightly_and_later_wrongly() -> None:
    """Where the second half fails, PyTorch has mended it: `own` can go."""
    assert error(added_at_once) < 1e-5
    assert error(added_later, backend="aot_eager") < 1e-5
    assert error(added_later) > 0.1


def test_an_output_that_is_owned_is_added_rightly_later() -> None:
    assert error(added_later_owned) < 1e-5
