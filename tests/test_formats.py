"""Odd folders that transformers opens, or that it should not: the native numbers, or a refusal that says what it is."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hf_llmarch import LlmArchConfig
from hf_llmarch.cli.app import certificate_view, report_view
from hf_llmarch.conversion import convert, export, export_plan, families, load, plan, verify
from hf_llmarch.conversion.errors import CheckpointError, ConversionError, NotExpressible, PlanError, UnknownFamily
from hf_llmarch.conversion.plans import WRAPPERS
from hf_llmarch.conversion.preserved import Aside, true_config
from hf_llmarch.conversion.sources import open_checkpoint
from hf_llmarch.model import attention
from tests import family_configs, test_encoders, test_seq2seq
from tests.test_conversion import (
    GGUF_SIZES,
    assert_same_bytes,
    config_of,
    edit_json,
    logits,
    native,
    tensors,
    write_gguf,
)
from tests.tiny import MLA, MOE, assert_close, redraw, tiny_config

CASES = {**family_configs.CASES, **test_encoders.CASES, **test_seq2seq.CASES}
IDS = torch.arange(5, 20)[None]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A llama folder in several files."""
    native().save_pretrained(tmp_path / "source", max_shard_size=24_000)
    return tmp_path / "source"


def saved(folder: Path, case: str, **changes: Any) -> Any:
    """A redrawn model of transformers' own class, saved."""
    name = max((n for n in families() if case == n or case.startswith(f"{n}-")), key=len)
    config = AutoConfig.for_model(name, **json.loads(json.dumps({**CASES[case], **changes})))
    model = getattr(transformers, next(iter(families()[name].architectures.values())))(config)
    redraw(torch.nn.ParameterList(p for p in model.parameters() if p.requires_grad))
    model.save_pretrained(folder)
    return model.eval()


def there_and_back(source: Path, folder: Path) -> Path:
    """Through our format: the same tensors and the same config.json."""
    convert(source, folder / "ours", progress=False)
    export(folder / "ours", folder / "back", progress=False)
    assert_same_bytes(tensors(folder / "back"), tensors(source))
    assert config_of(folder / "back") == config_of(source)
    return folder / "ours"


# -- tensors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("settings", [{}, {"quantization_config": {"quant_method": "fp8"}}])
def test_eight_bits_without_scales_are_refused(tmp_path: Path, dtype: torch.dtype, settings: dict[str, Any]) -> None:
    source, name = tmp_path / "source", "model.layers.1.mlp.up_proj.weight"
    native().save_pretrained(source)
    held = tensors(source)
    save_file({**held, name: held[name].to(dtype)}, source / "model.safetensors", metadata={"format": "pt"})
    edit_json(source / "config.json", **settings)
    with pytest.raises(CheckpointError, match=r"8-bit floats.*layers\.1\.mlp\.up_proj"):
        convert(source, tmp_path / "ours", progress=False)
    with pytest.raises(ConversionError, match="no floating-point dtype"):
        convert(source, tmp_path / "ours", dtype="float8_e4m3fn", progress=False)


def test_the_index_decides_between_two_files(sharded: Path, tmp_path: Path) -> None:
    """A patch in a file of its own, with the index turned to it: the older shard still holds what it replaces."""
    name = "model.layers.1.mlp.up_proj.weight"
    patched = tensors(sharded)[name] + 1
    expected = {**tensors(sharded), name: patched}
    save_file({name: patched}, sharded / "patch.safetensors", metadata={"format": "pt"})
    index = sharded / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map={**places, name: "patch.safetensors"})
    convert(sharded, tmp_path / "ours", progress=False)
    export(tmp_path / "ours", tmp_path / "back", progress=False)
    assert_same_bytes(tensors(tmp_path / "back"), expected)
    assert_close(logits(load(sharded)), logits(AutoModelForCausalLM.from_pretrained(sharded)), "native")
    edit_json(index, weight_map={other: file for other, file in places.items() if other != name})
    first, second = sorted(sharded.glob("model*.safetensors"))[:2]
    for file in (first, second):
        save_file({**load_file(file), name: patched}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"(?s)repeats tensors.*{name}"):
        convert(sharded, tmp_path / "other", progress=False)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("inside", [False, True])
