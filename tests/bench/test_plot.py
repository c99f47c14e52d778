"""Plots of results that are made up: their panels, what each line shows, and its name."""

from __future__ import annotations

from typing import Any

import pytest

from rewired.bench.plot import throughput
from rewired.bench.request import BenchRequest
from rewired.bench.results import Cell, to_json

# seconds of compute and of communication, by wiring; on one rank nothing is communicated
WIRINGS = {"stock": (10, 10), "standard": (10, 8), "ladder": (10, 2), "ladder@2-4": (10, 5), "none": (10, 0)}
SLOWDOWN = {"loopback": 1, "1gbit": 4}


def results(
    ranks: tuple[int, ...] = (2,),
    batches: tuple[int, ...] = (1,),
    links: tuple[str, ...] = ("loopback",),
    compiled: bool = True,
) -> dict[str, Any]:
    request = BenchRequest("tiny", ("ladder", "ladder@2-4", "none"), prompt=8, new=10, device="cpu")
    cells = [Cell(tp, batch, samples(tp, batch, links, compiled), SENT) for tp in ranks for batch in batches]
    return to_json(request, 4, cells, {"command": "rewired bench", "environment": {"device": "abacus"}})


SENT = {name: {"prefill": 1.0, "decode": 1.0} for name in WIRINGS}


def samples(tp: int, batch: int, links: tuple[str, ...], compiled: bool) -> dict[str, Any]:
    def seconds(link: str, name: str) -> list[float]:
        compute, communication = WIRINGS[name]
        return [
            noise * (compute / tp + (tp > 1) * SLOWDOWN[link] * communication) * batch**0.5 for noise in (1, 1.1, 1.2)
        ]

    names = [name for name in WIRINGS if tp > 1 or name != "none"]
    measures = ("prefill", "decode", "decode_compiled")[: 2 + compiled]
    return {link: {name: dict.fromkeys(measures, seconds(link, name)) for name in names} for link in links}


def titles(figure: Any) -> list[str]:
    return [axes.get_title() for axes in figure.axes]


def lines(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in axes.lines if line.get_label() in WIRINGS}


def test_of_one_number_of_ranks_each_measure_has_a_panel_over_the_batch() -> None:
    figure = throughput(results(batches=(1, 4, 16)))
    assert titles(figure) == ["tokens/s", "prefill", "decode", "compiled decode"]
    for axes in figure.axes:
        assert axes.get_xlabel() == "batch"
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "4", "16"]
        assert lines(axes).keys() == WIRINGS.keys()
        assert lines(axes)["ladder"].get_ydata() == pytest.approx([13 / 7] * 3)  # (5 + 8) / (5 + 2)


def test_eager_results_have_no_panel_of_compiled_decode() -> None:
    assert titles(throughput(results(batches=(1, 4), compiled=False))) == ["tokens/s", "prefill", "decode"]


def test_of_several_numbers_of_ranks_each_batch_has_a_panel_over_them() -> None:
    figure = throughput(results(ranks=(1, 2, 4), batches=(1, 16), compiled=False))
    assert titles(figure) == ["batch 1", "batch 16"] * 3
    assert [axes.get_ylabel().split(",")[0] for axes in figure.axes[::2]] == ["tokens/s", "prefill", "decode"]
    for axes in figure.axes:
        assert lines(axes)["ladder"].get_xdata().tolist() == [0, 1, 2]
        assert lines(axes)["ladder"].get_ydata() == pytest.approx([1, 13 / 7, 10.5 / 4.5])
        assert lines(axes)["none"].get_xdata().tolist() == [1, 2]  # on one rank there is no such thing


def test_of_one_point_there_are_bars_from_standard() -> None:
    axes = throughput(results()).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "stock",
        "ladder",
        "ladder@2-4",
        "none",
    ]
    assert [bar.get_x() for bar in axes.patches] == [1] * 4
    widths = [13 / 15 - 1, 13 / 7 - 1, 13 / 10 - 1, 13 / 5 - 1]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx(widths)
    assert len(axes.collections) == 4  # error bars
    assert [text.get_text() for text in axes.texts] == ["0.87x", "1.86x", "1.30x", "2.60x"]


@pytest.mark.parametrize("batches", [(1,), (1, 4)])
def test_each_link_has_panels(batches: tuple[int, ...]) -> None:
    figure = throughput(results(batches=batches, links=("loopback", "1gbit")))
    assert [axes.get_ylabel().split("\n")[0] for axes in figure.axes[::4]] == ["loopback", "1gbit"]


def test_the_bound_is_dashed() -> None:
    drawn = lines(throughput(results(batches=(1, 4))).axes[0])
    assert {name for name, line in drawn.items() if line.get_linestyle() == "--"} == {"none"}


def test_the_legend_names_every_line_in_its_colour() -> None:
    figure = throughput(results(batches=(1, 4)))
    (legend,) = figure.legends
    named = {text.get_text(): line.get_color() for text, line in zip(legend.texts, legend.get_lines(), strict=True)}
    assert named == {name: line.get_color() for name, line in lines(figure.axes[0]).items()}
