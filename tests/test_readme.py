"""The README says what the code does: its tables are the generated ones, its Python example and commands exist."""

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


@pytest.fixture(scope="module")
def generator() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "readme.py"))


def test_tables_are_current(generator: dict[str, Any]) -> None:
    assert generator["rewritten"](TEXT) == TEXT, "run: python scripts/readme.py"


def test_every_switch_is_listed_once() -> None:
    section = TEXT.split("<!-- switches:begin -->")[1].split("<!-- switches:end -->")[0]
    listed = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    assert sorted(listed) == sorted(field.name for field in LlmArchConfig.switches())


def test_missing_markers_are_an_error(generator: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="switches:begin"):
        generator["rewritten"]("# no markers")


def test_commands_of_the_readme_exist() -> None:
    named = set(re.findall(r"^hf-llmarch (\w+)", TEXT, flags=re.MULTILINE))
    assert named == {command.name for command in app.registered_commands}
    for name in named:
        used = set(re.findall(rf"^hf-llmarch {name}.*$", TEXT, flags=re.MULTILINE))
        options = {option for line in used for option in re.findall(r"(--[\w-]+)", line)}
        text = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
        assert not [option for option in options if option not in text]


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
    table = TEXT.split("## Versions")[1].split("## ")[0]
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
