"""Families with experts, beyond what all families go through in test_families.py: both layouts of experts, published
configs, quantised sources, layers that predict further ahead, the balance loss, and what is refused."""

import copy
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from family_configs import CASES, EXPERTS, TEXT_LENGTH, redraw
from hf_llmarch import LlmArchConfig, LlmArchForCausalLM
from hf_llmarch.conversion.errors import CheckpointError, NotExpressible, PlanError, UnsupportedField
from hf_llmarch.conversion.plans import Plan, export_plan, plan
from hf_llmarch.conversion.preserved import kept, to_keep, true_config
from hf_llmarch.conversion.sources import open_checkpoint
from hf_llmarch.conversion.sources.base import Checkpoint
from hf_llmarch.conversion.sources.quantised import dequantised
from test_families import Converted, assert_equal_logits, build, model_type, text

pytestmark = pytest.mark.core


def native_config(case: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type(case), **CASES[case], **changes}


# -- both layouts ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=EXPERTS)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return build(request.param, tmp_path_factory.mktemp("native"))


def with_linears(config: LlmArchConfig) -> LlmArchConfig:
    return LlmArchConfig.from_dict({**config.to_dict(), "experts_layout": "linear"})


@torch.no_grad()
def test_experts_as_linears_are_the_same_model_and_go_back_to_the_same_bytes(converted: Converted) -> None:
    assert converted.ours.config.experts_layout == "packed"
    config = with_linears(converted.ours.config)
    relation = export_plan(config)
    ours = LlmArchForCausalLM(config).eval()
    ours.load_state_dict(dict(relation.stream(converted.tensors.__getitem__, to="ours")), strict=False)
    ours.tie_weights()
    assert any(name.endswith("experts.0.gate_proj.weight") for name in ours.state_dict())
    assert_equal_logits(ours(text()).logits, converted.native(text()).logits)
    written = dict(relation.stream(ours.state_dict().__getitem__, to="theirs"))
    assert written.keys() == converted.tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in converted.tensors.items())
    assert relation.foreign_config == converted.config


def test_what_matters_is_away_from_its_default(converted: Converted) -> None:
    """Parity would not see a selection bias of zero, or experts as wide as the model."""
    sizes = converted.ours.config
    assert len({sizes.hidden_size, sizes.moe_intermediate_size or sizes.intermediate_size, sizes.num_experts}) == 3
    biases = [t for name, t in converted.ours.state_dict().items() if name.endswith("e_score_correction_bias")]
    assert len(biases) == (sizes.mlp_layer_types.count("sparse") if sizes.router_selection_bias else 0)
    assert all(bias.std() > 0.1 for bias in biases)


# -- the balance loss --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "qwen3_moe-biases", "olmoe", "gpt_oss"])
def test_the_loss_in_training_is_the_native_one_with_router_logits(case: str, tmp_path: Path) -> None:
    converted = build(case, tmp_path, router_aux_loss_coef=0.5)
    mask, labels = torch.ones(2, TEXT_LENGTH, dtype=torch.long), text()
    # Not the first real token either: what predicts it is padding, of which each class makes something else.
    mask[1, :7], labels[1, :8] = 0, -100
    inputs = {"input_ids": text(), "attention_mask": mask, "labels": labels}
    native = converted.native.train()(**inputs, output_router_logits=True)
    ours = converted.ours.train()(**inputs)
    assert native.aux_loss > 1
    torch.testing.assert_close(ours.aux_loss, native.aux_loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.loss, native.loss, rtol=1e-5, atol=0)


# -- SparseMixer's family: LongRoPE ------------------------------------------------------------------------------------


