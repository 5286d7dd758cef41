"""Phi-3.5-MoE: LayerNorm, LongRoPE and SparseMixer's router. arXiv 2404.14219, 2409.12136."""

from typing import Any

from ..entries import Const, Derived, Field, Values
from ..errors import UnsupportedField
from ..rules import Family
from .common import (
    ATTENTION,
    ATTENTION_BIAS,
    CAUSAL_LM,
    HEAD,
    HEAD_DIM,
    LAYER,
    PRE_NORMS,
    RMS_NORM,
    SIZES,
    SPELLINGS,
)
from .experts import (
    AUXILIARY_LOSS,
    LOSS_OUTPUT,
    ONLY_EXPERTS,
    ROUTER_IN_MODEL_DTYPE,
    always,
    experts,
    router,
    routing,
)

SPARSE = f"{LAYER}.block_sparse_moe"


def _rope(native: Any) -> Values:
    """LongRoPE states its factor on cos and sin twice, for short and for long texts; ours has one."""
    parameters = dict(native.rope_parameters)
    short, long = parameters.pop("short_mscale", None), parameters.pop("long_mscale", None)
    if parameters["rope_type"] == "default":
        return {"rope_parameters": parameters}
    if parameters["rope_type"] != "longrope" or short != long:
        raise UnsupportedField(
            f"rope_scaling of type {parameters['rope_type']!r} with short_mscale={short} and long_mscale={long}: only "
            "longrope, with the same factor for both, has a counterpart."
        )
    return {"rope_parameters": {**parameters, "attention_factor": short}}


def _rope_to_theirs(config: Any) -> Values:
    """Both spellings, and the original length beside the parameters, where their first code looks for it."""
    parameters = dict(config.rope_parameters or {})
    theta = parameters.get("rope_theta")
    if parameters.get("rope_type") != "longrope":
        return {"rope_parameters": parameters, "rope_theta": theta, "rope_scaling": None}
    factor = parameters.pop("attention_factor", None)
    parameters |= {"short_mscale": factor, "long_mscale": factor}
    return {
        "rope_parameters": parameters,
        "rope_theta": theta,
        "rope_scaling": {name: value for name, value in parameters.items() if name != "rope_theta"},
        "original_max_position_embeddings": parameters["original_max_position_embeddings"],
    }


FAMILY = Family(
    "phimoe",
    config=[
        *SIZES,
        *HEAD_DIM,
        *RMS_NORM,
        Const("norm_type", "layernorm"),
        Field("hidden_act"),
        *ATTENTION_BIAS,
        Field("lm_head_bias"),
        Field("sliding_window"),
        Derived(
            ("rope_parameters", "rope_theta", "rope_scaling", "original_max_position_embeddings"),
            _rope,
            _rope_to_theirs,
        ),
        Const("router_type", "sparsemixer"),
        Const("norm_topk_prob", False),
        Field("router_jitter_noise"),
        *routing("num_local_experts"),
        # Their router picks two whatever the field says.
        always("num_experts_per_tok", 2),
        always("hidden_dropout", 0.0),
        *ONLY_EXPERTS,
        *AUXILIARY_LOSS,
        *ROUTER_IN_MODEL_DTYPE,
    ],
    weights=[
        *HEAD,
        *ATTENTION,
        *PRE_NORMS,
        *router(f"{SPARSE}.gate"),
        *experts(f"{SPARSE}.experts.{{e}}", "w1", "w3", "w2"),
    ],
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "PhimoeForCausalLM"},
    # Noise on the sparse block's input, in training; 0.01 in the published checkpoint.
    inert=(*LOSS_OUTPUT, "input_jitter_noise"),
)