def test_a_wrapped_model_is_named(wrapper: str, inside: bool) -> None:
    part, advice = WRAPPERS[wrapper]
    native_config = native().config.to_dict()
    names = [n.replace("layers.1.", f"layers.1.{part}") if inside else part + n for n in native().state_dict()]
    with pytest.raises(PlanError) as caught:
        plan(native_config, names)
    assert wrapper in str(caught.value)
    assert advice in str(caught.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_all_that_a_native_class_saves_comes_back(case: str, tmp_path: Path) -> None:
    saved(tmp_path, case)
    checkpoint = open_checkpoint(tmp_path)
    proven = plan(checkpoint.config, checkpoint.shapes)
    assert {*proven.their_shapes, *proven.aside} == {*checkpoint.names}


CAST = ["llama", "llama-biases-tied", "gpt2", "phi3", "mixtral", "deepseek_v3", "bert", "roformer", "t5", "marian"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CAST)
def test_a_cast_is_certified_against_the_original_cast_alike(case: str, dtype: str, tmp_path: Path) -> None:
    saved(tmp_path / "source", case)
    report = convert(tmp_path / "source", tmp_path / "ours", dtype=dtype, verify=True, progress=False)
    certificate = report.certificate
    assert certificate is not None
    assert certificate.ok, certificate.problems
    # As strict as without a cast: rounding the weights alone would be seen.
    assert (certificate.cast, certificate.tolerance) == (dtype, 1e-5)
    assert f"cast to {dtype}" in certificate.facts["bytes"]
    assert report.numbers == f"cast to {dtype}"
    card = (tmp_path / "ours/README.md").read_text()
    assert f"Its numbers: cast to {dtype}." in card
    assert "byte for byte" not in card


@pytest.mark.filterwarnings("ignore")
def test_a_change_beside_a_cast_is_found(tmp_path: Path) -> None:
    saved(tmp_path / "source", "llama")
    convert(tmp_path / "source", tmp_path / "ours", dtype="bfloat16", progress=False)
    held, name = tensors(tmp_path / "ours"), "model.layers.1.mlp.up_proj.weight"
    held[name].view(torch.int16)[0, 0] ^= 1
    save_file(held, tmp_path / "ours/model.safetensors", metadata={"format": "pt"})
    certificate = verify(tmp_path / "source", tmp_path / "ours", progress=False)
    assert not certificate.ok
    assert certificate.tensors_different == (name,)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_gguf_is_said_to_be_dequantised(dtype: str | None, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", native(**GGUF_SIZES, tie_word_embeddings=True))
    report = convert(path, tmp_path / "ours", dtype=dtype, verify=True, progress=False)
    certificate = report.certificate
    assert certificate is not None
    assert certificate.ok, certificate.problems
    assert not report.byte_exact
    said = "dequantised; equal to what transformers dequantises" + (f", cast to {dtype}" if dtype else "")
    shown = Console(record=True, width=400)
    shown.print(report_view(report), certificate_view(certificate))
    for text in (report.numbers, certificate.facts["bytes"], (tmp_path / "ours/README.md").read_text()):
        assert said in text
    for text in (shown.export_text(), (tmp_path / "ours/README.md").read_text()):
        assert "byte for byte" not in text
    # And so it is: the same bits as in a model that transformers loads from the file.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name).state_dict()
    export(tmp_path / "ours", tmp_path / "back", progress=False)
    held = tensors(tmp_path / "back")
    assert len(held) == len(loaded) - 1  # the head is tied
    assert all(torch.equal(tensor, loaded[name].to(tensor.dtype)) for name, tensor in held.items())


# -- config.json -------------------------------------------------------------------------------------------------------


def test_mpt_is_as_wide_as_its_tensors_say(tmp_path: Path) -> None:
    """transformers' class does not read the ratio."""
    model = saved(tmp_path / "source", "mpt", expansion_ratio=3)
    there_and_back(tmp_path / "source", tmp_path)
    assert_close(logits(load(tmp_path / "source"), IDS), logits(model, IDS), "native")


ALL_LISTED = {"mlp_layer_types": ["dense"] * 3}
ALL_DENSE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"first_k_dense_replace": 3},
    "deepseek_v2-lite": {"first_k_dense_replace": 8},
    "deepseek_v3": {"first_k_dense_replace": 7},
    "qwen2_moe": {"mlp_only_layers": [0, 1, 2]},
    "qwen3_moe": {"decoder_sparse_step": 9, "mlp_only_layers": []},
    "flint": {"mlp_only_layers": [0, 1, 2]},
    "dots1": {"first_k_dense_replace": 3},
    "glm4_moe": {"first_k_dense_replace": 3},
    "glm4_moe_lite": ALL_LISTED,
    "exaone_moe": ALL_LISTED,
    "hy_v3": ALL_LISTED,
    "mellum": ALL_LISTED,
    "cohere2_moe-dense-first": ALL_LISTED,
    "ernie4_5_moe": {"moe_layer_start_index": 3, "moe_layer_end_index": 2},
}