@torch.no_grad()
def test_phimoe_reads_long_texts_with_the_long_factors(tmp_path: Path) -> None:
    """Its paper's rule. transformers' class computes its frequencies without the length, so always the short ones."""
    scaling = {**CASES["phimoe"]["rope_scaling"], "original_max_position_embeddings": 16}
    converted = build("phimoe", tmp_path, rope_scaling=scaling, original_max_position_embeddings=16)
    ours = converted.ours(text()).logits
    with pytest.raises(AssertionError):
        assert_equal_logits(ours, converted.native(text()).logits)
    native: Any = converted.native
    native.model.rotary_emb.rope_init_fn = partial(ROPE_INIT_FUNCTIONS["longrope"], seq_len=TEXT_LENGTH)
    assert_equal_logits(ours, native(text()).logits)


# -- published configs -------------------------------------------------------------------------------------------------

DEEPSEEK_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
DEEPSEEK = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "ep_size": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "num_hidden_layers": 61,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}
# As on the Hub, less what is inert in every family.
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {
        **DEEPSEEK,
        "model_type": "deepseek_v2",
        "aux_loss_alpha": 0.001,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "rope_scaling": {**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "topk_group": 1,
        "topk_method": "greedy",
        "vocab_size": 102400,
    },
    "deepseek-v2": {
        **DEEPSEEK,
        "model_type": "deepseek_v2",
        "aux_loss_alpha": 0.001,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "first_k_dense_replace": 1,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_group": 8,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 128,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 60,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "rope_scaling": {**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 16.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "vocab_size": 102400,
    },
    "deepseek-r1": {
        **DEEPSEEK,
        "model_type": "deepseek_v3",
        "aux_loss_alpha": 0.001,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "rope_scaling": {**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "vocab_size": 129280,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "vocab_size": 32000,
    },
    "qwen1.5-moe": {
        "model_type": "qwen2_moe",
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "eos_token_id": 50279,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "vocab_size": 50304,
    },
    "phi-3.5-moe": {
        "model_type": "phimoe",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 32000,
        "hidden_act": "silu",
        "hidden_dropout": 0.0,
        "hidden_size": 4096,
        "input_jitter_noise": 0.01,
        "intermediate_size": 6400,
        "lm_head_bias": True,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "original_max_position_embeddings": 4096,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": [1.0 + n / 8 for n in range(64)],
            "long_mscale": 1.243163121016122,
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0 + n / 64 for n in range(64)],
            "short_mscale": 1.243163121016122,
            "type": "longrope",
        },
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.01,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "vocab_size": 32064,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "granite-3.0-1b-a400m": {
        "model_type": "granitemoe",
        "attention_bias": False,
        "attention_dropout": 0.1,
        "attention_multiplier": 0.015625,
        "bos_token_id": 0,
        "embedding_multiplier": 12.0,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "logits_scaling": 6.0,
        "max_position_embeddings": 4096,
        "num_attention_heads": 16,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 0,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000,
        "router_aux_loss_coef": 0.0,
        "tie_word_embeddings": True,
        "vocab_size": 49155,
    },
}


