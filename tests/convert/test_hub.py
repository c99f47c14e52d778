"""`convert` takes a checkpoint from the hub as from a folder: only what it needs, once, and with a sentence if not."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from rewired.cli import main
from tests.commands import run

from .checkpoints import INDEX, make_llama, snapshot
from .hub_server import COMMIT, TOKEN, HubServer

LADDER = ("--ladder-layers", "2-4")
MIB = 1 << 20
DECOYS = (
    "modeling_evil.py",  # make_llama's
    "pytorch_model.bin",
    "model.pt",
    "training_args.bin",
    "original/consolidated.00.pth",
    "original/tokenizer.model",
    "onnx/model.onnx",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in shards, among files that no conversion needs."""
    folder = make_llama(tmp_path_factory.mktemp("tiny") / "tiny")
    for name in DECOYS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("raise SystemExit('not to be fetched')")
    return folder


@pytest.fixture
def hub(tiny: Path) -> Iterator[HubServer]:
    repos = {"org/tiny": tiny, "org/gated": tiny, "meta-llama/Llama-3.1-8B": tiny}
    with HubServer(repos, gated=["org/gated"]) as hub:
        yield hub


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The empty folder that the user works in; the hub's cache is beside it."""
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def convert(hub: HubServer, work: Path, *arguments: str, **environment: str) -> CompletedProcess[str]:
    """`convert` as a user of that hub runs it, with a cache of their own and, unless they say so, no token."""
    theirs = {"HF_ENDPOINT": hub.url, "HF_HOME": str(work.parent / "home"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}
    return run("convert", *arguments, *LADDER, cwd=work, **theirs | environment)


def assert_converted(done: CompletedProcess[str], out: Path) -> None:
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert (out / "config.json").is_file()
    assert hidden(out.parent) == []


def assert_refused(done: CompletedProcess[str], work: Path, *words: str) -> None:
    """Exit status 2, one sentence of ours at the end of stderr, nothing on stdout, and nothing written."""
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("convert: ") == 1
    assert done.stderr.splitlines()[-1].startswith("convert: ")
    for word in words:
        assert word in done.stderr.splitlines()[-1]
    assert list(work.iterdir()) == []


def hidden(folder: Path) -> list[Path]:
    return list(folder.glob(".*"))


def asked_for(hub: HubServer) -> set[str]:
    """The names of the files that were asked for, if only by HEAD."""
    return {path.partition(f"/resolve/{COMMIT}/")[2] for _, path, _, _ in hub.requests} - {""}


def weight_downloads(hub: HubServer) -> list[str]:
    return [path for method, path, _, _ in hub.requests if method == "GET" and path.endswith(".safetensors")]


def test_a_hub_checkpoint_converts_as_its_folder_does(hub: HubServer, work: Path, tiny: Path) -> None:
    """Through the redirects; apart from the model card, which names the repository, every byte is the same."""
    assert_converted(convert(hub, work, "org/tiny", "from-hub"), work / "from-hub")
    assert_converted(convert(hub, work, str(tiny), "from-folder"), work / "from-folder")
    from_hub, from_folder = snapshot(work / "from-hub"), snapshot(work / "from-folder")
    card = from_hub.pop("README.md").decode()
    assert 'base_model: "org/tiny"' in card
    assert 'license: "llama3.1"' in card
    assert from_folder.pop("README.md")
    assert from_hub == from_folder
    assert any(path.startswith("/cdn/") for path in weight_downloads(hub))


def test_only_the_files_of_the_conversion_are_asked_for(hub: HubServer, work: Path, tiny: Path) -> None:
    assert_converted(convert(hub, work, "org/tiny", "out"), work / "out")
    assert asked_for(hub) == set(snapshot(tiny)) - set(DECOYS)


def test_neither_code_nor_pickles_come_along_whatever_their_names(tmp_path: Path, work: Path) -> None:
    """Names that begin as a tokenizer's files do, as in old remote-code repositories."""
    folder = make_llama(tmp_path / "evil")
    decoys = {"tokenizer_evil.py", "vocab.pkl", "tokenizer.bin"}
    for name in decoys:
        (folder / name).write_text("raise SystemExit('not to be fetched')")
    with HubServer({"org/evil": folder}) as hub:
        assert_converted(convert(hub, work, "org/evil", "out"), work / "out")
    assert asked_for(hub) & decoys == set()
    assert set(snapshot(work / "out")) & decoys == set()


def test_a_second_conversion_downloads_nothing_again(hub: HubServer, work: Path) -> None:
    assert_converted(convert(hub, work, "org/tiny", "first"), work / "first")
    hub.requests.clear()
    assert_converted(convert(hub, work, "org/tiny", "second"), work / "second")
    assert asked_for(hub) == set()


def test_what_was_downloaded_converts_without_a_hub(hub: HubServer, work: Path) -> None:
    assert_converted(convert(hub, work, "org/tiny", "first"), work / "first")
    assert_converted(convert(hub, work, "org/tiny", "second", HF_ENDPOINT="http://127.0.0.1:9"), work / "second")


def test_converting_leaves_the_cache_fit_for_use(hub: HubServer, work: Path) -> None:
    """Weights are linked from the cache, and --force, which removes such a link, must not reach what is behind it."""
    for _ in range(2):
        assert_converted(convert(hub, work, "org/tiny", "out", "--force"), work / "out")
    cached = {path.name: path for path in (work.parent / "home").rglob("snapshots/*/*")}
    for path in (work / "out").glob("*.safetensors"):
        assert path.samefile(cached[path.name])
        assert not path.is_symlink()


@pytest.mark.parametrize("lists_its_files", [True, False])
def test_a_gated_repository_needs_its_licence_and_a_token(hub: HubServer, work: Path, lists_its_files: bool) -> None:
    hub.gated_api = not lists_its_files
    done = convert(hub, work, "org/gated", "out")
    assert_refused(done, work, "org/gated is gated", "licence", "hf auth login", "HF_TOKEN")


def test_a_token_that_the_licence_was_not_accepted_with_is_told_the_same(hub: HubServer, work: Path) -> None:
    assert_refused(convert(hub, work, "org/gated", "out", HF_TOKEN="hf_other"), work, "licence", "hf auth login")


def test_a_token_opens_a_gated_repository_and_goes_to_the_hub_only(hub: HubServer, work: Path) -> None:
    hub.gated_api = True
    assert_converted(convert(hub, work, "org/gated", "out", HF_TOKEN=TOKEN), work / "out")
    assert {token for _, path, _, token in hub.requests if path.startswith("/cdn/")} == {None}


@pytest.mark.parametrize("token", ["", TOKEN], ids=["no token", "token"])
def test_an_unknown_repository(hub: HubServer, work: Path, token: str) -> None:
    assert_refused(convert(hub, work, "org/nothing", HF_TOKEN=token), work, "'org/nothing'", "check the name")


def test_a_commit_can_be_asked_for(hub: HubServer, work: Path) -> None:
    assert_converted(convert(hub, work, "org/tiny", "out", "--revision", COMMIT), work / "out")


def test_an_unknown_revision(hub: HubServer, work: Path) -> None:
    done = convert(hub, work, "org/tiny", "out", "--revision", "nope")
    assert_refused(done, work, "org/tiny has no revision 'nope'")


def test_a_connection_cut_inside_files_is_repaired(hub: HubServer, work: Path, tiny: Path) -> None:
    hub.cut_once = {"config.json": 10, "model-00001-of-00004.safetensors": 0, "model-00002-of-00004.safetensors": 999}
    assert_converted(convert(hub, work, "org/tiny", "out"), work / "out")
    assert hub.cut_once == {}
    for path in tiny.glob("*.safetensors"):
        assert (work / "out" / path.name).read_bytes() == path.read_bytes()


def test_a_large_file_is_resumed_where_it_was_cut(tmp_path: Path, work: Path) -> None:
    """huggingface_hub keeps 10 MiB at a time."""
    big = make_llama(tmp_path / "big", sharded=False, vocab_size=49152)
    with HubServer({"org/big": big}, cut_once={"model.safetensors": 10 * MIB}) as hub:
        assert_converted(convert(hub, work, "org/big", "out"), work / "out")
    ranges = [asked for method, path, asked, _ in hub.requests if method == "GET" and path.startswith("/cdn/")]
    assert ranges == [None, f"bytes={10 * MIB}-"]
    assert (work / "out" / "model.safetensors").read_bytes() == (big / "model.safetensors").read_bytes()


@pytest.mark.parametrize("environment", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}], ids=str)
def test_no_hub(hub: HubServer, work: Path, environment: dict[str, str]) -> None:
    assert_refused(convert(hub, work, "org/tiny", "out", **environment), work, "does not answer", "org/tiny")


