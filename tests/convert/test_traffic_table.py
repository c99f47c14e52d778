"""The table that a conversion prints: all-reduces and bytes, layer by layer, before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rewired.convert import Request, convert
from rewired.convert.traffic import Traffic
from rewired.model.wiring import Wiring
from tests.commands import run

from .checkpoints import config_of


def test_the_table_tells_collectives_before_and_after(source: Path) -> None:
    options = ["--wiring", "desync-4x@2-6", "--json"]
    report = json.loads(run("convert", "tiny-llama", *options, cwd=source.parent).stdout)
    # 32 channels of 4 bytes, sent 2 * 3 / 4 times by each of 4 ranks
    assert report["per_token_dense"] == {"all_reduces": 12, "exposed": 12, "bytes_sent": 12 * 32 * 4 * 3 // 2}
    assert report["per_token"] == {"all_reduces": 6, "exposed": 6, "bytes_sent": 6 * 32 * 4 * 3 // 2}
    assert [row["wiring"] for row in report["layers"]] == ["standard", "desync-4x"]
    assert report["tp_shards"] == 4
    assert "4 KV heads" in report["notes"][0]


def test_ladder_hides_every_all_reduce_but_its_region_s_last(source: Path) -> None:
    request = Request([{"layers": "2-6", "preset": "ladder"}])
    traffic = convert(source, request=request, dry_run=True).plan.table.total
    assert (traffic.all_reduces, traffic.exposed) == (12, 4)  # layer 1's MLP hides too, and the final norm waits


def test_partial_reduces_its_fraction_of_the_bytes(source: Path) -> None:
    request = Request([{"layers": "0-", "preset": "partial", "shared_fraction": 0.5}])
    table = convert(source, request=request, dry_run=True).plan.table
    assert table.total.bytes_sent / table.dense.bytes_sent == pytest.approx((11 * 0.5 + 1) / 12)


@pytest.mark.parametrize(
    ("payload", "hidden_size", "ranks", "sent"),
    [
        ("int8", 576, 3, 2 * 2 * 3 * 66),  # nine groups of 64 channels and a scale: three on each rank
        ("int8", 576, 2, 2 * 1 * 5 * 66),  # five on one of two, so ten
        ("int8", 896, 4, 2 * 3 * 4 * 66),
        ({"8": 0.1, "4/8": 0.4, "0": 0.5}, 4096, 8, 7 * (2 * 1 * 66 + 4 * (66 + 34))),
    ],
)
def test_ranks_send_as_many_groups_as_the_one_that_has_most(
    payload: Any, hidden_size: int, ranks: int, sent: int
) -> None:
    module = Wiring.from_json([{"layers": "0-", "preset": "standard", "payload": payload}], 2, hidden_size).modules[0]
    assert Traffic.of([module], ranks, 2).bytes_sent == sent


def test_a_payload_is_counted_packed_and_said_to_need_its_ranks(source: Path) -> None:
    options = ["--wiring", "int4@0-2, ladder+int4@2-"]
    done = run("convert", "tiny-llama", "out", *options, cwd=source.parent)
    assert done.returncode == 0, done.stderr
    assert config_of(source.parent / "out")["wiring"] == [
        {"layers": "0-2", "preset": "standard", "payload": "int4"},
        {"layers": "2-6", "preset": "ladder", "payload": "int4"},
    ]
    note = "A rank that holds several of the 4 shards sends the part of each"
    printed = run("rewired", "info", "out", cwd=source.parent).stdout
    assert "standard+int4" in printed and note in " ".join(printed.split())
    assert note in (source.parent / "out" / "README.md").read_text()
    told = json.loads(run("rewired", "info", "out", "--json", cwd=source.parent).stdout)
    # 32 channels fill half of a group, and the others send as much; the model's last module sends 8 bits
    packed = 11 * (64 // 2 + 2) + (64 + 2)
    assert told["per_token"]["bytes_sent"] == 4 * packed * 3 // 2


def test_a_dry_run_tells_what_other_numbers_of_ranks_send(source: Path) -> None:
    """A rank that holds two shards sends the int8 part of each, 66 bytes, and then as much of the sum; where there is
    one group, all ranks send as much."""
    notes = json.loads(
        run("convert", "tiny-llama", "--wiring", "int8", "--dry-run", "--json", cwd=source.parent).stdout
    )["notes"]
    assert "so it is for 4 ranks" in notes[0] and "convert the original with --tp-shards N." in notes[0]
    assert notes[1:] == [
        "A token costs each of 2 ranks 2.3 KiB (155% of dense), or 1.5 KiB (103% of dense) with --tp-shards 2.",
        "A token costs each of 4 ranks 4.6 KiB (206% of dense).",
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--wiring", "ladder+int2@2-4"], "'payload' of layers 2-4 is 'int2': it must be 'full'"),
        (["--wiring", "desync+8:0.5+0:0.5@2-4"], "'desync' layers 2-4 reduce nothing after"),
    ],
)
def test_other_payloads_are_refused(options: list[str], sentence: str, source: Path) -> None:
    done = run("convert", "tiny-llama", *options, cwd=source.parent)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert sentence in done.stderr


def test_the_printed_table_shows_layers_and_totals(source: Path) -> None:
    printed = run("convert", "tiny-llama", "--ladder-layers", "2-4", cwd=source.parent).stdout
    assert "wrote tiny-llama-ladder-2-4" in printed
    assert "before: dense" in printed and "rank, 4 shards" in printed
    assert "tp_shards 4 (the largest number up to 8 that divides 8 heads, 4 KV heads and MLP width 48)" in printed


def test_brackets_are_printed_as_they_are(source: Path) -> None:
    done = run("convert", "tiny-llama", "[mine]-hybrid", "--ladder-layers", "2-4", cwd=source.parent)
    assert "wrote [mine]-hybrid" in done.stdout


def test_the_table_of_one_shard(source: Path) -> None:
    printed = run(
        "convert", "tiny-llama", "--dry-run", "--ladder-layers", "2-4", "--tp-shards", "1", cwd=source.parent
    ).stdout
    assert "rank, 1 shard\n" in printed