@pytest.mark.parametrize("case", ALL_DENSE)
def test_a_model_of_a_sparse_family_without_a_sparse_layer(case: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "source", case, **ALL_DENSE[case])
    ours = there_and_back(tmp_path / "source", tmp_path)
    assert config_of(ours)["num_experts"] is None
    assert_close(logits(load(tmp_path / "source"), IDS), logits(model, IDS), "native")
    # Written afresh, it is as dense.
    plain = LlmArchConfig.from_dict({**config_of(ours), "converted_from": None})
    foreign = export_plan(plain, family=config_of(tmp_path / "source")["model_type"]).foreign_config
    again = AutoModelForCausalLM.from_config(AutoConfig.for_model(**foreign))
    assert again.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("count", [0, 1])
def test_layers_ahead_are_counted_whoever_wrote_the_config(count: int, tmp_path: Path) -> None:
    saved(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    checkpoint = open_checkpoint(tmp_path)
    there = export_plan(plan(checkpoint.config, checkpoint.shapes).config)
    afresh = dataclasses.replace(there, foreign_config={**there.foreign_config, "num_nextn_predict_layers": 0})
    aside = Aside(dict(list(checkpoint.tensors.items())[:count]), checkpoint.read)
    assert true_config(afresh, aside)["num_nextn_predict_layers"] == count


# -- names from before a port ------------------------------------------------------------------------------------------

OLD = {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "num_kv_heads": "n_head_kv"}
BEFORE: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "7B": ("RefinedWebModel", {"multi_query": True}, ("num_kv_heads", "new_decoder_architecture")),
    "rw-1b": (
        "RefinedWeb",
        {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
        ("num_kv_heads", "new_decoder_architecture"),
    ),
    "40B": ("RefinedWeb", {"new_decoder_architecture": True, "num_kv_heads": 2}, ("new_decoder_architecture",)),
}


@pytest.mark.parametrize("size", BEFORE)
def test_falcon_from_before_its_port(size: str, tmp_path: Path) -> None:
    model_type, switches, unknown = BEFORE[size]
    source = tmp_path / "source"
    model = saved(source, "falcon", **{"multi_query": False, **switches})
    config = {OLD.get(name, name): value for name, value in config_of(source).items() if name not in unknown}
    config |= {"model_type": model_type, "architectures": ["RWForCausalLM"]}
    (source / "config.json").write_text(json.dumps(config))
    there_and_back(source, tmp_path)
    assert_close(logits(load(source), IDS), logits(model, IDS), "native")


# -- code --------------------------------------------------------------------------------------------------------------

# A tokenizer of two files, of which one is called as one of ours is, and a model that says it has code of its own.
TOKENIZER = """
from transformers import PreTrainedTokenizer

from .attention import VOWELS
from .odd_letters import (
    number,
)


class OddTokenizer(PreTrainedTokenizer):
    @property
    def vocab_size(self):
        return 97

    def get_vocab(self):
        return {chr(i + 32): i for i in range(97)}

    def _tokenize(self, text):
        return [letter for letter in text if letter not in VOWELS]

    def _convert_token_to_id(self, token):
        return number(token)
"""
CODE = {
    "tokenization_odd.py": TOKENIZER,
    "attention.py": "from .odd_letters import number\n\nVOWELS = 'aeiou'\r\n",
    "odd_letters.py": "def number(letter):\n    return ord(letter) - 32\n",
    "configuration_odd.py": "from transformers import LlamaConfig\n\n\nclass OddConfig(LlamaConfig):\n    pass\n",
    "modeling_odd.py": "from .configuration_odd import OddConfig\nfrom .attention import VOWELS\nraise RuntimeError\n",
}
OPENS = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
print(type(tokenizer).__name__, tokenizer("An odd one").input_ids)
"""


def opened(folder: Path, cache: Path) -> str:
    """What a process of its own prints, which finds no code but the folder's."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(cache)}
    run = subprocess.run([sys.executable, "-c", OPENS, str(folder)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("changed", [False, True])
def test_code_that_is_named_goes_along_and_comes_back(changed: bool, tmp_path: Path) -> None:
    source, ours, back = (tmp_path / name for name in ("source", "ours", "back"))
    native().save_pretrained(source)
    for name, text in {**CODE, "train.py": "raise RuntimeError\n"}.items():
        (source / name).write_bytes(text.encode())
    named = {"AutoConfig": "configuration_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddModel"}
    edit_json(source / "config.json", auto_map={**named, "AutoTokenizer": ["tokenization_odd.OddTokenizer", None]})
    settings = {
        "tokenizer_class": "OddTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_odd.OddTokenizer", None]},
    }
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    expected = opened(source, tmp_path / "a")
    assert expected == f"OddTokenizer {[ord(letter) - 32 for letter in 'An dd n']}\n"

    convert(source, ours, progress=False)
    assert opened(ours, tmp_path / "b") == expected
    assert (ours / "attention.py").read_bytes() == Path(attention.__file__).read_bytes()
    assert not (ours / "modeling_odd.py").exists()
    if changed:
        edit_json(ours / "tokenizer_config.json", model_max_length=77)
    export(ours, back, progress=False)
    assert opened(back, tmp_path / "c") == expected
    assert {file.name: file.read_bytes().decode() for file in back.glob("*.py")} == CODE
    assert config_of(back) == config_of(source)
    more = {"model_max_length": 77} if changed else {}
    assert json.loads((back / "tokenizer_config.json").read_text()) == {**settings, **more}
    if not changed:
        assert (back / "tokenizer_config.json").read_bytes() == (source / "tokenizer_config.json").read_bytes()
    # Another family has no use for the model's code, and the same tokenizer.
    export(ours, tmp_path / "other", family="mistral", progress=False)
    assert {file.name for file in (tmp_path / "other").glob("*.py")} == {*CODE} - {
        "modeling_odd.py",
        "configuration_odd.py",
    }
    # And once more over what is there.
    convert(back, ours, overwrite=True, progress=False)
    assert opened(ours, tmp_path / "d") == expected


@pytest.mark.parametrize("name", ["../odd.T", "/tmp/odd.T", "a.b.T", "odd", "", 3, None, {"odd.T": 1}, [["odd.T"]]])
def test_a_name_that_is_no_file_beside_is_left(name: Any, tmp_path: Path) -> None:
    native().save_pretrained(tmp_path / "a/source")
    (tmp_path / "a/odd.py").write_text("")
    edit_json(tmp_path / "a/source/config.json", auto_map={"AutoTokenizer": name})
    (tmp_path / "a/source/tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": name}}))
    convert(tmp_path / "a/source", tmp_path / "ours", progress=False)
    assert not [*tmp_path.glob("ours/**/odd.py")]


