"""Precautions of transformers' classes for half precision: which there are follows from their source, and each is seen
at weights that overflow without it."""

import ast
import copy
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import family_configs
import test_seq2seq as seq2seq
from hf_llmarch.conversion import convert
from hf_llmarch.conversion.families import families
from hf_llmarch.conversion.plans import Plan, plan
from tiny import assert_close

# The first case of each family with transformers' class of a head over the vocabulary.
DECODERS = {name: case for name, case in family_configs.CASES.items() if name in families()}
STACKED = {name: case for name, case in seq2seq.CASES.items() if name in families()}
CASES = {**DECODERS, **STACKED}
# What their attributes name, and what we call it; of which the last is a buffer that we always keep.
PARTS = {
    **{"wo": "ffn_output", "gate.weight": "router", "sinks": "sinks", "e_score_correction_bias": None},
    **dict.fromkeys(("post_attention_layernorm", "input_layernorm", "norm"), "norms"),
}


# GPT-2 has it as a field of its config; torch's grouped product of fp16 takes rows of whole 16 bytes.
ASKED: dict[str, dict[str, Any]] = {
    "gpt2": {"reorder_and_upcast_attn": True},
    "flint": {"hidden_size": 64, "moe_intermediate_size": 32},
}


def auto_class(folder: Path) -> Any:
    stacked = json.loads((folder / "config.json").read_text())
    two = stacked.get("topology") == "encoder-decoder" or stacked["model_type"] in STACKED
    return AutoModelForSeq2SeqLM if two else AutoModelForCausalLM


def foreign_config(name: str, **changes: Any) -> dict[str, Any]:
    architecture = next(iter(families()[name].architectures.values()))
    return {"model_type": name, "architectures": [architecture], "torch_dtype": "float32", **CASES[name], **changes}


def native_model(config: dict[str, Any]) -> Any:
    auto = AutoModelForSeq2SeqLM if config["model_type"] in STACKED else AutoModelForCausalLM
    native_config = AutoConfig.for_model(**copy.deepcopy(config))
    native = auto.from_config(native_config, attn_implementation="eager").eval()
    seq2seq.redraw(native)
    return native


def saved(name: str, folder: Path, largest: dict[str, float] | None = None, **changes: Any) -> dict[str, Any]:
    """A folder as its authors would have written it, with the weights that match scaled to a largest number."""
    config = foreign_config(name, **changes)
    native = native_model(config)
    with torch.no_grad():
        for parameter, tensor in native.named_parameters():
            for pattern, number in (largest or {}).items():
                if re.fullmatch(pattern, parameter):
                    tensor.mul_(number / tensor.abs().max())
    native.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return config


def planned(config: dict[str, Any], folder: Path) -> Plan:
    tensors = load_file(folder / "model.safetensors")
    return plan(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})


def attention_functions(source: str) -> list[str]:
    """The text of each function that has attention in its name, or is in a class that has."""
    found = []
    for part in ast.parse(source).body:
        functions = part.body if isinstance(part, ast.ClassDef) and "Attention" in part.name else [part]
        for function in functions:
            if isinstance(function, ast.FunctionDef) and (function is not part or "attention" in function.name):
                found.append(ast.unparse(function))
    return found


def precautions_of(native_class: type) -> dict[str, Any]:
    """What a class of theirs does against half precision, read from its source and its attributes."""
    source = inspect.getsource(sys.modules[native_class.__module__])
    upcast = re.compile(r"\b(q|query)(_states)?\.(to\(torch\.float32\)|float\(\))")
    kept = {*(native_class._keep_in_fp32_modules or ()), *(native_class._keep_in_fp32_modules_strict or ())}
    return {
        "scores": any(upcast.search(text) for text in attention_functions(source)),
        "clamp": "torch.clamp(hidden_states" in source,
        "kept": {PARTS[name] for name in kept} - {None},
    }


def with_precaution(kind: str) -> list[str]:
    classes = {name: getattr(transformers, foreign_config(name)["architectures"][0]) for name in CASES}
    return [name for name, native_class in classes.items() if precautions_of(native_class)[kind]]


@pytest.mark.parametrize("name", CASES)
def test_every_precaution_of_a_native_class_is_a_switch(name: str, tmp_path: Path) -> None:
    config = saved(name, tmp_path, **ASKED.get(name, {}))
    found = planned(config, tmp_path).config
    stacks = [found, *([found.source_config()] if found.topology == "encoder-decoder" else [])]
    ours = {
        "scores": found.scores_in_fp32,
        "clamp": any(stack.fp16_clamp != "none" for stack in stacks),
        "kept": set(found.keep_in_fp32 or ()),
    }
    assert ours == precautions_of(getattr(transformers, config["architectures"][0]))


def loaded(folder: Path, dtype: torch.dtype, **options: Any) -> Any:
    return auto_class(folder).from_pretrained(folder, dtype=dtype, attn_implementation="eager", **options).eval()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", with_precaution("kept"))
