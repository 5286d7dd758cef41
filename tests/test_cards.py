"""Model cards: what they say is true, what they take over holds, and nobody's text is lost."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer
from typer.testing import CliRunner

import hf_llmarch
from hf_llmarch import LlmArchConfig
from hf_llmarch.cli.app import Exit, app
from hf_llmarch.conversion import cards, convert, export, verify
from hf_llmarch.conversion.engine import Report
from hf_llmarch.conversion.errors import ConversionError, DestinationError
from hf_llmarch.conversion.sources.hub import hub_state
from hub_server import card_errors
from test_hub import BLOCKED, run
from tiny import BOTH, ENCODER, LONGROPE, MIXED, MOE, redraw, tiny_stack

THEIRS = """---
license: other
license_name: of-my-own
license_link: LICENSE
language:
- en
- fr
tags:
- chat
- onnx
base_model: somebody/base
model-index:
- name: theirs
  results: []
---

# Theirs

Meant for tests.
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a card, a licence and a tokenizer."""
    folder = tmp_path_factory.mktemp("source") / "llama"
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    redraw(LlamaForCausalLM(LlamaConfig(vocab_size=7, **sizes))).save_pretrained(folder)
    words = {"Hello": 3, "<unk>": 0}
    FastTokenizer(tokenizer_object=Tokenizer(WordLevel(words, "<unk>")), unk_token="<unk>").save_pretrained(folder)
    (folder / "README.md").write_text(THEIRS)
    (folder / "LICENSE").write_text("Mine.\n")
    return folder


@pytest.fixture(scope="module")
def converted(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    folder = tmp_path_factory.mktemp("converted") / "tiny-llama"
    return folder, convert(llama, folder, verify=True, progress=False)


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A folder of ours that was saved, not converted."""
    tiny_stack(**MIXED).save_pretrained(tmp_path / "ours")
    return tmp_path / "ours"


def text_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def table(text: str, heading: str) -> dict[str, str]:
    """The first two columns of the table, or tables, under a heading."""
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {row[0].strip("`"): row[1].strip("`") for row in rows if len(row) > 1 and not row[0].startswith("---")}


def test_a_conversion_has_a_card_and_keeps_the_originals(llama: Path, converted: tuple[Path, Report]) -> None:
    folder, report = converted
    assert {"README.md", "kept_aside/README.md"} <= set(report.files)
    assert (folder / "kept_aside" / "README.md").read_text() == THEIRS
    assert text_of(folder).startswith("---\n")
    assert "No number was changed" in text_of(folder)
    assert table(text_of(folder), "Source")["class"] == "LlamaForCausalLM"


def test_metadata(converted: tuple[Path, Report]) -> None:
    """The licence and the languages are the original's; its formats and its evaluation are not ours."""
    data = ModelCard.load(converted[0] / "README.md").data.to_dict()
    assert data == {
        "license": "other",
        "license_name": "of-my-own",
        "license_link": "LICENSE",
        "language": ["en", "fr"],
        "tags": ["chat", "llmarch"],
        "base_model": "somebody/base",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
    }


def test_the_licence_is_pointed_at(converted: tuple[Path, Report]) -> None:
    section = text_of(converted[0]).split("## Licence")[1]
    assert "`of-my-own`" in section
    assert "[LICENSE](LICENSE)" in section
    assert "(kept_aside/README.md)" in section


def test_an_unknown_licence_is_not_made_up(ours: Path) -> None:
    text = cards.write(ours).read_text()
    assert "license" not in ModelCard(text).data.to_dict()
    assert "The weights keep the licence of their authors." in text


def test_the_certificate_is_the_measured_one(llama: Path, converted: tuple[Path, Report]) -> None:
    folder, report = converted
    assert report.certificate is not None
    assert report.certificate.ok
    rows = table(text_of(folder), "Certificate")
    assert rows["sha256"] == report.certificate.sha256
    assert rows["bytes"].startswith("21 of 21 tensors")
    assert len(load_file(llama / "model.safetensors")) == 21
    assert "It is the same model." in text_of(folder)


