"""Tiny models of ours, the table of every architecture switch, and the tolerances of all tests.

Sizes leave no coincidence to hide behind: 6 query heads on 2 key/value heads, a head width that is not hidden / heads,
3 layers, an eps that is seen when forgotten, a text longer than every window.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from hf_llmarch import (
    LlmArchConfig,
    LlmArchForCausalLM,
    LlmArchForConditionalGeneration,
    LlmArchForMaskedLM,
    LlmArchPreTrainedModel,
)

logging.disable_progress_bar()

# Largest deviation, as a fraction of the spread (max - min) of what is expected, and why it is not zero.
TOLERANCES = {
    "cache": 1e-5,  # a matrix product over fewer rows sums in another order
    "padding": 1e-5,  # softmax over longer rows, whose masked part adds exact zeros in another order
    "backend": 1e-5,  # the host's fused attention sums in another order
    "reload": 1e-6,  # BLAS takes another path for weights that begin elsewhere in memory; the weights are bit-equal
    "bf16": 0.01,  # eight bits: the same in bf16
    "fp16": 0.01,  # ten bits, and sums in another order
    "compile": 1e-5,  # the compiler fuses and reorders sums
    "absorbed": 1e-5,  # MLA: (q W_UK) c and q (W_UK c) are one number in exact arithmetic
    "merged": 1e-5,  # PEFT: (W + B A) x and W x + B (A x) are one number in exact arithmetic
    "decomposed": 5e-5,  # PEFT: a singular value decomposition on either side, and (W - B A) x + B A x is W x
    "native": 1e-5,  # transformers' own class: fused projections, sums in another order
    "double": 5e-6,  # fp32 against float64: angles up to 128 carry an error of 128 * 2^-24
    "property": 2e-5,  # as "cache", over shapes and scales that nobody chose
    "recompute": 1e-6,  # reentrant checkpoints add up what the layers share in another order
    "gradient": 1e-4,  # long sums over batch and length, of numbers of both signs
    "accumulation": 1e-4,  # the same, and AdamW divides by the gradient's own size
}

TEXT_LENGTH = 23

_SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 34,
    "max_position_embeddings": 64,
    "norm_eps": 0.1,
}

MLA: dict[str, Any] = {
    "attention_type": "mla",
    "num_key_value_heads": 6,
    "head_dim": 8,  # of the part that is rotated
    "q_lora_rank": 22,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}


def tiny_config(**switches: Any) -> LlmArchConfig:
    """A config of tiny, awkward sizes with the given switches on top."""
    return LlmArchConfig(**{**_SIZES, **switches})


def redraw(model: nn.Module, seed: int = 0, std: float = 0.2) -> Any:
    """Every parameter anew from N(0, 0.2): fresh norms are 1 and biases 0, which hides a forgotten one.

    Each is drawn by its own name, so models that differ in one switch agree in all parameters that both have.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model


def tiny_model(**switches: Any) -> Any:
    """A redrawn causal model in evaluation mode. (Any: its modules depend on the config.)"""
    return redraw(LlmArchForCausalLM(tiny_config(**switches))).eval()


HEADS: dict[str, type[LlmArchPreTrainedModel]] = {
    "decoder": LlmArchForCausalLM,
    "encoder": LlmArchForMaskedLM,
    "encoder-decoder": LlmArchForConditionalGeneration,
}


def tiny_stack(**switches: Any) -> Any:
    """A redrawn model of any topology, with its head over the vocabulary, in evaluation mode."""
    config = tiny_config(**switches)
    return redraw(HEADS[config.topology](config)).eval()


def text(batch: int = 2, length: int = TEXT_LENGTH, seed: int = 1) -> torch.Tensor:
    """Token ids `(batch, length)`; ids below 3 are left to padding and the ends of texts."""
    return torch.randint(3, _SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: str) -> None:
    """Equal within TOLERANCES[tolerance] of the spread of what is expected."""
    assert actual.shape == expected.shape
    spread = (expected.max() - expected.min()).item()
    deviation = (actual.double() - expected.double()).abs().max().item()
    assert spread > 0
    assert deviation <= TOLERANCES[tolerance] * spread, f"{deviation:.3g} of a spread of {spread:.3g}"