def test_a_hub_that_goes_after_the_config_came_is_not_taken_for_one_without_weights(hub: HubServer, work: Path) -> None:
    assert convert(hub, work, "org/tiny", "out", "--dry-run").returncode == 0
    done = convert(hub, work, "org/tiny", "out", HF_ENDPOINT="http://127.0.0.1:9")
    assert_refused(done, work, "does not answer", "org/tiny")


def test_pickled_weights_are_neither_fetched_nor_loaded(tmp_path: Path, work: Path) -> None:
    folder = make_llama(tmp_path / "pickled")
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with HubServer({"org/pickled": folder}) as hub:
        assert_refused(convert(hub, work, "org/pickled", "out"), work, "org/pickled", "no safetensors", "run any code")
    assert "pytorch_model.bin" not in asked_for(hub)


def test_an_adapter_on_the_hub_is_called_one(tmp_path: Path, work: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    (tmp_path / "adapter" / "adapter_model.safetensors").write_text("")
    with HubServer({"org/adapter": tmp_path / "adapter"}) as hub:
        assert_refused(convert(hub, work, "org/adapter", "out"), work, "holds a PEFT adapter of org/base", "merge it")


def test_a_dry_run_asks_for_no_weights(hub: HubServer, work: Path) -> None:
    done = convert(hub, work, "org/tiny", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "would write tiny-ladder-2-4" in done.stdout
    assert asked_for(hub) == {"config.json", INDEX}
    assert list(work.iterdir()) == []


def test_a_folder_that_is_taken_is_refused_before_the_hub_is_asked(hub: HubServer, work: Path) -> None:
    (work / "out").mkdir()
    done = convert(hub, work, "org/tiny", "out")
    assert (done.returncode, hub.requests) == (2, [])
    assert done.stderr == "convert: out exists: choose another name, or replace it with --force.\n"


def test_a_conversion_that_could_not_be_pushed_is_pushed_by_the_command_that_it_names(
    hub: HubServer, work: Path, tiny: Path
) -> None:
    options = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(work.parent / "home"), "HF_TOKEN": TOKEN}
    arguments = (str(tiny), "out", *LADDER, "--push-to-hub", "org/new")
    offline = run("convert", *arguments, cwd=work, HF_ENDPOINT="http://127.0.0.1:9", **options)
    assert offline.returncode == 2
    sentence = offline.stderr.splitlines()[-1]
    assert "org/new could not be written" in sentence and "same command again" not in sentence
    said, _, command = sentence.partition("to upload it later: ")
    assert said.endswith("out is whole; ") and command == "rewired push out org/new"
    done = run(*command.split(), cwd=work, HF_ENDPOINT=hub.url, **options)
    assert (done.returncode, done.stdout) == (0, f"pushed to {hub.url}/org/new\n"), done.stderr
    assert hub.pushed["org/new"] == snapshot(work / "out")


def test_an_interrupted_push_says_that_the_folder_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def push(folder: Path, repo: str) -> str:
        raise KeyboardInterrupt

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("rewired.sources.hub.push", push)
    monkeypatch.setattr(sys, "argv", ["rewired", "push", str(tmp_path), "org/new"])
    with pytest.raises(SystemExit) as ended:
        main()
    later = f"{tmp_path} is whole; to upload it later: rewired push {tmp_path} org/new"
    assert (ended.value.code, capsys.readouterr().err) == (130, f"rewired push: interrupted. {later}\n")


def test_weights_of_an_earlier_push_leave_the_repository(hub: HubServer, work: Path, tiny: Path) -> None:
    """Transformers would load a single file that stays, and not the shards that came."""
    options = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(work.parent / "home"), "HF_TOKEN": TOKEN, "HF_ENDPOINT": hub.url}
    hub.pushed["org/new"] = dict.fromkeys(("model.safetensors", "rotation.npy", "notes.md"), b"old")
    done = run("convert", str(tiny), "out", *LADDER, "--push-to-hub", "org/new", cwd=work, **options)
    assert done.returncode == 0, done.stderr
    assert hub.pushed["org/new"] == snapshot(work / "out") | {"notes.md": b"old"}