def test_a_certificate_of_another_model_says_so(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    convert(llama, folder, progress=False)
    assert "## Certificate" not in text_of(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] += 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    cards.write(folder, certificate=verify(llama, folder, progress=False))
    assert "It is the same model." not in text_of(folder)
    assert "logits differ by" in text_of(folder)


def test_no_path_of_a_disk_is_in_what_is_published(converted: tuple[Path, Report]) -> None:
    folder, _ = converted
    for file in ("README.md", "kept_aside/certificate.json", "config.json"):
        assert str(folder.parent.parent) not in (folder / file).read_text()


def test_writing_again_loses_nothing(converted: tuple[Path, Report], tmp_path: Path) -> None:
    folder = tmp_path / "again"
    folder.symlink_to(converted[0])
    before = table(text_of(folder), "Certificate")
    edited = text_of(folder).replace("license_name: of-my-own", "license_name: of-ours")
    (folder / "README.md").write_text(edited)
    cards.write(folder, base_model="somebody/llama")
    assert table(text_of(folder), "Certificate") == before
    data = ModelCard.load(folder / "README.md").data.to_dict()
    assert data["license_name"] == "of-ours"
    assert (data["base_model"], data["base_model_relation"]) == ("somebody/llama", "quantized")
    assert "https://huggingface.co/somebody/llama" in text_of(folder)


def test_a_card_of_another_hand_stays(ours: Path) -> None:
    (ours / "README.md").write_text("# Mine\n")
    with pytest.raises(DestinationError, match="--overwrite"):
        cards.write(ours)
    assert text_of(ours) == "# Mine\n"
    cards.write(ours, overwrite=True)
    assert "# ours" in text_of(ours)


def test_an_export_has_the_originals_card(llama: Path, converted: tuple[Path, Report], tmp_path: Path) -> None:
    export(converted[0], tmp_path / "back", progress=False)
    names = {path.name for path in llama.iterdir()}
    assert {path.name for path in (tmp_path / "back").iterdir()} == names
    same = names - {"model.safetensors"}
    assert all((tmp_path / "back" / name).read_bytes() == (llama / name).read_bytes() for name in same)


def test_an_export_without_an_original_card_has_none_but_ones_own_goes_along(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    for file in llama.iterdir():
        if file.name != "README.md":
            (tmp_path / "bare" / file.name).write_bytes(file.read_bytes())
    convert(tmp_path / "bare", tmp_path / "ours", progress=False)
    export(tmp_path / "ours", tmp_path / "back", progress=False)
    assert not (tmp_path / "back" / "README.md").exists()
    (tmp_path / "ours" / "README.md").write_text("# Mine\n")
    export(tmp_path / "ours", tmp_path / "mine", progress=False)
    assert text_of(tmp_path / "mine") == "# Mine\n"


def test_a_card_that_cannot_be_read_is_kept_and_adds_nothing(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    for file in llama.iterdir():
        (tmp_path / "odd" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "odd" / "README.md").write_text("---\nlicense: [\n---\n# Odd\n")
    convert(tmp_path / "odd", tmp_path / "ours", progress=False)
    assert (tmp_path / "ours" / "kept_aside" / "README.md").read_text().endswith("# Odd\n")
    assert "license" not in ModelCard.load(tmp_path / "ours" / "README.md").data.to_dict()


MODELS: dict[str, dict[str, Any]] = {
    "windows": MIXED,
    "experts": {**MOE, "num_shared_experts": 1},
    "encoder": ENCODER,
    "both": {**BOTH, "source_stack": {"num_hidden_layers": 2}},
    "long": {"rope_parameters": LONGROPE},
}


@pytest.mark.parametrize("name", MODELS)
def test_what_the_card_says_of_a_model(name: str, tmp_path: Path) -> None:
    model = tiny_stack(**MODELS[name])
    model.save_pretrained(tmp_path / name)
    text = cards.write(tmp_path / name).read_text()
    assert card_errors(text) == []
    rows = table(text, "Architecture")
    assert rows["numbers in the weights"] == f"{model.num_parameters():,} (float32)"
    given = {**json.loads((tmp_path / name / "config.json").read_text())}
    listed = [name for name in rows if name in given]
    assert listed, rows
    for switch in MODELS[name]:
        assert switch in rows
    assert all(line.count("|") - line.count("\\|") in (3, 4) for line in text.splitlines() if line.startswith("|"))


def test_only_switches_that_were_set_are_listed() -> None:
    """What follows from others, such as a head's width, is no decision."""
    given = {"hidden_size": 64, "num_hidden_layers": 12, "num_key_value_heads": 2, "sliding_window": 16}
    assert {row["name"] for row in cards.changed_switches(LlmArchConfig(**given))} == set(given)
    rows = {row["name"]: row["value"] for row in cards.changed_switches(LlmArchConfig(**given, head_dim=10))}
    assert set(rows) == {*given, "head_dim"}
    assert rows["head_dim"] == "`10`"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 2], "[1, 2]"),
        (["a"] * 5 + ["b"] * 4, '[5 x "a", 4 x "b"]'),
        ([1.0, 2.5] * 24, "[… 48 values]"),
        ({"rope_type": "default", "factors": list(range(9))}, '{"rope_type": "default", "factors": [… 9 values]}'),
    ],
)
def test_values_stay_readable(value: Any, text: str) -> None:
    assert cards.shown(value) == text


