"""A saved folder loads where the package is not installed, from the code that travels with it."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import hf_llmarch
from hf_llmarch import LlmArchConfig
from hf_llmarch.model.compat import code_files
from hf_llmarch.model.configuration_llmarch import AUTO_MAP
from hf_llmarch.model.host import SUPPORTED
from tiny import BOTH, ENCODER, MIXED, MLA, MOE, YARN, assert_close, redraw, text, tiny_config

pytestmark = pytest.mark.core

SOURCE = Path(hf_llmarch.__file__).parent

# A folder for each Auto class, and a few more for parts that would be left behind: (the class, the switches).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("AutoModelForCausalLM", {}),
    "mla": ("AutoModelForCausalLM", {**MLA, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}}),
    "alibi": ("AutoModelForCausalLM", {"position_encoding": "alibi", "norm_type": "layernorm", **MIXED}),
    "t5": ("AutoModelForCausalLM", {"position_encoding": "relative_bias", "tie_word_embeddings": True}),
    "experts": ("AutoModelForCausalLM", {**MOE, "num_shared_experts": 1, "swish_beta": "learned"}),
    "masked": ("AutoModelForMaskedLM", {**ENCODER, "pooler": True}),
    "translation": ("AutoModelForSeq2SeqLM", {**BOTH, "position_encoding": "sinusoidal"}),
    "classes": ("AutoModelForSequenceClassification", {"pad_token_id": 0, "classifier_dense": True}),
    "tags": ("AutoModelForTokenClassification", {**ENCODER}),
    "answers": ("AutoModelForQuestionAnswering", {**ENCODER}),
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
transformers.utils.logging.disable_progress_bar()
models = json.loads(Path("models.json").read_text())
inputs = {name: torch.tensor(ids) for name, ids in json.loads(Path("inputs.json").read_text()).items()}

def output(model):
    given = {"input_ids": inputs["input_ids"]}
    if model.config.topology == "encoder-decoder":
        given["decoder_input_ids"] = inputs["decoder_input_ids"]
    with torch.no_grad():
        result = model.eval()(**given)
    for name in ("logits", "start_logits", "last_hidden_state"):
        if name in result:
            return result[name].contiguous()

for name, head in models.items():
    outputs = {}
    for auto in ("AutoConfig", "AutoModel", head):
        loaded = getattr(transformers, auto).from_pretrained(f"models/{name}", trust_remote_code=True)
        assert type(loaded).__module__.startswith("transformers_modules."), type(loaded)
        if auto != "AutoConfig":
            outputs[auto] = output(loaded)
            # Products by processor are the package's: here all are torch's own.
            linears = [part for part in loaded.modules() if type(part).__name__ == "Linear"]
            assert linears and all(type(part).forward is torch.nn.Linear.forward for part in linears)
    loaded.save_pretrained(f"again/{name}")
    again = getattr(transformers, head).from_pretrained(f"again/{name}", trust_remote_code=True)
    outputs["again"] = output(again)
    if head == "AutoModelForCausalLM":
        outputs["written"] = again.generate(inputs["input_ids"], max_new_tokens=5, do_sample=False, pad_token_id=0)
    save_file(outputs, f"{name}.safetensors")
print("loaded")
"""


def inputs(config: LlmArchConfig) -> dict[str, torch.Tensor]:
    given = {"input_ids": text(length=12)}
    return given | {"decoder_input_ids": text(seed=5)} if config.topology == "encoder-decoder" else given


def build(name: str) -> Any:
    """The model of a row of MODELS, here."""
    head, switches = MODELS[name]
    config = tiny_config(**switches, num_labels=3)
    return redraw(getattr(hf_llmarch, AUTO_MAP[head].split(".")[1])(config)).eval()