def differs(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether they differ by more than rounding."""
    if actual.shape != expected.shape:
        return True
    return bool((actual - expected).abs().max() > 1e-4 * (expected.max() - expected.min()))


@dataclass(frozen=True)
class Variant:
    """Switches to test, and those of the model that they are compared with.

    Args:
        switches: of the model under test.
        against: of the reference, whose output must differ.
        decoding: further switches for cached decoding, where the frequencies would else depend on the text's length.
    """

    switches: dict[str, Any]
    against: dict[str, Any] = field(default_factory=dict)
    decoding: dict[str, Any] = field(default_factory=dict)

    @property
    def decoded(self) -> dict[str, Any]:
        return {**self.switches, **self.decoding}


def values(name: str, *options: Any, **needs: Any) -> list[Variant]:
    """A variant a value of one field, against the field's default; both with the switches that it needs."""
    return [Variant({**needs, name: option}, against=needs) for option in options]


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_theta": 777.0, **parameters}


YARN = _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=2.0, beta_slow=0.5)
LONGROPE = _rope(
    rope_type="longrope",
    short_factor=[1.0, 1.1, 1.2, 1.3, 1.4],
    long_factor=[1.5, 2.5, 3.5, 4.5, 5.5],
    original_max_position_embeddings=16,
)
LOCAL_AND_GLOBAL = {
    "full_attention": _rope(rope_type="linear", factor=3.0),
    "sliding_attention": _rope(rope_theta=33.0),
}
MIXED: dict[str, Any] = {
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
ALL_FULL = {"layer_types": ["full_attention"] * 3}

MOE: dict[str, Any] = {"num_experts": 5, "moe_intermediate_size": 14}
# Three experts out of three groups: the best of them need not lie in two.
GROUPS: dict[str, Any] = {**MOE, "num_experts": 9, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2}

# Every architecture switch that is built, with the values to test and the switches they need. What
# `LlmArchConfig.switches()` has beyond these is in EXCEPTIONS; test_switches proves that nothing is missing.
SWITCHES: dict[str, list[Variant]] = {
    "vocab_size": values("vocab_size", 101),
    "hidden_size": values("hidden_size", 50),
    "num_hidden_layers": values("num_hidden_layers", 2),
    "intermediate_size": values("intermediate_size", 35),
    "max_position_embeddings": [
        Variant(  # it is the original length of dynamic NTK, beyond which the base grows
            {"max_position_embeddings": 12, "rope_parameters": _rope(rope_type="dynamic", factor=3.0)},
            against={"rope_parameters": _rope(rope_type="dynamic", factor=3.0)},
            decoding={"max_position_embeddings": 40},
        ),
    ],
    "attention_type": [
        Variant({"attention_type": "mha", "num_key_value_heads": 6}),
        Variant({"attention_type": "gqa", "num_key_value_heads": 3}),
        Variant({"attention_type": "mqa", "num_key_value_heads": 1}),
        Variant(MLA),
    ],
    "num_attention_heads": values("num_attention_heads", 4),
    "num_key_value_heads": values("num_key_value_heads", 1, 3, 6),
    "head_dim": values("head_dim", 6),
    "v_head_dim": [Variant({**MLA, "v_head_dim": 30}, against=MLA)],
    "q_lora_rank": [Variant({**MLA, "q_lora_rank": None}, against=MLA)],
    "kv_lora_rank": [Variant({**MLA, "kv_lora_rank": 5}, against=MLA)],
    "qk_nope_head_dim": [Variant({**MLA, "qk_nope_head_dim": 3}, against=MLA)],
    "qk_rope_head_dim": [Variant({**MLA, "qk_rope_head_dim": 4, "head_dim": 4}, against=MLA)],
    "latent_norm_eps": values("latent_norm_eps", 0.5, **MLA),
    "attention_bias": [*values("attention_bias", True), *values("attention_bias", True, **MLA)],
    "attention_output_bias": [*values("attention_output_bias", True), *values("attention_output_bias", True, **MLA)],
    "qk_norm": [
        *values("qk_norm", "head", "heads", "projection"),
        *values("qk_norm", "heads", norm_type="layernorm"),
    ],
    "qk_norm_type": [
        *values("qk_norm_type", "layernorm", qk_norm="head"),
        *values("qk_norm_type", "layernorm", qk_norm="projection"),
        *values("qk_norm_type", "rmsnorm", qk_norm="heads", norm_type="layernorm"),
    ],
    "qk_norm_bias": [
        *values("qk_norm_bias", True, qk_norm="head"),
        *values("qk_norm_bias", False, qk_norm="projection", norm_type="layernorm"),
    ],
    "attention_scale": [*values("attention_scale", 1.0, 0.11), *values("attention_scale", 0.11, **MLA)],
    "attention_scale_by_layer": values("attention_scale_by_layer", True),
    "attn_logit_softcapping": [
        *values("attn_logit_softcapping", 0.1),
        *values("attn_logit_softcapping", 0.01, **MLA),
        *values("attn_logit_softcapping", 0.1, position_encoding="alibi"),
    ],
    "attention_sinks": [
        *values("attention_sinks", True),
        *values("attention_sinks", True, **MIXED),
        *values("attention_sinks", True, **MLA),
    ],
    "clip_qkv": values("clip_qkv", 0.5),
    "attention_dropout": values("attention_dropout", 0.3),
    "sliding_window": [
        *values("sliding_window", 5),
        Variant({"sliding_window": 2}),
        Variant({"sliding_window": 3, **MLA}, against=MLA),
    ],
    "attention_chunk_size": [
        *values("attention_chunk_size", 5),
        Variant({"attention_chunk_size": 6, **MLA}, against=MLA),
    ],
    "layer_types": [
        *values("layer_types", MIXED["layer_types"], sliding_window=5),
        Variant(
            {"attention_chunk_size": 6, "layer_types": ["chunked_attention", "chunked_attention", "full_attention"]},
            against={"attention_chunk_size": 6},
        ),
        Variant(
            {
                **{"attention_chunk_size": 4, "sliding_window": 4},
                "layer_types": ["full_attention", "chunked_attention", "sliding_attention"],
            }
        ),
    ],
    "position_encoding": [
        *values("position_encoding", "none", "sinusoidal", "learned", "alibi", "relative_bias"),
        *values("position_encoding", "alibi", "relative_bias", "none", **MIXED),
        *values("position_encoding", "alibi", "relative_bias", sliding_window=4),
        *values("position_encoding", "alibi", "relative_bias", attention_chunk_size=6),
    ],
    "rope_parameters": [
        *values(
            "rope_parameters",
            _rope(),
            _rope(rope_type="linear", factor=3.0),
            _rope(rope_type="ntk", factor=3.0),
            YARN,
            {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
            {**YARN, "attention_factor": 1.3, "truncate": False},
            _rope(
                **{"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 5.0},
                original_max_position_embeddings=16,
            ),
            _rope(partial_rotary_factor=0.4),
        ),
        # The whole text is on the short side of a length of 40, and on the long side of 6 from the first chunk on.
        Variant(
            {"rope_parameters": LONGROPE},
            decoding={"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 40}},
        ),
        Variant({"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 6}}),
        Variant({"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 40}}),
        Variant({**MIXED, "rope_parameters": LOCAL_AND_GLOBAL}, against=MIXED),
        Variant(
            {
                **MIXED,
                "rope_parameters": {**LOCAL_AND_GLOBAL, "full_attention": _rope(partial_rotary_factor=0.4)},
            },
            against={**MIXED, "rope_parameters": {**LOCAL_AND_GLOBAL, "full_attention": _rope()}},
        ),
        Variant({**MLA, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, against=MLA),
        Variant(
            {**MLA, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}},
            against={**MLA, "rope_parameters": YARN},
        ),
    ],
    "rope_interleaved": [
        *values("rope_interleaved", True),
        *values("rope_interleaved", True, rope_parameters=_rope(partial_rotary_factor=0.4)),
        *values("rope_interleaved", True, **MLA),
    ],
    "nope_layers": [
        *values("nope_layers", [1], [0, 2]),
        *values("nope_layers", [1], **MIXED),
        *values("nope_layers", [1], position_encoding="alibi"),
        *values("nope_layers", [0], position_encoding="relative_bias"),
        *values("nope_layers", [1], **MLA),
    ],
    "sinusoidal_layout": values("sinusoidal_layout", "halves", position_encoding="sinusoidal"),
    "sinusoidal_endpoint": values("sinusoidal_endpoint", True, position_encoding="sinusoidal"),
    "position_offset": [
        *values("position_offset", 2, position_encoding="learned"),
        *values("position_offset", 2, position_encoding="sinusoidal"),
    ],
    "alibi_bias_max": values("alibi_bias_max", 16, position_encoding="alibi"),
    "alibi_in_bf16": [  # slopes 2^(-5k/4): those of a bias_max of 8 are exact in bf16
        *values("alibi_in_bf16", True, position_encoding="alibi", alibi_bias_max=5),
        *values("alibi_in_bf16", True, position_encoding="alibi", alibi_bias_max=5, alibi_scaled=True, **MIXED),
    ],
    "alibi_scaled": values("alibi_scaled", True, position_encoding="alibi"),
    "relative_attention_num_buckets": values("relative_attention_num_buckets", 8, position_encoding="relative_bias"),
    "relative_attention_max_distance": values(
        "relative_attention_max_distance", 20, position_encoding="relative_bias", relative_attention_num_buckets=8
    ),
    "relative_attention_shared": [
        *values("relative_attention_shared", False, position_encoding="relative_bias"),
        *values("relative_attention_shared", False, position_encoding="relative_bias", **MIXED),
        *values("relative_attention_shared", False, position_encoding="relative_bias", nope_layers=[0]),
    ],
    "ffn_type": values("ffn_type", "mlp"),
    "hidden_act": [
        *values("hidden_act", "gelu", "gelu_pytorch_tanh", "relu", "sigmoid", "gelu_new"),
        *values("hidden_act", "relu2", ffn_type="mlp"),
    ],
    "swish_beta": [
        *values("swish_beta", 1.702, 2, "learned"),
        *values("swish_beta", "learned", ffn_type="mlp"),
    ],
    "ffn_bias": [*values("ffn_bias", True), *values("ffn_bias", True, ffn_type="mlp")],
    "ffn_multiple_of": values("ffn_multiple_of", 10, intermediate_size=None),
    "glu_limit": [*values("glu_limit", 0.02), *values("glu_limit", 0.02, **MOE)],
    "glu_up_offset": [*values("glu_up_offset", 1.0), *values("glu_up_offset", 1.0, **MOE)],
    "num_experts": [
        *values("num_experts", 5),
        Variant({**MOE, "num_experts": 4}, against=MOE),
    ],
    "num_experts_per_tok": values("num_experts_per_tok", 1, 3, **MOE),
    "moe_intermediate_size": values("moe_intermediate_size", 9, num_experts=5),
    "num_shared_experts": values("num_shared_experts", 2, **MOE),
    "shared_expert_intermediate_size": values("shared_expert_intermediate_size", 19, **MOE),
    "shared_expert_gate": values("shared_expert_gate", True, num_shared_experts=1, **MOE),
    "mlp_layer_types": values("mlp_layer_types", ["dense", "sparse", "sparse"], **MOE),
    "router_type": values("router_type", "sparsemixer", router_jitter_noise=0.1, **MOE),
    "router_score": values("router_score", "sigmoid", **MOE),
    "router_bias": values("router_bias", True, **MOE),
    "norm_topk_prob": values("norm_topk_prob", False, **MOE),
    "routed_scaling_factor": values("routed_scaling_factor", 2.5, **MOE),
    "n_group": [Variant(GROUPS, against={**MOE, "num_experts": 9, "num_experts_per_tok": 3})],
    "topk_group": [Variant({**GROUPS, "topk_group": 1}, against=GROUPS)],
    "router_group_score": values("router_group_score", "top2", router_score="sigmoid", **GROUPS),
    "router_jitter_noise": values("router_jitter_noise", 0.3, **MOE),
    "capacity_factor": [
        # An expert's room is a share of the tokens that a forward sees. With room for all of them, pieces agree.
        Variant({**MOE, "capacity_factor": 0.8}, against=MOE, decoding={"capacity_factor": 5}),
    ],
    "expert_capacity": [Variant({**MOE, "expert_capacity": 4}, against=MOE, decoding={"expert_capacity": 99})],
    "overflow": [
        Variant(
            {**MOE, "capacity_factor": 0.8, "overflow": "next_best"},
            against={**MOE, "capacity_factor": 0.8},
            decoding={"capacity_factor": 5},
        ),
    ],
    "norm_type": values("norm_type", "layernorm"),
    "norm_placement": [
        *values("norm_placement", "post", "sandwich", "branch"),
        *values("norm_placement", "post", norm_type="layernorm"),
    ],
    "norm_eps": values("norm_eps", 1e-5, 1),
    "norm_bias": [*values("norm_bias", True), *values("norm_bias", False, norm_type="layernorm")],
    "norm_offset": [
        *values("norm_offset", 1.0),
        *values("norm_offset", 1.0, norm_type="layernorm"),
        *values("norm_offset", 1.0, qk_norm="head"),
    ],
    "first_attention_norm": [
        *values("first_attention_norm", False),
        *values("first_attention_norm", False, norm_placement="sandwich"),
    ],
    "final_norm": values("final_norm", False),
    "embedding_norm": values("embedding_norm", True),
    "parallel_block": values("parallel_block", True),
    "parallel_norms": values("parallel_norms", 2, parallel_block=True),
    "residual_scale": [
        *values("residual_scale", 0.22),
        *values("residual_scale", 0.22, parallel_block=True),
        *values("residual_scale", 0.22, parallel_block=True, parallel_norms=2),
        *values("residual_scale", 0.22, norm_placement="sandwich"),
    ],
    "hidden_dropout": values("hidden_dropout", 0.3),
    "embedding_dropout": values("embedding_dropout", 0.3),
    "final_dropout": values("final_dropout", 0.3),
    "ffn_dropout": [*values("ffn_dropout", 0.3), *values("ffn_dropout", 0.3, ffn_type="mlp")],
    "embedding_scale": values("embedding_scale", 6.9),
    "embedding_size": values("embedding_size", 20),
    "type_vocab_size": values("type_vocab_size", 2),
    "lm_head_transform": values("lm_head_transform", True),
    "head_act": values("head_act", "relu", lm_head_transform=True),
    "head_bias": values("head_bias", False, lm_head_transform=True),
    "tie_word_embeddings": [
        *values("tie_word_embeddings", True, embedding_size=20, lm_head_transform=True),
        *values("tie_word_embeddings", True),
        *values("tie_word_embeddings", True, embedding_scale=6.9, lm_head_bias=True),
    ],
    "lm_head_bias": values("lm_head_bias", True),
    "logit_scale": values("logit_scale", 0.0625),
    "final_logit_softcapping": values("final_logit_softcapping", 1.5),
}

# Read in training alone, so that is where they must change the output.
TRAINING_ONLY = {
    *("attention_dropout", "hidden_dropout", "embedding_dropout", "final_dropout", "ffn_dropout"),
    "router_jitter_noise",
}

# The same for switches of an encoder and of an encoder-decoder, which have no cached pieces of their own to compare.
ENCODER = {"topology": "encoder"}
BOTH = {"topology": "encoder-decoder", "decoder_start_token_id": 1}
STACKS: dict[str, list[Variant]] = {
    "topology": [Variant(ENCODER), Variant(BOTH, against=ENCODER)],
    "layer_groups": values("layer_groups", 1, **ENCODER),
    "source_stack": values(
        "source_stack", {"num_hidden_layers": 2}, {"intermediate_size": 21, "ffn_type": "mlp"}, **BOTH
    ),
    "share_source_embeddings": values("share_source_embeddings", False, **BOTH),
    "position_encoding": [
        *values("position_encoding", "alibi", "relative_bias", "learned", **ENCODER),
        *values("position_encoding", "alibi", "relative_bias", "learned", **BOTH),
    ],
    "sliding_window": [*values("sliding_window", 3, **ENCODER), Variant({**BOTH, **MIXED}, against=BOTH)],
    "tie_word_embeddings": values("tie_word_embeddings", True, **BOTH),
}

# The architecture fields that are not in SWITCHES, and why.
EXCEPTIONS: dict[str, str] = {
    "mla_cache": "what is cached, not what is computed: test_latent_attention",
    "norm_weight_in_fp32": "the order of a cast, so seen in bf16 alone: test_switches",
    "router_in_fp32": "the order of a cast, so seen in bf16 alone: test_switches",
    "router_selection_bias": "begins at zero and is no parameter: test_switches",
    "router_bias_update_rate": "acts after a step of an optimiser: test_switches",
    "router_aux_loss_coef": "part of the loss: test_switches",
    "router_aux_loss_scope": "part of the loss: test_switches",
    "router_z_loss_coef": "part of the loss: test_switches",
    "experts_layout": "how experts are stored, not what they compute: test_switches",
    "initializer_range": "how parameters begin: test_switches",
    "use_cache": "whether a cache is returned: test_cache",
    "pooler": "an output of the base model beside the others: test_switches",
    "classifier_pooling": "read by a sequence classifier: test_switches",
    "classifier_dense": "read by a sequence classifier: test_switches",
    "classifier_act": "read by a sequence classifier: test_switches",
    "classifier_norm": "read by a sequence classifier: test_switches",
    "token_head_dense": "read by a token classifier: test_switches",
    "classifier_bias": "read by a sequence classifier: test_switches",
    "classifier_dropout": "read by a sequence classifier: test_switches",
    "classifier_input_dropout": "read by a sequence classifier in training: test_task_heads",
    "scores_in_fp32": "the order of a cast, so seen in half precision alone: test_half_precision",
    "fp16_clamp": "acts where fp16 overflows: test_half_precision",
    "keep_in_fp32": "what is loaded in another dtype: test_half_precision",
    "positions_skip_padding": "acts where there is padding: test_switches",
    "positions_follow_mask": "acts where there is a mask: test_switches, test_families",
    "pad_token_id": "a token's meaning: test_switches",
    "wrap_decoder_start": "how labels become a decoder's tokens: test_switches",
    "decoder_start_token_id": "a token's meaning: test_switches",
    "bos_token_id": "a token's meaning, read by generate",
    "eos_token_id": "a token's meaning, read by generate: test_generate",
    "converted_from": "never read by the model: test_config",
}


def _name(switches: dict[str, Any]) -> str:
    def short(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{k}={short(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(short(v) for v in value) + "]"
        return str(value).removesuffix("_attention")

    return ",".join(f"{name}={short(value)}" for name, value in switches.items())


def variants(table: dict[str, list[Variant]] = SWITCHES) -> Iterator[tuple[str, str, Variant]]:
    """(id, field, variant) for every row of a table."""
    for name, rows in table.items():
        for row in rows:
            mla = all(row.switches.get(key) == MLA[key] for key in ("attention_type", "num_key_value_heads"))
            shown = {k: v for k, v in row.switches.items() if k == name or (k not in row.against and k not in MLA)}
            needs = {k: v for k, v in row.switches.items() if k not in shown and k not in MLA}
            label = _name({name: row.switches[name], **{k: v for k, v in shown.items() if k != name}, **needs})
            yield (f"mla,{label}" if mla else label), name, row
