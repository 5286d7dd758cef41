"""gpt-oss 20B and 120B: biased and clamped experts, attention sinks, alternating windows. arXiv 2508.10925."""

from typing import Any

from ..entries import Const, Derived, Values
from ..ops import alternating_rows, both, chain, rename, transpose_experts
from ..rules import Family
from .common import (
    ATTENTION,
    ATTENTION_BIAS,
    CAUSAL_LM,
    HEAD,
    HEAD_DIM,
    LAYER,
    MASKED_LAYER_TYPES,
    PRE_NORMS,
    RMS_NORM,
    ROPE,
    SINKS,
    SIZES,
    SPELLINGS,
)
from .experts import AUXILIARY_LOSS, LOSS_OUTPUT, ONLY_EXPERTS, ROUTER_IN_MODEL_DTYPE, packed_experts, routing

GATE_UP, DOWN = (f"{LAYER}.mlp.experts.{name}_proj" for name in ("gate_up", "down"))


def _gate(native: Any) -> Values:
    # The class of older transformers has these as constants, and not in its config.
    return {"swish_beta": getattr(native, "swiglu_alpha", 1.702), "glu_limit": getattr(native, "swiglu_limit", 7.0)}


def _gate_to_theirs(config: Any) -> Values:
    return {"swiglu_alpha": config.swish_beta, "swiglu_limit": config.glu_limit}


FAMILY = Family(
    "gpt_oss",
    config=[
        *SIZES,
        *HEAD_DIM,
        *ROPE,
        *RMS_NORM,
        Const("norm_weight_in_fp32", True),
        Const("keep_in_fp32", ["norms"]),
        *ATTENTION_BIAS,
        *MASKED_LAYER_TYPES,
        Const("attention_sinks", True),
        # gate * sigmoid(alpha gate) * (up + 1), whatever hidden_act says.
        Const("hidden_act", "silu"),
        Derived(("swiglu_alpha", "swiglu_limit"), _gate, _gate_to_theirs),
        Const("glu_up_offset", 1.0),
        Const("ffn_bias", True),
        # Softmax over the picked logits alone.
        Const("norm_topk_prob", True),
        Const("router_bias", True),
        *routing("num_local_experts"),
        *ONLY_EXPERTS,
        *AUXILIARY_LOSS,
        *ROUTER_IN_MODEL_DTYPE,
    ],
    weights=[
        *HEAD,
        *ATTENTION,
        *SINKS,
        *PRE_NORMS,
        *both(f"{LAYER}.mlp.router", f"{LAYER}.mlp.gate"),
        # Inputs along the rows, and gate and up in turn along the columns.
        *packed_experts(GATE_UP, DOWN, chain(transpose_experts, alternating_rows), transpose_experts, ("", ".weight")),
        *packed_experts(f"{GATE_UP}_bias", f"{DOWN}_bias", alternating_rows, rename, ("_bias", ".bias")),
    ],
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "GptOssForCausalLM"},
    inert=LOSS_OUTPUT,
)
