"""A saved folder loads where the package is not installed, from the code that travels with it."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import MIXED, MLA, YARN, text, tiny_model

import hf_llmarch
from hf_llmarch.compat import BEFORE, OLDEST, code_files
from hf_llmarch.configuration_llmarch import AUTO_MAP

pytestmark = pytest.mark.core

SOURCE = Path(hf_llmarch.__file__).parent

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mla": {**MLA, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}},
    "alibi": {"position_encoding": "alibi", "norm_type": "layernorm", "parallel_block": True, **MIXED},
    "t5": {"position_encoding": "relative_bias", "swish_beta": "learned", "tie_word_embeddings": True},
}

# The package cannot be imported, however it is installed: a path, an editable finder, a namespace.
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_llmarch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
try:
    import hf_llmarch
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("the package was importable")
"""

LOADED_ELSEWHERE = """
import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

transformers.logging.set_verbosity_error()
ids = torch.tensor(json.loads(Path("ids.json").read_text()))
for folder in sorted(path for path in Path("models").iterdir()):
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    outputs = {}
    for auto in auto_map:
        loaded = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
        assert type(loaded).__module__.startswith("transformers_modules."), type(loaded)
        assert type(loaded).__name__ == auto_map[auto].split(".")[1]
        if auto == "AutoConfig":
            continue
        with torch.no_grad():
            result = loaded.eval()(ids)
        outputs[auto] = result.logits if "logits" in result else result.last_hidden_state
        if auto == "AutoModelForCausalLM":
            written = loaded.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
            outputs["written"] = written.float()
            loaded.save_pretrained(Path("again") / folder.name)
    save_file({name: tensor.contiguous() for name, tensor in outputs.items()}, f"{folder.name}.safetensors")
for folder in sorted(Path("again").iterdir()):
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        save_file({"logits": again(ids).logits.contiguous()}, f"again-{folder.name}.safetensors")
print("loaded", sorted(outputs))
"""


