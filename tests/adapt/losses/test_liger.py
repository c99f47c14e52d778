"""liger-kernel's fused losses are ours. On CPUs Triton interprets its kernels: see CONTRIBUTING for the command."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rewired.adapt.losses import liger
from rewired.adapt.losses import token_loss as losses
from rewired.adapt.losses.token_loss import TokenLoss
from rewired.adapt.recipe.keys import DIVERGENCES
from tests.adapt.world import logged, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs liger-kernel"),
    pytest.mark.skipif(
        not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a GPU, or Triton's interpreter",
    ),
]
TOKENS, WIDTH, WORDS = 7, 16, 259
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def problem(tokens: int, learns_head: bool) -> tuple[torch.Tensor, ...]:
    """Hidden states, head, labels, the teacher's states and head."""
    states, head, *teacher = (torch.randn(size, WIDTH, device=DEVICE) for size in (tokens, WORDS, tokens, WORDS))
    labels = torch.randint(WORDS, (tokens,), device=DEVICE)
    return states.requires_grad_(), head.requires_grad_(learns_head), labels, *teacher


@pytest.mark.parametrize("learns_head", [True, False])
@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize(
    "loss",
    [
        TokenLoss(),
        *(TokenLoss(ce=0, kd=1, divergence=name) for name in DIVERGENCES),
        TokenLoss(ce=0.3, kd=2, temperature=2.0),
    ],
    ids=str,
)
def test_losses_and_gradients_are_ours(loss: TokenLoss, is_rounded: bool, learns_head: bool) -> None:
    parts = problem(TOKENS, learns_head)
    learnt = [part for part in parts[:2] if part.requires_grad]
    with torch.autocast(DEVICE, torch.bfloat16, enabled=is_rounded):
        expected, found = losses.token_loss(loss, *parts), liger.token_loss(loss, *parts)
    near = {"rtol": 2e-2, "atol": 2e-2} if is_rounded else {"rtol": 1e-4, "atol": 1e-5}
    for name in ("total", "ce", "kd"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), **near, msg=name)
    wanted = torch.autograd.grad(3 * expected.total, learnt)
    for own, other in zip(torch.autograd.grad(3 * found.total, learnt), wanted, strict=True):
        assert own.dtype == other.dtype
        assert (own - other).norm() < near["rtol"] * other.norm()


@pytest.mark.parametrize("loss", [TokenLoss(), TokenLoss(ce=0, kd=1)], ids=str)
def test_the_gradient_of_a_head_in_16_bits_is_not_summed_in_them(loss: TokenLoss) -> None:
    """Over the chunks, of which there are as many as the vocabulary is larger than the width."""
    states, head, labels, *teacher = problem(512, learns_head=True)
    short = [part.detach()[:, :4].bfloat16() for part in (states, head, *teacher)]
    exact = [part.float() for part in short]

    def gradient(of: Any, states: torch.Tensor, head: torch.Tensor, *teacher: torch.Tensor) -> torch.Tensor:
        total = of(loss, states.requires_grad_(), head.requires_grad_(), labels, *teacher).total
        return torch.autograd.grad(total, head)[0].float()

    wanted = gradient(losses.token_loss, *exact)
    own, ours = ((gradient(of, *short) - wanted).norm() for of in (liger.token_loss, losses.token_loss))
    assert own < 1.5 * ours


def test_no_token_is_no_loss() -> None:
    states, *others = problem(0, learns_head=True)
    total = liger.token_loss(TokenLoss(kd=1), states, *others).total
    total.backward()
    assert total == 0 and states.grad is not None


def test_a_training_with_it_is_the_same(keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys |= {"ce_weight": 0.5, "bf16": False}  # on GPUs it is TRL's default, and rounds more than is compared here
    expected = train(tmp_path / "r.yaml", **keys)
    monkeypatch.delattr(losses, "_Chunked")
    found = train(tmp_path / "r.yaml", **keys | {"use_liger_kernel": True, "output_dir": str(tmp_path / "fused")})
    for name in ("loss", "ce", "kd"):
        assert logged(found, name) == pytest.approx(logged(expected, name), rel=1e-4) != [], name
