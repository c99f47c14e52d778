"""The chunked losses, against what the textbook says, of all tokens at once; forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax
from torch.utils._python_dispatch import TorchDispatchMode

from rewired.adapt.losses import token_loss as losses
from rewired.adapt.losses.token_loss import TokenLoss, token_loss

TOKENS, WIDTH, WORDS = 7, 5, 11


def problem() -> tuple[torch.Tensor, ...]:
    """Hidden states, head, labels, the teacher's states and head."""
    states, head = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randn(WORDS, WIDTH, requires_grad=True)
    return states, head, torch.randint(WORDS, (TOKENS,)), torch.randn(TOKENS, WIDTH), torch.randn(WORDS, WIDTH)


def naive(loss: TokenLoss, *parts: torch.Tensor) -> torch.Tensor:
    """By torch's own functions, which are not used by ours."""
    states, head, labels, teacher_states, teacher_head = parts
    student, teacher = states @ head.T, teacher_states @ teacher_head.T
    t = loss.temperature
    p, q = softmax(teacher / t, -1), softmax(student / t, -1)
    found = {
        "forward_kl": kl_div(log_softmax(student / t, -1), p, reduction="sum"),
        "reverse_kl": kl_div(log_softmax(teacher / t, -1), q, reduction="sum"),
        "jsd": 0.5 * (p * (p / ((p + q) / 2)).log()).sum() + 0.5 * (q * (q / ((p + q) / 2)).log()).sum(),
    }[loss.divergence]
    return loss.ce * cross_entropy(student, labels, reduction="sum") + loss.kd * t**2 * found


@pytest.mark.parametrize("size", [1, 3, 100], ids="chunks of {}".format)
@pytest.mark.parametrize(
    "loss",
    [
        TokenLoss(),
        TokenLoss(ce=0, kd=1),
        TokenLoss(ce=0.3, kd=2, divergence="reverse_kl"),
        TokenLoss(ce=1, kd=1, divergence="jsd", temperature=2.0),
        TokenLoss(ce=0, kd=1, temperature=0.5),
    ],
    ids=str,
)
def test_sums_and_gradients_are_those_of_all_tokens_at_once(
    loss: TokenLoss, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_CHUNK_BYTES", 4 * WORDS * size)
    parts = problem()
    expected = naive(loss, *parts)
    expected_grads = torch.autograd.grad(3 * expected, parts[:2])
    found = token_loss(loss, *parts).total
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(3 * found, parts[:2]), expected_grads)


def test_the_parts_are_told_apart() -> None:
    states, head, labels, *teacher = problem()
    found = token_loss(TokenLoss(ce=2, kd=3), states, head, labels, *teacher)
    assert not found.ce.requires_grad and not found.kd.requires_grad
    assert found.total.item() == pytest.approx(2 * found.ce.item() + 3 * found.kd.item(), rel=1e-6)


def test_a_frozen_head_gets_no_gradient() -> None:
    states, head, labels, *teacher = problem()
    token_loss(TokenLoss(ce=1, kd=1), states, head.detach(), labels, *teacher).total.backward()
    assert states.grad is not None


def test_no_tensor_holds_the_logits_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 128 k words they would be the largest tensors of a training by far."""
    tokens, words = 64, 1000
    monkeypatch.setattr(losses, "_CHUNK_BYTES", 4 * words * 8)
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor):
                largest = max(largest, found.numel())
            return found

    states, head = torch.randn(tokens, 4, requires_grad=True), torch.randn(words, 4, requires_grad=True)
    with Watch():
        loss = token_loss(TokenLoss(kd=1), states, head, torch.zeros(tokens, dtype=torch.long), states, head)
        loss.total.backward()
    assert 0 < largest <= 8 * words


def test_under_autocast_no_copy_of_the_head_is_kept_for_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_CHUNK_BYTES", 4 * WORDS)
    parts = problem()
    casts = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal casts
            found = function(*args, **(kwargs or {}))
            casts += "_to_copy" in str(function) and found.shape == parts[1].shape and found.dtype == torch.bfloat16
            return found

    with torch.autocast("cpu", dtype=torch.bfloat16), Watch():
        total = token_loss(TokenLoss(kd=1), *parts).total
    assert casts == 2, "the student's head and the teacher's"
    found = torch.autograd.grad(total, parts[:2])
    assert all(grad.dtype == torch.float32 for grad in found)
    for grad, expected in zip(found, torch.autograd.grad(naive(TokenLoss(kd=1), *parts), parts[:2]), strict=True):
        torch.testing.assert_close(grad, expected, rtol=0.1, atol=0.1)


def test_no_token_is_no_loss() -> None:
    states = torch.zeros(0, WIDTH, requires_grad=True)
    head = torch.randn(WORDS, WIDTH)
    loss = token_loss(TokenLoss(kd=1), states, head, torch.zeros(0, dtype=torch.long), states.detach(), head).total
    loss.backward()
    assert loss == 0 and states.grad is not None


def test_the_divergences_of_known_distributions() -> None:
    teacher, student = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    forward = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    backward = 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)
    assert losses.forward_kl(teacher, student)[0].item() == pytest.approx(forward)
    assert losses.reverse_kl(teacher, student)[0].item() == pytest.approx(backward)
    assert losses.jsd(teacher, teacher)[0].item() == pytest.approx(0, abs=1e-7)
