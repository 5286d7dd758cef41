"""Flint: sigmoid-scored experts beside an ungated shared one, attention sinks, and windows on layers that rotate.

Recursive 2026.
"""

from ..entries import Const
from ..ops import rename
from ..rules import Rule
from .common import (
    ATTENTION_BIAS,
    FULL_WITHOUT_POSITION,
    LAYER,
    LLAMA_CONFIG,
    LLAMA_WEIGHTS,
    MASKED_LAYER_TYPES,
    QK_NORM,
)
from .decoders import decoder
from .experts import LOSS_OUTPUT, ROUTED, SHARED_WIDTH, qwen_experts_and, shared_experts

FAMILY = decoder(
    "flint",
    "Flint",
    [
        *LLAMA_CONFIG,
        *ATTENTION_BIAS,
        Const("norm_weight_in_fp32", True),
        Const("qk_norm", "head"),
        Const("attention_sinks", True),
        Const("scores_in_fp32", True),
        Const("keep_in_fp32", ["sinks"]),
        *MASKED_LAYER_TYPES,
        FULL_WITHOUT_POSITION,
        *qwen_experts_and(
            *SHARED_WIDTH,
            Const("router_score", "sigmoid"),
            Const("router_in_fp32", True),
            Const("keep_in_fp32", ["router", "sinks"]),
        ),
    ],
    [
        *LLAMA_WEIGHTS,
        *QK_NORM,
        Rule((f"{LAYER}.self_attn.softmax_offset",), (f"{LAYER}.self_attn.sinks",), rename),
        *ROUTED,
        *shared_experts(f"{LAYER}.mlp.shared_expert"),
    ],
    inert=LOSS_OUTPUT,
)