def run(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh process in a folder, with a cache of remote code of its own, and no input to answer prompts with."""
    # As many threads as here: with another number, sums are added up in another order.
    environment = {"OMP_NUM_THREADS": str(torch.get_num_threads()), **environment}
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_CURRENT_TEST")}
    options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": 300}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        **options,
        env={**kept, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "HF_MODULES_CACHE": str(folder / "modules")}
        | environment,
    )


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with saved models, and what a process without the package made of them."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for name in MODELS:
        build(name).save_pretrained(folder / "models" / name)
    (folder / "models.json").write_text(json.dumps({name: head for name, (head, _) in MODELS.items()}))
    both = {name: ids.tolist() for name, ids in inputs(tiny_config(**BOTH)).items()}
    (folder / "inputs.json").write_text(json.dumps(both))
    finished = run(BLOCKED + LOADED_ELSEWHERE, folder)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.strip() == "loaded"
    return folder


def test_every_auto_class_has_a_folder() -> None:
    assert {"AutoConfig", "AutoModel", *(head for head, _ in MODELS.values())} == set(AUTO_MAP)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_loads_without_the_package_and_is_saved_again_from_there(name: str, elsewhere: Path) -> None:
    model: Any = type(build(name)).from_pretrained(elsewhere / "models" / name).eval()
    theirs = load_file(elsewhere / f"{name}.safetensors")
    given = inputs(model.config)
    result = model(**given)
    expected = result["start_logits" if "start_logits" in result else "logits"]
    # Not bit for bit: with the package, products are by what is fastest on this processor.
    assert_close(theirs[MODELS[name][0]], expected, "backend")
    assert_close(theirs["AutoModel"], model.model(**given).last_hidden_state, "backend")
    assert torch.equal(theirs["again"], theirs[MODELS[name][0]])
    if "written" in theirs:
        written = model.generate(given["input_ids"], max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert torch.equal(theirs["written"], written)


@torch.no_grad()
@pytest.mark.parametrize("name", ["plain", "experts", "translation"])
def test_the_second_copy_has_the_same_code_and_loads_with_the_package(name: str, elsewhere: Path) -> None:
    for file in code_files():
        assert (elsewhere / "again" / name / file.name).read_bytes() == file.read_bytes(), file.name
    built = build(name)
    # Both from files: a model in memory has its weights at other addresses, for which kernels may add in another order.
    first, second = (
        getattr(transformers, MODELS[name][0]).from_pretrained(elsewhere / copy / name) for copy in ("models", "again")
    )
    assert type(second) is type(built)
    expected, saved = built.state_dict(), second.state_dict()
    assert expected.keys() == saved.keys()
    assert all(torch.equal(saved[tensor], value) for tensor, value in expected.items())
    assert torch.equal(second(**inputs(built.config)).logits, first(**inputs(built.config)).logits)


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
            stacks: dict[str, dict[str, Any]] = {"AutoModelForSeq2SeqLM": BOTH, "AutoModelForMaskedLM": ENCODER}
            config = tiny_config(**stacks.get(auto, {}))
            assert type(mapping.from_config(config)) is ours


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
sizes = dict(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
config = transformers.AutoConfig.for_model("llmarch", **sizes)
assert type(config) is hf_llmarch.LlmArchConfig
assert type(transformers.AutoModelForCausalLM.from_config(config)) is hf_llmarch.LlmArchForCausalLM
print("twice")
"""
    finished = run(code, tmp_path, PYTHONPATH=str(SOURCE.parent))
    assert finished.stdout.strip() == "twice", finished.stderr[-2000:]


USES = {
    "a class from transformers": "from transformers import AutoModelForCausalLM as auto; table = auto._model_mapping",
    "a class from its module": """
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as auto
table = auto._model_mapping
""",
    "a table": "from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as table",
    "our model": """
from hf_llmarch import LlmArchForCausalLM
import transformers
table = transformers.AutoModelForCausalLM._model_mapping
""",
}


@pytest.mark.parametrize("use", USES)
def test_our_models_are_imported_when_auto_classes_are_used_and_known_then(use: str, tmp_path: Path) -> None:
    """Not before: a config class of transformers alone imports the module of the Auto classes."""
    code = f"""
import sys
import hf_llmarch
from transformers import LlamaConfig
import transformers.models.auto.modeling_auto
assert "hf_llmarch.model.modeling_llmarch" not in sys.modules
assert "transformers.modeling_utils" not in sys.modules
{USES[use]}
assert table[hf_llmarch.LlmArchConfig] is hf_llmarch.LlmArchForCausalLM
print("known")
"""
    finished = run(code, tmp_path, PYTHONPATH=str(SOURCE.parent))
    assert finished.stdout.strip() == "known", finished.stderr[-2000:]


def import_beside(version: str, folder: Path) -> str:
    """The last line of what importing a class of ours says beside a transformers that has nothing but a version: in
    another release, any name may be missing."""
    install_empty("transformers", version, folder)
    path = os.pathsep.join((str(folder), str(SOURCE.parent)))
    finished = run("from hf_llmarch import LlmArchConfig", folder, PYTHONPATH=path)
    assert finished.returncode == 1
    return finished.stderr.strip().splitlines()[-1]


def install_empty(library: str, version: str, folder: Path) -> None:
    """A release of a library without any content, as pip would leave it."""
    (folder / library).mkdir()
    (folder / library / "__init__.py").write_text(f"__version__ = {version!r}\n")
    metadata = folder / f"{library}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {library}\nVersion: {version}\n")


