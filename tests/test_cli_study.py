"""The commands that study a model without running it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from family_configs import CASES
from hf_llmarch.cli.app import app
from hf_llmarch.conversion.errors import CheckpointError
from hf_llmarch.study.sources import config_from
from tests.tiny import tiny_stack

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def shown(*arguments: str) -> str:
    """What a terminal of 80 columns shows."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    return result.stdout


def test_the_printed_table_of_five_models() -> None:
    """Layers, width, heads, feed-forward, vocabulary and parameters, as the papers and cards have them."""
    text = shown(
        "inspect", "llama-2-7b", "llama-3-8b", "mistral-7b-v0.1", "qwen2-72b", "deepseek-v3", "--length", "4096"
    )
    rows = {line.split()[0]: line.split()[1:9] for line in text.splitlines() if "-" in line and "B " in line}
    assert rows == {
        "llama-2-7b": ["6.74B", "6.74B", "32", "4096", "32/32", "11008", "32k", "524k"],
        "llama-3-8b": ["8.03B", "8.03B", "32", "4096", "32/8", "14336", "128k", "131k"],
        "mistral-7b-v0.1": ["7.24B", "7.24B", "32", "4096", "32/8", "14336", "32k", "131k"],
        "qwen2-72b": ["72.7B", "72.7B", "80", "8192", "64/8", "29568", "152k", "328k"],
        "deepseek-v3": ["671B", "37.6B", "61", "7168", "128/mla", "256x2048", "129k", "70.3k"],
    }


def test_inspect_of_one() -> None:
    text = shown(
        "inspect", "gemma-3-1b", "--set", "num_hidden_layers=6", "--length", "700", "--measure", "--hardware", "h100"
    )
    assert text.count("measured: the same") == 4
    assert "0-4" in text
    assert "GLU weights = 3·d·d_ff" in text
    assert "decode on h100" in text
    data = run("inspect", "gemma-3-1b", "--length", "700", "--shapes")
    assert len(data["layers"]) == 26
    assert {"heads", "key_value_heads", "feed_forward", "reach", "cache_bytes"} <= set(data["layers"][0])
    assert (data["layers"][0]["direct"], data["layers"][5]["direct"]) == (512, 700)
    assert all(formula["value"] == formula["counted"] for formula in data["formulas"])


@pytest.mark.parametrize("case", ["mixtral", "llama-biases-tied"])
def test_a_config_alone_is_a_whole_checkpoint_s(case: str, tmp_path: Path) -> None:
    """Of a native model: its config.json says what its weights would."""
    from test_families import build

    converted = build(case, tmp_path)
    folder = next(path.parent for path in tmp_path.rglob("config.json") if "llmarch" not in path.read_text())
    whole = run("inspect", str(folder), "--length", "9")
    for weights in folder.glob("*.safetensors*"):
        weights.unlink()
    alone = run("inspect", str(folder), "--length", "9")
    assert alone == whole == run("inspect", str(folder / "config.json"), "--length", "9")
    assert whole["parameters"] == sum(p.numel() for p in converted.ours.parameters())
    assert case in CASES


def test_inspect_of_both_stacks(tmp_path: Path) -> None:
    tiny_stack(topology="encoder-decoder", position_encoding="learned").save_pretrained(tmp_path / "two")
    data = run("inspect", str(tmp_path / "two"), "--length", "9", "--source-length", "5")
    assert [(layer["stack"], layer["direct"]) for layer in data["layers"]] == [("encoder", 5)] * 3 + [
        ("decoder", 9)
    ] * 3
    assert "Layers of the encoder" in shown("inspect", str(tmp_path / "two"), "--length", "9")


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Did you mean 'llama-3-8b'"):
        config_from("llama3-8b")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        config_from(str(tmp_path))
    with pytest.raises(CheckpointError, match="could not be had from the Hub"):
        config_from("nobody/nothing")
    assert CliRunner().invoke(app, ["inspect", "llama-3-8b", "--hardware", "h1000"]).exit_code == 3


