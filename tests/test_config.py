"""The config: types, refusals, old spellings, derived values, and that what is written is read back."""

import copy
import dataclasses
import json
import logging
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_llmarch import LlmArchConfig, LlmArchForCausalLM
from hf_llmarch.conversion.entries import Field
from hf_llmarch.conversion.families import families
from hf_llmarch.model import configuration_llmarch as configuration
from hf_llmarch.model.attention import QK_NORM_SHAPES
from hf_llmarch.model.block import ATTENTIONS, BLOCKS
from hf_llmarch.model.configuration_llmarch import CONSTRAINTS, ROPE_SPELLINGS
from hf_llmarch.model.experts import EXPERT_LAYOUTS
from hf_llmarch.model.feedforward import FEED_FORWARDS
from hf_llmarch.model.heads import POOLINGS
from hf_llmarch.model.norms import NORM_SLOTS, NORMS
from hf_llmarch.model.positions import POSITIONS, ROPE_FREQUENCIES
from hf_llmarch.model.routing import GROUP_SCORES, OVERFLOWS, ROUTERS, SCORES
from tiny import LOCAL_AND_GLOBAL, LONGROPE, MIXED, MLA, STACKS, SWITCHES, YARN, tiny_config, variants

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 7.0, "factor": 2.0}
EXPERT_CHOICE = {"num_experts": 6, "router_type": "expert_choice", "use_cache": False}
ONE_GROUP = {"topology": "encoder", "layer_groups": 1}
SLIDING = {"layer_types": ["sliding_attention"] * 3}


def refusal(**switches: Any) -> str:
    """The message with which a combination is refused. The host wraps what a validator raises."""
    with pytest.raises((ValueError, StrictDataclassClassValidationError)) as caught:
        tiny_config(**switches)
    error = caught.value
    assert isinstance(error, ValueError) or isinstance(error.__cause__, ValueError)
    return str(error)


# -- types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "switches",
    [
        {"num_hidden_layers": "3"},
        {"num_hidden_layers": 3.0},
        {"num_hidden_layers": True},
        {"norm_eps": "1e-6"},
        {"norm_eps": True},
        {"attention_bias": 1},
        {"attention_bias": "true"},
        {"position_encoding": "rotary"},
        {"norm_placement": "peri"},
        {"ffn_type": None},
        {"parallel_norms": 3},
        {"layer_types": "full_attention"},
        {"rope_parameters": [("rope_theta", 1.0)]},
        {"swish_beta": "fixed"},
        {"nope_layers": {1}},
    ],
    ids=str,
)
def test_wrong_types_are_refused_by_name(switches: dict[str, Any]) -> None:
    (name,) = switches
    with pytest.raises(StrictDataclassFieldValidationError, match=name):
        tiny_config(**switches)
    config = tiny_config()
    with pytest.raises(StrictDataclassFieldValidationError, match=name):
        setattr(config, name, switches[name])


def test_json_numbers_are_numbers() -> None:
    """JSON has one kind: 1 and 1.0 are both written for a float."""
    for name in ("norm_eps", "norm_offset", "attention_scale", "embedding_scale", "residual_scale", "logit_scale"):
        assert getattr(tiny_config(**{name: 1}), name) == getattr(tiny_config(**{name: 1.0}), name) == 1


# -- unknown names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("num_atention_heads", "num_attention_heads"),
        ("hidden_sise", "hidden_size"),
        ("norm_placment", "norm_placement"),
        ("qk_norms", "qk_norm"),
        ("slidingwindow", "sliding_window"),
        ("attention_sink", "attention_sinks"),
        ("rope_thta", "rope_theta"),
        ("rope_parameter", "rope_parameters"),
    ],
)
def test_near_misses_are_refused_with_the_name_that_was_meant(typo: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"Unknown field '{typo}'. Did you mean '{meant}'"):
        tiny_config(**{typo: 1})


def names_of_others() -> dict[str, set[str]]:
    """What the configs of transformers call fields of ours: by the conversion's tables, and by their own."""
    ours = {f.name for f in LlmArchConfig.switches()}
    found: dict[str, set[str]] = {}
    for name, family in families().items():
        for entry in family.config:
            if isinstance(entry, Field):
                found.setdefault(entry.name, set()).update(entry.ours)
        for general, theirs in (CONFIG_MAPPING[name].attribute_map if name in CONFIG_MAPPING else {}).items():
            found.setdefault(theirs, set()).update({general} & ours)
    return {name: meant for name, meant in found.items() if meant and name not in ours}


@pytest.mark.parametrize(("name", "meant"), names_of_others().items(), ids=names_of_others())
def test_names_of_other_configs_are_refused_with_ours(name: str, meant: set[str]) -> None:
    with pytest.raises(ValueError, match=f"Unknown field '{name}'. Did you mean ") as told:
        tiny_config(**{name: 7})
    assert meant & set(re.findall(r"'(\w+)'", str(told.value)))
    with pytest.raises(ValueError, match=f"Unknown field '{name}'. Did you mean "):
        setattr(tiny_config(), name, 7)


@pytest.mark.parametrize(("name", "meant"), [("num_kv_heads", "num_key_value_heads"), ("n_embd", "hidden_size")])
def test_a_name_that_is_not_near_is_understood(name: str, meant: str) -> None:
    assert f"Did you mean '{meant}'" in refusal(**{name: 3})


def test_other_names_of_the_same_value_say_nothing_new(tmp_path: Path) -> None:
    """Tools switch dropout off by the names of BERT and GPT-2, on configs of any model."""
    config = tiny_config(n_embd=48, hidden_dropout_prob=0.0)
    config.attn_pdrop = config.hidden_dropout_prob = 0.0
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).hidden_dropout == 0.0
    assert not {"n_embd", "attn_pdrop", "hidden_dropout_prob"} & set(json.loads((tmp_path / "config.json").read_text()))
    with pytest.raises(ValueError, match="Did you mean 'hidden_dropout'"):
        config.hidden_dropout_prob = 0.1