def test_the_same_weights_stay_in_fp32(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = saved(name, tmp_path / "theirs")
    steps = planned(config, tmp_path / "theirs").steps
    convert(tmp_path / "theirs", tmp_path / "ours", progress=False)
    ours, native = (loaded(tmp_path / side, dtype).state_dict() for side in ("ours", "theirs"))
    compared = {step.ours[0]: step.theirs[0] for step in steps if step.theirs[0] in native and step.ours[0] in ours}
    assert len(compared) > 10
    assert {mine: ours[mine].dtype for mine in compared} == {mine: native[n].dtype for mine, n in compared.items()}


def outputs(model: Any, name: str) -> torch.Tensor:
    """Logits in fp32; of the encoder, where there is one, what overflows may show in its states alone."""
    ids = seq2seq.random_ids(2, 9)
    given = {"decoder_input_ids": seq2seq.random_ids(2, 5, seed=2)} if name in STACKED else {}
    return model(ids, **given).logits.float()


# Weights and their largest number, which fp16 holds; their products it does not. Behind BART's last norm of an encoder
# there is only what reads it.
T5_OVERFLOWS = {
    r"encoder\.block\.0\..*SelfAttention\.v\.weight": 60.0,
    r"encoder\.block\.0\..*SelfAttention\.o\.weight": 6e4,
}
BART_OVERFLOWS = {
    r"model\.encoder\.layers\.1\.final_layer_norm\.weight": 6e4,
    r"model\.decoder\..*encoder_attn\.[kv]_proj\.weight": 1e-5,
}
MBART_OVERFLOWS = {r"model\.encoder\.layers\.0\.fc1\.weight": 60.0, r"model\.encoder\.layers\.0\.fc2\.weight": 6e4}
OVERFLOWS = {
    **dict.fromkeys(("t5", "mt5", "umt5", "switch_transformers"), T5_OVERFLOWS),
    **dict.fromkeys(("bart", "marian"), BART_OVERFLOWS),
    **dict.fromkeys(("mbart", "pegasus", "m2m_100"), MBART_OVERFLOWS),
}


@torch.no_grad()
@pytest.mark.parametrize("name", with_precaution("clamp"))
def test_hidden_states_stay_within_fp16(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "theirs", OVERFLOWS[name])
    convert(tmp_path / "theirs", tmp_path / "ours", progress=False)
    native = outputs(loaded(tmp_path / "theirs", torch.float16), name)
    assert native.isfinite().all()
    unbound = loaded(tmp_path / "ours", torch.float16, fp16_clamp="none", source_stack=unclamped(tmp_path / "ours"))
    assert not outputs(unbound, name).isfinite().all()
    assert_close(outputs(loaded(tmp_path / "ours", torch.float16), name), native, "fp16")


def unclamped(folder: Path) -> dict[str, Any] | None:
    stack = json.loads((folder / "config.json").read_text())["source_stack"]
    return stack and {**stack, "fp16_clamp": "none"}


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in with_precaution("kept") if name in STACKED])
def test_the_residual_stream_of_t5_outgrows_fp16(name: str, tmp_path: Path) -> None:
    """Its class keeps `wo` in fp32, so all that is added to what `wo` says is fp32 too."""
    saved(name, tmp_path / "theirs", {r"encoder\.block\.0\..*DenseReluDense\.wo\.weight": 1e6})
    convert(tmp_path / "theirs", tmp_path / "ours", progress=False)
    native = outputs(loaded(tmp_path / "theirs", torch.float16), name)
    assert native.isfinite().all()
    assert_close(outputs(loaded(tmp_path / "ours", torch.float16), name), native, "fp16")
    plain = outputs(loaded(tmp_path / "ours", torch.float16, keep_in_fp32=None), name)
    assert not plain.isfinite().all() or (plain - native).abs().max() > 0.1 * native.std()


# Largest weights of queries and keys: but for GPT-Neo, the masks of their classes hide no larger scores.
LARGE = {"gpt_neo": 300.0, "gptj": 200.0, "gpt2": 200.0, "flint": 250.0}


@torch.no_grad()
@pytest.mark.parametrize("name", with_precaution("scores"))
def test_scores_outgrow_fp16(name: str, tmp_path: Path) -> None:
    saved(
        name,
        tmp_path / "theirs",
        {r".*\.0\..*(c_attn|q_proj|k_proj|q_norm|k_norm)\.weight": LARGE[name]},
        **ASKED.get(name, {}),
    )
    convert(tmp_path / "theirs", tmp_path / "ours", progress=False)
    native = outputs(loaded(tmp_path / "theirs", torch.float16), name)
    assert native.isfinite().all()
    plain = loaded(tmp_path / "ours", torch.float16, scores_in_fp32=False)
    assert not outputs(plain, name).isfinite().all()
    assert_close(outputs(loaded(tmp_path / "ours", torch.float16), name), native, "fp16")