def native_parameters(config: dict[str, Any]) -> int:
    """Saved numbers of transformers' own class, a tied head counted once."""
    with torch.device("meta"):
        native = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(config)))
    return sum(t.numel() for t in {id(t): t for t in native.state_dict(keep_vars=True).values()}.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_whole_and_given_back_word_for_word(name: str) -> None:
    config = PUBLISHED[name]
    names = every_name(config)
    proven = plan(config, names)
    assert sum(math.prod(shape) for shape in proven.their_shapes.values()) == native_parameters(config)
    assert proven.aside == tuple(name for name in names if name.startswith("model.layers.61."))
    assert export_plan(proven.config).foreign_config == config


def every_name(config: dict[str, Any]) -> list[str]:
    """The tensors that a published checkpoint of this config lists, by the rules of its authors' code."""
    return list(NAMES[config["model_type"]](config))


def shared_names(config: dict[str, Any], biased: str = "") -> Iterator[str]:
    yield from ("model.embed_tokens.weight", "model.norm.weight")
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight"
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield from (f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight")
        if "kv_lora_rank" not in config:
            yield from (f"{layer}.self_attn.{part}_proj.weight" for part in "qkvo")
            yield from (f"{layer}.self_attn.{part}_proj.bias" for part in biased)


def sparse_names(config: dict[str, Any], block: str, gates: tuple[str, ...], experts: int, parts: str) -> Iterator[str]:
    for i in range(config.get("first_k_dense_replace", 0), config["num_hidden_layers"]):
        yield from (f"model.layers.{i}.{block}.{gate}" for gate in gates)
        yield from (
            f"model.layers.{i}.{block}.experts.{e}.{part}.weight" for e in range(experts) for part in parts.split()
        )


def qwen_names(config: dict[str, Any], biased: str = "", extra: tuple[str, ...] = ()) -> Iterator[str]:
    yield from shared_names(config, biased)
    yield from sparse_names(
        config, "mlp", ("gate.weight", *extra), config["num_experts"], "gate_proj up_proj down_proj"
    )


def normed(config: dict[str, Any]) -> Iterator[str]:
    yield from qwen_names(config)
    for i in range(config["num_hidden_layers"]):
        yield from (f"model.layers.{i}.self_attn.{part}_norm.weight" for part in "qk")


def deepseek_names(config: dict[str, Any], gates: tuple[str, ...] = ("gate.weight",)) -> Iterator[str]:
    yield from shared_names(config)
    shared = tuple(f"shared_experts.{part}_proj.weight" for part in ("gate", "up", "down"))
    parts = "gate_proj up_proj down_proj"
    yield from sparse_names(config, "mlp", (*gates, *shared), config["n_routed_experts"], parts)
    queries = "q_proj" if config["q_lora_rank"] is None else "q_a_proj q_a_layernorm q_b_proj"
    for i in range(config["num_hidden_layers"]):
        for part in f"{queries} kv_a_proj_with_mqa kv_a_layernorm kv_b_proj o_proj".split():
            yield f"model.layers.{i}.self_attn.{part}.weight"
    for i in range(config["first_k_dense_replace"]):
        yield from (f"model.layers.{i}.mlp.{part}.weight" for part in parts.split())


def deepseek_v3_names(config: dict[str, Any]) -> Iterator[str]:
    """With the layers ahead, which are blocks like the others and a little more."""
    last, ahead = config["num_hidden_layers"], config["num_nextn_predict_layers"]
    gates = ("gate.weight", "gate.e_score_correction_bias")
    yield from deepseek_names({**config, "num_hidden_layers": last + ahead}, gates)
    for i in range(last, last + ahead):
        for part in ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"):
            yield f"model.layers.{i}.{part}.weight"


def mixtral_names(config: dict[str, Any], biased: str = "") -> Iterator[str]:
    yield from shared_names(config, biased)
    yield from sparse_names(config, "block_sparse_moe", ("gate.weight",), config["num_local_experts"], "w1 w2 w3")


def phimoe_names(config: dict[str, Any]) -> Iterator[str]:
    yield from mixtral_names(config, "qkvo")
    yield from ("lm_head.bias", "model.norm.bias")
    for i in range(config["num_hidden_layers"]):
        yield from (f"model.layers.{i}.{norm}.bias" for norm in ("input_layernorm", "post_attention_layernorm"))


def gpt_oss_names(config: dict[str, Any]) -> Iterator[str]:
    yield from shared_names(config, "qkvo")
    for i in range(config["num_hidden_layers"]):
        yield f"model.layers.{i}.self_attn.sinks"
        yield from (f"model.layers.{i}.mlp.router.{kind}" for kind in ("weight", "bias"))
        for part in ("gate_up_proj", "down_proj"):
            yield from (f"model.layers.{i}.mlp.experts.{part}{bias}" for bias in ("", "_bias"))


def granitemoe_names(config: dict[str, Any]) -> Iterator[str]:
    yield from shared_names(config)
    for i in range(config["num_hidden_layers"]):
        for part in ("input_linear", "output_linear", "router.layer"):
            yield f"model.layers.{i}.block_sparse_moe.{part}.weight"


SHARED_EXPERT = (*(f"shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")), "shared_expert_gate.weight")
NAMES = {
    "mixtral": mixtral_names,
    "qwen2_moe": partial(qwen_names, biased="qkv", extra=SHARED_EXPERT),
    "qwen3_moe": normed,
    "olmoe": normed,
    "deepseek_v2": deepseek_names,
    "deepseek_v3": deepseek_v3_names,
    "phimoe": phimoe_names,
    "gpt_oss": gpt_oss_names,
    "granitemoe": granitemoe_names,
}


# -- quantised sources -------------------------------------------------------------------------------------------------

BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}