@pytest.mark.parametrize("field", ["hidden_act", "head_act", "classifier_act"])
def test_an_unknown_activation_is_refused_by_the_config(field: str) -> None:
    switches = {"topology": "encoder", "lm_head_transform": True, "classifier_dense": True}
    assert f"{field}='silo' is not one of" in refusal(**switches, **{field: "silo"})


@pytest.mark.parametrize(("typo", "meant"), [("nom_type", "norm_type"), ("hidden_sise", "hidden_size")])
def test_a_near_miss_is_not_set(typo: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"Unknown field '{typo}'. Did you mean '{meant}'"):
        setattr(tiny_config(), typo, 1)


# -- the config of a model --------------------------------------------------------------------------------------------


def models() -> dict[str, Any]:
    model = LlmArchForCausalLM(tiny_config())
    return {"built": model, "copied": copy.deepcopy(model), "pickled": pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("model", models().values(), ids=models())
def test_a_switch_that_the_model_has_read_is_not_set(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"norm_placement=.sandwich. would change nothing.*from_pretrained"):
        model.config.norm_placement = "sandwich"
    assert model.config.norm_placement == "pre"
    model.config.norm_placement = "pre"  # vLLM writes back what it has read
    # The ways that the message names.
    of_a_copy = LlmArchConfig.from_dict(model.config.to_dict(), norm_placement="sandwich")
    assert len(LlmArchForCausalLM(of_a_copy).state_dict()) > len(model.state_dict())
    model.save_pretrained(tmp_path)
    assert LlmArchForCausalLM.from_pretrained(tmp_path, norm_placement="sandwich").config.norm_placement == "sandwich"
    copied = copy.deepcopy(model.config)
    copied.norm_placement = "sandwich"
    model.config.restate(norm_placement="sandwich")
    assert model.config.to_dict() == copied.to_dict()
    with pytest.raises(ValueError, match="'nom_type' is no switch"):
        model.config.restate(nom_type="rmsnorm")


def test_what_tools_set_on_the_config_of_a_model_is_set() -> None:
    model = LlmArchForCausalLM(tiny_config(num_experts=4))
    told: dict[str, Any] = {
        **{"use_cache": False, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": [3, 4]},
        **{"output_hidden_states": True, "output_router_logits": True, "router_aux_loss_coef": 0.1},
        **{"tie_word_embeddings": True, "vocab_size": 101, "num_hidden_layers": 2, "max_position_embeddings": 128},
        **{"dtype": torch.bfloat16, "torch_dtype": torch.float32, "return_dict": False, "problem_type": "regression"},
        **{"_attn_implementation": "eager", "name_or_path": "x", "architectures": ["X"], "num_labels": 5},
        **{"pretraining_tp": 1, "quantization_config": None, "max_length": 7, "is_causal": False, "_name_or_path": "y"},
        **{"intermediate_size": 30, "num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 40},
        **{"mtp_layer_types": None, "is_decoder": True, "id2label": {0: "a"}, "unsloth_version": "1", "some_tool": 1},
    }
    for name, value in told.items():
        setattr(model.config, name, value)
        if name != "num_labels":
            assert getattr(model.config, name) == value
    model = LlmArchForCausalLM(tiny_config())
    assert model.resize_token_embeddings(105).weight.shape[0] == model.config.vocab_size == 105


def test_other_unknown_names_are_kept_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(configuration.logger.name)
    logger.addHandler(caplog.handler)
    try:
        config = tiny_config(a_field_of_the_future=3)
    finally:
        logger.removeHandler(caplog.handler)
    assert "has no field 'a_field_of_the_future'" in caplog.text
    assert LlmArchConfig.from_dict(config.to_dict()).a_field_of_the_future == 3


@pytest.mark.parametrize("name", ["temperature", "max_length", "top_k", "torch_dtype", "_name_or_path", "id2label"])
def test_names_of_the_host_are_no_typos(name: str) -> None:
    tiny_config(**{name: {0: "a"} if name == "id2label" else None})


# -- combinations -----------------------------------------------------------------------------------------------------

# An example that breaks each row of CONSTRAINTS, by the fields of the row.
BROKEN: dict[tuple[str, ...], list[dict[str, Any]]] = {
    ("num_attention_heads", "num_key_value_heads"): [{"num_key_value_heads": 4}],
    ("attention_type", "num_attention_heads", "num_key_value_heads"): [
        {"attention_type": "mha"},
        {"attention_type": "mqa", "num_key_value_heads": 2},
        {"attention_type": "gqa", "num_key_value_heads": 6},
        {"attention_type": "gqa", "num_key_value_heads": 1},
        {**MLA, "num_key_value_heads": 2},
    ],
    ("attention_type", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"): [
        {**MLA, "v_head_dim": None},
        {**MLA, "kv_lora_rank": None},
        {"v_head_dim": 7},
        {"attention_type": "gqa", "kv_lora_rank": 7},
    ],
    ("attention_type", "position_encoding"): [{**MLA, "position_encoding": "alibi"}],
    ("attention_type", "qk_norm"): [{**MLA, "qk_norm": "head"}],
    ("layer_types",): [{"layer_types": ["full_attention", "linear_attention", "full_attention"]}],
    ("sliding_window", "layer_types"): [SLIDING, {"sliding_window": 5, "layer_types": ["full_attention"] * 3}],
    ("attention_chunk_size", "layer_types"): [
        {"layer_types": ["chunked_attention"] * 3},
        {"attention_chunk_size": 5, "layer_types": ["full_attention"] * 3},
    ],
    ("rope_parameters", "position_encoding"): [{"position_encoding": "alibi", "rope_parameters": {"rope_theta": 7.0}}],
    ("rope_parameters", "layer_types"): [
        {**MIXED, "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 7.0}}}
    ],
    ("rope_parameters",): [{"rope_parameters": {"rope_type": "proportional", "rope_theta": 7.0}}],
    ("sliding_window", "attention_chunk_size"): [
        {
            **{"sliding_window": 5, "attention_chunk_size": 6},
            "layer_types": ["full_attention", "chunked_attention", "sliding_attention"],
        }
    ],
    ("sliding_window",): [{"sliding_window": 1}, {"sliding_window": 0}],
    ("attention_chunk_size",): [{"attention_chunk_size": 1}],
    ("embedding_size", "tie_word_embeddings", "lm_head_transform"): [
        {"embedding_size": 20, "tie_word_embeddings": True},
    ],
    ("rope_parameters", "head_dim", "qk_rope_head_dim"): [
        {"head_dim": 2, "rope_parameters": {"rope_type": "ntk", "rope_theta": 7.0, "factor": 2.0}},
        {"head_dim": 4, "rope_parameters": {**DYNAMIC, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 0.1}},
        {"rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 0.5}},
        {**MLA, "qk_rope_head_dim": 7},
    ],
    ("nope_layers", "num_hidden_layers"): [{"nope_layers": [3]}, {"nope_layers": [-1]}, {"nope_layers": [2, 0, 1]}],
    ("position_encoding", "hidden_size", "embedding_size"): [
        {"position_encoding": "sinusoidal", "hidden_size": 49},
        {"position_encoding": "sinusoidal", "embedding_size": 21},
    ],
    ("parallel_block", "norm_placement"): [
        {"parallel_block": True, "norm_placement": "sandwich"},
        {"parallel_block": True, "norm_placement": "post", "parallel_norms": 2},
    ],
    ("num_experts", "num_experts_per_tok"): [
        {"num_experts": 3, "num_experts_per_tok": 4},
        {"num_experts": 3, "num_experts_per_tok": 0},
    ],
    ("num_experts", "n_group", "topk_group"): [
        {"num_experts": 6, "topk_group": 1},
        {"num_experts": 6, "n_group": 3},
        {"num_experts": 6, "n_group": 4, "topk_group": 2},
        {"num_experts": 6, "n_group": 2, "topk_group": 3},
        {"num_experts": 6, "n_group": 6, "topk_group": 1},
    ],
    ("router_group_score", "num_experts", "n_group"): [
        {"num_experts": 6, "router_group_score": "top2"},
        {"num_experts": 6, "n_group": 6, "topk_group": 3, "router_group_score": "top2"},
    ],
    ("router_bias_update_rate", "router_selection_bias"): [{"num_experts": 6, "router_bias_update_rate": 0.01}],
    ("router_type", "topology"): [{"num_experts": 6, "router_type": "expert_choice"}],
    ("router_type", "n_group", "router_selection_bias", "overflow"): [
        {"num_experts": 6, "router_type": "sparsemixer", "router_selection_bias": True},
        {"num_experts": 6, "router_type": "sparsemixer", "n_group": 3, "topk_group": 2},
    ],
    ("router_type", "capacity_factor", "expert_capacity", "router_score", "router_bias"): [
        {"num_experts": 6, "router_type": "sparsemixer", "expert_capacity": 5},
        {"num_experts": 6, "router_type": "sparsemixer", "capacity_factor": 1.5},
        {"num_experts": 6, "router_type": "sparsemixer", "router_score": "sigmoid"},
        {"num_experts": 6, "router_type": "sparsemixer", "router_bias": True},
    ],
    ("expert_capacity", "capacity_factor", "router_type"): [
        {"num_experts": 6, "expert_capacity": 5, "capacity_factor": 1.5},
    ],
    ("overflow", "capacity_factor", "expert_capacity"): [{"num_experts": 6, "overflow": "next_best"}],
    ("glu_limit", "glu_up_offset", "ffn_type"): [
        {"ffn_type": "mlp", "glu_limit": 7.0},
        {"ffn_type": "mlp", "glu_up_offset": 1.0},
    ],
    ("shared_expert_gate", "num_shared_experts"): [{"num_experts": 6, "shared_expert_gate": True}],
    ("num_shared_experts", "shared_expert_intermediate_size"): [
        {"num_experts": 6, "num_shared_experts": 1, "shared_expert_intermediate_size": 9},
    ],
    ("swish_beta", "experts_layout", "num_experts"): [
        {"num_experts": 6, "swish_beta": "learned", "experts_layout": "linear"},
    ],
    ("num_experts", "mlp_layer_types"): [{"num_experts": 6, "mlp_layer_types": ["dense"] * 3}],
    ("router_type", "norm_topk_prob", "router_aux_loss_coef"): [
        {**EXPERT_CHOICE, "norm_topk_prob": False},
        {**EXPERT_CHOICE, "router_aux_loss_coef": 0.1},
    ],
    ("router_type", "router_jitter_noise"): [{"num_experts": 6, "router_type": "sparsemixer"}],
    ("alibi_in_bf16", "topology"): [{"topology": "encoder", "position_encoding": "alibi", "alibi_in_bf16": True}],
    ("alibi_scaled", "attention_scale_by_layer"): [
        {"position_encoding": "alibi", "alibi_scaled": True, "attention_scale_by_layer": True},
    ],
    ("relative_attention_max_distance", "relative_attention_num_buckets"): [
        {"position_encoding": "relative_bias", "relative_attention_num_buckets": 3},
        {"position_encoding": "relative_bias", "relative_attention_max_distance": 16},
    ],
    ("positions_skip_padding", "pad_token_id", "position_encoding", "position_offset"): [
        {"position_encoding": "sinusoidal", "positions_skip_padding": True},
        {"position_encoding": "learned", "positions_skip_padding": True, "pad_token_id": 1},
    ],
    ("positions_follow_mask", "position_encoding", "position_offset", "positions_skip_padding", "alibi_in_bf16"): [
        {"position_encoding": "learned", "positions_follow_mask": True},
        {"position_encoding": "alibi", "positions_follow_mask": True, "alibi_in_bf16": True},
        {
            **{"position_encoding": "learned", "position_offset": 2, "pad_token_id": 1},
            **{"positions_skip_padding": True, "positions_follow_mask": True},
        },
    ],
    ("layer_groups", "layer_types", "mlp_layer_types", "nope_layers", "first_attention_norm"): [
        {**ONE_GROUP, "sliding_window": 5, "layer_types": MIXED["layer_types"]},
        {**ONE_GROUP, "num_experts": 6, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        {**ONE_GROUP, "nope_layers": [1]},
        {**ONE_GROUP, "first_attention_norm": False},
        {**ONE_GROUP, "attention_scale_by_layer": True},
    ],
    ("keep_in_fp32", "norm_placement", "final_norm"): [
        {"keep_in_fp32": ["ffn_output"], "norm_placement": "post"},
        {"keep_in_fp32": ["ffn_output"], "final_norm": False},
    ],
    ("keep_in_fp32", "attention_sinks"): [{"keep_in_fp32": ["sinks"]}],
    ("keep_in_fp32", "norm_weight_in_fp32"): [{"keep_in_fp32": ["norms"]}],
    ("keep_in_fp32", "router_in_fp32", "num_experts"): [
        {"keep_in_fp32": ["router"]},
        {"keep_in_fp32": ["router"], "num_experts": 4, "router_in_fp32": False},
    ],
    ("topology", "parallel_block"): [{"topology": "encoder-decoder", "parallel_block": True}],
    ("topology", "attention_chunk_size"): [
        {"topology": "encoder", "attention_chunk_size": 5},
        {"topology": "encoder-decoder", "attention_chunk_size": 5},
    ],
    ("layer_groups", "topology", "num_hidden_layers"): [
        {"layer_groups": 1},
        {"topology": "encoder", "layer_groups": 2},
    ],
    ("classifier_pooling", "pooler"): [{"topology": "encoder", "classifier_pooling": "pooler"}],
    ("share_source_embeddings", "hidden_size", "source_stack"): [
        {"topology": "encoder-decoder", "source_stack": {"vocab_size": 50}},
        {"topology": "encoder-decoder", "source_stack": {"hidden_size": 36}},
    ],
    ("swish_beta", "hidden_act"): [{"swish_beta": 1.5, "hidden_act": "gelu"}],
}

# A value off the default for each field that needs something, in a config where nothing would read it.
UNREAD: dict[str, Any] = {
    "q_lora_rank": 7,
    "latent_norm_eps": 0.5,
    "mla_cache": "expanded",
    "clip_qkv": {**MLA},
    "qk_norm_type": "layernorm",
    "qk_norm_bias": True,
    "rope_interleaved": {"position_encoding": "learned"},
    "nope_layers": {"position_encoding": "learned"},
    "sinusoidal_layout": "halves",
    "position_offset": 2,
    "alibi_bias_max": 16,
    "alibi_scaled": True,
    "alibi_in_bf16": True,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "parallel_norms": 2,
    "head_act": "relu",
    "head_bias": False,
    "classifier_act": "relu",
    "classifier_norm": True,
    "classifier_input_dropout": True,
    "token_head_dense": True,
    "source_stack": {"num_hidden_layers": 2},
    "share_source_embeddings": False,
    "wrap_decoder_start": True,
    "sinusoidal_endpoint": True,
    "expert_capacity": 5,
    "pooler": True,
    "first_attention_norm": {"norm_placement": "branch"},
    "positions_skip_padding": True,
    "positions_follow_mask": True,
    "relative_attention_shared": False,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 7,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 7,
    "router_bias": True,
    "router_in_fp32": False,
    "router_group_score": "top2",
    "router_selection_bias": True,
    "router_aux_loss_scope": "batch",
    "shared_expert_gate": True,
    "mlp_layer_types": ["sparse"] * 3,
    "router_type": "expert_choice",
    "router_score": "sigmoid",
    "norm_topk_prob": False,
    "routed_scaling_factor": 2.5,
    "n_group": 2,
    "topk_group": 1,
    "router_aux_loss_coef": 0.01,
    "router_z_loss_coef": 0.01,
    "router_jitter_noise": 0.01,
    "capacity_factor": 1.5,
    "overflow": "next_best",
    "router_bias_update_rate": 0.01,
    "experts_layout": "linear",
}
# Where it is the rest of the config that keeps it from being read, that is what stands above; the value stands here.
UNREAD_VALUES = {"clip_qkv": 0.5, "rope_interleaved": True, "nope_layers": [1], "first_attention_norm": False}


def test_every_refusal_has_an_example() -> None:
    assert {constraint.fields for constraint in CONSTRAINTS} == set(BROKEN)
    assert len(CONSTRAINTS) == len(BROKEN), "two constraints on the same fields: give each its own example"
    assert {name for name, declared in configuration.SWITCHES.items() if declared.needs} == set(UNREAD)


@pytest.mark.parametrize(
    ("fields", "switches"),
    [pytest.param(f, s, id=f"{'+'.join(f)}-{i}") for f, rows in BROKEN.items() for i, s in enumerate(rows)],
)
def test_each_constraint_refuses_naming_its_fields(fields: tuple[str, ...], switches: dict[str, Any]) -> None:
    message = refusal(**switches)
    (constraint,) = (constraint for constraint in CONSTRAINTS if constraint.fields == fields)
    assert constraint.why in message
    for name in fields:
        assert f"{name}=" in message


@pytest.mark.parametrize("name", UNREAD)
def test_a_switch_that_nothing_reads_is_refused(name: str) -> None:
    switches = {**UNREAD[name], name: UNREAD_VALUES[name]} if name in UNREAD_VALUES else {name: UNREAD[name]}
    message = refusal(**switches)
    assert f"{name}={switches[name]!r} has no effect without {configuration.SWITCHES[name].needs.text}" in message


def test_layer_types_must_be_as_many_as_layers() -> None:
    assert "layer_types" in refusal(layer_types=["full_attention"] * 2)


@pytest.mark.parametrize(
    "name",
    [
        *("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "head_dim"),
        *("max_position_embeddings", "attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"),
    ],
)
@pytest.mark.parametrize("value", [0, -1])
def test_there_is_no_model_of_size_zero(name: str, value: int) -> None:
    assert name in refusal(**{name: value, "position_encoding": "none"})


def test_odd_heads_are_refused_with_rope_alone() -> None:
    assert "head_dim" in refusal(head_dim=9)
    assert tiny_config(head_dim=9, position_encoding="alibi").head_dim == 9


# -- old spellings of RoPE --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_scaling(key: str) -> None:
    config = tiny_config(rope_theta=777.0, rope_scaling={key: "linear", "factor": 3.0})
    modern = tiny_config(rope_parameters={"rope_type": "linear", "rope_theta": 777.0, "factor": 3.0})
    assert (
        config.rope_parameters == modern.rope_parameters == {"rope_type": "linear", "rope_theta": 777.0, "factor": 3.0}
    )
    assert config.to_dict() == modern.to_dict()
    assert config.rope_theta == 777.0


def test_top_level_theta_and_partial_rotary_factor() -> None:
    config = tiny_config(rope_theta=1000000, partial_rotary_factor=0.4)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.4}
    assert config.rope_theta == 1000000


def test_theta_beside_other_parameters_is_folded_in() -> None:
    config = tiny_config(rope_theta=777.5, rope_parameters={"rope_type": "linear", "factor": 3.0})
    assert config.rope_parameters == {"rope_type": "linear", "factor": 3.0, "rope_theta": 777.5}


def test_the_default_base() -> None:
    assert tiny_config().rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert tiny_config(rope_scaling=None, rope_theta=None).rope_theta == 10000.0


@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling"])
def test_bases_that_disagree_are_refused(where: str) -> None:
    given = {"rope_type": "default", "rope_theta": 5.0}
    message = refusal(rope_theta=6.0, **{where: given})
    assert "6.0" in message
    assert "5.0" in message
    assert tiny_config(rope_theta=5.0, **{where: given}).rope_theta == 5.0


def test_rope_without_rope_is_refused() -> None:
    for old in (
        {"rope_theta": 5.0},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"partial_rotary_factor": 0.5},
    ):
        assert next(iter(old)) in refusal(position_encoding="alibi", **old)
        assert "position_encoding='alibi'" in refusal(position_encoding="alibi", **old)
    assert not tiny_config(position_encoding="alibi", **dict.fromkeys(ROPE_SPELLINGS)).rope_parameters
    assert not hasattr(tiny_config(position_encoding="alibi"), "rope_theta")


def test_theta_of_the_first_layer_type() -> None:
    config = tiny_config(**MIXED, rope_parameters=LOCAL_AND_GLOBAL)
    assert config.rope_theta == 33.0


@pytest.mark.parametrize("rope_type", ["linear", "ntk", "dynamic", "yarn", "llama3", "longrope"])
def test_missing_keys_of_a_rope_type_are_named(rope_type: str) -> None:
    with pytest.raises((KeyError, ValueError, StrictDataclassClassValidationError), match="factor"):
        tiny_config(rope_parameters={"rope_type": rope_type, "rope_theta": 7.0})


@pytest.mark.parametrize(
    "switches",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0}},
        {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 7.0},
        {**MIXED, "rope_parameters": LOCAL_AND_GLOBAL},
        {"rope_parameters": YARN},
        {"per_layer_config": {1: {"ffn_type": "mlp"}}},
    ],
)
def test_what_the_caller_gave_is_not_changed(switches: dict[str, Any]) -> None:
    before = copy.deepcopy(switches)
    config = tiny_config(**switches)
    assert switches == before
    written = config.to_dict()
    for parameters in _dicts(switches):
        parameters["changed_later"] = True
    assert config.to_dict() == written


def _dicts(value: Any) -> Iterator[dict[Any, Any]]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from _dicts(inner)
        yield value


# -- what is written is read ------------------------------------------------------------------------------------------

VARIANTS = [
    pytest.param(variant.switches, id=f"{kind}{label}")
    for kind, table in (("", SWITCHES), ("stack,", STACKS))
    for label, _, variant in variants(table)
]


@pytest.mark.parametrize("switches", VARIANTS)
def test_written_and_read(switches: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config(**switches)
    written = config.to_dict()
    again = LlmArchConfig.from_dict(copy.deepcopy(written))
    assert again.to_dict() == written
    assert [getattr(again, f.name) for f in LlmArchConfig.switches()] == [
        getattr(config, f.name) for f in LlmArchConfig.switches()
    ]
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is LlmArchConfig
    assert {**loaded.to_dict(), "_name_or_path": ""} == {**written, "_name_or_path": ""}
    for f in LlmArchConfig.switches():
        assert type(getattr(loaded, f.name)) is type(getattr(config, f.name)), f.name


def test_all_switches_are_in_the_file_so_that_a_new_default_changes_no_old_model(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {f.name for f in LlmArchConfig.switches() if getattr(tiny_config(), f.name) is not None} <= written.keys()
    assert written["model_type"] == "llmarch"


def test_auto_map_serves_every_head_whatever_is_saved(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["auto_map"] == dict(configuration.AUTO_MAP)


def test_the_rule_of_heads_says_which_number_divides_which() -> None:
    assert "num_key_value_heads must divide num_attention_heads" in refusal(
        num_attention_heads=8, num_key_value_heads=3, head_dim=10
    )


def test_keywords_of_from_pretrained_override_what_was_saved(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, attention_bias=True, norm_placement="sandwich")
    assert config.attention_bias
    assert config.norm_placement == "sandwich"


LINEAR = {"rope_type": "linear", "factor": 2.0}
SCALED = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 777.0, "partial_rotary_factor": 0.4}


@pytest.mark.parametrize(
    ("saved", "given", "expected"),
    [
        ({"rope_theta": 5e5}, LINEAR, {**LINEAR, "rope_theta": 5e5}),
        ({"rope_theta": 5e5}, {"type": "linear", "factor": 2.0}, {**LINEAR, "rope_theta": 5e5}),
        (SCALED, LINEAR, {**LINEAR, "rope_theta": 777.0, "partial_rotary_factor": 0.4}),
        (SCALED, {"factor": 8.0}, {**SCALED, "factor": 8.0}),
        (SCALED, {"rope_type": "yarn", "factor": 8.0}, {**SCALED, "factor": 8.0}),
        (SCALED, {"rope_theta": 9.0}, {**SCALED, "rope_theta": 9.0}),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_rope_given_beside_a_saved_config_keeps_the_rest(
    saved: dict[str, Any], given: dict[str, Any], expected: dict[str, Any], spelling: str, tmp_path: Path
) -> None:
    tiny_config(rope_parameters=saved).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, **{spelling: dict(given)})
    assert {name: config.rope_parameters[name] for name in expected} == expected
    assert ("beta_fast" in config.rope_parameters) <= (config.rope_parameters["rope_type"] == "yarn")


def test_rope_given_by_layer_type_keeps_the_rest(tmp_path: Path) -> None:
    full, sliding = LOCAL_AND_GLOBAL["full_attention"], LOCAL_AND_GLOBAL["sliding_attention"]
    tiny_config(**MIXED, rope_parameters=LOCAL_AND_GLOBAL).save_pretrained(tmp_path / "nested")
    found = AutoConfig.from_pretrained(tmp_path / "nested", rope_parameters={"full_attention": {"factor": 9.0}})
    assert found.rope_parameters["full_attention"] == {**full, "factor": 9.0}
    assert found.rope_parameters["sliding_attention"].items() >= sliding.items()
    with pytest.raises(ValueError, match="full_attention and sliding_attention"):
        AutoConfig.from_pretrained(tmp_path / "nested", rope_parameters=LINEAR)
    tiny_config(**MIXED, rope_parameters={"rope_theta": 5e5}).save_pretrained(tmp_path / "flat")
    found = AutoConfig.from_pretrained(tmp_path / "flat", rope_parameters={"full_attention": dict(LINEAR)})
    assert found.rope_parameters["full_attention"] == {**LINEAR, "rope_theta": 5e5}
    assert found.rope_parameters["sliding_attention"]["rope_theta"] == 5e5


def test_a_source_stack_given_beside_a_saved_one_keeps_the_rest(tmp_path: Path) -> None:
    stack = {"num_hidden_layers": 2, "intermediate_size": 20}
    tiny_config(topology="encoder-decoder", source_stack=stack).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, source_stack={"num_hidden_layers": 4})
    assert config.source_stack == {"num_hidden_layers": 4, "intermediate_size": 20}
    assert AutoConfig.from_pretrained(tmp_path, source_stack=None).source_stack is None


@pytest.mark.parametrize(("width", "kind"), [("sliding_window", "sliding"), ("attention_chunk_size", "chunked")])
def test_a_window_given_beside_a_saved_config_comes_and_goes(width: str, kind: str, tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path / "full")
    found = AutoConfig.from_pretrained(tmp_path / "full", **{width: 6})
    assert found.layer_types == [f"{kind}_attention"] * 3
    mixed = [f"{kind}_attention", "full_attention", f"{kind}_attention"]
    tiny_config(**{width: 6}, layer_types=mixed).save_pretrained(tmp_path / "mixed")
    assert AutoConfig.from_pretrained(tmp_path / "mixed", **{width: 8}).layer_types == mixed
    assert AutoConfig.from_pretrained(tmp_path / "mixed", **{width: None}).layer_types == ["full_attention"] * 3


# -- ranges -----------------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
FLOATS = [f.name for f in LlmArchConfig.switches() if float in get_args(f.type)]
# What the formula of each type cannot do without, of all that transformers does not fill in by itself.
FORMULAS = {
    **dict.fromkeys(("linear", "ntk", "dynamic", "yarn"), ("factor",)),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 7.0},
    "linear": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0},
    "ntk": {"rope_type": "ntk", "rope_theta": 7.0, "factor": 2.0},
    "dynamic": {**DYNAMIC},
    "yarn": {**YARN},
    "llama3": {
        **{"rope_type": "llama3", "rope_theta": 7.0, "factor": 2.0, "original_max_position_embeddings": 16},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "longrope": {**LONGROPE},
}
OUT_OF_RANGE: list[tuple[str, dict[str, Any]]] = [
    ("attention_scale=0", {"attention_scale": 0}),
    ("attention_scale=-1.0", {"attention_scale": -1.0}),
    ("attention_chunk_size=1", {"attention_chunk_size": 1}),
    ("norm_eps=-1", {"norm_eps": -1}),
    ("latent_norm_eps=-0.5", {**MLA, "latent_norm_eps": -0.5}),
    ("type_vocab_size=-1", {"type_vocab_size": -1}),
    ("initializer_range=-0.02", {"initializer_range": -0.02}),
    ("position_offset=-1", {"position_encoding": "learned", "position_offset": -1}),
    ("num_experts=0", {"num_experts": 0}),
    ("num_shared_experts=-1", {"num_experts": 6, "num_shared_experts": -1}),
    ("n_group=0", {"num_experts": 6, "n_group": 0, "topk_group": 0}),
    ("router_jitter_noise=-0.1", {"num_experts": 6, "router_jitter_noise": -0.1}),
    ("hidden_dropout=1.5", {"hidden_dropout": 1.5}),
    ("hidden_dropout=-0.1", {"hidden_dropout": -0.1}),
    ("attention_scale=-1", {"per_layer_config": {1: {"attention_scale": -1}}}),
    ("attention_scale=-1", {"topology": "encoder-decoder", "source_stack": {"attention_scale": -1}}),
    ("'partial_rotary_factor'", {"rope_parameters": {**ROPES["default"], "partial_rotary_factor": 2}}),
    ("'partial_rotary_factor'", {"rope_parameters": {**ROPES["default"], "partial_rotary_factor": 0}}),
    ("'rope_theta'", {"rope_parameters": {**ROPES["default"], "rope_theta": 0}}),
    ("'rope_theta'", {"rope_theta": -7.0}),
    ("'factor'", {"rope_parameters": {**ROPES["linear"], "factor": "2"}}),
    ("'factor'", {"rope_parameters": {**YARN, "factor": 0}}),
    ("'high_freq_factor'", {"rope_parameters": {**ROPES["llama3"], "high_freq_factor": 1.0}}),
    ("'short_factor'", {"rope_parameters": {**LONGROPE, "short_factor": LONGROPE["short_factor"][:-1]}}),
    ("'long_factor'", {"rope_parameters": {**LONGROPE, "long_factor": [*LONGROPE["long_factor"], 1.0]}}),
    ("'long_factor'", {"rope_parameters": {**LONGROPE, "long_factor": 2.0}}),
    ("'long_factor'", {"rope_parameters": {**LONGROPE, "long_factor": [NAN, *LONGROPE["long_factor"][1:]]}}),
    (
        "'factor'",
        {**MIXED, "rope_parameters": {"full_attention": {**YARN, "factor": -1}, "sliding_attention": ROPES["default"]}},
    ),
]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", FLOATS)
def test_no_field_is_nan_or_infinite(name: str, value: float) -> None:
    assert f"{name}={value} must be a finite number" in refusal(**{name: value})


def test_the_sweep_over_floats_finds_them() -> None:
    assert {"norm_eps", "attention_scale", "swish_beta", "capacity_factor", "hidden_dropout"} <= set(FLOATS)
    assert len(FLOATS) > 20


@pytest.mark.parametrize(("named", "switches"), OUT_OF_RANGE, ids=str)
def test_a_number_out_of_range_is_refused(named: str, switches: dict[str, Any]) -> None:
    assert named in refusal(**switches)


@pytest.mark.parametrize("kind", ROPES)
def test_rope_parameters_are_checked(kind: str) -> None:
    """Each type is accepted as it is, and refused with a wrong number or without what its formula needs."""
    tiny_config(rope_parameters=ROPES[kind])
    for name, good in ROPES[kind].items():
        for value in () if isinstance(good, str) else [[]] if isinstance(good, list) else [NAN, INF, 0, -1, "1"]:
            assert f"rope_parameters[{name!r}]" in refusal(rope_parameters={**ROPES[kind], name: value})
    for name in FORMULAS.get(kind, ()):
        for without in ({}, {name: None}):
            kept = {key: value for key, value in ROPES[kind].items() if key != name}
            assert f"rope_parameters[{name!r}] is missing" in refusal(rope_parameters={**kept, **without})


def test_a_number_set_later_is_refused_by_the_model() -> None:
    config = tiny_config()
    config.rope_parameters["rope_theta"] = 0
    with pytest.raises(ValueError, match="rope_theta"):
        LlmArchForCausalLM(config)


# -- one layer's own --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "own",
    [
        {"num_key_value_heads": 3},
        {"num_attention_heads": 4},
        {"intermediate_size": 21},
        {"ffn_type": "mlp", "hidden_act": "relu2"},
        {"norm_placement": "sandwich"},
        {"qk_norm": "head"},
        {"parallel_block": True},
        {"attention_bias": True, "attention_sinks": True},
    ],
    ids=str,
)
def test_a_layer_may_differ_in_what_is_its_own(own: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config(per_layer_config={1: own})
    for name, value in own.items():
        assert getattr(config.per_layer_config[1], name) == value
        assert getattr(config.per_layer_config[0], name) == getattr(tiny_config(), name)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert {**again.to_dict(), "_name_or_path": ""} == {**config.to_dict(), "_name_or_path": ""}


@pytest.mark.parametrize(
    ("switches", "named"),
    [
        ({"per_layer_config": {1: {"hidden_size": 32}}}, "hidden_size"),
        ({"per_layer_config": {1: {"position_encoding": "alibi"}}}, "position_encoding"),
        ({"per_layer_config": {1: {"rope_interleaved": True}}}, "rope_interleaved"),
        ({"per_layer_config": {1: {"tie_word_embeddings": True}}}, "tie_word_embeddings"),
        ({"per_layer_config": {1: {"final_norm": False}}}, "final_norm"),
        ({"per_layer_config": {1: {"norm_type": "layernorm"}}}, "norm_type"),
        ({"per_layer_config": {1: {"num_experts": 4}}}, "num_experts"),
        ({"per_layer_config": {1: {"head_dim": 8}}}, "head_dim"),
        ({"topology": "encoder", "layer_groups": 1, "per_layer_config": {1: {"ffn_bias": True}}}, "layer_groups"),
        ({"position_encoding": "alibi", "per_layer_config": {1: {"num_attention_heads": 4}}}, "num_attention_heads"),
        (
            {"position_encoding": "relative_bias", "per_layer_config": {1: {"num_attention_heads": 4}}},
            "num_attention_heads",
        ),
    ],
    ids=str,
)
def test_a_layer_may_not_differ_in_what_the_model_has_once(switches: dict[str, Any], named: str) -> None:
    message = refusal(**switches)
    assert named in message
    assert "per_layer_config" in message


def test_constraints_hold_in_each_layer() -> None:
    assert "num_key_value_heads=4" in refusal(per_layer_config={2: {"num_key_value_heads": 4}})
    assert "parallel_norms=2" in refusal(per_layer_config={0: {"parallel_norms": 2}})
    assert "num_experts_per_tok=4" in refusal(num_experts=3, per_layer_config={1: {"num_experts_per_tok": 4}})


# -- tables and derived values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "literal"),
    [
        (POSITIONS, configuration.PositionEncoding),
        (NORMS, configuration.NormType),
        (NORM_SLOTS, configuration.NormPlacement),
        (ATTENTIONS, configuration.AttentionType),
    ],
    ids=["POSITIONS", "NORMS", "NORM_SLOTS", "ATTENTIONS"],
)
def test_tables_have_a_part_for_each_value(table: Mapping[str, Any], literal: Any) -> None:
    assert set(table) == set(get_args(literal))


def test_other_tables_have_a_part_for_each_value() -> None:
    assert set(QK_NORM_SHAPES) == set(get_args(configuration.QKNorm)) - {"none"}
    assert set(get_args(configuration.RopeType)) <= set(ROPE_FREQUENCIES)
    # A parallel block has no place for cross-attention, and one norm or two only where it is parallel.
    assert set(BLOCKS) == {(False, 1, False), (True, 1, False), (True, 2, False), (False, 1, True)}
    assert {kind for kind, _ in FEED_FORWARDS} == set(get_args(configuration.FFNType))
    assert set(ROUTERS) == set(get_args(configuration.RouterType))
    assert set(SCORES) == set(get_args(configuration.RouterScore))
    assert set(GROUP_SCORES) == set(get_args(configuration.RouterGroupScore))
    assert set(OVERFLOWS) == set(get_args(configuration.Overflow))
    assert set(EXPERT_LAYOUTS) == set(get_args(configuration.ExpertsLayout))
    assert set(POOLINGS) == set(get_args(configuration.ClassifierPooling))


def test_every_field_says_what_it_is() -> None:
    fields = list(LlmArchConfig.switches())
    assert len(fields) > 80
    assert LlmArchConfig.docs().keys() == {f.name for f in fields}
    for f in fields:
        doc = LlmArchConfig.docs()[f.name]
        assert len(doc) > 10, f.name
        assert doc[-1] in ".)" or doc.endswith("`"), f.name
    ours = [group for group in LlmArchConfig.__mro__ if group.__module__ == configuration.__name__]
    declared = {name for group in ours for name in vars(group).get("__annotations__", {})}
    assert declared & {f.name for f in dataclasses.fields(LlmArchConfig)} == {f.name for f in fields}


DERIVED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"hidden_size": 96, "num_attention_heads": 6},
        {"head_dim": 16, "num_key_value_heads": 6, "attention_kind": "mha"},
    ),
    ({"num_attention_heads": 8, "attention_type": "mqa"}, {"num_key_value_heads": 1, "attention_kind": "mqa"}),
    ({"num_attention_heads": 8, "num_key_value_heads": 1}, {"attention_kind": "mqa", "attention_type": None}),
    ({"num_attention_heads": 8, "num_key_value_heads": 4}, {"attention_kind": "gqa"}),
    ({**MLA, "attention_type": None, "num_attention_heads": 6}, {"attention_kind": "mla", "qk_head_dim": 22}),
    ({}, {"qk_head_dim": None}),
    ({"hidden_size": 512, "ffn_type": "mlp"}, {"intermediate_size": 2048}),
    # 8/3 * 4096 = 10922.7, LLaMA-7B's 11008 = 43 * 256.
    ({"hidden_size": 4096}, {"intermediate_size": 11008}),
    ({"hidden_size": 48, "num_attention_heads": 8, "ffn_multiple_of": 1}, {"intermediate_size": 128}),
    ({"hidden_size": 56, "num_attention_heads": 4, "ffn_multiple_of": 1}, {"intermediate_size": 150}),
    ({"hidden_size": 48, "num_attention_heads": 8, "ffn_multiple_of": 10}, {"intermediate_size": 130}),
    ({"hidden_size": 48, "num_attention_heads": 8, "ffn_multiple_of": 100}, {"intermediate_size": 200}),
    ({}, {"norm_bias": False}),
    ({"norm_type": "layernorm"}, {"norm_bias": True}),
    ({"norm_type": "layernorm", "norm_bias": False}, {"norm_bias": False}),
    ({"num_hidden_layers": 2}, {"layer_types": ["full_attention"] * 2}),
    ({"num_hidden_layers": 2, "sliding_window": 5}, {"layer_types": ["sliding_attention"] * 2}),
    ({"num_hidden_layers": 2, "attention_chunk_size": 5}, {"layer_types": ["chunked_attention"] * 2}),
]


@pytest.mark.parametrize(("given", "expected"), DERIVED, ids=[str(given) for given, _ in DERIVED])
def test_derived_values(given: dict[str, Any], expected: dict[str, Any]) -> None:
    config = LlmArchConfig(**given)
    assert {name: getattr(config, name) for name in expected} == expected


def test_example_functions_are_pure() -> None:
    """Constraints are read for each layer and on each save: they must not change what they look at."""
    config = tiny_config(**MIXED, rope_parameters=LOCAL_AND_GLOBAL)
    before = config.to_dict()
    checks: list[Callable[[LlmArchConfig], bool]] = [constraint.holds for constraint in CONSTRAINTS]
    checks += [declared.needs.holds for declared in configuration.SWITCHES.values() if declared.needs]
    for holds in checks:
        holds(config)
    assert config.to_dict() == before
