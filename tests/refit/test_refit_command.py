"""The command `convert --refit`: how its flags are read, what it prints, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rewired.convert import RefitRequest, Request, cli, convert
from rewired.text import MIX
from tests.commands import run
from tests.convert.checkpoints import snapshot
from tests.evaluate.world import make_dense


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--refit"], RefitRequest(MIX)),
        (["--refit", "--refit-tokens", "9"], RefitRequest(MIX, 9)),
        (["--refit=a.txt", "--peek"], RefitRequest("a.txt")),
        (["--refit", "a.txt", "--calibrate"], RefitRequest("a.txt", gains=True)),
        (["--calibrate", "--peek"], RefitRequest(MIX, gains=True, matrices=False)),
        (["--calibrate", "a.txt", "--refit"], RefitRequest("a.txt", gains=True)),
        ([], None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_are_read(arguments: list[str], wanted: RefitRequest | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """--refit and --calibrate may stand alone, with a text or without."""
    asked: list[Request] = []

    def ask(source: str, out: str, request: Request, **_: Any) -> None:
        asked.append(request)
        raise ValueError("heard.")

    monkeypatch.setattr(cli, "convert", ask)
    monkeypatch.setattr("sys.argv", ["convert", "model", "out", "--ladder-layers", "1-4", *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    assert [request.refit for request in asked] == [wanted]


def test_the_command(dense: Path, text: Path, tmp_path: Path) -> None:
    done = run(
        "convert", dense, "out", "--ladder-layers", "1-4", "--refit", text, "--refit-tokens", "6144", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^ +[123] (?:attention|MLP) .*→", done.stderr, re.MULTILINE)) == 6
    assert "Refitted in closed form on 6,144 tokens" in done.stdout
    assert re.match(r"The refit needs about [1-9][\d.]* [kM]B of host memory .* [MG]FLOP\.\n", done.stderr), (
        "before it begins"
    )
    assert re.search(r"That took \d+\.\d times as long as the original needs", done.stdout)
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize("tokens", [0, -5])
def test_nor_does_python_take_tokens_that_make_no_sense(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"tokens {tokens} makes no sense: give a number of at least 1"):
        RefitRequest("notes.txt", tokens)


BAD = {
    "no text": (["--refit", "nowhere.txt"], "There is no calibration text nowhere.txt"),
    "no text in a folder": (["--refit", "empty/prose.txt"], "There is no calibration text empty/prose.txt"),
    "short": (["--refit", "short.txt"], "short.txt is too short to calibrate on"),
    "short, dry": (["--refit", "short.txt", "--dry-run"], "short.txt is too short to calibrate on"),
    "no name": (["--refit", ""], "The calibration text has an empty name: name one, or mix"),
    "two texts": (["--refit", "short.txt", "--calibrate", "other.txt"], "name different texts"),
    "tokens": (["--refit", "short.txt", "--refit-tokens", "0"], "--refit-tokens 0 makes no sense"),
    "no rows": (["--refit", "rows.jsonl"], "rows.jsonl, row 3 cannot be read as text"),
    "broken": (["--refit", "broken.json"], "broken.json cannot be read as JSON"),
    "a broken row": (["--refit", "broken.jsonl"], "broken.jsonl, row 2 cannot be read as JSON"),
    "binary": (["--refit", "binary.txt"], "binary.txt is not UTF-8 text"),
    "empty folder": (["--refit", "empty"], "empty holds no text"),
    "no peek": (["--calibrate", "short.txt"], "--calibrate fits the gains of modules that peek, and none does"),
    "tokens alone": (["--refit-tokens", "9"], "--refit-tokens goes with --refit or --calibrate"),
}


@pytest.mark.parametrize(("arguments", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence(
    arguments: list[str],
    sentence: str,
    dense: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: Any,
) -> None:
    from rewired.convert.cli import main

    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "rows.jsonl").write_text('\n\n{"prompt": "a"}\n')
    (tmp_path / "broken.json").write_text('[{"text": ')
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": ')
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\xd8")
    (tmp_path / "empty").mkdir()
    before = snapshot(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["convert", str(dense), "out", "--ladder-layers", "1-4", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    printed = capfd.readouterr()
    assert sentence in printed.err and "Traceback" not in printed.err
    assert printed.err.strip().count("\n") == 0
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("dry_run", [False, True], ids=["", "dry"])
def test_a_checkpoint_without_a_tokenizer_is_said(dry_run: bool, text: Path, tmp_path: Path) -> None:
    source = make_dense(tmp_path / "dense")
    for path in source.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match="has no tokenizer that can be loaded, and a refit needs one"):
        wiring = [{"layers": "1-4", "preset": "ladder"}]
        convert(source, tmp_path / "out", Request(wiring, refit=RefitRequest(str(text))), dry_run=dry_run)
