"""What is published against what is predicted, by the fitted parameters and by fits that left rows out."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from studies.plan import caat_benchmark, fit, ladder_benchmark, score
from studies.plan.ladder_benchmark import Run, fitted, predicted_speedups, published


def predicted_speedup(run: Run) -> float:
    """Of prefill and decoding together."""
    return float(predicted_speedups(run)[2])


def test_what_is_published() -> None:
    rows = published()
    assert len(rows) == 35
    ladder = Run("70b", 1, 8, True, "ladder")
    assert (rows[ladder], rows[ladder.standard]) == (101.22, 77.39)


def test_what_is_published_is_met() -> None:
    off = score.totals()
    assert len(off) == 25
    assert sum(map(abs, off)) / len(off) < 1.5
    assert max(map(abs, off)) < 6


def test_raw_runs_are_met() -> None:
    """Of desync-2x no fit has seen any."""
    for of_what, points in score.by_wiring(score.raw()):
        assert score.mean_absolute(points)[-1] < 1.7, of_what


@pytest.mark.slow
def test_raw_runs_are_met_by_fits_that_saw_nothing_of_their_number_of_gpus_and_batch() -> None:
    """The goals of issue 53, in points of speedup of prefill and decoding together."""
    for of_what, points in score.by_wiring(score.held_out(score.GROUPS["each (GPUs, batch)"])):
        assert score.mean_absolute(points)[-1] < (2.0 if of_what.startswith("NVLink") else 4.0), of_what


def test_most_raw_speedups_lie_in_the_range() -> None:
    assert score.in_range() > 0.9


def test_repeats_differ_as_those_of_one_run() -> None:
    """The 70B on eight GPUs, one sequence, ladder: seconds of three logs, each with a standard run of its own."""
    run = Run("70b", 1, 8, True, "ladder")
    logs, standard = ladder_benchmark.repeats()[run], ladder_benchmark.repeats()[run.standard]
    assert logs.keys() == standard.keys() and len(logs) == 3
    ratios = [100 * sum(standard[log]) / sum(logs[log]) for log in logs]
    assert sum(abs(a - b) for a, b in combinations(ratios, 2)) / 3 == pytest.approx(score.noise()[-1], abs=1.5)


def test_copies_take_time_in_proportion_to_their_bytes_and_hide_well() -> None:
    """Raw runs of two GPUs: 17 MB take 1.1 ms (15 GB/s) without peer-to-peer access, and ladder hides most of it."""
    copied, direct = (
        ladder_benchmark.machine_of(Run("70b", 4, 2, nvlink, "standard")).all_reduce for nvlink in (False, True)
    )
    assert copied.seconds(16.8e6, 2) == pytest.approx(1.15e-3, rel=0.1)
    assert copied.hidden(16.8e6, 2) > 0.8 > direct.hidden(16.8e6, 2)
    assert copied.latency(0, 2) < copied.seconds(0, 2) < copied.seconds(1e3, 2)


def test_switches_still_reduce_large_messages_of_four_gpus() -> None:
    """Without peer-to-peer access, too; small ones are copied."""
    copied, direct = (
        ladder_benchmark.machine_of(Run("70b", 4, 4, nvlink, "standard")).all_reduce for nvlink in (False, True)
    )
    assert copied.seconds(1e8, 4) == pytest.approx(direct.seconds(1e8, 4), rel=0.1)
    assert copied.seconds(16e3, 4) > 1.3 * direct.seconds(16e3, 4)
    assert copied.hidden(1e8, 4) == direct.hidden(1e8, 4) < copied.hidden(16e3, 4)


def test_times_that_no_fit_saw() -> None:
    """Of the 8B without peer-to-peer access: nothing of these was seen, and no standard run is beside them."""
    shares = score.times_that_no_fit_saw()
    assert len(shares) == 10 and {run.model for run in shares} == {"8b"}
    assert sum(map(abs, shares.values())) / len(shares) < 0.06


def test_caat_net_by_gpt_fast_saves_less_than_with_flash_attention() -> None:
    """Its second version says "at most 13 %" on eight H100s."""
    assert caat_benchmark.saved_by_gpt_fast() == pytest.approx(13, abs=3)
    assert caat_benchmark.saved_by_gpt_fast(score_passes=0.0) > 20


def test_trainings_that_no_fit_saw() -> None:
    """CAAT-Net's table 5, in points of time saved; and the Ladder paper's "5-7%", if its TP degree was 8."""
    off = [predicted - measured for *_, measured, predicted in caat_benchmark.trainings()]
    assert len(off) == 12
    assert sum(map(abs, off)) / len(off) < 3
    assert all(1.05 < ladder_benchmark.training_speedup(8, sequences) < 1.07 for sequences in (1, 4))


def test_caat_runs_that_no_fit_saw() -> None:
    """The parameters are of the 70B alone. Points of time saved; a smaller model on more GPUs is farther off."""

    def error(model: str, tp: int) -> float:
        off = caat_benchmark.points(model, tp)
        return sum(map(abs, off)) / len(off)

    assert error("llama-2-34b", 8) < 1.5
    assert error("llama-2-7b", 8) < 3
    assert error("llama-2-7b", 16) < 5.5


def test_the_paper_s_text() -> None:
    """Speedups of other models, which took part in the fit with the weight of a few rows; one is not met."""
    missed = [run for run, said, error in fit.TEXT if abs(predicted_speedup(run) - said) > 1.5 * error]
    assert missed == [Run("405b", 16, 16, False, "ladder")]


def test_trends_that_the_paper_states() -> None:
    """From 8B to 70B at batch 4, ladder wins less with NVLink and more without; more GPUs win more."""
    with_nvlink, without = (
        [predicted_speedup(Run(model, 4, 8, nvlink, "ladder")) for model in ("8b", "70b")] for nvlink in (True, False)
    )
    assert with_nvlink[0] > with_nvlink[1]
    assert without[0] < without[1]


def test_the_parameters_are_what_the_fit_finds() -> None:
    found, stored = fit.fit(), fitted(ladder_benchmark.NAME)
    assert found.pop("without_p2p") == pytest.approx(stored["without_p2p"], rel=0.02)
    assert found == pytest.approx({name: stored[name] for name in found}, rel=0.02)


@pytest.mark.parametrize("nvlink", [True, False])
@pytest.mark.parametrize("model", ["1b", "8b", "70b"])
def test_the_upper_bound_is_one(model: str, nvlink: bool) -> None:
    run = Run(model, 4, 8, nvlink, "none")
    upper = predicted_speedup(run)
    assert 1 < predicted_speedup(replace(run, wiring="ladder")) < upper
    assert 1 < predicted_speedup(replace(run, wiring="parallel")) < upper
    assert predicted_speedup(replace(run, wiring="standard")) == 1


def test_more_gpus_win_more() -> None:
    speedups = [predicted_speedup(Run("70b", 1, tp, True, "ladder")) for tp in (2, 4, 8)]
    assert speedups == sorted(speedups)
