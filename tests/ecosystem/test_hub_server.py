"""The Hub's real client, pushing to and loading from a Hub on this machine (tests/hub_server.py)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors.torch import load, load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from hf_llmarch.conversion import convert
from hf_llmarch.model.compat import code_files
from hf_llmarch.model.configuration_llmarch import AUTO_MAP
from tests.hub_server import TOKEN, Blob, Hub, Repository, serve
from tests.test_hub import BLOCKED, inputs, run
from tests.test_hub import MODELS as EVERY
from tests.test_hub import build as build_model
from tests.tiny import redraw

# One of each Auto class; test_hub has the variants.
MODELS = {name: row for name, row in EVERY.items() if name not in ("mla", "alibi", "t5")}
CARD = "---\nlicense: apache-2.0\nlanguage: en\n---\n\n# Theirs\n"

# With the package: everything that a person pushes, and what the commands do with ids on the Hub.
WITH_THE_PACKAGE = """
import json
from pathlib import Path

import torch
import transformers
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import save_file
from typer.testing import CliRunner

import hf_llmarch
from hf_llmarch.conversion import cards
from hf_llmarch.cli.app import app

transformers.utils.logging.disable_progress_bar()
api = HfApi()
models = json.loads(Path("models.json").read_text())
ids = torch.tensor(json.loads(Path("inputs.json").read_text())["input_ids"])
found = {}

# Heads, each into a repository of its own.
for name, head in models.items():
    if name != "plain":
        getattr(transformers, head).from_pretrained(f"models/{name}").push_to_hub(f"someone/{name}")

# One model, with its card first, in shards, with a tokenizer, a tag, and a branch of other weights.
model = transformers.AutoModelForCausalLM.from_pretrained("models/plain")
card = cards.write("models/plain", base_model="somebody/original")
api.create_repo("someone/plain")
cards.make("models/plain").push_to_hub("someone/plain")
found["first"] = api.upload_file(path_or_fileobj=b"notes", path_in_repo="notes.txt", repo_id="someone/plain").oid
model.push_to_hub("someone/plain", max_shard_size="20KB")
transformers.AutoTokenizer.from_pretrained("models/plain").push_to_hub("someone/plain")
api.create_tag("someone/plain", tag="v1")
with torch.no_grad():
    model.lm_head.weight.neg_()
model.push_to_hub("someone/plain", revision="negated")
model.config.push_to_hub("someone/config")

# And back.
logits = {}
for revision in (None, "v1", "negated", api.model_info("someone/plain").sha):
    again = transformers.AutoModelForCausalLM.from_pretrained("someone/plain", revision=revision).eval()
    with torch.no_grad():
        logits[str(revision)[:7]] = again(ids).logits
save_file(logits, "logits.safetensors")
tokenizer = transformers.AutoTokenizer.from_pretrained("someone/plain")
found["tokens"] = tokenizer("Hello world").input_ids
found["config"] = transformers.AutoConfig.from_pretrained("someone/config").to_json_string()
trusted = transformers.AutoModelForCausalLM.from_pretrained("someone/plain", trust_remote_code=True)
found["trusted"] = f"{type(trusted).__module__}.{type(trusted).__name__}"
ModelCard.load("someone/plain").validate()

# Commands.
api.create_repo("someone/llama")
api.upload_folder(folder_path="llama", repo_id="someone/llama")
api.create_branch("someone/llama", branch="old")
api.upload_file(path_or_fileobj=b"# Newer", path_in_repo="README.md", repo_id="someone/llama")
api.create_repo("someone/converted")
api.upload_folder(folder_path="converted", repo_id="someone/converted")

def command(*arguments):
    result = CliRunner().invoke(app, [*arguments, "--json"])
    found[" ".join(arguments[:2])] = {"code": result.exit_code, **json.loads(result.stdout), "stderr": result.stderr}

command("convert", "someone/llama", "from-hub", "--revision", "old", "--quiet")
command("export", "someone/converted", "back", "--quiet")
command("convert", "someone/missing", "nowhere", "--quiet")
command("convert", "somebody/gated", "nowhere", "--quiet")
command("convert", "someone/plain", "nowhere", "--quiet", "--revision", "no-such-branch")
Path("found.json").write_text(json.dumps(found))
print("done")
"""

# Without: an unknown host first, then every Auto class of the map.
WITHOUT_THE_PACKAGE = """
import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

transformers.utils.logging.disable_progress_bar()
models = json.loads(Path("models.json").read_text())
inputs = {name: torch.tensor(ids) for name, ids in json.loads(Path("inputs.json").read_text()).items()}
found = {"classes": {}}

true = transformers.__version__
transformers.__version__ = "6.0.0"
try:
    transformers.AutoModelForCausalLM.from_pretrained("someone/plain", trust_remote_code=True)
except ImportError as error:
    found["refusal"] = str(error)
transformers.__version__ = true