def stored(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder)


def blocks(weight: torch.Tensor, rows: int = 16, columns: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in 8 bits and its scales, block by block; the last ones are as large as what is left."""
    code = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i, j in [(i, j) for i in range(scales.shape[0]) for j in range(scales.shape[1])]:
        part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
        scales[i, j] = weight[part].abs().max() / 448
        code[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
    return code, scales


def unblocks(code: torch.Tensor, scales: torch.Tensor, rows: int = 16, columns: int = 32) -> torch.Tensor:
    """Number by number."""
    row, column = torch.meshgrid(*(torch.arange(size) for size in code.shape), indexing="ij")
    return (code.float() * scales[row // rows, column // columns]).bfloat16()


def is_coded(name: str) -> bool:
    """As in DeepSeek-V3: matrices of the blocks, but neither routers nor norms."""
    return (".layers." in name and name.endswith("_proj.weight")) or "kv_a_proj_with_mqa" in name


def in_8_bits(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    coded: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if is_coded(name):
            coded[name], coded[f"{name}_scale_inv"] = blocks(tensor)
        else:
            coded[name] = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
    return coded


@torch.no_grad()
def test_an_8_bit_source_is_the_bf16_model_that_its_scales_say(tmp_path: Path) -> None:
    converted = build("deepseek_v3", tmp_path / "native")
    coded = in_8_bits(converted.tensors)
    ragged = [
        name for name, t in coded.items() if t.dtype == torch.float8_e4m3fn and (t.shape[0] % 16 or t.shape[1] % 32)
    ]
    assert len(ragged) > 10
    source = stored(tmp_path / "fp8", {**converted.config, "quantization_config": BLOCK}, coded)
    plain = dequantised(source)
    assert plain.tensors.keys() == converted.tensors.keys()
    proven = plan(plain.config, plain.shapes)
    ours = dict(proven.stream(plain.read))
    back = dict(export_plan(proven.config).stream(ours.__getitem__, to="theirs"))
    for name, tensor in back.items():
        expected = unblocks(coded[name], coded[f"{name}_scale_inv"]) if is_coded(name) else coded[name]
        assert plain.tensors[name] == (tuple(tensor.shape), tensor.dtype), name
        assert torch.equal(tensor, expected), name
    assert export_plan(proven.config).foreign_config == converted.config  # no longer quantised


def test_whole_blocks_are_read_as_transformers_does() -> None:
    code, scales = blocks(torch.randn(48, 96, generator=torch.Generator().manual_seed(0)))
    settings = {"model_type": "deepseek_v3", "quantization_config": BLOCK}
    expected = Fp8Dequantize(None)._dequantize_one(code, scales, torch.bfloat16)
    assert torch.equal(dequantised(Held(settings, {"w": code, "w_scale_inv": scales})).read("w"), expected)


class Held(Checkpoint):
    """A checkpoint in memory."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor]):
        from hf_llmarch.conversion.sources.base import TensorInfo

        infos = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}
        super().__init__("held", Path("held"), config, infos)
        self.held = tensors

    def read(self, name: str) -> torch.Tensor:
        return self.held[name]

    @property
    def companions(self) -> tuple[str, ...]:
        return ()

    def write_companions(self, directory: Path) -> None:
        pass


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"a.weight": (48, 96)}, r"No _scale_inv for: a\.weight"),
        ({"a.weight": (48, 96), "a.weight_scale_inv": (3, 3), "b.weight_scale_inv": (3, 3)}, r"nothing: b\.weight_sc"),
        ({"a.weight": (49, 96), "a.weight_scale_inv": (3, 3)}, r"a\.weight_scale_inv is \[3, 3\], expected \[4, 3\]"),
    ],
)
def test_scales_that_are_missing_or_of_another_weight_are_refused(
    tensors: dict[str, tuple[int, int]], named: str
) -> None:
    held = {
        name: torch.zeros(shape, dtype=torch.float32 if name.endswith("_inv") else torch.float8_e4m3fn)
        for name, shape in tensors.items()
    }
    with pytest.raises(CheckpointError, match=named):
        dequantised(Held({"quantization_config": BLOCK}, held))


