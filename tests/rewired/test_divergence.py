"""Divergence against a loop over tokens in float64."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rewired.divergence import TOP, Divergence, divergence

BOS, EOS = 1, 2


def replay(logits: Iterable[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A model that gives logits, [W, T, V] or each [T, V], window by window."""
    left = iter(logits)
    return lambda input_ids: next(left)[None]


def random_case(windows: int, length: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of two models that are alike, [W, T, V], and the tokens, [W, T]."""
    original = 3 * torch.randn(windows, length, vocabulary)
    tokens = torch.randint(vocabulary, (windows, length))
    return original, original + torch.randn(windows, length, vocabulary), tokens


def naive(original: torch.Tensor, rewired: torch.Tensor, tokens: torch.Tensor) -> dict[str, Any]:
    """The definitions, token by token: the logits at a position predict the token after it."""
    kl, losses = [], ([], [])
    shared: dict[int, list[float]] = {k: [] for k in TOP}
    for window in range(len(tokens)):
        for position in range(tokens.shape[1] - 1):
            target = int(tokens[window, position + 1])
            p, q = (softmax(logits[window, position].tolist()) for logits in (original, rewired))
            kl.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
            for loss, probabilities in zip(losses, (p, q), strict=True):
                loss.append(-math.log(probabilities[target]))
            for k in TOP:
                likeliest = [set(sorted(range(len(each)), key=each.__getitem__)[-k:]) for each in (p, q)]
                shared[k].append(len(likeliest[0] & likeliest[1]) / len(likeliest[0]))
    return {"kl": kl, "losses": losses, "shared": shared}


def softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(logit) for logit in logits]
    return [power / sum(powers) for power in powers]


@pytest.mark.parametrize(
    ("windows", "length", "vocabulary"),
    [(3, 7, 23), (2, 131, 12), (1, 258, 11), (4, 2, 30)],
    ids=["small", "more positions than are held at once", "two times as many", "one prediction a window"],
)
def test_divergence_is_that_of_a_loop_over_tokens(windows: int, length: int, vocabulary: int) -> None:
    original, rewired, tokens = random_case(windows, length, vocabulary)
    expected = naive(original, rewired, tokens)
    measured = divergence(replay(original), replay(rewired), tokens)
    assert measured.tokens == windows * (length - 1)
    assert measured.kl == pytest.approx(np.mean(expected["kl"]), rel=1e-5)
    assert measured.kl_p95 == pytest.approx(np.quantile(expected["kl"], 0.95), rel=1e-4)
    assert measured.perplexity_original == pytest.approx(math.exp(np.mean(expected["losses"][0])), rel=1e-5)
    assert measured.perplexity == pytest.approx(math.exp(np.mean(expected["losses"][1])), rel=1e-5)
    assert measured.agreement == pytest.approx({k: np.mean(values) for k, values in expected["shared"].items()})
    by_window = np.array(expected["kl"]).reshape(windows, -1).mean(axis=1)
    error = by_window.std(ddof=1) / math.sqrt(windows) if windows > 1 else None
    assert measured.kl_standard_error == (error and pytest.approx(error, rel=1e-4))
    by_window = np.array(expected["shared"][1]).reshape(windows, -1).mean(axis=1)
    error = by_window.std(ddof=1) / math.sqrt(windows) if windows > 1 else None
    assert measured.same_top_standard_error == (error and pytest.approx(error, rel=1e-4))


def test_windows_of_different_lengths_count_by_their_tokens() -> None:
    cases = [random_case(1, length, 23) for length in (5, 131, 2)]
    first, second, tokens = zip(*[(original[0], rewired[0], ids[0]) for original, rewired, ids in cases], strict=True)
    kls = [naive(*case)["kl"] for case in cases]
    mean = sum(map(sum, kls)) / 135
    measured = divergence(replay(first), replay(second), tokens)
    assert (measured.tokens, measured.kl) == (135, pytest.approx(mean, rel=1e-5))
    # of a quotient of two sums over windows (Cochran, Sampling Techniques, 2.11)
    residuals = [sum(window) - len(window) * mean for window in kls]
    error = math.sqrt(3 / 2 * sum(residual**2 for residual in residuals)) / 135
    assert measured.kl_standard_error == pytest.approx(error, rel=1e-4)


def test_divergence_is_torchs_and_runs_from_the_original_to_the_other() -> None:
    original, rewired, tokens = random_case(3, 9, 50)
    p, q = (logits.double()[:, :-1].log_softmax(-1).flatten(0, 1) for logits in (original, rewired))
    forward = F.kl_div(q, p, log_target=True, reduction="batchmean")
    backward = F.kl_div(p, q, log_target=True, reduction="batchmean")
    assert abs(forward - backward) > 0.01, "a case that tells the two apart"
    assert divergence(replay(original), replay(rewired), tokens).kl == pytest.approx(float(forward), rel=1e-5)


def test_perplexity_is_that_of_the_mean_cross_entropy() -> None:
    original, rewired, tokens = random_case(3, 9, 50)
    measured = divergence(replay(original), replay(rewired), tokens)
    for logits, perplexity in ((original, measured.perplexity_original), (rewired, measured.perplexity)):
        loss = F.cross_entropy(logits[:, :-1].double().flatten(0, 1), tokens[:, 1:].flatten())
        assert perplexity == pytest.approx(math.exp(loss), rel=1e-5)


def test_a_model_does_not_diverge_from_itself() -> None:
    logits, _, tokens = random_case(2, 140, 40)
    measured = divergence(replay(logits), replay(logits), tokens)
    assert (measured.kl, measured.kl_standard_error, measured.kl_p95) == (0, 0, 0)
    assert measured.agreement == dict.fromkeys(TOP, 1)
    assert measured.perplexity == measured.perplexity_original


def test_what_moves_all_logits_alike_changes_nothing() -> None:
    logits, _, tokens = random_case(2, 10, 40)
    measured = divergence(replay(logits), replay(logits + 5), tokens)
    assert measured.kl == pytest.approx(0, abs=1e-6)
    assert measured.agreement[10] == 1


def test_logits_of_a_low_precision_are_compared_in_a_high_one() -> None:
    original, rewired, tokens = (
        given.bfloat16() if given.is_floating_point() else given for given in random_case(2, 9, 60)
    )
    expected = naive(original.double(), rewired.double(), tokens)
    measured = divergence(replay(original), replay(rewired), tokens)
    assert measured.kl == pytest.approx(np.mean(expected["kl"]), rel=1e-5)
    assert measured.perplexity == pytest.approx(math.exp(np.mean(expected["losses"][1])), rel=1e-5)


@pytest.mark.parametrize("vocabulary", [4, 7])
def test_fewer_tokens_than_are_compared_all_agree(vocabulary: int) -> None:
    original, rewired, tokens = random_case(2, 6, vocabulary)
    measured = divergence(replay(original), replay(rewired), tokens)
    assert measured.agreement[10] == 1
    assert measured.agreement[1] < 1


def test_disjoint_predictions_do_not_agree_at_all() -> None:
    tokens = torch.zeros(1, 5, dtype=torch.long)
    rising = torch.arange(40.0).expand(1, 5, 40)
    measured = divergence(replay(rising), replay(-rising), tokens)
    assert measured.agreement == dict.fromkeys(TOP, 0)


class Recorder:
    """A model that counts how many of its logits are in memory; logits [W, T, V]."""

    in_memory: list[int]  # as each call begins

    def __init__(self, logits: torch.Tensor, alive: list[Any]) -> None:
        self.logits, self.alive, self.seen = iter(logits), alive, []
        self.in_memory = []

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.in_memory.append(sum(reference() is not None for reference in self.alive))
        self.seen.append(input_ids.clone())
        storage = next(self.logits)[None].numpy().copy()  # lives as long as any tensor that looks at it
        self.alive.append(weakref.ref(storage))
        return torch.from_numpy(storage)


def test_no_more_than_one_windows_logits_are_in_memory() -> None:
    """A window of 512 tokens of Llama 3 is 260 MB of float32 logits a model."""
    original, rewired, tokens = random_case(4, 6, 20)
    alive: list[Any] = []
    first, second = Recorder(original, alive), Recorder(rewired, alive)
    divergence(first, second, tokens)
    for model in (first, second):
        assert [ids.shape for ids in model.seen] == [(1, 6)] * 4
        assert torch.cat(model.seen).equal(tokens), "each window once, in order"
    assert (first.in_memory, second.in_memory) == ([0] * 4, [1] * 4)


def test_each_window_is_reported_as_it_is_done() -> None:
    original, rewired, tokens = random_case(3, 4, 9)
    reports: list[None] = []
    divergence(replay(original), replay(rewired), tokens, lambda: reports.append(None))
    assert len(reports) == 3


def test_no_gradients_are_kept() -> None:
    original, rewired, tokens = random_case(1, 4, 9)
    weight = torch.ones(1, requires_grad=True)

    def model(input_ids: torch.Tensor) -> torch.Tensor:
        logits = original * weight
        assert not logits.requires_grad
        return logits

    assert isinstance(divergence(model, replay(rewired), tokens), Divergence)
