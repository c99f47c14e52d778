"""Gates: what passes, what fails, and what more items have to say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rewired.evaluate.gates import FAILED, PASSED, TOLD, UNDECIDED, Check, Gate, checks, load_gate, verdict
from rewired.evaluate.statistics import Delta, Score

from .made_up_results import DIVERGENCE, task


@pytest.mark.parametrize(
    ("value", "error", "at_least", "expected"),
    [
        (0.995, 0.001, True, PASSED),
        (0.985, 0.001, True, FAILED),
        (0.991, 0.001, True, UNDECIDED),  # 0.98904 to 0.99296
        (0.989, 0.001, True, UNDECIDED),
        (0.99, 0.0, True, PASSED),
        (0.995, None, True, UNDECIDED),  # of one item, or one window
        (0.985, 0.001, False, PASSED),
        (0.995, 0.001, False, FAILED),
    ],
)
def test_a_check_is_undecided_where_its_interval_holds_the_bound(
    value: float, error: float | None, at_least: bool, expected: str
) -> None:
    assert Check("a measure", value, error, 0.99, at_least).verdict == expected


def test_it_says_how_many_items_would_decide() -> None:
    """Twice as near to the bound takes four times as many; the error falls with their root."""
    check = Check("a measure", 0.991, 0.002, 0.99, items=1000)
    needed = check.items_to_decide
    assert needed is not None
    assert replace(check, error=0.002 * (1000 / needed) ** 0.5).verdict == PASSED
    assert replace(check, error=0.002 * (1000 / (0.9 * needed)) ** 0.5).verdict == UNDECIDED
    assert replace(check, value=0.9995).items_to_decide is None
    assert Check("told", 0.5, None, None).verdict == TOLD


def test_one_failure_fails_and_one_open_check_leaves_open() -> None:
    passed, failed, open_ = (Check("", value, 0.001, 0.99) for value in (1.0, 0.9, 0.99))
    told = Check("", 0.1, None, None)
    assert verdict([passed, told]) == PASSED
    assert verdict([passed, open_]) == UNDECIDED
    assert verdict([open_, failed]) == FAILED


GATE = Gate("mine", mean_recovery=0.99, task_recovery=0.97, kl=0.1, same_top=0.95, retrieval_loss=0.01)


def test_recovery_is_the_share_of_the_originals_score() -> None:
    """Of two tasks: 0.5 to 0.49, of items that are no right or wrong, and 0.8 to 0.8, where 16 flip."""
    tasks = [
        task(title, {"dense": Score(before, 0.02, n), "hybrid": Score(after, 0.02, n)}, {"hybrid": delta}, {})
        for title, before, after, n, delta in (
            ("a", 0.5, 0.49, 600, Delta(-0.01, 0.005, 0.1)),
            ("b", 0.8, 0.8, 400, Delta(0.0, 0.01, 1.0, 0.04)),
        )
    ]
    asked = checks(GATE, "hybrid", "dense", tasks, {"prose": {"hybrid": DIVERGENCE}}, tasks)
    found = {check.what: check for check in asked}
    mean = found["mean recovery of 2 tasks"]
    of_b = 17**0.5 / 402 / 0.8
    assert (mean.value, mean.items) == (pytest.approx(0.99), 1000)
    assert mean.error == pytest.approx((0.01**2 + of_b**2) ** 0.5 / 2)
    of_a = found["recovery of a"]
    assert (of_a.value, of_a.error, of_a.verdict) == (pytest.approx(0.98), pytest.approx(0.01), UNDECIDED)
    assert (found["recovery of b"].error, found["recovery of b"].verdict) == (pytest.approx(of_b), PASSED)
    assert found["answers to b that change"].value == 0.04
    assert found["KL on prose"].verdict == FAILED
    assert found["same likeliest token on prose"].value == DIVERGENCE.agreement[1]
    lost = found["lost in retrieval"]
    assert lost.value == pytest.approx(0.006)
    assert lost.error == pytest.approx((17 - 6**2 / 1002) ** 0.5 / 1002)


@pytest.mark.parametrize(("items", "expected"), [(80, UNDECIDED), (200, PASSED)])
def test_a_few_items_without_a_flip_do_not_show_that_there_are_none(items: int, expected: str) -> None:
    """With no flip in n items, up to about 2 / n of all may well flip."""
    same = task("1,024 tokens", {"dense": Score(1.0, 0.0, items)}, {"hybrid": Delta(0.0, 0.0, 1.0, 0.0)}, {})
    (lost,) = checks(Gate("mine", retrieval_loss=0.01), "hybrid", "dense", [], {}, [same])
    assert lost.verdict == expected


def test_an_original_that_finds_nothing_has_nothing_to_lose() -> None:
    nothing = task("1,024 tokens", {"dense": Score(0.0, 0.0, 200)}, {"hybrid": Delta(0.0, 0.0, 1.0, 0.0)}, {})
    found = nothing, replace(nothing, scores={"dense": Score(0.5, 0.1, 200)})
    gate = Gate("mine", retrieval_loss=0.01)
    for retrieval, expected in ((found[:1], UNDECIDED), (found, PASSED)):
        (lost,) = checks(gate, "hybrid", "dense", [], {}, retrieval)
        assert (lost.verdict, "the original finds nothing" in lost.what) == (expected, expected == UNDECIDED)


def test_a_mean_with_a_task_of_one_item_is_undecided() -> None:
    """The error of that task, no right or wrong, is not known, and so is the mean's."""
    tasks = [
        task(title, {"dense": Score(0.5, 0.0, n)}, {"hybrid": Delta(0.0, error, None)}, {})
        for title, n, error in (("a", 1000, 0.0), ("b", 1, None))
    ]
    mean, *_ = checks(Gate("mine", mean_recovery=0.9), "hybrid", "dense", tasks, {})
    assert (mean.value, mean.error, mean.verdict) == (1.0, None, UNDECIDED)