def output(model):
    given = {"input_ids": inputs["input_ids"]}
    if model.config.topology == "encoder-decoder":
        given["decoder_input_ids"] = inputs["decoder_input_ids"]
    with torch.no_grad():
        result = model.eval()(**given)
    return next(result[name] for name in ("logits", "start_logits", "last_hidden_state") if name in result).contiguous()

outputs = {}
for name, head in models.items():
    for auto in ("AutoConfig", "AutoModel", head) if name == "plain" else (head,):
        loaded = getattr(transformers, auto).from_pretrained(f"someone/{name}", trust_remote_code=True)
        found["classes"][auto] = f"{type(loaded).__module__}.{type(loaded).__name__}"
        if auto == head:
            outputs[name] = output(loaded)
other = transformers.AutoModelForCausalLM.from_pretrained("someone/plain", revision="negated", trust_remote_code=True)
outputs["negated"] = output(other)
save_file(outputs, "outputs.safetensors")
Path("elsewhere.json").write_text(json.dumps(found))
print("done")
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve() as running:
        gated = running.repositories["somebody/gated"] = Repository(gated=True)
        gated.commit("main", {"config.json": Blob(b"{}", lfs=False)})
        yield running


@pytest.fixture(scope="module")
def folder(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the process with the package had, and what it left: found.json, logits.safetensors, from-hub, back."""
    folder = tmp_path_factory.mktemp("hub")
    for name in MODELS:
        build_model(name).save_pretrained(folder / "models" / name)
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "Hello world": 3}, "<unk>"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.save_pretrained(folder / "models" / "plain")
    (folder / "models.json").write_text(json.dumps({name: head for name, (head, _) in MODELS.items()}))
    both = inputs(build_model("translation").config)
    (folder / "inputs.json").write_text(json.dumps({name: ids.tolist() for name, ids in both.items()}))
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=97, **sizes))
    redraw(llama).save_pretrained(folder / "llama", max_shard_size="20KB")
    (folder / "llama" / "README.md").write_text(CARD)
    convert(folder / "llama", folder / "converted", progress=False)
    talk(hub, WITH_THE_PACKAGE, folder)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def elsewhere(hub: Hub, folder: Path) -> dict[str, Any]:
    """What a process without the package found."""
    talk(hub, BLOCKED + WITHOUT_THE_PACKAGE, folder, HF_HOME=str(folder / "empty"))
    return json.loads((folder / "elsewhere.json").read_text())


def talk(hub: Hub, code: str, folder: Path, **environment: str) -> None:
    """Run code in a process whose Hub this is."""
    settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    finished = run(code, folder, **settings, HF_HUB_DISABLE_TELEMETRY="1", **environment)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.strip().endswith("done")


def tensors_at(hub: Hub, repository: str, revision: str = "main") -> dict[str, torch.Tensor]:
    """What a repository holds, over all its shards."""
    files = hub.repositories[repository].files(revision)
    shards = [blob for path, blob in files.items() if path.endswith(".safetensors")]
    assert all(blob.lfs for blob in shards)
    return {name: tensor for blob in shards for name, tensor in load(blob.content).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.shows("Hub", "`push_to_hub` and `from_pretrained`, shards over LFS, byte for byte", "huggingface_hub")
@pytest.mark.parametrize("name", MODELS)
def test_weights_and_code_arrive(name: str, hub: Hub, folder: Path, found: dict[str, Any]) -> None:
    files = hub.repositories[f"someone/{name}"].files("main")
    assert same(tensors_at(hub, f"someone/{name}"), load_file(folder / "models" / name / "model.safetensors"))
    assert (sum(path.endswith(".safetensors") for path in files) > 1) == (name == "plain")
    for file in code_files():
        assert files[file.name].content == file.read_bytes()
    assert json.loads(files["config.json"].content)["auto_map"] == AUTO_MAP


@pytest.mark.shows("Hub", "Branches, tags and commits as `revision`", "huggingface_hub")
def test_revisions(hub: Hub, folder: Path, found: dict[str, Any]) -> None:
    logits = load_file(folder / "logits.safetensors")
    sha = hub.repositories["someone/plain"].resolve("main")[:7]
    assert logits.keys() == {"None", "v1", "negated", sha}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "models" / "plain").eval()
    ids = torch.tensor(json.loads((folder / "inputs.json").read_text())["input_ids"])
    with torch.no_grad():
        expected = model(ids).logits
    assert all(torch.equal(logits[name], expected) for name in ("None", "v1", sha))
    assert torch.equal(logits["negated"], -expected)
    # The file of an earlier commit is there in later ones.
    repository = hub.repositories["someone/plain"]
    assert repository.commits[found["first"]].keys() == {"README.md", "notes.txt"}
    assert repository.files("negated")["notes.txt"].content == b"notes"


@pytest.mark.shows("Hub", "Tokenizers and configs by themselves", "huggingface_hub", "tokenizers")
def test_tokenizer_and_config(folder: Path, found: dict[str, Any]) -> None:
    assert found["tokens"] == [3]
    config = json.loads((folder / "models" / "plain" / "config.json").read_text())
    pushed = json.loads(found["config"])
    assert {name: pushed.get(name) for name in config} == config


@pytest.mark.shows("Hub", "`trust_remote_code` without the package: every Auto class of the map", "huggingface_hub")
@pytest.mark.parametrize("name", MODELS)
def test_every_auto_class_loads_without_the_package(name: str, folder: Path, elsewhere: dict[str, Any]) -> None:
    outputs = load_file(folder / "outputs.safetensors")
    model = getattr(transformers, MODELS[name][0]).from_pretrained(folder / "models" / name).eval()
    with torch.no_grad():
        result = model(**inputs(model.config))
    assert torch.equal(outputs[name], result["start_logits" if "start_logits" in result else "logits"])
    assert torch.equal(outputs["negated"], -outputs["plain"])
    assert elsewhere["classes"].keys() == AUTO_MAP.keys()
    for auto, reference in AUTO_MAP.items():
        module, _, cls = elsewhere["classes"][auto].rpartition(".")
        assert module.startswith("transformers_modules.someone.")
        assert cls == reference.split(".")[1]


@pytest.mark.shows("Hub", "Code on the Hub refuses a transformers that it does not know", "huggingface_hub")
def test_code_refuses_an_unknown_host(elsewhere: dict[str, Any]) -> None:
    refusal = elsewhere["refusal"]
    assert refusal.startswith("hf_llmarch 0.1.0 supports transformers >=5.16.1,<6 and found 6.0.0:")
    assert refusal.count("\n") == 0
    assert "pip install" in refusal


@pytest.mark.shows("Hub", "Code on the Hub gives way to the installed package", "huggingface_hub")
def test_the_installed_package_wins(found: dict[str, Any]) -> None:
    assert found["trusted"] == "hf_llmarch.model.modeling_llmarch.LlmArchForCausalLM"


@pytest.mark.shows(
    "Hub", "`convert` and `export` of repositories, pinned to a commit, byte for byte", "huggingface_hub"
)
def test_commands_take_repositories(hub: Hub, folder: Path, found: dict[str, Any]) -> None:
    assert found["convert someone/llama"]["code"] == found["export someone/converted"]["code"] == 0
    assert same(load_file(folder / "from-hub/model.safetensors"), load_file(folder / "converted/model.safetensors"))
    origin = json.loads((folder / "from-hub" / "config.json").read_text())["converted_from"]
    assert (origin["source"], origin["revision"]) == ("someone/llama", hub.repositories["someone/llama"].resolve("old"))
    # Of the branch that was asked for, not of main, where the card has changed.
    assert (folder / "from-hub" / "kept_aside" / "README.md").read_text() == CARD
    for path, blob in hub.repositories["someone/llama"].files("old").items():
        if "safetensors" not in path:
            assert (folder / "back" / path).read_bytes() == blob.content, path
    assert same(load_file(folder / "back/model.safetensors"), tensors_at(hub, "someone/llama", "old"))


@pytest.mark.shows(
    "Hub", "Repositories that are missing, gated or of another revision: what to do next", "huggingface_hub"
)
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("convert someone/missing", ("'someone/missing'", "no such repository", "hf auth login")),
        ("convert somebody/gated", ("'somebody/gated'", "gated", "Accept its terms", "/somebody/gated;")),
        ("convert someone/plain", ("'someone/plain'", "no revision 'no-such-branch'")),
    ],
)
def test_refusals_say_what_to_do(asked: str, words: tuple[str, ...], folder: Path, found: dict[str, Any]) -> None:
    answer = found[asked]
    assert (answer["code"], answer["error"]) == (3, "CheckpointError")
    assert not [word for word in words if word not in answer["message"]], answer["message"]
    assert "\n" not in answer["message"]
    assert not (folder / "nowhere").exists()


@pytest.mark.shows(
    "Hub", "Model cards: validated, kept by `push_to_hub`, with the original and its commit", "huggingface_hub"
)
def test_model_cards(hub: Hub, folder: Path, found: dict[str, Any]) -> None:
    assert "POST /api/validate-yaml" in hub.requests
    pushed = ModelCard(hub.repositories["someone/plain"].files("main")["README.md"].content.decode())
    assert pushed.data.base_model == "somebody/original"
    assert "hf_llmarch" in pushed.text
    card = ModelCard.load(folder / "from-hub" / "README.md")
    assert card.data.to_dict() == {
        "license": "apache-2.0",
        "language": "en",
        "base_model": "someone/llama",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["llmarch"],
    }
    assert hub.repositories["someone/llama"].resolve("old") in card.text
    on_hub = hub.repositories["someone/converted"].files("main")
    assert on_hub["README.md"].content == (folder / "converted" / "README.md").read_bytes()
    assert on_hub["kept_aside/README.md"].content == CARD.encode()