def test_of_a_repository_only_the_config_and_the_index_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []

    def fetch(repository: str, name: str, revision: str | None = None) -> str:
        fetched.append((repository, name, revision))
        if name != "config.json":
            raise EntryNotFoundError(name)
        return str(tmp_path / name)

    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **CASES["llama"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    assert config_from("owner/name", revision="v1").hidden_size == CASES["llama"]["hidden_size"]
    index = ("owner/name", "model.safetensors.index.json", tmp_path.name)
    assert fetched == [("owner/name", "config.json", "v1"), index]


def test_presets() -> None:
    rows = run("presets", "llama-3")["presets"]
    found = {row["name"]: row["parameters"] for row in rows}
    assert (
        found["llama-3-8b"] == 8_030_261_248
    )  # model.safetensors.index.json of meta-llama/Meta-Llama-3-8B, in bytes / 2
    assert "8.03B" in shown("presets")


def test_new_writes_a_fresh_model(tmp_path: Path) -> None:
    sizes = ("num_hidden_layers=2", "num_key_value_heads=4", "vocab_size=99", "head_dim=16", "hidden_size=40")
    arguments = ["new", "smollm2-135m", "--set=num_attention_heads=8", *(f"--set={pair}" for pair in sizes)]
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        run(*arguments, str(tmp_path / name), "--seed", seed)
    a, b, c = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "abc")
    assert (a.config.num_hidden_layers, a.config.num_key_value_heads, a.config.hidden_size) == (2, 4, 40)
    assert str(a.dtype) == "torch.bfloat16"
    weights = [model.model.layers[0].self_attn.q_proj.weight for model in (a, b, c)]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])
    assert CliRunner().invoke(app, [*arguments, str(tmp_path / "a")]).exit_code == 5
    data = run("new", "llama-3-8b", str(tmp_path / "d"), "--parameters", "150M", "--config-only")
    assert data["parameters"] == pytest.approx(150e6, rel=0.1)
    assert config_from(str(tmp_path / "d")).vocab_size == 128256
    assert not list((tmp_path / "d").glob("*.safetensors"))


def test_plan(tmp_path: Path) -> None:
    assert [(row["parameters"], row["tokens"]) for row in run("plan")["table"]][1] == (7e9, 1.4e11)
    assert "1.4T" in shown("plan")
    over = run("plan", "llama-3-8b", "--tokens", "15T")["over_training"]
    assert over["times"] == pytest.approx(93.4, abs=0.1)
    assert "93.4 times" in shown("plan", "llama-3-8b", "--tokens", "15T", "--served", "100T")
    optima = run("plan", "--compute", "5.76e23")["optima"]
    assert optima["D = 20 N"]["parameters"] == pytest.approx(69.3e9, rel=0.01)
    assert CliRunner().invoke(app, ["plan", "--memory", "1GB"]).exit_code == 2


def test_figures(tmp_path: Path) -> None:
    runs = tmp_path / "runs.csv"
    lines = [f"{n},{d},{1.8 + 480 / n**0.35 + 2000 / d**0.37}" for n in (1e7, 1e8, 1e9) for d in (1e9, 1e10, 1e11)]
    runs.write_text("\n".join(["N,D,loss", *lines]))
    for number, arguments in enumerate(
        (["inspect", "llama-3-8b", "mistral-7b-v0.1"], ["inspect", "bert-base"], ["plan", "--runs", str(runs)])
    ):
        figure = tmp_path / f"{number}.png"
        run(*arguments, "--plot", str(figure))
        assert figure.read_bytes().startswith(b"\x89PNG")


def test_nothing_of_this_is_imported_by_the_package() -> None:
    code = "import sys, hf_llmarch; from hf_llmarch import LlmArchConfig; LlmArchConfig()\n"
    code += "print([name for name in sys.modules if name.startswith('hf_llmarch.study')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    # transformers' config class imports torch; these modules themselves do not.
    for name in ("analysis", "steps", "formulas", "hardware", "presets", "planning", "sources"):
        text = (ROOT / f"hf_llmarch/study/{name}.py").read_text()
        assert "import torch" not in text, name
        assert "from torch" not in text, name
