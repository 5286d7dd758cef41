"""The README and docs/ say what the code does: tables are the generated ones, links lead somewhere, examples run."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_llmarch.cli.app import app
from hf_llmarch.model.configuration_llmarch import LlmArchConfig
from hf_llmarch.model.host import SUPPORTED

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}


@pytest.fixture(scope="module")
def generator() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "tables.py"))


def test_tables_are_current(generator: dict[str, Any]) -> None:
    for page in generator["TABLES"]:
        assert generator["rewritten"](page, PAGES[page]) == PAGES[page], "run: python scripts/tables.py"


def test_every_switch_is_listed_once() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", PAGES["switches.md"], flags=re.MULTILINE)
    assert sorted(listed) == sorted(field.name for field in LlmArchConfig.switches())


def test_missing_markers_are_an_error(generator: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="switches:begin"):
        generator["rewritten"]("switches.md", "# no markers")


def test_the_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 150


def test_links_lead_somewhere() -> None:
    for page, text in {"README.md": TEXT, **{f"docs/{name}": text for name, text in PAGES.items()}}.items():
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
            if not link.startswith("http"):
                assert ((ROOT / page).parent / link).exists(), f"{page}: {link}"


def test_every_page_can_be_reached() -> None:
    """From the README, by links."""
    seen, waiting = set(), {ROOT / "README.md"}
    while waiting:
        page = waiting.pop()
        seen.add(page)
        links = re.findall(r"\]\(([^)#:]+\.md)", page.read_text(encoding="utf-8"))
        waiting |= {(page.parent / link).resolve() for link in links} - seen
    assert set(DOCS.glob("*.md")) <= seen


def test_the_documented_commands_exist() -> None:
    text = PAGES["commands.md"]
    named = set(re.findall(r"^hf-llmarch (\w+)", text, flags=re.MULTILINE))
    assert named == {command.name for command in app.registered_commands}
    for name in named:
        used = set(re.findall(rf"^hf-llmarch {name}.*$", text, flags=re.MULTILINE))
        options = {option for line in used for option in re.findall(r"(--[\w-]+)", line)}
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
        assert not [option for option in options if option not in shown]


def test_python_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    first = [line for line in blocks[0].splitlines() if line]
    assert len(first) <= 10
    words = ["<unk>", *re.findall(r"\w+", "The capital of France is Paris")]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path / "source")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes)).save_pretrained(tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        # The same lines, on a source that needs no network.
        exec(block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "source"), names)
    assert names["tuned"].num_parameters(only_trainable=True) == 2 * 2 * 8 * (16 + 16)
    assert names["model"].config.norm_placement == "sandwich"


def test_versions_are_those_that_are_checked_and_tested() -> None:
    table = PAGES["versions.md"]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line]
    by_name = {name: dict(zip(rows[0][1:], versions, strict=True)) for name, *versions in rows}
    assert by_name["supported"] == {lib: f">={oldest},<{before}" for lib, (oldest, before) in SUPPORTED.items()}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for library in SUPPORTED:
        for name in ("oldest", "between"):
            assert (
                f"{library}=={by_name[f'compat-{name}'][library]}" in re.findall(rf"HOSTS_{name} *:= (.*)", makefile)[0]
            )
        assert f"\n{library}=={by_name['constraints.txt'][library]}\n" in constraints


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"`?make ([a-z][\w-]+)", TEXT)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_the_ecosystem_page_has_every_line_that_is_tested() -> None:
    script = ROOT / "scripts" / "ecosystem.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