@pytest.mark.parametrize("settings", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "fp8"}])
def test_other_quantisations_are_left_for_the_plan_to_refuse(settings: dict[str, Any]) -> None:
    source = Held(native_config("mixtral", quantization_config=settings), {})
    assert dequantised(source) is source
    with pytest.raises(UnsupportedField, match="quantization_config"):
        plan(source.config, [])


def test_a_4_bit_source_is_the_bf16_model_that_its_scales_say(tmp_path: Path) -> None:
    """gpt-oss as it is published. Sizes must be whole groups of 32."""
    sizes = {"hidden_size": 64, "intermediate_size": 32}
    converted = build("gpt_oss", tmp_path / "native", **sizes)
    generator, coded, expected = torch.Generator().manual_seed(0), {}, {}
    for name, tensor in converted.tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensor.shape
            shape = (experts, rows, columns // 32, 16)
            codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            scales = torch.randint(120, 134, shape[:-1], generator=generator, dtype=torch.uint8)
            coded |= {f"{name}_blocks": codes, f"{name}_scales": scales}
            expected[name] = convert_moe_packed_tensors(codes, scales)
        else:
            coded[name] = expected[name] = tensor.bfloat16()
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    plain = dequantised(stored(tmp_path / "mxfp4", {**converted.config, "quantization_config": settings}, coded))
    proven = plan(plain.config, plain.shapes)
    ours = dict(proven.stream(plain.read))
    back = dict(export_plan(proven.config).stream(ours.__getitem__, to="theirs"))
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], expected[name]) for name in expected)


# -- layers that predict further ahead ---------------------------------------------------------------------------------


