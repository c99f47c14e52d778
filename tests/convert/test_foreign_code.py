"""Code that a source brings is not in the output, is never run, and nobody is asked whether it may."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import rewired
from rewired.checkpoint.rewired_config import auto_map
from rewired.convert import Conversion, Request, convert
from rewired.model.family import LLAMA
from rewired.serve.generate import Prompt, generate
from tests.commands import run
from tests.evaluate.world import make_dense, tokenizer

from .checkpoints import edit_json

LAYERS = [{"layers": "2-4", "preset": "ladder"}]


@pytest.fixture
def spy(tmp_path: Path) -> Path:
    """A folder with modules that leave a mark when they are imported."""
    folder = tmp_path / "spy"
    folder.mkdir()
    for name in ("tok", "evil"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    return folder


@pytest.fixture
def laden(tmp_path: Path, spy: Path) -> Path:
    """A checkpoint whose files point to code in every way that there is."""
    folder = make_dense(tmp_path / "laden")
    code = {"auto_map": {"AutoTokenizer": [f"{spy}--tok.Tok", None]}}
    edit_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **code)
    edit_json(folder / "generation_config.json", auto_map={"GenerationConfig": "other/repo--evil.Config"})
    pipelines = {"text-generation": {"impl": "other/repo--evil.Pipeline", "pt": ["AutoModelForCausalLM"]}}
    edit_json(
        folder / "config.json",
        auto_map={"AutoModelForCausalLM": "other/repo--evil.Model"},
        custom_pipelines=pipelines,
        inner={"auto_map": {"AutoConfig": "evil.Config"}},
        _attn_implementation="owner/kernel",  # which transformers fetches from the hub, where it may be any code
        attn_implementation={"": "owner/other"},
        experts_implementation="owner/experts",
        configuration_files=["config.4.0.0.json"],  # which is read instead, and may have all of that
    )
    (folder / "special_tokens_map.json").write_text('{"auto\\u005fmap": {"AutoTokenizer": ["evil.T", null]}}')
    (folder / "added_tokens.json").write_text('{"auto_map": 258}')
    return folder


POINTERS = {"auto_map", "custom_pipelines", "configuration_files"}
POINTERS |= {"attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"}


def code_in(folder: Path) -> dict[str, Any]:
    """What each JSON file at the top of `folder` has as an entry that can point to code, at any depth."""
    found = dict[str, Any]()
    for path in folder.glob("*.json"):

        def see(entries: dict[str, Any], path: Path = path) -> dict[str, Any]:
            for name in POINTERS & entries.keys():
                found[path.name] = entries[name]
            return entries

        json.loads(path.read_text(), object_hook=see)
    return found


def converted(source: Path, **options: Any) -> Conversion:
    return convert(source, source.parent / "out", Request(**({"wiring": LAYERS} | options)))


def test_no_code_but_ours_is_in_the_output(laden: Path) -> None:
    done = converted(laden)
    assert code_in(done.out) == {"config.json": auto_map(LLAMA), "added_tokens.json": 258}  # a token of that name stays
    note = next(note for note in done.plan.notes if "does not come along" in note)
    for code in ("tok.Tok", "other/repo--evil.Config", "other/repo--evil.Model", "other/repo--evil.Pipeline"):
        assert code in note
    for code in ("owner/kernel", "owner/other", "owner/experts", "config.4.0.0.json"):
        assert code in note
    for file in ("tokenizer_config.json", "generation_config.json", "config.json", "special_tokens_map.json"):
        assert f"of {file}" in note
    assert note in (done.out / "README.md").read_text()


def test_nor_in_that_of_a_stock_llama_and_ours_needs_no_note(laden: Path) -> None:
    first = converted(laden, wiring=[{"layers": "0-", "preset": "standard"}])
    again = convert(first.out, laden.parent / "again", Request(to_stock=True))
    assert code_in(again.out) == {"added_tokens.json": 258}
    assert not [note for note in again.plan.notes if "does not come along" in note]


def test_code_that_was_pointed_to_does_not_run_where_remote_code_is_trusted(laden: Path, tmp_path: Path) -> None:
    out = converted(laden).out
    script = (
        "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        "M.from_pretrained(sys.argv[1], trust_remote_code=True); T.from_pretrained(sys.argv[1], trust_remote_code=True)"
    )
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", script, out], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
    assert AutoConfig.from_pretrained(out)._attn_implementation is None


def test_a_tokenizer_loads_without_our_code_and_nobody_is_asked(laden: Path, tmp_path: Path) -> None:
    """AutoTokenizer reads config.json, whose auto_map lets it ask about the model's code unless it is told not to."""
    out = converted(laden).out
    script = (
        "import sys; sys.modules['rewired'] = None; from transformers import AutoTokenizer as T; "
        "print(T.from_pretrained(sys.argv[1], trust_remote_code=False)('ab').input_ids)"
    )
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", script, out], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, f"{tokenizer()('ab').input_ids}\n")
    assert not (tmp_path / "modules").exists() and "[y/N]" not in done.stderr


def test_a_tokenizer_that_takes_its_own_code_is_refused(laden: Path, tmp_path: Path) -> None:
    edit_json(laden / "tokenizer_config.json", tokenizer_class="Tok")
    done = run("convert", laden, "out", "--ladder-layers", "2-4", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"convert: The tokenizer of {laden} is of a class of its own (Tok), and code ")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="class of its own"):
        generate(laden, Prompt("a", 1), device="cpu")


def test_generate_asks_nothing_and_refuses_a_model_of_other_code(
    laden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked at the terminal"))
    edit_json(laden / "config.json", **dict.fromkeys(POINTERS - {"auto_map", "custom_pipelines"}))
    assert isinstance(generate(laden, Prompt("a", 1, chat=False), device="cpu"), str)
    edit_json(laden / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config"})
    with pytest.raises(ValueError, match="custom code"):
        generate(laden, Prompt("a", 1), device="cpu")
    assert not (tmp_path / "ran").exists()


def test_whoever_loads_by_an_auto_class_says_that_no_code_may_run() -> None:
    """Else transformers asks at the terminal."""
    for room in Path(rewired.__file__).parent.iterdir():  # some are links, which rglob does not follow
        for path in room.rglob("*.py"):
            for call in ast.walk(ast.parse(path.read_text())):
                if isinstance(call, ast.Call) and re.fullmatch(r"Auto\w+\.from_pretrained", ast.unparse(call.func)):
                    text = ast.unparse(call)
                    assert "trust_remote_code=False" in text or "**options" in text, f"{path}: {text}"