def run(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh process in a folder, with a cache of remote code of its own, and no input to answer prompts with."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_CURRENT_TEST")}
    return subprocess.run(
        [sys.executable, "-c", code],
        **{"cwd": folder, "capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": 300},
        env={**kept, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "HF_MODULES_CACHE": str(folder / "modules")}
        | environment,
    )


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with saved models, and what a process without the package made of them."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for name, switches in MODELS.items():
        tiny_model(**switches).save_pretrained(folder / "models" / name)
    (folder / "ids.json").write_text(json.dumps(text().tolist()))
    finished = run(BLOCKED + LOADED_ELSEWHERE, folder)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "loaded" in finished.stdout
    yield folder


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_loads_without_the_package(name: str, elsewhere: Path) -> None:
    from safetensors.torch import load_file

    model = tiny_model(**MODELS[name])
    theirs = load_file(elsewhere / f"{name}.safetensors")
    assert torch.equal(theirs["AutoModelForCausalLM"], model(text()).logits)
    assert torch.equal(theirs["AutoModel"], model.model(text()).last_hidden_state)
    written = model.generate(text(), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(theirs["written"].long(), written)
    assert {"AutoConfig", *theirs} - {"written"} == set(AUTO_MAP)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_saved_again_from_there(name: str, elsewhere: Path) -> None:
    """The second copy has the same code and loads again, with the package and without it."""
    from safetensors.torch import load_file

    for file in code_files():
        assert (elsewhere / "again" / name / file.name).read_bytes() == file.read_bytes(), file.name
    theirs = load_file(elsewhere / f"again-{name}.safetensors")["logits"]
    assert torch.equal(theirs, tiny_model(**MODELS[name])(text()).logits)
    here = transformers.AutoModelForCausalLM.from_pretrained(elsewhere / "again" / name)
    assert type(here) is hf_llmarch.LlmArchForCausalLM
    assert torch.equal(here(text()).logits, theirs)


def test_the_installed_package_wins_over_the_folder(elsewhere: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(elsewhere / "models" / "plain", trust_remote_code=True)
    assert type(model) is hf_llmarch.LlmArchForCausalLM


def test_a_saved_folder_holds_the_code_that_travels_and_no_more(elsewhere: Path) -> None:
    saved = {path.name for path in (elsewhere / "models" / "plain").glob("*.py")}
    assert saved == {path.name for path in code_files()}


def test_auto_classes_know_ours() -> None:
    for auto, reference in AUTO_MAP.items():
        ours = getattr(hf_llmarch, reference.split(".")[1])
        mapping = getattr(transformers, auto)
        if auto == "AutoConfig":
            assert type(mapping.for_model("llmarch")) is ours
        else:
            assert type(mapping.from_config(tiny_model().config)) is ours


def test_importing_twice_is_idempotent(tmp_path: Path) -> None:
    """A reload, as a notebook does, and another package that took the name before."""
    code = """
import importlib, sys
import transformers
import hf_llmarch
hf_llmarch._register()
importlib.reload(hf_llmarch)
assert type(transformers.AutoConfig.for_model("llmarch")) is hf_llmarch.LlmArchConfig
assert type(transformers.AutoConfig.for_model("llama")).__name__ == "LlamaConfig"
first = hf_llmarch
for name in [name for name in sys.modules if name.split(".")[0] == "hf_llmarch"]:
    del sys.modules[name]
import hf_llmarch
assert hf_llmarch is not first
config = transformers.AutoConfig.for_model("llmarch", hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
assert type(config) is hf_llmarch.LlmArchConfig
assert type(transformers.AutoModelForCausalLM.from_config(config)) is hf_llmarch.LlmArchForCausalLM
print("twice")
"""
    finished = run(code, tmp_path, PYTHONPATH=str(SOURCE.parent))
    assert finished.stdout.strip() == "twice", finished.stderr[-2000:]


def import_beside(version: str, folder: Path) -> str:
    """The last line of what `import hf_llmarch` says beside a transformers of which nothing but the version can be read:
    in another release, any name may be missing."""
    (folder / "transformers").mkdir()
    (folder / "transformers" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    finished = run("import hf_llmarch", folder, PYTHONPATH=os.pathsep.join((str(folder), str(SOURCE.parent))))
    assert finished.returncode == 1
    return finished.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("version", ["4.57.0", "5.15.1", "6.0.0"])
def test_an_unsupported_transformers_is_refused_in_one_sentence(version: str, tmp_path: Path) -> None:
    message = import_beside(version, tmp_path)
    assert message.startswith(f"ImportError: hf_llmarch supports transformers >={OLDEST},<{BEFORE} and found {version}:")
    assert message.endswith(".")
    assert "pip install" in message


@pytest.mark.parametrize("version", [str(OLDEST), "5.30.0.dev0"])
def test_supported_releases_and_their_development_versions_are_not(version: str, tmp_path: Path) -> None:
    message = import_beside(version, tmp_path)
    assert "supports" not in message
    assert message.startswith(("ImportError", "ModuleNotFoundError"))


# -- what makes the code fit to travel ------------------------------------------------------------------------------------

ALLOWED = {"torch", "transformers", "huggingface_hub", "packaging", *sys.stdlib_module_names}


def test_the_files_that_travel() -> None:
    names = {path.name for path in code_files()}
    assert {"modeling_llmarch.py", "configuration_llmarch.py", "compat.py", "attention.py", "positions.py"} <= names
    assert not names & {"__init__.py", "cli.py", "demo.py"}
    assert all(path.parent == SOURCE for path in code_files())


@pytest.mark.parametrize("path", code_files(), ids=lambda path: path.name)
def test_flat_imports_only(path: Path) -> None:
    """The host finds what to copy by a pattern on the text: `from .name import x` alone, anywhere in a file."""
    source = path.read_text()
    assert not re.search(r"^\s*from\s+\.\s+import", source, re.MULTILINE)
    assert not re.search(r"^\s*from\s+\.\w+\.", source, re.MULTILINE)
    assert not re.search(r"^\s*(from|import)\s+\.\.", source, re.MULTILINE)
    assert not re.search(r"^\s*(from|import)\s+hf_llmarch", source, re.MULTILINE)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1
            assert node.module is not None
            assert (SOURCE / f"{node.module}.py").exists()
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.module.split(".")[0] in ALLOWED, node.module
        elif isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= ALLOWED


def test_the_config_module_keeps_its_annotations() -> None:
    """As strings they would be checked by nobody."""
    assert "from __future__ import annotations" not in (SOURCE / "configuration_llmarch.py").read_text().split('"""', 2)[2]