@pytest.mark.parametrize(
    ("same", "tokens", "over_windows", "error"),
    [
        (0.98, 8176, 0.004, 0.004),  # of windows, as tokens of one are not independent
        (1.0, 59, 0.0, 1 / 61),  # 59 tokens leave room for 2 in 59
        (1.0, 8176, None, None),  # one window
    ],
)
def test_a_share_of_tokens_is_as_uncertain_as_its_windows_and_its_few_tokens(
    same: float, tokens: int, over_windows: float | None, error: float | None
) -> None:
    measured = replace(DIVERGENCE, tokens=tokens, agreement={1: same}, same_top_standard_error=over_windows)
    (check,) = checks(Gate("mine", same_top=0.99), "hybrid", "dense", [], {"prose": {"hybrid": measured}})
    assert check.error == (error and pytest.approx(error))


@pytest.mark.parametrize(
    ("gate", "error"),
    [
        (Gate("mine", kl=0.1), AssertionError("a text is asked for at the start")),
        (Gate("mine", retrieval_loss=0.1), AssertionError("and so are lengths")),
    ],
    ids=str,
)
def test_what_was_not_measured_passes_no_gate(gate: Gate, error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        checks(gate, "hybrid", "dense", [], {})


def test_a_task_that_could_not_be_judged_leaves_a_gate_open() -> None:
    """One that was not run, one of which the original knows nothing, and no task at all; a perplexity is only told."""
    good, nothing, perplexity = (
        task(title, {"dense": Score(value, 0.0, 1000), "hybrid": Score(value, 0.0, 1000)}, {"hybrid": same}, {})
        for title, value, same in (
            ("a", 0.5, Delta(0.0, 0.0, 1.0, 0.0)),
            ("b", 0.0, Delta(0.0, 0.0, 1.0, 0.0)),
            ("c", 9.0, Delta(0.0, 0.0, 1.0)),
        )
    )
    perplexity = replace(perplexity, is_share=False, higher_is_better=False)
    gate = Gate("mine", mean_recovery=0.9)
    judged = {
        name: verdict(checks(gate, "hybrid", "dense", tasks, {}, left_out=left_out))
        for name, tasks, left_out in (
            ("all", [good, perplexity], ()),
            ("not run", [good], ("d",)),
            ("nothing to lose", [good, nothing], ()),
            ("no share", [perplexity], ()),
            ("none", [], ()),
        )
    }
    assert judged.pop("all") == PASSED
    assert set(judged.values()) == {UNDECIDED}, judged


@pytest.mark.parametrize(("items", "expected"), [(2, UNDECIDED), (2000, PASSED)])
def test_a_few_items_of_which_none_changed_do_not_pass(items: int, expected: str) -> None:
    """Of a mean over items that are neither right nor wrong, such as IFEval's."""
    same = Delta(0.0, 0.0, 1.0, changed=0.0)
    of_few = task("a", {"dense": Score(0.5, 0.1, items)}, {"hybrid": same}, {})
    mean, *_ = checks(Gate("mine", mean_recovery=0.99), "hybrid", "dense", [of_few], {})
    assert mean.verdict == expected


def test_gates_of_the_package_and_of_ones_own(tmp_path: Path) -> None:
    assert load_gate("lossless").kl == 0.001
    assert (load_gate("recommended").mean_recovery, load_gate("recommended").suite) == (0.99, "gate")
    own = tmp_path / "own.yaml"
    own.write_text("mean_recovery: 0.95\n")
    assert load_gate(str(own)) == Gate("own", mean_recovery=0.95)
    own.write_text("kl: 1e-3\n")
    assert load_gate(str(own)) == Gate("own", kl=0.001)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("mean_recover: 0.9", "has the key 'mean_recover', which is not known: did you mean mean_recovery"),
        ("mean_recovery: most", "has mean_recovery 'most': give a number from 0 on"),
        ("same_top: 2", "has same_top '2': give a number from 0 to 1"),
        ("suite: 5", "has suite '5': give a text"),
        ("about: [5]", r"has about '\[5\]': give a text"),
        ("about: nothing", "asks for nothing"),
        ("suite: quick\nkl: 1", "has a suite, and asks nothing of tasks"),
        ("[1, 2", "is not readable YAML"),
    ],
)
def test_a_gate_that_makes_no_sense_is_refused(content: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=sentence):
        load_gate(str(file))
    with pytest.raises(ValueError, match="There is no gate 'strict': take lossless or recommended, or the path"):
        load_gate("strict")