@pytest.mark.parametrize("damage", ["a link", "no text"])
def test_code_that_leads_elsewhere_is_refused(damage: str, tmp_path: Path) -> None:
    native().save_pretrained(tmp_path / "source")
    (tmp_path / "source/tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["odd.T", null]}}')
    (tmp_path / "elsewhere.py").write_text("")
    if damage == "a link":
        (tmp_path / "source/odd.py").symlink_to(tmp_path / "elsewhere.py")
    else:
        (tmp_path / "source/odd.py").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"odd\.py"):
        convert(tmp_path / "source", tmp_path / "ours", progress=False)
    assert not (tmp_path / "ours").exists()


# -- load --------------------------------------------------------------------------------------------------------------

OVERRIDES: dict[str, dict[str, Any]] = {
    "layers": {"num_hidden_layers": 2},
    "attention": {"attn_implementation": "eager"},
    "base": {"rope_parameters": {"rope_type": "default", "rope_theta": 99.0}},
    "cache": {"use_cache": False},
    "none": {},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", OVERRIDES)
def test_load_takes_what_from_pretrained_takes(sharded: Path, case: str) -> None:
    given = OVERRIDES[case]
    ours, theirs = load(sharded, **given), AutoModelForCausalLM.from_pretrained(sharded, **given)
    assert_close(logits(ours), logits(theirs), "native")
    assert len(ours.model.layers) == len(theirs.model.layers)
    for name in {*given, "_attn_implementation", "dtype"} - {"attn_implementation", "rope_parameters"}:
        assert getattr(ours.config, name) == getattr(theirs.config, name)


# -- export ------------------------------------------------------------------------------------------------------------

DEEPSEEK = {
    **{**MLA, **MOE, "n_group": 1, "topk_group": 1, "latent_norm_eps": None, "norm_eps": 1e-6},
    "keep_in_fp32": ["router"],
}
SAME: dict[str, tuple[str, Callable[[], LlmArchConfig]]] = {
    "an eps that is the other norms'": (
        "deepseek_v2",
        lambda: tiny_config(
            **{**DEEPSEEK, "n_group": None, "topk_group": None}, rope_interleaved=True, norm_topk_prob=False
        ),
    ),
    "one group of all experts": (
        "deepseek_v2",
        lambda: tiny_config(**DEEPSEEK, rope_interleaved=True, norm_topk_prob=False),
    ),
    "the usual scale, written out": ("llama", lambda: tiny_config(attention_scale=10**-0.5)),
    "no layer without positions": ("llama", lambda: tiny_config(nope_layers=[])),
    "all layers full": ("llama", lambda: tiny_config(layer_types=["full_attention"] * 3)),
    "all of a head rotated": (
        "llama",
        lambda: tiny_config(rope_parameters={"rope_type": "default", "rope_theta": 9.0, "partial_rotary_factor": 1.0}),
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_another_way_to_say_the_same_is_exported(case: str) -> None:
    family, config = SAME[case]
    assert export_plan(config(), family=family).foreign_config["model_type"] == family


def test_another_meaning_is_not() -> None:
    for changes in ({"latent_norm_eps": 1e-5}, {"norm_eps": 1e-5}, {"attention_scale": 0.3}):
        with pytest.raises(NotExpressible, match=r"latent_norm_eps|attention_scale"):
            export_plan(
                tiny_config(**{**DEEPSEEK, **changes}, rope_interleaved=True, norm_topk_prob=False),
                family="deepseek_v2",
            )


def test_a_model_from_scratch_is_told_the_families_that_can_express_it() -> None:
    with pytest.raises(UnknownFamily, match=r"family=.*These can express it: ([\w, -]+)\.$") as caught:
        export_plan(tiny_config())
    able = str(caught.value).rpartition(": ")[2].removesuffix(".").split(", ")
    assert {"llama", "mistral"} <= set(able)
    assert not {"gpt2", "bert", "t5", "mixtral", "gemma"} & set(able)
    with pytest.raises(UnknownFamily, match="None of those here"):
        export_plan(tiny_config(position_encoding="alibi", norm_placement="sandwich"))