def test_a_dry_run_lists_what_would_be_pushed(hub: HubServer, work: Path, tiny: Path) -> None:
    shutil.copytree(tiny, work / "out")
    (work / "out" / ".git").mkdir()
    (work / "out" / ".git" / "HEAD").write_text("ref")
    done = run("rewired", "push", "out", "org/new", "--dry-run", cwd=work, HF_ENDPOINT=hub.url)
    *listed, last = done.stdout.splitlines()
    files = [path for path in (work / "out").rglob("*") if path.is_file() and path.name != "HEAD"]
    sizes = {path.relative_to(work / "out").as_posix(): path.stat().st_size for path in files}
    assert {line.split()[1]: int(line.split()[0].replace(",", "")) for line in listed} == sizes
    assert last == f"would push {len(sizes)} files, {sum(sizes.values()):,} bytes, to org/new"
    assert "org/new" not in hub.pushed
    refused = run("rewired", "push", "out", "a name", "--dry-run", cwd=work)
    assert refused.returncode == 2 and "'a name' is not a folder here" in refused.stderr


def test_only_a_checkpoint_is_pushed(hub: HubServer, work: Path) -> None:
    done = run("rewired", "push", ".", "org/new", cwd=work, HF_ENDPOINT=hub.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "rewired push: . holds no config.json: point to a folder with a Hugging Face checkpoint.\n"


def test_a_checkpoint_without_weights_is_not_pushed(hub: HubServer, work: Path, tiny: Path) -> None:
    (work / "out").mkdir()
    shutil.copy(tiny / "config.json", work / "out")
    done = run("rewired", "push", "out", "org/new", cwd=work, HF_ENDPOINT=hub.url)
    assert (done.returncode, "org/new" in hub.pushed) == (2, False)
    assert done.stderr.startswith("rewired push: out holds no weights")


def test_the_short_name_of_a_model_is_enough(hub: HubServer, work: Path) -> None:
    done = convert(hub, work, "llama-3.1-8b")
    assert_converted(done, work / "llama-3.1-8b-ladder-2-4")
    assert "wrote llama-3.1-8b-ladder-2-4" in done.stdout
    assert 'base_model: "meta-llama/Llama-3.1-8B"' in (work / "llama-3.1-8b-ladder-2-4" / "README.md").read_text()
