"""Pages: the program on the Python API's runs as a reader would run it, and links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import yaml

from rewired import sources
from tests.adapt.world import conversations, make_chat, write_rows

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "python.md"
NOTEBOOK = ROOT / "examples" / "rewire-a-model.ipynb"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/*.md")),
    ROOT / "recipes" / "README.md",
    *sorted(page for page in ROOT.glob("results/**/*.md") if page.name != "card.md"),  # which our commands wrote
    *ROOT.glob("studies/*/*.md"),
]
RECIPE = {
    "model": "my-refitted-ladder",
    "datasets": ["rows.jsonl"],
    "refit": "none",
    "train": "rewired",
    "output_dir": "trained",
    "max_steps": 4,
    "max_length": 128,
    "held_out": 4,
    "save_strategy": "no",
    "disable_tqdm": True,
}


def test_the_pages_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny Llama of 30 layers, which our short name alone leads to, and a text and a recipe beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tiny = make_chat(tmp_path / "tiny", num_hidden_layers=30)
    monkeypatch.setattr(sources, "_on_hub_or_packaged", lambda repo, revision, part: tiny)
    Path("notes.txt").write_text(" ".join(f"The river of stone {n % 7} runs under the bridge." for n in range(400)))
    write_rows(Path("rows.jsonl"), conversations())
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    names = run_all(PAGE, re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    assert type(names["model"]).__name__ == "RewiredLlamaForCausalLM"
    assert names["conversion"].plan.wiring.exposed == 30
    assert names["refitted"].refit.after.kl < names["refitted"].refit.before.kl
    measured = names["results"].divergences["notes.txt"]
    assert 0 < measured["my-refitted-ladder"].kl < measured["my-ladder"].kl
    assert names["measured"].kl < measured["my-ladder"].kl
    assert (tmp_path / "report" / "report.md").is_file()
    assert sum(region["preset"] == "ladder" for region in names["selection"].candidates[0].wiring) > 0
    assert names["final"] == Path("trained/final") and names["answer"]
    assert {row["wiring"] for row in names["timed"]["rows"]} >= {"standard", "ladder@15-30"}
    assert names["ranking"].rows[0].speedup > 1
    assert json.loads((tmp_path / "trained" / "final" / "config.json").read_text())["model_type"] == "rewired_llama"


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = make_chat(tmp_path / "tiny", num_hidden_layers=30)
    monkeypatch.setattr(sources, "_on_hub_or_packaged", lambda repo, revision, part: tiny)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    names = run_all(NOTEBOOK, ["".join(cell["source"]) for cell in cells])
    assert 0 < names["kl"](names["healed"]) < names["kl"](names["model"])
    printed = capsys.readouterr().out
    assert "30 all-reduces that a token waits for, of 60" in printed and "refitted: " in printed


def run_all(file: Path, blocks: list[str]) -> dict[str, Any]:
    """Run the blocks of `file` as one program, and return its names."""
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(file), "exec"), names)
    return names


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_paper_index_names_what_exists() -> None:
    names = re.findall(r"`(rewired\.[\w.]+)`", (ROOT / "docs" / "paper_index.md").read_text())
    assert len(names) > 30
    for name in names:
        resolve_name(name)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(page: Path) -> list[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