def test_the_usage_runs(
    converted: tuple[Path, Report], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = text_of(converted[0]).split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(converted[0].parent)
    exec(code, {})
    assert "Hello" in capsys.readouterr().out


def test_the_usage_runs_elsewhere_and_neither_asks_nor_warns(converted: tuple[Path, Report]) -> None:
    code = text_of(converted[0]).split("```python\n")[1].split("```")[0]
    finished = run(f"{BLOCKED}\n{code}", converted[0].parent)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "Hello" in finished.stdout
    for unwanted in ("custom code", "of type", "Warning", "[transformers]"):
        assert unwanted not in finished.stdout + finished.stderr


def test_the_task_is_that_of_the_head(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20, num_labels=3
    )
    redraw(BertForSequenceClassification(config)).save_pretrained(tmp_path / "bert")
    convert(tmp_path / "bert", tmp_path / "ours", progress=False)
    text = text_of(tmp_path / "ours")
    assert ModelCard(text).data.pipeline_tag == "text-classification"
    assert "AutoModelForSequenceClassification.from_pretrained" in text


def test_a_cast_is_not_called_unchanged(llama: Path, tmp_path: Path) -> None:
    convert(llama, tmp_path / "out", dtype=torch.bfloat16, progress=False)
    assert "No number was changed" not in text_of(tmp_path / "out")
    assert "cast to bfloat16" in text_of(tmp_path / "out")
    assert table(text_of(tmp_path / "out"), "Architecture")["numbers in the weights"].endswith("(bfloat16)")


def test_the_state_of_a_hub_repository_is_told_by_its_place_in_the_cache() -> None:
    commit = "0123456789" * 4
    path = Path("/somewhere/hub/models--owner--a-name.b/snapshots") / commit
    expected = {"source": "owner/a-name.b", "revision": commit}
    assert hub_state(path) == hub_state(path / "model.gguf") == expected
    assert hub_state(path.parent / "main") == hub_state(Path("/somewhere/models--owner")) == {}


def test_the_command(llama: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    convert(llama, tmp_path / "out", progress=False)
    proof = runner.invoke(app, ["verify", str(llama), str(tmp_path / "out"), "--json", "--new-tokens", "2"])
    (tmp_path / "proof.json").write_text(proof.stdout)
    options = ["--base-model", "owner/model", "--certificate", str(tmp_path / "proof.json"), "--json"]
    result = runner.invoke(app, ["card", str(tmp_path / "out"), *options])
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["metadata"]["base_model"]) == (Exit.OK, "owner/model")
    assert yaml.safe_load(text_of(tmp_path / "out").split("---")[1]) == answer["metadata"]
    assert table(text_of(tmp_path / "out"), "Certificate")["sha256"] == json.loads(proof.stdout)["sha256"]


def test_the_command_refuses(llama: Path, ours: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["card", str(llama)]).exit_code == Exit.DESTINATION  # its card is its author's
    result = runner.invoke(app, ["card", str(llama), "--overwrite"])
    assert result.exit_code == Exit.INPUT
    assert "no llmarch model" in result.stderr
    assert text_of(llama) == THEIRS
    (tmp_path / "proof.json").write_text('{"ok": true}')
    result = runner.invoke(app, ["card", str(ours), "--certificate", str(tmp_path / "proof.json")])
    assert (result.exit_code, "no certificate" in result.stderr) == (Exit.INPUT, True)
    with pytest.raises(ConversionError, match="llama"):
        cards.make(llama)


@pytest.mark.slow
def test_a_wheel_holds_the_template_and_the_types(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    # Of a copy: a build leaves folders behind. With the setuptools of this environment, which needs no network.
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ("hf_llmarch", "conversion", "model_cards", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (root / name).is_dir() else shutil.copyfile
        copy(root / name, source / name)
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([*pip, "wheel", *options, str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    code = "from hf_llmarch.conversion import cards; print(cards.TEMPLATE, cards.TEMPLATE.is_file())"
    path = {"PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], env=path, cwd=site, capture_output=True, text=True)
    assert found.stdout.split() == [str(site / "hf_llmarch/model_cards/template.md"), "True"], found.stderr
    assert (site / "hf_llmarch/py.typed").is_file()
    assert f"-{hf_llmarch.__version__}-" in wheel.name
