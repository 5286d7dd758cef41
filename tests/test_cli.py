"""The commands on real checkpoints: what they print, what `--json` prints, and the exit codes that scripts rely on."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

import hf_llmarch.conversion
from hf_llmarch import LlmArchConfig, LlmArchForCausalLM
from hf_llmarch.cli.app import EXIT_MEANING, Exit, app
from tiny import redraw

WEIGHTS = "model.safetensors"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})


def run_json(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """Exit code and the object on stdout, which must be all there is."""
    result = run(*arguments, "--json")
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of transformers' own Llama."""
    folder = tmp_path_factory.mktemp("source") / "llama"
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        max_position_embeddings=64,
    )
    redraw(LlamaForCausalLM(config)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ours(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "llama"
    assert run("convert", llama, folder).exit_code == Exit.OK
    return folder


@pytest.fixture
def copied(llama: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(llama, tmp_path / "copied"))


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def shift_one_weight(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"][3] += 1.0
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def test_there_and_back(llama: Path, ours: Path, tmp_path: Path) -> None:
    code, report = run_json("export", ours, tmp_path / "back")
    assert (code, report["family"], report["byte_exact"]) == (0, "llama", True)
    before, after = load_file(llama / WEIGHTS), load_file(tmp_path / "back" / WEIGHTS)
    assert report["tensors"] == len(before) == len(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((llama / "config.json").read_text())


def test_options_of_convert_arrive(llama: Path, tmp_path: Path) -> None:
    options = ("--dtype", "bfloat16", "--max-shard-size", "20KB", "--family", "llama", "--quiet")
    code, report = run_json("convert", llama, tmp_path / "out", *options)
    assert (code, report["byte_exact"]) == (0, False)
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    parameters = sum(t.numel() for t in load_file(llama / WEIGHTS).values())
    assert report["bytes"] == 2 * parameters
    assert len(shards) > 1
    assert all(t.dtype == torch.bfloat16 for shard in shards for t in load_file(shard).values())


def test_convert_with_verification(llama: Path, tmp_path: Path) -> None:
    code, report = run_json("convert", llama, tmp_path / "out", "--verify")
    assert (code, report["certificate"]["ok"]) == (0, True)


@pytest.mark.parametrize("swapped", [False, True], ids=["original-first", "converted-first"])
def test_verify_accepts(llama: Path, ours: Path, swapped: bool) -> None:
    sides = (ours, llama) if swapped else (llama, ours)
    code, certificate = run_json("verify", *sides, "--new-tokens", "4")
    assert (code, certificate["ok"], certificate["problems"], certificate["new_tokens"]) == (0, True, [], 4)


def test_verify_finds_a_changed_weight(copied: Path, ours: Path) -> None:
    shift_one_weight(copied)
    code, certificate = run_json("verify", copied, ours)
    assert (code, certificate["ok"]) == (Exit.DIFFERENT, False)
    assert certificate["tensors_different"] == ["model.norm.weight"]
    assert "model.norm.weight" in run("verify", copied, ours).stdout


def test_people_get_tables(llama: Path, ours: Path) -> None:
    result = run("verify", llama, ours)
    assert result.exit_code == 0
    assert "the same model" in result.stdout
    assert not result.stdout.lstrip().startswith("{")


def missing_source(folder: Path) -> None:
    shutil.rmtree(folder)


def truncated(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def unknown_family(folder: Path) -> None:
    edit_config(folder, model_type="lama")


def unsupported_field(folder: Path) -> None:
    edit_config(folder, model_type="mistral", attention_dropout=0.0, hidden_act="no_such_activation")


def wrong_shape(folder: Path) -> None:
    edit_config(folder, intermediate_size=57)


@pytest.mark.parametrize("damage", [missing_source, truncated, unknown_family, unsupported_field, wrong_shape])
def test_bad_sources(copied: Path, tmp_path: Path, damage: Any) -> None:
    damage(copied)
    result = run("convert", copied, tmp_path / "out")
    assert result.exit_code == Exit.INPUT
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
    code, error = run_json("convert", copied, tmp_path / "out")
    assert code == error["exit_code"] == Exit.INPUT
    assert error["message"]


def test_unknown_family_is_told_the_nearest(copied: Path, tmp_path: Path) -> None:
    unknown_family(copied)
    _, error = run_json("convert", copied, tmp_path / "out")
    assert error["error"] == "UnknownFamily"
    assert "'llama'" in error["message"]


def test_what_a_family_cannot_say(tmp_path: Path) -> None:
    config = LlmArchConfig(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=6,
        position_encoding="alibi",
        max_position_embeddings=64,
    )
    LlmArchForCausalLM(config).save_pretrained(tmp_path / "ours")
    code, error = run_json("export", tmp_path / "ours", tmp_path / "out", "--family", "llama")
    assert (code, error["error"]) == (Exit.NOT_EXPRESSIBLE, "NotExpressible")
    assert "position_encoding" in error["message"]


def test_occupied_destination(llama: Path, ours: Path, tmp_path: Path) -> None:
    occupied = Path(shutil.copytree(ours, tmp_path / "occupied"))
    shift_one_weight(occupied)
    before = (occupied / WEIGHTS).read_bytes()
    code, error = run_json("convert", llama, occupied)
    assert (code, error["error"]) == (Exit.DESTINATION, "DestinationError")
    assert "--overwrite" in error["message"]
    assert (occupied / WEIGHTS).read_bytes() == before
    assert run("convert", llama, occupied, "--overwrite").exit_code == Exit.OK
    assert (occupied / WEIGHTS).read_bytes() == (ours / WEIGHTS).read_bytes()


def test_pickles_need_permission(copied: Path, tmp_path: Path) -> None:
    torch.save(load_file(copied / WEIGHTS), copied / "pytorch_model.bin")
    (copied / WEIGHTS).unlink()
    code, error = run_json("convert", copied, tmp_path / "out")
    assert code == Exit.INPUT
    assert "--allow-pickle" in error["message"]
    assert run("convert", copied, tmp_path / "out", "--allow-pickle").exit_code == Exit.OK


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = run("convert", tmp_path / "nothing", tmp_path / "out", "--debug")
    assert result.exit_code == Exit.INPUT
    assert "Traceback" in result.stderr


def test_defects_have_their_own_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def defective(*args: object, **options: object) -> None:
        raise KeyError("layer")

    monkeypatch.setattr(hf_llmarch.conversion, "convert", defective)
    result = run("convert", tmp_path, tmp_path / "out")
    assert result.exit_code == Exit.INTERNAL
    assert "--debug" in result.stderr


def test_a_config_of_ours_that_cannot_be(ours: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(ours, tmp_path / "damaged"))
    edit_config(damaged, norm_placement="middle")
    code, error = run_json("export", damaged, tmp_path / "out")
    assert code == Exit.INPUT
    assert "norm_placement" in error["message"]


@pytest.mark.parametrize("arguments", [("convert",), ("nonsense",), ("verify", "a", "b", "--new-tokens", "-1")])
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (Exit.USAGE, "")


def test_switches() -> None:
    code, answer = run_json("switches")
    rows = {row["name"]: row for row in answer["switches"]}
    assert code == 0
    assert rows.keys() == {field.name for field in LlmArchConfig.switches()}
    assert rows["norm_placement"] == {
        "topic": "norm",
        "name": "norm_placement",
        "type": "pre | post | sandwich | branch",
        "default": "pre",
        "needs": None,
        "doc": rows["norm_placement"]["doc"],
    }
    assert rows["sliding_window"]["type"] == "int | null"
    topics = list(dict.fromkeys(row["topic"] for row in answer["switches"]))
    assert topics[:3] == ["size", "attention", "position"]


def test_what_a_switch_needs_is_told() -> None:
    _, answer = run_json("switches")
    needs = {row["name"]: row["needs"] for row in answer["switches"]}
    assert needs["alibi_bias_max"] == "position_encoding='alibi'"
    with pytest.raises(StrictDataclassError, match=needs["alibi_bias_max"]):
        LlmArchConfig(alibi_bias_max=4)
    LlmArchConfig(alibi_bias_max=4, position_encoding="alibi")


def test_switches_of_a_topic() -> None:
    _, answer = run_json("switches", "norm")
    assert {row["topic"] for row in answer["switches"]} == {"norm"}
    _, answer = run_json("switches", "softcapping")
    assert [row["name"] for row in answer["switches"]] == ["attn_logit_softcapping", "final_logit_softcapping"]
    result = run("switches", "nonsense")
    assert result.exit_code == Exit.USAGE
    assert "attention, position" in result.stderr


def test_families() -> None:
    code, answer = run_json("families")
    classes = {row["name"]: row["architectures"] for row in answer["families"]}
    assert code == 0
    assert classes["llama"] == ["LlamaForCausalLM"]
    assert {"gpt2", "gpt_neox", "gemma2", "olmo2", "qwen3", "mistral"} <= classes.keys()
    assert all(row["covers"] for row in answer["families"])


def test_exit_codes_do_not_move() -> None:
    numbers = {code.name: code.value for code in EXIT_MEANING}
    kinds = ("OK", "DIFFERENT", "USAGE", "INPUT", "NOT_EXPRESSIBLE", "DESTINATION")
    assert numbers == {**{name: i for i, name in enumerate(kinds)}, "INTERNAL": 70, "INTERRUPTED": 130}


def test_as_a_module() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "hf_llmarch", "--help"], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert all(name in help_text for name in ("convert", "export", "verify", "families", "switches", "Exit codes"))


def test_inspect(tmp_path: Path) -> None:
    from hf_llmarch import LlmArchConfig, LlmArchForCausalLM

    kinds = ["sliding_attention", "full_attention"]
    config = LlmArchConfig(
        vocab_size=99, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        head_dim=10, intermediate_size=34, sliding_window=4, layer_types=kinds, nope_layers=[1],
    )  # fmt: skip
    LlmArchForCausalLM(config).save_pretrained(tmp_path / "model")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "model"), "--length", "9", "--json"])
    assert result.exit_code == 0, result.output
    sliding, full = json.loads(result.stdout)["layers"]
    assert (sliding["kind"], sliding["direct"], sliding["reach"]) == ("sliding_attention", 4, 4)
    assert (full["kind"], full["positions"], full["direct"], full["reach"]) == ("full_attention", "none", 9, 9)


@pytest.mark.parametrize(
    ("command", "forbidden"),
    [
        (["--help"], ("torch", "transformers", "numpy")),
        (["convert", "--help"], ("torch", "transformers", "numpy")),
        (["families"], ("torch", "transformers", "numpy")),
        (["switches"], ("transformers.modeling_utils", "hf_llmarch.model.modeling_llmarch")),
        (["inspect", "llama-3-8b"], ("transformers.modeling_utils", "hf_llmarch.model.modeling_llmarch")),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_command_imports_only_what_it_needs(command: list[str], forbidden: tuple[str, ...]) -> None:
    """Start-up time is imports: torch takes over a second, a model class three."""
    code = f"""
import sys
from hf_llmarch.cli import main
sys.argv = ["hf-llmarch", *{command!r}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print([name for name in {forbidden!r} if name in sys.modules], file=sys.stderr)
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stderr.strip() == "[]"