@pytest.mark.parametrize("version", ["4.57.0", "5.15.1", "6.0.0"])
def test_an_unsupported_transformers_is_refused_in_one_sentence(version: str, tmp_path: Path) -> None:
    message = import_beside(version, tmp_path)
    assert message.startswith(f"ImportError: hf_llmarch 0.1.0 supports transformers >=5.16.1,<6 and found {version}:")
    assert message.endswith(".")
    assert "pip install" in message


@pytest.mark.parametrize("version", ["5.16.1", "5.30.0.dev0"])
def test_supported_releases_and_their_development_versions_are_not(version: str, tmp_path: Path) -> None:
    message = import_beside(version, tmp_path)
    assert "supports" not in message
    assert message.startswith(("ImportError", "ModuleNotFoundError"))


@pytest.mark.parametrize("version", ["2.6.0", "3.0.0"])
def test_an_unsupported_torch_is_refused_in_one_sentence(version: str, tmp_path: Path) -> None:
    code = f"import torch; torch.__version__ = {version!r}; import hf_llmarch"
    finished = run(code, tmp_path, PYTHONPATH=str(SOURCE.parent))
    message = finished.stderr.strip().splitlines()[-1]
    assert message.startswith(f"ImportError: hf_llmarch 0.1.0 supports torch >=2.7.1,<3 and found {version}:")


def test_an_unsupported_peft_is_refused_in_one_sentence(tmp_path: Path) -> None:
    install_empty("peft", "0.18.1", tmp_path)
    finished = run("import hf_llmarch", tmp_path, PYTHONPATH=os.pathsep.join((str(tmp_path), str(SOURCE.parent))))
    message = finished.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError: hf_llmarch 0.1.0 supports peft >=0.19,<1 and found 0.18.1:")


def test_what_is_checked_at_import_is_what_is_asked_for_at_installation() -> None:
    """The version too: pyproject.toml reads it where the code that travels has it."""
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())
    for library, (oldest, before) in SUPPORTED.items():
        assert f"{library}>={oldest},<{before}" in project["project"]["dependencies"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "hf_llmarch.model.host.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", hf_llmarch.__version__)


# -- what makes the code fit to travel --------------------------------------------------------------------------------

ALLOWED = {"torch", "transformers", "huggingface_hub", "packaging", *sys.stdlib_module_names}


def test_the_files_that_travel() -> None:
    names = {path.name for path in code_files()}
    assert {"modeling_llmarch.py", "configuration_llmarch.py", "compat.py", "attention.py", "positions.py"} <= names
    assert not names & {"__init__.py", "cli.py", "demo.py"}
    assert all(path.parent == SOURCE / "model" for path in code_files())
    # The room holds what travels and nothing else.
    assert names == {path.name for path in (SOURCE / "model").glob("*.py")} - {"__init__.py"}


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
            assert (SOURCE / "model" / f"{node.module}.py").exists()
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.module.split(".")[0] in ALLOWED, node.module
        elif isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= ALLOWED


def test_the_config_module_keeps_its_annotations() -> None:
    """As strings they would be checked by nobody."""
    source = (SOURCE / "model" / "configuration_llmarch.py").read_text()
    assert "from __future__ import annotations" not in source.split('"""', 2)[2]
