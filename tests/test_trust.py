"""Killed runs, runs at once, full disks, sources that change or lie: nothing is lost, nothing leaked, nothing run."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from hf_llmarch.cli.app import Exit, app
from hf_llmarch.conversion import cards, convert, destination, errors, export, verify
from tiny import redraw

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers and few words, so that every run is short."""
    folder = tmp_path_factory.mktemp("pristine") / "llama"
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    redraw(LlamaForCausalLM(LlamaConfig(vocab_size=31, max_position_embeddings=64, **sizes))).save_pretrained(folder)
    (folder / "LICENSE").write_text("Mine.\n")
    return folder


@pytest.fixture(scope="module")
def converted(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "ours"
    convert(pristine, folder, progress=False)
    return folder


@pytest.fixture
def source(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "source"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# -- the destination ---------------------------------------------------------------------------------------------------


def interfere(act: Callable[[], object]) -> Callable[[int, int], None]:
    """A progress function that acts once, in the middle of a conversion."""
    done = False

    def tell(nbytes: int, total: int) -> None:
        nonlocal done
        if not done and nbytes > total // 3:
            done = True
            act()

    return tell


@pytest.mark.parametrize("swaps", [True, False], ids=["exchange", "two-renames"])
@pytest.mark.parametrize("was_there", ["nothing", "an empty folder", "a model"])
def test_what_appears_in_the_destination_meanwhile_is_kept(
    source: Path, converted: Path, out: Path, was_there: str, swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:
        monkeypatch.setattr(destination, "exchange", lambda one, other: False)
    if was_there == "an empty folder":
        out.mkdir()
    elif was_there == "a model":
        shutil.copytree(converted, out)

    def fill() -> None:
        out.mkdir(exist_ok=True)
        (out / "thesis.tex").write_text("years of work")

    before = contents(out)
    with pytest.raises(errors.DestinationError, match="meanwhile, and is left as it is"):
        convert(source, out, overwrite=True, progress=interfere(fill))
    assert contents(out) == {**before, "thesis.tex": b"years of work"}
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("swaps", [True, False], ids=["exchange", "two-renames"])
def test_what_appears_at_the_last_moment_is_kept(
    source: Path, converted: Path, out: Path, swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last look and the rename itself."""
    shutil.copytree(converted, out)
    swap = destination.exchange

    def exchange(one: Path, other: Path) -> bool:
        (out / "thesis.tex").write_text("years of work")
        return swaps and swap(one, other)

    monkeypatch.setattr(destination, "exchange", exchange)
    with pytest.raises(errors.DestinationError, match=r"thesis\.tex"):
        convert(source, out, overwrite=True, progress=False)
    assert contents(out) == {**contents(converted), "thesis.tex": b"years of work"}
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "source"]


NO_MODELS: dict[str, Callable[[Path], object]] = {
    "a config of another kind": lambda f: (f / "config.json").write_text('{"webpack": true}'),
    "a config and no weights": lambda f: (f / "config.json").write_text('{"model_type": "llama"}'),
    "a config that is a list": lambda f: (f / "config.json").write_text("[]"),
    "a config nested without end": lambda f: (f / "config.json").write_text("[" * 100_000),
}
MORE_THAN_A_MODEL = {
    "notes.txt": "mine",
    ".git/HEAD": "ref: refs/heads/main",
    "runs/log.csv": "1,2",
    "kept_aside/deep/notes.txt": "mine",
    "train.py": "print()",
    "checkpoint-100/model.safetensors": "",
}


@pytest.mark.parametrize("case", NO_MODELS)
def test_overwrite_is_for_models(source: Path, out: Path, case: str) -> None:
    out.mkdir()
    NO_MODELS[case](out)
    before = contents(out)
    with pytest.raises(errors.DestinationError, match="no model folder"):
        convert(source, out, overwrite=True, progress=False)
    assert contents(out) == before


@pytest.mark.parametrize("name", MORE_THAN_A_MODEL)
def test_overwrite_names_what_is_not_the_models(source: Path, converted: Path, out: Path, name: str) -> None:
    shutil.copytree(converted, out)
    (out / name).parent.mkdir(exist_ok=True, parents=True)
    (out / name).write_text(MORE_THAN_A_MODEL[name])
    before = contents(out)
    with pytest.raises(errors.DestinationError, match=f"holds more than a model: {name}"):
        convert(source, out, overwrite=True, progress=False)
    assert contents(out) == before


def test_overwrite_replaces_what_the_source_brings_again(source: Path, out: Path) -> None:
    (source / "notes.txt").write_text("of the model")
    convert(source, out, progress=False)
    (source / "notes.txt").write_text("of the model, revised")
    convert(source, out, overwrite=True, progress=False)
    assert (out / "notes.txt").read_text() == "of the model, revised"


def test_an_export_replaces_a_converted_folder(converted: Path, pristine: Path, out: Path) -> None:
    shutil.copytree(converted, out)
    export(converted, out, overwrite=True, progress=False)
    assert load_file(out / WEIGHTS).keys() == load_file(pristine / WEIGHTS).keys()
    assert not list(out.glob("*.py"))


def test_a_source_that_leads_into_the_destination_is_kept(source: Path, out: Path, tmp_path: Path) -> None:
    """The folder is another one, and its weights are links."""
    shutil.copytree(source, out)
    linked = tmp_path / "linked"
    shutil.copytree(source, linked)
    (linked / WEIGHTS).unlink()
    (linked / WEIGHTS).symlink_to(out / WEIGHTS)
    before = contents(out)
    with pytest.raises(errors.DestinationError, match=r"holds, the source .*linked/model\.safetensors"):
        convert(linked, out, overwrite=True, progress=False)
    assert contents(out) == before


# What fails after the weights are written, by the file or field that does it.
LATE_FAILURES: dict[str, Callable[[Path], object]] = {
    "a card of the wrong type": lambda f: (f / "README.md").write_text("---\ntags: [[1]]\n---\n# Odd\n"),
    "a licence that is no text": lambda f: (f / "README.md").write_text('---\nlicense: "\\ud800"\n---\n# Odd\n'),
    "architectures": lambda f: edit_json(f / "config.json", architectures={"a": 1}),
    "rms_norm_eps": lambda f: edit_json(f / "config.json", rms_norm_eps=float("nan")),
}


@pytest.mark.parametrize("case", LATE_FAILURES)
def test_a_destination_is_whole_or_as_it_was(source: Path, converted: Path, out: Path, case: str) -> None:
    shutil.copytree(converted, out)
    before = contents(out)
    LATE_FAILURES[case](source)
    try:
        convert(source, out, overwrite=True, progress=False)
    except errors.ConversionError:
        assert contents(out) == before
    else:
        assert cards.is_ours(out / "README.md")
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("there", [False, True], ids=["new", "replaced"])
def test_a_difference_never_replaces_a_model(
    source: Path, converted: Path, out: Path, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that is not one, as a defect of ours would make it."""
    if there:
        shutil.copytree(converted, out)
    before = contents(out)
    write = cards.write

    def spoil(folder: Path, **given: Any) -> Path:
        tensors = load_file(folder / WEIGHTS)
        tensors["model.norm.weight"][3] += 1
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        return write(folder, **given)

    monkeypatch.setattr(cards, "write", spoil)
    result = CliRunner().invoke(app, ["convert", str(source), str(out), "--verify", "--overwrite", "--json"])
    assert result.exit_code == Exit.DIFFERENT, result.output
    if there:
        assert contents(out) == before
        assert "left as it was" in json.loads(result.stdout)["message"]
    else:
        assert json.loads(result.stdout)["certificate"]["ours"] == str(out)
        assert "logits differ" in (out / "README.md").read_text()


def test_a_comparison_that_does_not_fit_is_refused_before_it_begins(
    source: Path, converted: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both models hold the same numbers, at four bytes each."""
    count = sum(tensor.numel() for tensor in load_file(source / WEIGHTS).values())
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=8 * count))
    assert verify(source, converted, progress=False).ok
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=8 * count - 1))
    with pytest.raises(errors.ConversionError, match="for both in float32"):
        convert(source, out, verify=True, progress=False)
    assert [path.name for path in out.parent.iterdir()] == ["source"]


# -- runs at once, and killed ones -------------------------------------------------------------------------------------

RUN = """
import os, sys, time
from pathlib import Path
from hf_llmarch.conversion import {task} as run
from hf_llmarch.conversion.errors import DestinationError
from hf_llmarch.conversion import cards, destination, engine, plans, certificate
source, out, barrier = sys.argv[1:4]
print("ready", flush=True)
while not os.path.exists(barrier):
    time.sleep(0.001)
try:
    run(source, out, progress=False, overwrite={overwrite})
except DestinationError as error:
    print(error)
    sys.exit(5)
"""


def started(task: str, source: Path, out: Path, barrier: Path, overwrite: bool = False) -> subprocess.Popen[str]:
    code = RUN.format(task=task, overwrite=overwrite)
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(source), str(out), str(barrier)], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    return run


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_runs_at_once_make_one_destination(source: Path, converted: Path, out: Path, count: int) -> None:
    runs = [started("convert", source, out, out.parent / "go") for _ in range(count)]
    (out.parent / "go").touch()
    said = {run: run.communicate()[0] for run in runs}
    refused = [text for run, text in said.items() if run.returncode == 5]
    assert sorted(run.returncode for run in runs) == [0, *[5] * (count - 1)], said
    assert all("another run (process" in text or "not empty" in text for text in refused)
    assert contents(out).keys() == contents(converted).keys()
    assert (out / WEIGHTS).read_bytes() == (converted / WEIGHTS).read_bytes()
    assert sorted(path.name for path in out.parent.iterdir()) == ["go", "out", "source"]


def test_a_second_run_is_told_whose_the_destination_is(source: Path, out: Path) -> None:
    def again() -> None:
        with pytest.raises(errors.DestinationError, match=rf"another run \(process {os.getpid()}\)"):
            convert(source, out, progress=False)

    convert(source, out, progress=interfere(again))
    assert (out / WEIGHTS).is_file()


def killed_and_repeated(
    tmp_path: Path, source: Path, task: str, overwrite: bool, moments: Iterator[float], expected: dict[str, bytes]
) -> None:
    """Kill a run at each moment (seconds after its start): what was there stays or the new one is there whole; and the
    same run afterwards gives the same bytes."""
    old = tmp_path / "old"
    for i, moment in enumerate(moments):
        place = tmp_path / f"place{i}"
        place.mkdir()
        out = place / "out"
        if overwrite:
            shutil.copytree(old, out)
        before = contents(out) if out.exists() else {}
        run = started(task, source, out, place / "go", overwrite)
        (place / "go").touch()
        time.sleep(moment)
        run.send_signal(signal.SIGKILL)
        run.wait()
        assert same_model(contents(out), before) or same_model(contents(out), expected)
        run_again = {"convert": convert, "export": export}[task]
        if overwrite or not out.exists():
            run_again(source, out, overwrite=overwrite, progress=False)
        assert same_model(contents(out), expected)
        assert sorted(path.name for path in place.iterdir()) == ["go", "out"]


def same_model(found: dict[str, bytes], expected: dict[str, bytes]) -> bool:
    """All but the card, which is called like its folder."""
    return {k: v for k, v in found.items() if k != "README.md"} == {
        k: v for k, v in expected.items() if k != "README.md"
    }


@pytest.mark.parametrize(
    ("task", "overwrite", "count"),
    [
        ("convert", True, 2),
        *(pytest.param(*case, 14, marks=pytest.mark.slow) for case in (("convert", False), ("convert", True))),
        pytest.param("export", True, 14, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_loses_nothing_and_can_be_repeated(
    source: Path, converted: Path, tmp_path: Path, task: str, overwrite: bool, count: int
) -> None:
    given = source if task == "convert" else converted
    began = time.perf_counter()
    {"convert": convert, "export": export}[task](given, tmp_path / "whole", progress=False)
    took = time.perf_counter() - began
    shutil.copytree(converted, tmp_path / "old")
    tensors = load_file(tmp_path / "old" / WEIGHTS)
    save_file({n: t + 1 for n, t in tensors.items()}, tmp_path / "old" / WEIGHTS, metadata={"format": "pt"})
    moments = (random.uniform(0, 1.5 * took) for _ in range(count))
    killed_and_repeated(tmp_path, given, task, overwrite, moments, contents(tmp_path / "whole"))


@pytest.mark.parametrize("swaps", [True, False], ids=["exchange", "two-renames"])
@pytest.mark.parametrize("step", range(1, 7))
def test_killed_between_any_two_steps_of_the_replacement(
    source: Path, converted: Path, out: Path, swaps: bool, step: int
) -> None:
    """The process ends at the n-th system call that gives something another name, or just after the last."""
    shutil.copytree(converted, out)
    tensors = load_file(out / WEIGHTS)
    save_file({n: t + 1 for n, t in tensors.items()}, out / WEIGHTS, metadata={"format": "pt"})
    before, expected = contents(out), contents(converted)
    process = os.fork()
    if process == 0:
        left = step

        def count(function: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*arguments: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    os._exit(9)
                return function(*arguments)

            return counted

        destination.os.rename, destination.spare = count(os.rename), count(destination.spare)
        destination.exchange = count(destination.exchange if swaps else lambda one, other: False)
        destination.recover = count(destination.recover)
        convert(source, out, overwrite=True, progress=False)
        os._exit(0)
    os.waitpid(process, 0)
    claim = out.with_name(".out.incomplete")
    there = contents(out) if out.exists() else contents(claim / "old")
    assert same_model(there, before) or same_model(there, expected)
    with pytest.raises(errors.DestinationError, match="not empty"):
        convert(source, out, progress=False)  # which puts the old one back, if it is not in its place
    assert same_model(contents(out), before) or same_model(contents(out), expected)
    convert(source, out, overwrite=True, progress=False)
    assert same_model(contents(out), expected)
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "source"]


def test_a_replaced_model_that_was_given_something_is_not_removed(source: Path, converted: Path, out: Path) -> None:
    """As a run leaves it that was killed after it had put the new model in place."""
    shutil.copytree(converted, out)
    old = out.with_name(".out.incomplete") / "old"
    shutil.copytree(converted, old)
    (old / "thesis.tex").write_text("years of work")
    for _ in range(2):
        with pytest.raises(errors.DestinationError, match=r"thesis\.tex: move this away"):
            convert(source, out, overwrite=True, progress=False)
    (old / "thesis.tex").rename(out.parent / "thesis.tex")
    convert(source, out, overwrite=True, progress=False)
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "source", "thesis.tex"]


# -- sources that change, disks that are full --------------------------------------------------------------------------


def rewrite(path: Path) -> None:
    tensors = load_file(path)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


CHANGES: dict[str, Callable[[Path], object]] = {
    WEIGHTS: lambda f: rewrite(f / WEIGHTS),
    "config.json": lambda f: edit_json(f / "config.json", rms_norm_eps=1e-3),
    "LICENSE": lambda f: (f / "LICENSE").write_text("Yours.\n"),
    "NOTICE": lambda f: (f / "NOTICE").write_text("New.\n"),
}


@pytest.mark.parametrize("file", CHANGES)
def test_a_source_that_changes_meanwhile_is_noticed(source: Path, out: Path, file: str) -> None:
    with pytest.raises(errors.CheckpointError, match=f"changed while it was read: {file}"):
        convert(source, out, progress=interfere(lambda: CHANGES[file](source)))
    assert [path.name for path in out.parent.iterdir()] == ["source"]


FULL_AT = ["companion", "weights", "code", "config", "generation", "card", "kept card", "certificate", "flush", "lock"]


@pytest.mark.parametrize("point", FULL_AT)
def test_a_disk_that_is_full_at_any_point(
    source: Path, converted: Path, out: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "README.md").write_text("# Theirs\n")
    edit_json(source / "config.json", do_sample=True, temperature=0.5)
    (source / "generation_config.json").unlink(missing_ok=True)
    shutil.copytree(converted, out)
    before = contents(out)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    reached = []

    def fail_at(home: Any, name: str, when: Callable[..., bool] = lambda *given: True) -> None:
        real = getattr(home, name)

        def failing(*given: Any, **more: Any) -> Any:
            if when(*given):
                reached.append(name)
                raise full
            return real(*given, **more)

        monkeypatch.setattr(home, name, failing)

    def named(wanted: str) -> Callable[..., bool]:
        return lambda *given: any(Path(str(one)).name == wanted for one in given[:2])

    from hf_llmarch import LlmArchConfig

    places: dict[str, Callable[[], None]] = {
        "companion": lambda: fail_at(shutil, "copyfile", named("LICENSE")),
        "weights": lambda: fail_at(destination, "save_file"),
        "code": lambda: fail_at(shutil, "copyfile", named("modeling_llmarch.py")),
        "config": lambda: fail_at(LlmArchConfig, "save_pretrained"),
        "generation": lambda: fail_at(Path, "write_text", named("generation_config.json")),
        "card": lambda: fail_at(Path, "write_text", named("README.md")),
        "kept card": lambda: fail_at(Path, "rename", named("README.md")),
        "certificate": lambda: fail_at(Path, "write_text", named("certificate.json")),
        "flush": lambda: fail_at(os, "fsync"),
        "lock": lambda: fail_at(os, "write"),
    }
    places[point]()
    result = CliRunner().invoke(app, ["convert", str(source), str(out), "--overwrite", "--verify", "--json"])
    assert reached, "the point was not passed"
    assert result.exit_code == Exit.DESTINATION, result.output
    assert "No space left" in json.loads(result.stdout)["message"]
    assert contents(out) == before
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "source"]


# -- permissions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "folder"), [(0o600, 0o700), (0o640, 0o750), (0o644, 0o755)])
def test_nobody_can_read_more_than_before(source: Path, out: Path, file: int, folder: int) -> None:
    for path in source.iterdir():
        path.chmod(file)
    source.chmod(folder)
    previous = os.umask(0o022)
    try:
        convert(source, out, progress=False)
    finally:
        os.umask(previous)
    modes = {path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()}
    assert (modes, out.stat().st_mode & 0o777) == ({file}, folder)


def test_a_private_destination_stays_private(source: Path, out: Path) -> None:
    out.mkdir(mode=0o700)
    convert(source, out, progress=False)
    convert(source, out, overwrite=True, progress=False)
    assert {path.stat().st_mode & 0o077 for path in (out, *out.rglob("*"))} == {0}


# -- hostile input -----------------------------------------------------------------------------------------------------

DEEP = "[" * 100_000 + "]" * 100_000
BOMB = (
    "---\na0: &a0 [x, x]\n"
    + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 30))
    + "tags: *a29\n---\n"
)
# JSON of every kind that is no object.
NO_OBJECTS = {"list": "[1]", "number": "1e30", "null": "null", "text": '"x"', "deep": DEEP, "cut": '{"a": '}


def config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "config.json", **changes)


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def link(name: str, target: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return make


def module_link(folder: Path) -> None:
    (folder / "modules.json").write_text('[{"path": "1_Pooling"}]')
    (folder / "1_Pooling").mkdir()
    link("1_Pooling/config.json", "/etc/hostname")(folder)


def pickled(content: Any) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        torch.save(content, folder / "pytorch_model.bin")

    return make


def huge_number(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"][0] = 1e30
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


# Name -> what is done to a source, what the message names, and more arguments. All end in exit 3.
HOSTILE: dict[str, tuple[Callable[[Path], object], str, tuple[str, ...]]] = {
    **{
        f"{file} is {kind}": (text(file, content), file, ())
        for file in ("config.json", "generation_config.json", "modules.json")
        for kind, content in NO_OBJECTS.items()
        if (file, kind) != ("modules.json", "list")
    },
    "modules.json lists numbers": (text("modules.json", "[1]"), "modules.json", ()),
    **{
        f"the index is {kind}": (
            lambda f, content=content: ((f / WEIGHTS).unlink(), (f / f"{WEIGHTS}.index.json").write_text(content)),
            "index.json",
            (),
        )
        for kind, content in NO_OBJECTS.items()
    },
    **{
        f"{field} is {value}": (config(**{field: value}), field, ())
        for field, values in {
            "num_hidden_layers": (10**9, 10**30, 1e30, float("nan"), "x", [1]),
            "num_attention_heads": (10**9, 10**30),
            "num_labels": (10**6,),
            "hidden_size": (10**30, float("inf"), "x"),
            "head_dim": (10**30,),
            "vocab_size": (10**30,),
            "rms_norm_eps": (float("nan"), float("-inf"), 10**400),
            "architectures": ({"a": 1}, "x", 7, [1]),
            "model_type": ({}, 1, ["llama"]),
            "dtype": ("int8", 1e30, [1], "x"),
            "torch_dtype": ("uint8", {"a": 1}),
            "quantization_config": ("fp8", [1]),
            "converted_from": (1, {"a": 1}),
        }.items()
        for value in values
    },
    "more experts than tensors": (config(model_type="mixtral", num_local_experts=10**6), "num_local_experts", ()),
    "sizes that no tensor has": (config(vocab_size=10**17), "sizes in this config", ()),
    "a config nested deep": (config(a=json.loads("[" * 200 + "]" * 200)), "nested", ()),
    "blocks of no size": (
        config(quantization_config={"quant_method": "fp8", "weight_block_size": 5}),
        "weight_block_size",
        (),
    ),
    **{
        f"{name} leads elsewhere": (link(name, "/etc/hostname"), f"{name} leads out of its folder", ())
        for name in ("notes.txt", "LICENSE", "README.md", "tokenizer.json", "config.json", "generation_config.json")
    },
    "templates lead elsewhere": (link("additional_chat_templates", "/etc/ssl"), "leads out of its folder", ()),
    "a module leads elsewhere": (module_link, "1_Pooling/config.json leads out of its folder", ()),
    "a config in a circle": (link("config.json", "config.json"), "config.json", ()),
    "weights in a circle": (link(WEIGHTS, WEIGHTS), WEIGHTS, ()),
    "a tokenizer of another repository": (
        text("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["them/theirs--tokenization.T", null]}}'),
        "them/theirs--tokenization.T",
        (),
    ),
    "integer keys": (pickled({1: torch.ones(2)}), "pytorch_model.bin", ("--allow-pickle",)),
    "a number beyond the dtype": (huge_number, "model.norm.weight", ("--dtype", "float16")),
    "an empty family": (lambda f: None, "model_type ''", ("--family", "")),
    "an error without end": (config(hidden_act="x" * 10**6), "xxx", ()),
}


def converting(source: Path, out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["convert", str(source), str(out), "--quiet", "--json", *more])
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_input_is_refused_by_name(source: Path, out: Path, case: str) -> None:
    spoil, named, more = HOSTILE[case]
    spoil(source)
    code, answer = converting(source, out, *more)
    assert code == Exit.INPUT, answer
    assert named in answer["message"]
    assert len(answer["message"]) < 5000
    assert [path.name for path in out.parent.iterdir()] == ["source"]


HEADER = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 3) + b"key"
GGUFS = {
    "an array longer than the file": HEADER + struct.pack("<IIQ", 9, 4, 2**40) + bytes(64),
    "an array of texts longer than the file": HEADER + struct.pack("<IIQ", 9, 8, 2**40) + bytes(64),
    "arrays in arrays": HEADER + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 1000,
    "a text longer than the file": HEADER + struct.pack("<IQ", 8, 2**60),
    "more keys than bytes": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
    "more tensors than bytes": b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0),
    "nothing": b"",
}


@pytest.mark.parametrize("case", GGUFS)
def test_a_gguf_cannot_ask_for_more_than_it_holds(out: Path, tmp_path: Path, case: str) -> None:
    (tmp_path / "a.gguf").write_bytes(GGUFS[case])
    began = time.perf_counter()
    code, answer = converting(tmp_path / "a.gguf", out)
    assert (code, "a.gguf" in answer["message"]) == (Exit.INPUT, True), answer
    assert time.perf_counter() - began < 60


def test_what_a_source_calls_itself_is_no_markup(source: Path, out: Path) -> None:
    """Its card, its classes, its files: text stays on its line, in code, and a file's name is any bytes."""
    said = "mit`\\n# Injected\\n<script>|"
    (source / "README.md").write_text(f'---\nlicense: "{said}"\ntags: [[1], chat]\nlanguage: "\\ud800"\n---\n')
    edit_json(source / "config.json", architectures=["LlamaForCausalLM`\n# Injected | <b>"])
    (source / "line\nbreak\x1b[31m.txt").write_text("x")
    Path(os.fsdecode(os.fsencode(source) + b"/no\xff.txt")).write_text("x")
    code, answer = converting(source, out)
    assert code == Exit.OK, answer
    assert "no\udcff.txt" in answer["files"]
    card = (out / "README.md").read_text()
    assert not [line for line in card.splitlines() if line.startswith(("# Injected", "<script>"))]
    assert "`mit' # Injected <script>|`" in card
    data = cards.read_metadata(out / "README.md")
    assert (data["tags"], "language" in data) == (["chat", "llmarch"], False)
    result = CliRunner().invoke(app, ["card", str(out), "--base-model", "a/b\n# Injected", "--json"])
    assert (result.exit_code, "base_model" in json.loads(result.stdout)["message"]) == (Exit.INPUT, True)


def test_a_card_of_references_adds_nothing(source: Path, out: Path) -> None:
    """2 ** 30 tags, in a kilobyte."""
    (source / "README.md").write_text(BOMB)
    assert converting(source, out)[0] == Exit.OK
    assert cards.read_metadata(out / "README.md")["tags"] == ["llmarch"]


def test_code_is_not_carried(source: Path, out: Path) -> None:
    code = ("train.py", "cache.pyc", "lib.so", "run.sh", "state.pkl", "1_Pooling/pool.py", "1_Pooling/.hidden")
    kept = ("notes.txt", "1_Pooling/config.json", "1_Pooling/model.safetensors")
    (source / "1_Pooling").mkdir()
    for name in (*code, *kept):
        (source / name).write_text("{}")
    (source / "modules.json").write_text('[{"path": "1_Pooling"}]')
    convert(source, out, progress=False)
    assert [name for name in code if (out / name).exists()] == []
    assert [name for name in kept if not (out / name).exists()] == []


def test_nothing_is_asked_and_nothing_run(
    source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer with code of its own beside it, and somebody who answers every question with yes."""
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail("a question was asked"))
    convert(source, out, progress=False)
    (out / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["theirs.Tokenizer", null]}}')
    (out / "theirs.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')")
    result = CliRunner().invoke(app, ["inspect", str(out), "--text", "Hello", "--json"], input="y\ny\n")
    assert result.exit_code == Exit.INPUT, result.output
    assert not (tmp_path / "run").exists()


def test_an_interrupt_is_said(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*given: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_llmarch.conversion.engine.write_tensors", interrupt)
    code, answer = converting(source, out)
    assert (code, answer["exit_code"], answer["error"]) == (Exit.INTERRUPTED, Exit.INTERRUPTED, "KeyboardInterrupt")
    assert [path.name for path in out.parent.iterdir()] == ["source"]


ADAPTERS: dict[str, tuple[dict[str, Any], str]] = {
    "rank 0": ({"r": 0}, "rank 0"),
    "a rank that is text": ({"r": "x"}, "'r'"),
    "an alpha without end": ({"lora_alpha": float("inf")}, "lora_alpha"),
    "an expression that never ends": ({"alpha_pattern": {"(q+)+$": 2}}, "alpha_pattern"),
    "an expression that takes long": ({"alpha_pattern": {".*" * 12: 2}}, "alpha_pattern"),
    "no expression": ({"rank_pattern": {"(": 2}}, "rank_pattern"),
    "patterns in a list": ({"alpha_pattern": [1]}, "alpha_pattern"),
    "another kind": ({"peft_type": "LOKR"}, "LOKR"),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_hostile_adapters(source: Path, out: Path, tmp_path: Path, case: str) -> None:
    changes, named = ADAPTERS[case]
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **changes}
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(settings))
    rank = 0 if settings["r"] == 0 else 2
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.ones(rank, 24), name.format("B"): torch.ones(24, rank)}
    save_file(tensors, tmp_path / "lora" / "adapter_model.safetensors")
    code, answer = converting(source, out, "--adapter", str(tmp_path / "lora"))
    assert code == (Exit.NOT_EXPRESSIBLE if case == "another kind" else Exit.INPUT), answer
    assert named in answer["message"]


# -- damage at random --------------------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2, 3, 2**31, 2**63, 10**30, 1e30, -0.5, float("nan"), float("inf"), "", "x", "auto"]),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.sampled_from(["a", "0", "rope_type", "factor", "family"]), st.integers(-1, 9), max_size=2),
)
FIELDS = [
    *("architectures", "attention_bias", "dtype", "head_dim", "hidden_act", "hidden_size", "id2label", "label2id"),
    *("initializer_range", "intermediate_size", "layer_types", "max_position_embeddings", "mlp_bias", "model_type"),
    *("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "num_labels", "pad_token_id", "problem_type"),
    *("eos_token_id", "quantization_config", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta"),
    *("tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache", "vocab_size", "temperature", "top_k"),
]
LIMIT = 2**30


@settings(
    max_examples=int(os.environ.get("FUZZ", "60")),
    deadline=None,
    derandomize="FUZZ" not in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_damage_is_refused_or_does_no_harm(data: st.DataObject, pristine: Path, tmp_path: Path) -> None:
    """Fields of a config that are anything, and files with bytes exchanged, cut off or repeated: never a defect, never
    the memory of many models, and never a part of a destination."""
    place = tmp_path / str(len(list(tmp_path.iterdir())))
    source, out = place / "source", place / "out"
    shutil.copytree(pristine, source)
    edit_json(source / "config.json", **data.draw(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3)))
    file = source / data.draw(st.sampled_from(["config.json", "generation_config.json", WEIGHTS, "LICENSE"]))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(0, 2))):
        where = data.draw(st.integers(0, min(len(content) - 1, 2000)))
        kind = data.draw(st.sampled_from(["set", "cut", "repeat"]))
        if kind == "set":
            content[where] = data.draw(st.integers(0, 255))
        elif kind == "repeat":
            content[where:where] = content[where : where + 50]
        else:
            del content[max(where, 1) :]
    file.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, answer = converting(source, out)
    assert code in (Exit.OK, Exit.INPUT), answer
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < LIMIT
    assert sorted(path.name for path in place.iterdir()) == (["out", "source"] if code == Exit.OK else ["source"])
    shutil.rmtree(source)
    shutil.rmtree(out, ignore_errors=True)