def with_a_layer_ahead(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A tiny DeepSeek-V3 with the names of the published layer 61 after its last."""
    config = native_config("deepseek_v3", num_nextn_predict_layers=1)
    native = redraw(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)))
    native.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    last = config["num_hidden_layers"] - 1
    ahead = {n.replace(f".{last}.", f".{last + 1}.", 1): t + 1 for n, t in tensors.items() if f"layers.{last}." in n}
    parts = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
    ahead |= {f"model.layers.{last + 1}.{part}.weight": torch.randn(5, 3) for part in parts}
    return config, tensors | ahead


def carried(plan: Plan, source: Checkpoint, folder: Path) -> Checkpoint:
    """A folder of ours with what the plan keeps aside beside it."""
    target = stored(folder, plan.config.to_dict(), dict(plan.stream(source.read)))
    to_keep(source, plan).write(folder, max_shard_size=4000)
    return target


def test_the_layer_ahead_is_kept_aside_and_goes_back(tmp_path: Path) -> None:
    config, tensors = with_a_layer_ahead(tmp_path / "native")
    source = stored(tmp_path / "source", config, tensors)
    proven = plan(config, source.shapes)
    ahead = {name for name in tensors if name.startswith("model.layers.3.")}
    assert len(ahead) > 40
    assert set(proven.aside) == set(proven.dropped) == ahead
    assert all("multi-token prediction" in reason for reason in proven.dropped.values())

    ours = carried(proven, source, tmp_path / "ours")
    assert len(list((tmp_path / "ours").rglob("*.safetensors"))) > 2
    back = export_plan(LlmArchConfig.from_dict(ours.config))
    aside = kept(ours, back)
    written = {**dict(back.stream(ours.read, to="theirs")), **dict(aside.stream())}
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert true_config(back, aside) == config


def test_without_what_was_kept_aside_the_config_does_not_promise_it(tmp_path: Path) -> None:
    config, tensors = with_a_layer_ahead(tmp_path / "native")
    back = export_plan(plan(config, list(tensors)).config)
    aside = kept(stored(tmp_path / "ours", {}, {"none": torch.zeros(1)}), back)
    assert not aside.tensors
    assert true_config(back, aside) == {**config, "num_nextn_predict_layers": 0}


def test_a_layer_that_the_config_does_not_count_is_unknown(tmp_path: Path) -> None:
    config, tensors = with_a_layer_ahead(tmp_path)
    with pytest.raises(PlanError, match=r"No place for: model\.layers\.3\."):
        plan({**config, "num_nextn_predict_layers": 0}, list(tensors))


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "changes", "named"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("olmoe", {"clip_qkv": 3.0}, "clip_qkv"),
        ("phimoe-plain", {"num_experts_per_tok": 3}, "num_experts_per_tok=3"),
        ("phimoe", {"rope_scaling": {**CASES["phimoe"]["rope_scaling"], "long_mscale": 1.4}}, "long_mscale=1.4"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_source_fields_without_a_counterpart_are_refused(case: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedField, match=named):
        plan(native_config(case, **changes), [])


OURS: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "intermediate_size": 40,
    "num_experts": 6,
    "router_in_fp32": False,
}


@pytest.mark.parametrize(
    ("changes", "family", "named"),
    [
        ({}, "llama", "num_experts is 6"),
        ({"num_shared_experts": 1}, "mixtral", "num_shared_experts is 40, mixtral would read 0"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mixtral", "mlp_layer_types"),
        ({"norm_topk_prob": False}, "mixtral", "norm_topk_prob is False"),
        ({"capacity_factor": 2.0}, "mixtral", r"capacity_factor is 2\.0"),
        ({"router_score": "sigmoid"}, "qwen3_moe", "router_score is 'sigmoid'"),
        ({"router_in_fp32": True}, "olmoe", "router_in_fp32 is True"),
        ({"ffn_type": "mlp"}, "granitemoe", "ffn_type is 'mlp'"),
        ({"n_group": 2, "topk_group": 1}, "qwen3_moe", "n_group is 2"),
    ],
)
def test_what_a_family_cannot_say_is_refused(changes: dict[str, Any], family: str, named: str) -> None:
    with pytest.raises(NotExpressible, match=named):
        export_plan(LlmArchConfig(**{**OURS, **changes}), family=family)


@pytest.mark.parametrize(
    "changes",
    [
        {"moe_intermediate_size": 28, "intermediate_size": 99},  # nothing is as wide as a dense layer
        {"experts_layout": "linear"},
        {"router_aux_loss_coef": 0.1, "router_aux_loss_scope": "batch", "router_z_loss_coef": 0.2},
    ],
)
def test_how_a_model_is_trained_or_stored_keeps_nobody_from_saying_it(changes: dict[str, Any]) -> None:
    said = export_plan(LlmArchConfig(**{**OURS, **changes}), family="mixtral")
    assert said.foreign_config["intermediate_size"] == changes.get("moe_intermediate_size", 40)
    assert said.their_shapes["model.layers.0.block_sparse_moe.experts.5.w2.weight"][0] == 48
