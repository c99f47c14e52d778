"""Every command of the pages and of `--help`: our parsers take ours, and others name what there is."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import typer

from rewired.adapt.recipe.reading import read
from rewired.cli import new_app
from rewired.model.wiring_text import parse_wiring, parse_wirings
from tests.test_docs import PAGES, ROOT, relative

OURS = ("adapt", "convert", "evaluate")
WITHOUT_LAYERS = ("own", "none", "mix")  # names of sets of wirings, or of none
LAUNCHERS = r"(?:torchrun|accelerate launch) .*?(?:-m rewired\.|--no-python )"
PLACEHOLDERS = {"RECIPE": "smollm2-135m-ladder-distill", "NAME": "smollm2-135m-ladder-distill"}


def command_line() -> typer.main.TyperGroup:
    app = new_app()
    app.callback()(lambda: None)
    for value in {entry.value: entry for entry in entry_points(group="rewired.commands")}.values():
        value.load()(app)
    group = typer.main.get_command(app)
    assert isinstance(group, typer.main.TyperGroup)
    return group


GROUP = command_line()


def commands(text: str) -> Iterator[list[str]]:
    """Those of the indented blocks; other text is fenced. Words of each, without what launches it."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).replace("\\\n", " ")
    paragraphs = re.split(r"\n\s*\n", text)
    blocks = [paragraph for paragraph in paragraphs if re.match(r"(?:#.*\n)*\n*    \S", paragraph)]
    for line in "\n".join(blocks).splitlines():
        for part in re.sub(r"\s#.*|^#.*", "", line).split("&&"):
            bare = re.sub(r"\[.*?\]|\.\.\. ", "", re.sub(LAUNCHERS, "", part)) if "pip" not in part else part
            words = shlex.split(bare)
            while words and (words[0] in ("sudo", "time") or re.fullmatch(r"\w+=.*", words[0])):
                words = words[1:]
            if words:
                yield [words[0].rpartition("/")[2], *words[1:]]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_the_commands_of_a_page(page: Path) -> None:
    for words in commands(page.read_text(encoding="utf-8")):
        check(words)


@pytest.mark.parametrize("name", [name for name in GROUP.commands if name != "data"])
def test_the_examples_of_help(name: str) -> None:
    examples = re.findall(r"^```\n(.*?)^```", GROUP.commands[name].help or "", re.MULTILINE | re.DOTALL)
    for words in commands("\n\n".join(re.sub("^", "    ", example, flags=re.MULTILINE) for example in examples)):
        check(words)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=relative)
def test_flags_in_the_text_of_a_page(page: Path) -> None:
    """Of commands in backticks, such as `convert --rotate`; the changelog names former flags."""
    for span in re.findall(r"`((?:convert|evaluate|rewired \w+) [^`]*)`", page.read_text(encoding="utf-8")):
        name, *rest = span.removeprefix("rewired ").split()
        known = {flag for param in GROUP.commands[name].params for flag in (*param.opts, *param.secondary_opts)}
        assert {word for word in rest if word.startswith("--")} <= known | {"--help"}, span


def check(words: list[str]) -> None:
    program, *rest = words
    if program in OURS:
        parse(program, rest)
    elif program == "rewired":
        parse(*(("fetch", rest[2:]) if rest[0] == "data" else (rest[0], rest[1:])))
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif program in ("python", "python3") and rest[:2] != ["-m", "pip"]:
        path = Path(rest[1].replace(".", "/") + ".py" if rest[0] == "-m" else rest[0])
        assert (ROOT / path).exists(), words
    elif program == "pytest":
        assert all((ROOT / word).exists() for word in rest if word.endswith(".py")), words
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = re.findall(r"(?:rewired|\.)\[(.*?)\]", " ".join(rest))
        assert {extra for some in asked for extra in some.split(",")} <= set(extras), words
    else:
        assert program in ("cd", "git", "python3", "vllm"), words


def parse(name: str, rest: list[str]) -> None:
    """Raises what the command's own parser raises, and that of the wirings or the recipe in it."""
    data = GROUP.commands["data"]
    assert isinstance(data, typer.main.TyperGroup)
    command = data.commands["fetch"] if name == "fetch" else GROUP.commands[name]
    rest = [PLACEHOLDERS.get(word, word) for word in rest]
    try:
        context = command.make_context(name, list(rest))
    except typer.Exit:
        return  # adapt --list
    wiring, wirings = context.params.get("wiring"), context.params.get("wirings")
    for text in [*([wiring] if wiring else []), *(parse_wirings(wirings) if isinstance(wirings, str) else [])]:
        if text not in WITHOUT_LAYERS and not text.endswith(".json"):
            parse_wiring(text)
    if name == "adapt":
        recipe = Path(context.params["recipe"])
        read(ROOT / recipe if os.sep in str(recipe) else recipe, context.args)
